"""Updating the weights of a layer that is laid out: raw form, checks, rollback, and never a mixture.

A layer is *closed* when its tensors are packed, and only then it can be called. To be written, a
parameter is *opened*: its bytes become raw again where they are, so the parameter, its
``weight_loader`` and its address stay. Closing packs them. What happens between is an update:

* a loader's tensor is checked before it is written, and everything that can be known of a whole update
  is checked before its first write (:mod:`.mxfp4_update_check`);
* what an update writes is first copied to the host if ``SGLANG_AITER_MOE_RELOAD_STAGING=host``;
* when an update fails, every layer that it wrote gets the copy back. Without copies such a layer is
  *invalid*: calls refuse, and its scales are NaN, so that a captured graph, which asks nobody, gives
  NaN and not a mixture. A full update makes it valid again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4_update_check
from sglang_aiter_moe.srt.layers.quantization.mxfp4_layer_weights import (
    RUNNING,
    STAGING,
    STAGINGS,
    LayerWeights,
    staging,
)
from sglang_aiter_moe.srt.layers.quantization.mxfp4_watch import data_of

__all__ = [
    "RUNNING",
    "STAGING",
    "STAGINGS",
    "WEIGHTS",
    "LayerWeights",
    "begin_session",
    "end_session",
    "fail",
    "guarded",
    "staging",
    "update",
    "updating",
    "weights_of",
]

#: Where a layer keeps its :class:`LayerWeights`.
WEIGHTS = "aiter_moe_weights"


def weights_of(layer: Any) -> LayerWeights | None:
    """The state of a layer that has been laid out; None for any other."""
    return getattr(layer, WEIGHTS, None)


def guarded(layer: Any, name: str, loader: Callable[..., Any]) -> Callable[..., Any]:
    """A ``weight_loader`` that also works on a layer that is laid out.

    Args:
        layer: whose parameter it loads.
        name: of the parameter.
        loader: SGLang's.
    """

    @functools.wraps(loader)
    def load(param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        state = weights_of(layer)
        if state is None:
            return loader(param, loaded_weight, *args, **kwargs)
        try:
            mxfp4_update_check.check_dtype(name, loaded_weight, state.plan.spec.name)
            state.touch(name)
            result = loader(param, loaded_weight, *args, **kwargs)
        except Exception as error:
            fail(f"{name}: {error}")
            if RUNNING.depth == 0:
                _close_written()
            raise
        shard = kwargs.get("shard_id", args[1] if len(args) > 1 else None)
        expert = kwargs.get("expert_id", args[2] if len(args) > 2 else None)
        state.wrote(name, shard, _local(layer, expert))
        return result

    return load


def update(layer: Any, tensors: dict[str, torch.Tensor], *, experts: Any = slice(None)) -> None:
    """Updates a layer outside SGLang's loaders, as one update.

    Args:
        layer: laid out by ``prepare_weights``.
        tensors: raw tensors by parameter name.
        experts: which experts they are: an index into the first dimension; all by default.

    Raises:
        ContractError: a name, shape or dtype does not fit. Nothing has been written then.
    """
    state = weights_of(layer)
    if state is None:
        raise ContractError(
            "the layer is not laid out",
            allowed="a layer after prepare_weights",
            fix="load it with its loaders first",
        )
    mxfp4_update_check.check_local(state, tensors, experts)
    with updating():
        for name, tensor in tensors.items():
            state.touch(name)
            target = data_of(getattr(layer, name))
            same_bytes = tensor.element_size() == 1
            target[experts] = (tensor.view(target.dtype) if same_bytes else tensor).to(target)
            for expert in torch.arange(state.plan.spec.num_experts)[experts].view(-1).tolist():
                for shard in ("w1", "w3") if name.startswith("w13") else ("w2",):
                    state.wrote(name, shard, expert)


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """One update of any number of layers: all of it, or what :func:`fail` leaves.

    On leaving, layers that the update wrote are closed, unless a session goes on around it.
    """
    RUNNING.depth += 1
    try:
        yield
        if RUNNING.depth == 1:
            _close_written()
    except BaseException as error:
        fail(f"{type(error).__name__}: {error}")
        if RUNNING.depth == 1:
            _close_written()
        raise
    finally:
        RUNNING.depth -= 1
        if RUNNING.depth == 0:
            RUNNING.forget(list(RUNNING.written))


def begin_session() -> None:
    """An update in several steps begins (SGLang's ``begin_weight_update``)."""
    if RUNNING.depth == 0:
        RUNNING.depth = 1


def end_session() -> None:
    """It ends: what is still open is closed."""
    try:
        _close_written()
    finally:
        RUNNING.depth = 0
        RUNNING.failed = None
        RUNNING.forget(list(RUNNING.written))


def fail(reason: str) -> None:
    """Every layer that the running update wrote gets its weights back, or becomes invalid."""
    RUNNING.fail(reason)


def _close_written() -> None:
    for state in list(RUNNING.written):
        state.close()


def _local(layer: Any, expert: Any) -> Any:
    to_local = getattr(layer, "_map_global_expert_id_to_local_expert_id", None)
    return expert if expert is None or to_local is None else to_local(expert)
