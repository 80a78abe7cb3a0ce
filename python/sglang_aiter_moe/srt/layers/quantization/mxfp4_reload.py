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
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sglang_aiter_moe.contract.identity import (
    TENSORS,
    Fingerprint,
    Sizes,
    fingerprint,
    identify,
    one_form,
)
from sglang_aiter_moe.contract.scale_layouts import NAN_SCALE
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4_update_check
from sglang_aiter_moe.srt.layers.quantization.mxfp4_checkpoint import refuse_nan
from sglang_aiter_moe.srt.layers.quantization.mxfp4_raw_form import RawForm, pack, unpacked

logger = logging.getLogger(__name__)

#: Where a layer keeps its :class:`LayerWeights`.
WEIGHTS = "aiter_moe_weights"
STAGING = "SGLANG_AITER_MOE_RELOAD_STAGING"
STAGINGS = ("none", "host")

_lock = threading.RLock()
_written: list[LayerWeights] = []  # layers that the running update has written
_depth = 0  # nested updates; an SGLang session counts as one


def staging() -> str:
    """``host`` or ``none``, as SGLANG_AITER_MOE_RELOAD_STAGING says.

    Raises:
        ContractError: for another value.
    """
    value = os.environ.get(STAGING, STAGINGS[0])
    if value not in STAGINGS:
        raise ContractError(
            f"{STAGING} is {value!r}",
            allowed=", ".join(STAGINGS),
            fix=f"type `export {STAGING}=host` to keep a copy of what an update replaces, or unset it",
        )
    return value


