"""The one owner of what kernels read in place of a correction bias, in any dtype.

A :class:`CorrectionBias` belongs to one TopKConfig and holds at most one *copy* of the bias for each dtype,
in memory of its own. Three rules, and nothing else:

1. **A captured graph reads the copy**, also in the bias's own dtype, because a graph keeps an address and the
   parameter's address is not ours to keep: ``param.data = new`` leaves the old storage to whoever holds it
   (another parameter, a backup that is swapped back later), so nothing may be written there. From the first
   capture on, the copy stays where it is. Its conversion is no node of the graph: a replay converts nothing.
   On a GPU an eager call has to come first (SGLang warms up before each capture), since memory that outlives a
   graph cannot be had during a capture.
2. **An eager call converts at each call**, in place, so it sees every change: a loader's
   ``param.data.copy_()`` bumps no version counter and inference tensors have none, and on a GPU the only way
   to tell that content changed would be a launch like the conversion itself. On a CPU a look at the content
   saves the write. The address is that of the call before while the *stamp* of the source (storage, version
   counter, device, dtype, shape, strides) is the same; with another stamp and no graph, the copy is a new
   tensor, as SGLang's own test of ``correction_bias_for_dtype`` expects.
3. **After an update** :func:`refresh_all` writes every copy again, whatever the source looks like. That is what
   reaches graphs which only replay.

Code that torch.compile traces calls an operator (``sglang_aiter_moe::correction_bias``) that finds the owner by
its number when it runs, so a graph captured around compiled code obeys rule 1; the operator's result is a copy
of the copy, one launch in compiled code alone.

Not held, but converted in the call: sparse tensors, fake tensors and whatever runs under a dispatch mode.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ....errors import ContractError

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_aiter_moe_correction_bias"
# In SGLang's source this module has another name: both may be loaded, and an operator is defined once.
_NAMESPACE = __name__.partition(".srt.layers.moe.correction")[0].replace(".", "_")
_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, CorrectionBias] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class _Copy:
    tensor: torch.Tensor
    stamp: tuple
    held: bool = False  # by a captured graph: never to move
    narrower: bool = False  # than the source, at the capture


class CorrectionBias:
    """The copies of one TopKConfig's bias. The bias is passed in, since the config's attribute may be replaced."""

    def __init__(self, config: Any) -> None:
        self.config = weakref.ref(config)
        self.number = next(_numbers)
        self._copies: dict[torch.dtype, _Copy] = {}
        self._seen: tuple = ()
        self._retired: list[torch.Tensor] = []  # another shape came; a graph may still read these
        _owners[self.number] = self

    def __reduce__(self) -> tuple:
        # Belongs to one config in one process: a pickled or deep-copied config makes its own.
        return _nothing, ()

    def as_dtype(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``source`` in ``dtype``.

        Returns:
            ``source`` itself where it has that dtype and no graph is being captured, else the copy, up to date.
        """
        if torch.compiler.is_compiling():
            return source if source.dtype == dtype else traced(source, self.number, dtype)
        if any(source is copy.tensor for copy in self._copies.values()):
            return source.to(dtype)  # what a capture was given
        stamp = _stamp(source)
        if stamp is None:
            return (source if source.layout == torch.strided else source.to_dense()).to(dtype)
        if _is_capturing(source):
            return self._captured(source, dtype, stamp)
        if source.dtype == dtype:
            self.look_at(source, dtype)
            return source
        self._follow(source, stamp)
        return self._written(source, dtype, stamp).tensor

    def as_traced(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``source`` in ``dtype`` for code under torch.compile: always through the operator."""
        return traced(source, self.number, dtype)

    def is_capturing(self, source: torch.Tensor) -> bool:
        """Whether a kernel that is launched now on ``source`` becomes part of a graph."""
        return _is_capturing(source)

    def look_at(self, source: torch.Tensor, dtype: torch.dtype) -> None:
        """An eager call is about to read ``source``, and a capture may follow in which ``dtype`` is read.

        What graphs read follows, if the stamp changed; on a GPU the copy is made now, outside of any capture.
        """
        stamp = _stamp(source)
        if stamp is None or any(source is copy.tensor for copy in self._copies.values()):
            return
        self._follow(source, stamp)
        copy = self._copies.get(dtype)
        if source.is_cuda and (copy is None or copy.stamp != stamp):
            self._written(source, dtype, stamp)

    def refresh(self, source: torch.Tensor) -> ContractError | None:
        """Rule 3. A copy that a graph reads and that cannot hold the new bias is the error that is returned."""
        stamp, problem = _stamp(source), None
        for dtype, copy in list(self._copies.items()):
            misfit = _misfit(copy, source)
            if misfit is None:
                _write(copy.tensor, source)
                copy.stamp = stamp or ()
            elif copy.held:
                problem = misfit
            else:
                del self._copies[dtype]  # the next call makes another
        return problem

    def _captured(self, source: torch.Tensor, dtype: torch.dtype, stamp: tuple) -> torch.Tensor:
        for other in [d for d, copy in self._copies.items() if copy.held and _misfit(copy, source)]:
            # The graphs that read it cannot be brought up to date; this capture takes their place.
            self._retired.append(self._copies.pop(other).tensor)
        copy = self._copies.get(dtype)
        if source.is_cuda and (copy is None or not _same_place(copy.tensor, source)):
            # Memory of the graph's pool is written by other nodes of it, and no other can be had now.
            logger.error(
                "a graph is captured around a correction bias that no eager call has read before: it converts the "
                "bias itself at each replay and does not follow a replaced storage"
            )
            return source.to(dtype)
        if (
            copy is None or not source.is_cuda or copy.stamp != stamp
        ):  # else the warm-up has written it
            with _beside_the_capture(source):
                copy = self._written(source, dtype, stamp)
        copy.narrower |= is_narrower(dtype, source.dtype)
        copy.held = True
        return copy.tensor

    def _written(self, source: torch.Tensor, dtype: torch.dtype, stamp: tuple) -> _Copy:
        copy = self._copies.get(dtype)
        fits = copy is not None and _same_place(copy.tensor, source)
        if not fits or (copy.stamp != stamp and not copy.held and not _is_capturing(source)):
            with torch.inference_mode(False):  # a normal tensor, so that any caller may use it
                tensor = torch.empty(source.shape, dtype=dtype, device=source.device)
            copy = self._copies[dtype] = _Copy(tensor, ())
        if copy.stamp != stamp or source.device.type != "cpu" or not _holds(copy.tensor, source):
            _write(copy.tensor, source)
            copy.stamp = stamp
        return copy

    def _follow(self, source: torch.Tensor, stamp: tuple) -> None:
        # Graphs need not wait for the end of an update for a change that an eager call sees by the stamp.
        if stamp != self._seen and any(copy.held for copy in self._copies.values()):
            problem = self.refresh(source)
            if (
                problem is not None
            ):  # an error after the update, unless the graphs are captured again
                logger.error("%s", problem)
        self._seen = stamp


def _nothing() -> None:
    return None


def correction_bias_of(config: Any) -> CorrectionBias:
    """The owner for a TopKConfig, made at the first call (the plugin calls when the config is made)."""
    owner = getattr(config, _ATTRIBUTE, None)
    if owner is None or owner.config() is not config:  # the second: copy.copy() of a config
        if torch.compiler.is_compiling():
            return _NOBODY  # none can be made while code is traced: the operator converts the tensor it gets
        owner = CorrectionBias(config)
        setattr(config, _ATTRIBUTE, owner)
    return owner


_NOBODY = CorrectionBias(_nothing)  # of a config without a bias


def refresh_all() -> int:
    """Writes the copies of every living config from its bias, in place; returns how many configs.

    Raises:
        ContractError: after all others have been written, for a bias that no longer fits what a captured graph
            reads (another shape or device, or wider than the graph computes in).
    """
    refreshed, problems = 0, []
    for owner in list(_owners.values()):
        config = owner.config()
        if getattr(config, "correction_bias", None) is None:
            continue
        refreshed += 1
        problem = owner.refresh(config.correction_bias)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise problems[0]
    return refreshed


def is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether ``dtype`` cannot hold every number of ``other``."""
    return torch.promote_types(dtype, other) != dtype


@torch.library.custom_op(f"{_NAMESPACE}::correction_bias", mutates_args=())
def traced(source: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
    """What compiled code calls: :meth:`CorrectionBias.as_dtype` of owner ``number``, in a tensor of its own."""
    owner = _owners.get(number)
    if owner is None or owner is _NOBODY:
        return source.to(dtype, copy=True)
    return owner.as_dtype(source, dtype).clone()


@traced.register_fake
def _(source: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(source.shape, dtype=dtype, device=source.device)


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _beside_the_capture(source: torch.Tensor):
    # On a stream of its own, what runs is done now and becomes no node of the graph. Nothing of the capture can
    # have written the bias, and a capture begins with a synchronised device. No wait is allowed while capturing,
    # and none is needed: the device is idle, and the graph has yet to be instantiated before it can replay.
    if not source.is_cuda:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(source.device)):
        yield


def _stamp(source: torch.Tensor) -> tuple | None:
    """What tells one source from another without a look at its content; None: a kind that is not held."""
    if (
        source.layout != torch.strided
        or isinstance(source, FakeTensor)
        or is_traceable_wrapper_subclass(source)
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return None
    version = None if source.is_inference() else source._version
    place = source.data_ptr(), source.device, source.dtype
    return (*place, source.shape, source.stride(), version)


def _same_place(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    return tensor.shape == source.shape and tensor.device == source.device


def _misfit(copy: _Copy, source: torch.Tensor) -> ContractError | None:
    if not _same_place(copy.tensor, source):
        return ContractError(
            f"the correction bias changed its shape from {tuple(copy.tensor.shape)} on {copy.tensor.device} to "
            f"{tuple(source.shape)} on {source.device} under captured graphs",
            allowed="new values in the same shape, on the same device",
            fix="capture the graphs again after changing the model",
        )
    if copy.held and not copy.narrower and is_narrower(copy.tensor.dtype, source.dtype):
        return ContractError(
            f"the correction bias changed to {source.dtype}, and a captured graph reads it in the narrower "
            f"dtype {copy.tensor.dtype}",
            allowed="the dtype at capture, or a narrower one",
            fix="capture the graphs again (update_weights_from_disk takes recapture_cuda_graph)",
        )
    return None


def _holds(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    return torch.equal(tensor, source.detach().to(tensor.dtype))


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():  # allowed to write normal and inference tensors alike
        target.copy_(source)
