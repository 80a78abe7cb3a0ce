"""SGLang's weight updates on layers that are laid out: checked first, whole or not at all.

Around the methods of SGLang's ``WeightUpdater`` (up to 0.5.15: of ``ModelRunner``), each of which returns
``(success, message)``. An update that is refused, or that fails, returns ``False`` with the reason; it does not end
the scheduler. What one rank of a tensor-parallel group refuses, none of them writes; what fails on one is a failure
on all.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4_reload
from sglang_aiter_moe.srt.layers.quantization.mxfp4 import restore_raw
from sglang_aiter_moe.srt.layers.quantization.mxfp4_others import Others
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import (
    RUNNING,
    LayerWeights,
    weights_of,
)
from sglang_aiter_moe.srt.layers.quantization.mxfp4_update_check import Described, check_update
from sglang_aiter_moe.srt.model_executor.model_runner_components.ranks import failure_elsewhere

logger = logging.getLogger(__name__)

_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}


class _Unsuccessful(Exception):
    """SGLang caught what went wrong, and says so in its result."""

    def __init__(self, result: tuple[bool, str]) -> None:
        super().__init__(result[1])
        self.result = result


def restore_raw_in(model: torch.nn.Module) -> None:
    """After SGLang's own ``restore_weights_before_loading``: every layer that is laid out gets its raw form."""
    from sglang.srt.model_loader import loader

    if loader.QuantizedRLModelLoader.is_reload_scenario(model):
        return
    for module in model.modules():
        restore_raw(module)


def from_disk(original: Any, updater: Any, model_path: str, *args: Any, **kwargs: Any) -> Any:
    """``update_weights_from_disk``. The headers of the files are checked before the first is read."""

    def run() -> Any:
        result = original(updater, model_path, *args, **kwargs)
        # After a failure SGLang loads once more, so what it leaves is no mixture.
        if not result[0] and mxfp4_reload.staging() == "host":
            raise _Unsuccessful(result)
        return result

    chosen = kwargs.get("weight_name_filter", args[1] if len(args) > 1 else None)
    return _update(updater, lambda: _in_files(model_path), run, checked=False, chosen=chosen)


