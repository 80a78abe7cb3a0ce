"""What an update writes beside the experts (attention, router, norms): undone with them, or the model is refused.

SGLang's loaders for these are its own, and a failed update may leave them half-way. With
``SGLANG_AITER_MOE_RELOAD_STAGING=host`` they are copied to the host before the first write and put back. Without
copies, and if a checksum says that any of them has changed, the names that the failed update carried stay open:
every MoE layer of the model refuses calls, and the scales of the first are NaN for captured graphs, until later
updates have brought each of those tensors again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sglang_aiter_moe.checkpoint.names import parse
from sglang_aiter_moe.srt.layers.quantization.mxfp4_layer_weights import LayerWeights, staging
from sglang_aiter_moe.srt.layers.quantization.mxfp4_watch import checksum

logger = logging.getLogger(__name__)

_ATTRIBUTE = "aiter_moe_others"
#: Stands for tensors whose names nobody told.
UNNAMED = "(tensors without names)"


class Others:
    """Of one model.

    Attributes:
        pending: names that a failed update may have left half-way.
    """

    def __init__(self) -> None:
        self.pending: set[str] = set()
        self._names: set[str] = set()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._sums: list[tuple[torch.Tensor, str]] | None = None

    @classmethod
    def of(cls, model: Any) -> Others:
        found = getattr(model, _ATTRIBUTE, None)
        if found is None:
            found = cls()
            setattr(model, _ATTRIBUTE, found)
        return found

    def begin(self, model: Any, states: Iterable[LayerWeights], names: Sequence[str]) -> None:
        """Before the first write of an update, or of one step of a session.

        Args:
            model: SGLang's.
            states: of its layers that are laid out.
            names: of the update's tensors; empty if nobody told.
        """
        others = {name for name in names if parse(name) is None} if names else {UNNAMED}
        self._names |= others
        if not others or self._copies is not None or self._sums is not None:
            return
        ours = {id(p) for state in states for p in state.layer.parameters(recurse=False)}
        found = [*_tensors(model, "named_parameters"), *_tensors(model, "named_buffers")]
        tensors = [t for key, t in found if key not in ours and not t.is_meta]
        if staging() == "host":
            self._copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in tensors]
        else:
            self._sums = [(tensor, checksum(tensor)) for tensor in tensors]

    def succeeded(self, states: Iterable[LayerWeights], *, whole: bool) -> None:
        """An update has been written.

        Args:
            states: of the model's layers.
            whole: it was a whole checkpoint.
        """
        if not self.pending:
            return
        self.pending = set() if whole else self.pending - self._names
        for state in states:
            if not self.pending:
                state.unblock()

    def failed(self, states: Sequence[LayerWeights], reason: str) -> None:
        """An update has failed after its first write, perhaps."""
        if self._copies is not None:
            for tensor, copy in self._copies:
                tensor.copy_(copy)
            logger.warning("the failed update is undone outside the experts too: %s", reason)
        elif self._sums is not None and any(checksum(t) != known for t, known in self._sums):
            self.pending |= self._names
            some = ", ".join(sorted(self.pending)[:3])
            what = f"{reason}; {len(self.pending)} tensors beside the experts are open: {some}"
            for number, state in enumerate(states):
                state.block(what, poison=number == 0)
        self.end()

    def end(self) -> None:
        """The update, or the session, is over."""
        self._copies = self._sums = None
        self._names = set()


def _tensors(model: Any, which: str) -> Iterable[tuple[int, torch.Tensor]]:
    for _, tensor in getattr(model, which, tuple)():
        yield id(tensor), tensor.detach()