class LayerWeights:
    """The state of one layer's weights.

    Attributes:
        plan: by which they are packed.
        forms: each parameter's raw form.
        opened: packed storage of the parameters that are open, by name.
        invalid: why the layer cannot be called; None if it can.
        fingerprint: of the content, from the last time that the layer was closed.
    """

    def __init__(self, layer: Any, plan: Any, forms: dict[str, RawForm]) -> None:
        self.layer = layer
        self.plan = plan
        self.forms = forms
        self.opened: dict[str, torch.Tensor] = {}
        self.invalid: str | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._touched: set[str] = set()
        self._rewritten: set[tuple[str, Any, Any]] = set()
        self.fingerprint = self._take_fingerprint()

    # --- the two states ---------------------------------------------------------------------------

    def open(self, names: Iterable[str] | None = None) -> None:
        """Brings parameters into their raw form, all by default. Open ones stay as they are."""
        with _lock:
            for name in self.forms if names is None else names:
                if name in self.opened:
                    continue
                parameter = getattr(self.layer, name)
                home = parameter.data
                parameter.data = unpacked(self.forms[name], home, self.plan)
                parameter.is_shuffled = False
                self.opened[name] = home

    def close(self) -> None:
        """Packs what is open. Bit-identical to a fresh load of the same weights.

        Raises:
            ContractError: a scale that was written is NaN. The update has failed then.
        """
        with _lock:
            error = self._nan_error()
            if error is not None:
                fail(error.what)
                if self._nan_error() is not None:  # written past the loaders: nothing to go back to
                    self.invalid = error.what
            for name, home in self.opened.items():
                parameter = getattr(self.layer, name)
                raw = parameter.data
                if raw.device != home.device:  # moved by the CPU offload
                    home = torch.empty_like(home, device=raw.device)
                pack(self.forms[name], raw, home, self.plan)
                parameter.data = home
                parameter.is_shuffled = name in ("w13_weight", "w2_weight")
            changed = bool(self.opened)
            self.opened.clear()
            if self.invalid is not None and self._is_rewritten():
                self.invalid = None
                self._rewritten.clear()
            if changed and self.invalid is None:
                self.fingerprint = self._take_fingerprint()
            if _depth == 0:
                _forget([self])
        if error is not None:
            raise error

    # --- writing ------------------------------------------------------------------------------------

    def touch(self, name: str) -> None:
        """Before a parameter is written: opens it, and copies it where the user asks for that."""
        with _lock:
            keep = staging() == "host"
            self.open([name])
            if name in self._touched:
                return
            if keep and self.invalid is None:
                self._staged[name] = getattr(self.layer, name).data.to("cpu", copy=True)
            self._touched.add(name)
            if self not in _written:
                _written.append(self)

    def wrote(self, name: str, shard: Any, expert: Any) -> None:
        """After a write: an invalid layer counts what it has got."""
        with _lock:
            if self.invalid is not None:
                self._rewritten.add((name, shard, expert))

    def roll_back(self, reason: str) -> None:
        """Undoes what the running update wrote, or marks the layer invalid."""
        with _lock:
            if not self._touched:
                return
            self.open(self._touched)
            if self._touched <= self._staged.keys():
                for name, copy in self._staged.items():
                    getattr(self.layer, name).data.copy_(copy)
                logger.warning("%s: the update failed and is undone: %s", self._name, reason)
            else:
                self.invalid = reason
                self._rewritten.clear()
                self.open()
                for name in ("w13_weight_scale", "w2_weight_scale"):
                    scale = getattr(self.layer, name).data
                    (scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)).fill_(
                        NAN_SCALE
                    )
                logger.error("%s is invalid until a full update: %s", self._name, reason)
            self._forget()

    def _forget(self) -> None:
        self._staged.clear()
        self._touched.clear()

    # --- what can be asked --------------------------------------------------------------------------

    def refuse_call(self) -> None:
        """Raises unless the layer may be called.

        Raises:
            ContractError: an update failed, or has not been finished.
        """
        if self.invalid is not None:
            raise ContractError(
                f"{self._name} has no valid weights: an update failed ({self.invalid})",
                allowed="calls after a full update of this layer",
                fix=f"load all weights of the model again; `export {STAGING}=host` before the server "
                "starts keeps the old weights when an update fails",
            )
        if self.opened:
            raise ContractError(
                f"{self._name} is being updated: {', '.join(self.opened)} are in raw form",
                allowed="calls after process_weights_after_loading",
                fix="end the weight update before the next request",
            )

    def layout(self) -> dict[str, str | None]:
        """The form of each tensor as its content tells; None where it does not (see contract.identity)."""
        sizes, known = Sizes.of_plan(self.plan), self.fingerprint
        found = {}
        for name in TENSORS:
            by_expert = dict(zip(known.experts, known.digests[name], strict=True))
            tensor = getattr(self.layer, name).data
            forms = identify(name, tensor, sizes, known.experts, by_expert.__getitem__)
            found[name] = one_form(forms)
        return found

    @property
    def _name(self) -> str:
        return self.plan.spec.name

    def _take_fingerprint(self) -> Fingerprint:
        forms = dict(zip(TENSORS, _layout_names(self.plan), strict=True))
        tensors = {name: getattr(self.layer, name).data for name in TENSORS}
        return fingerprint(tensors, forms, Sizes.of_plan(self.plan))

    def _nan_error(self) -> ContractError | None:
        if self.invalid is not None:
            return None  # its scales are NaN on purpose
        for name in self.opened:
            if self.forms[name].is_scale:
                scale = getattr(self.layer, name).data
                try:
                    refuse_nan(
                        scale if scale.dtype == torch.uint8 else scale.view(torch.uint8), name
                    )
                except ContractError as error:
                    return error
        return None

    def _is_rewritten(self) -> bool:
        return all(self._covers(name) for name in self.forms)

    def _covers(self, name: str) -> bool:
        keys = {(shard, expert) for n, shard, expert in self._rewritten if n == name}
        if (None, None) in keys:
            return True
        shards = ("w1", "w3") if name.startswith("w13") else ("w2",)
        experts = range(self.plan.spec.num_experts)
        return all((shard, expert) in keys for shard in shards for expert in experts)


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
            if _depth == 0:
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
            target = getattr(layer, name).data
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
    global _depth
    _depth += 1
    try:
        yield
        if _depth == 1:
            _close_written()
    except BaseException as error:
        fail(f"{type(error).__name__}: {error}")
        if _depth == 1:
            _close_written()
        raise
    finally:
        _depth -= 1
        if _depth == 0:
            _forget(list(_written))


def begin_session() -> None:
    """An update in several steps begins (SGLang's ``begin_weight_update``)."""
    global _depth
    if _depth == 0:
        _depth = 1


def end_session() -> None:
    """It ends: what is still open is closed."""
    global _depth
    try:
        _close_written()
    finally:
        _depth = 0
        _forget(list(_written))


def fail(reason: str) -> None:
    """Every layer that the running update wrote gets its weights back, or becomes invalid."""
    with _lock:
        for state in _written:
            state.roll_back(reason)


def _close_written() -> None:
    for state in list(_written):
        state.close()


def _forget(states: Iterable[LayerWeights]) -> None:
    for state in states:
        state._forget()
        if state in _written:
            _written.remove(state)


def _local(layer: Any, expert: Any) -> Any:
    to_local = getattr(layer, "_map_global_expert_id_to_local_expert_id", None)
    return expert if expert is None or to_local is None else to_local(expert)


def _layout_names(plan: Any) -> tuple[str, str, str, str]:
    return plan.w13_layout, plan.w13_scale_layout, plan.w2_layout, plan.w2_scale_layout