def from_tensor(
    original: Any, updater: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """``update_weights_from_tensor``, also for ``direct``, which goes around the weight loaders."""

    def run() -> Any:
        with _direct(_model_of(updater), named_tensors, load_format):
            return original(updater, named_tensors, load_format)

    return _update(updater, lambda: _in_memory(named_tensors), run)


def receiving(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """``receive_weights_from_distributed``: what a rank did not get, none loads.

    SGLang does not call ``load_weights_from_distributed`` on such a rank, and the others would wait for it there.

    Raises:
        Exception: what was raised here.
        RuntimeError: another rank received nothing.
    """
    if not states_in(_model_of(updater)):
        return original(updater, *args, **kwargs)
    try:
        received = original(updater, *args, **kwargs)
    except Exception as error:
        failure_elsewhere(str(error))
        _fail_session(str(error))
        raise
    elsewhere = failure_elsewhere(None)
    if elsewhere is not None:
        _fail_session(elsewhere)
        raise RuntimeError(elsewhere)
    return received


def from_received(original: Any, updater: Any, named_tensors: Any) -> Any:
    """``load_weights_from_distributed``: the tensors have been received."""
    return _update(
        updater, lambda: _in_memory(named_tensors), lambda: original(updater, named_tensors)
    )


def from_distributed(
    original: Any, updater: Any, names: Any, dtypes: Any, shapes: Any, *args: Any, **kwargs: Any
) -> Any:
    """``update_weights_from_distributed`` up to 0.5.20: checked before anything is received."""

    def described() -> Iterator[Described]:
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            known = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
            yield name, tuple(shape), known

    run = lambda: original(updater, names, dtypes, shapes, *args, **kwargs)  # noqa: E731
    return _update(updater, described, run)


def from_ipc(original: Any, updater: Any, recv_req: Any) -> Any:
    """``update_weights_from_ipc``: what comes is only known to the checkpoint engine."""
    return _update(updater, lambda: (), lambda: original(updater, recv_req))


def begin_session(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """``begin_weight_update``: everything until the end is one update."""
    mxfp4_reload.begin_session()
    try:
        return original(updater, *args, **kwargs)
    except BaseException:  # SGLang has no session then
        mxfp4_reload.end_session()
        for state in states_in(_model_of(updater)):
            state.close()
        raise


def end_session(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """``end_weight_update``."""
    try:
        return original(updater, *args, **kwargs)
    finally:
        _end_others()
        mxfp4_reload.end_session()


def _model_of(updater: Any) -> torch.nn.Module:
    """The model that a ``WeightUpdater``, or up to 0.5.15 a ``ModelRunner``, writes."""
    return updater.get_model() if hasattr(updater, "get_model") else updater.model


def states_in(model: torch.nn.Module) -> list[LayerWeights]:
    """The layers of a model that are laid out."""
    found = (weights_of(module) for module in model.modules())
    return [state for state in found if state is not None]


def _update(
    updater: Any,
    described: Callable[[], Iterable[Described]],
    run: Callable[[], tuple[bool, str]],
    *,
    checked: bool = True,
    chosen: Callable[[str], bool] | None = None,
) -> tuple[bool, str]:
    """Runs one update: checked, whole or undone, and the model refused where it is neither.

    Args:
        updater: SGLang's.
        described: its tensors, as far as anybody can tell.
        run: SGLang's method.
        checked: a result without success is a failure.
        chosen: which of the tensors are read; all by default.
    """
    model = _model_of(updater)
    states = states_in(model)
    # A draft without such layers is written in one session with a target that has them: it fails with it.
    if not states and not RUNNING.models and RUNNING.failed is None:
        return run()
    try:
        _refuse_after_failure()
        mxfp4_reload.staging()
        tensors = list(described())
        check_update(tensors, states)
        names = [name for name, _, _ in tensors if chosen is None or chosen(name)]
        refused = None
    except Exception as error:
        refused = error
    elsewhere = failure_elsewhere(None if refused is None else str(refused))
    if refused is not None or elsewhere is not None:
        _fail_session(str(refused or elsewhere))
        return _told(refused or _Unsuccessful((False, f"refused: {elsewhere}")))
    others = Others.of(model)

    def begin() -> None:
        if all(known is not others for _, known in RUNNING.models):
            RUNNING.models.append((states, others))
        others.begin(model, states, names)

    try:
        with mxfp4_reload.updating():
            result = _on_all_ranks(lambda: _written(begin, run, states, checked))
        if result[0]:
            others.succeeded(states, whole=not checked and chosen is None)
        if RUNNING.depth == 0:
            _end_others()
        return result
    except Exception as error:
        _undo_others(str(error))
        if RUNNING.depth:
            RUNNING.failed = str(error)
        return _told(error)


def _undo_others(reason: str) -> None:
    """What the update wrote beside the experts, in every model of it.

    The last model first: a draft shares tensors with its target, and its copies were taken after the target's.
    """
    while RUNNING.models:
        states, others = RUNNING.models.pop()
        others.failed(states, reason)


def _end_others() -> None:
    """The update is over in every model."""
    while RUNNING.models:
        _, others = RUNNING.models.pop()
        others.end()


def _fail_session(reason: str) -> None:
    """A step of a session is refused: what the steps before it wrote goes with it."""
    if RUNNING.depth == 0 or RUNNING.failed is not None:
        return
    mxfp4_reload.fail(reason)
    _undo_others(reason)
    RUNNING.failed = reason


def _refuse_after_failure() -> None:
    """A session is one update: nothing is written after a step that failed.

    Raises:
        ContractError: it has failed.
    """
    if RUNNING.failed is not None:
        raise ContractError(
            f"this session of weight updates has failed: {RUNNING.failed}",
            allowed="no further step of it",
            fix="end it (end_weight_update), and send the whole update in a new one",
        )


def _written(
    begin: Callable[[], None],
    run: Callable[[], tuple[bool, str]],
    states: list[LayerWeights],
    checked: bool,
) -> tuple[bool, str]:
    """Writes an update, and looks at everything that could fail when it is packed."""
    begin()
    result = run()
    if checked and not result[0]:
        raise _Unsuccessful(result)
    for state in states:
        state.verify()
    for state in list(RUNNING.written):
        state.check_written()
    return result


def _on_all_ranks(write: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """Writes here, and fails if that failed on another rank.

    Raises:
        Exception: what was raised here.
        _Unsuccessful: it went well here alone.
    """
    try:
        result = write()
    except Exception as error:
        failure_elsewhere(str(error))
        raise
    # A disk update that SGLang has undone by itself is none that the others may keep.
    elsewhere = failure_elsewhere(None if result[0] else str(result[1]))
    if result[0] and elsewhere is not None:
        raise _Unsuccessful((False, elsewhere))
    return result


def _told(error: Exception) -> tuple[bool, str]:
    """A failure as SGLang's methods return it."""
    if isinstance(error, _Unsuccessful):
        return error.result
    logger.error("the weight update failed", exc_info=error)
    return False, f"{type(error).__name__}: {error}"


def _in_memory(named_tensors: Any) -> Iterator[Described]:
    if isinstance(named_tensors, dict):  # a flattened bucket
        for part in named_tensors["metadata"]:
            yield part.name, tuple(part.shape), part.dtype
        return
    for name, tensor in named_tensors:
        if isinstance(tensor, torch.Tensor):
            yield name, tuple(tensor.shape), tensor.dtype
        else:
            yield name, None, None  # serialised for each rank


def _in_files(model_path: str) -> Iterator[Described]:
    from sglang_aiter_moe.checkpoint.check import PLAN_KEY
    from sglang_aiter_moe.checkpoint.files import Checkpoint

    path = Path(model_path)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return  # not on this disk yet, or another format: SGLang finds it
    files = Checkpoint(path)
    if PLAN_KEY in files.metadata:
        raise ContractError(
            f"{model_path} is laid out ahead of time",
            allowed="a raw checkpoint for an update in place",
            fix="update from the checkpoint that it was packed from, or restart with it",
        )
    for name in files.names:
        yield name, files.shape(name), _DTYPES.get(files.dtype(name))


@contextlib.contextmanager
def _direct(model: torch.nn.Module, named_tensors: Any, load_format: str | None) -> Iterator[None]:
    """Opens the parameters that are about to be written without their loaders."""
    touched = []
    if load_format == "direct":
        names = {name for name, _ in named_tensors}
        for prefix, module in model.named_modules():
            state = weights_of(module)
            for name in () if state is None else state.forms:
                if f"{prefix}.{name}" in names:
                    state.touch(name)
                    touched.append((state, name))
    yield
    for state, name in touched:
        state.wrote(name, None, None)
