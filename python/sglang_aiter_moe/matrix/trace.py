"""What a silent failure was made of: how SGLang packed, and what AITER's kernel read and computed."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any

from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.layer import ACTIVATIONS, SIZES, Rank, columns
from sglang_aiter_moe.portable.registry import PortableAiter
from sglang_aiter_moe.portable.resolution import Resolution

#: Attributes of a Resolution that the oracle's arguments name too.
_CONSTANTS = {"limit": "limit", "beta": "betas", "linear_beta": "betas"}


@dataclass
class Trace:
    """One cell's.

    Attributes:
        packed: layout of w13 at each call of AITER's layout functions.
        resolved: the last call's kernel.
        inter: the intermediate size of that call, pads included.
        hidden: its hidden size.
        routing: how SGLang's routing differs from float64's (``routing.difference``).
    """

    packed: list[str] = field(default_factory=list)
    resolved: Resolution | None = None
    inter: int = 0
    hidden: int = 0
    routing: str = ""

    def watch(self, aiter: PortableAiter) -> None:
        """Notes what is done through this AITER."""
        shuffle = sys.modules["aiter.ops.shuffle"]
        for name in ("shuffle_weight", "shuffle_weight_a16w4"):
            if hasattr(shuffle, name):
                setattr(shuffle, name, self._noting(getattr(shuffle, name)))
        resolve = aiter.dispatcher.resolve

        def noted(call: Any) -> Resolution:
            self.resolved = resolve(call)
            self.inter, self.hidden = call.inter, call.hidden
            return self.resolved

        aiter.dispatcher.resolve = noted

    def _noting(self, shuffle: Any) -> Any:
        @functools.wraps(shuffle)
        def noted(*args: Any, **kwargs: Any) -> Any:
            a16w4 = shuffle.__name__ == "shuffle_weight_a16w4"
            gate_up = kwargs.get("gate_up", args[2] if a16w4 and len(args) > 2 else False)
            if gate_up:
                mixed = a16w4 or kwargs.get("is_guinterleave", False)
                self.packed.append("gu_interleaved" if mixed else "separated")
            return shuffle(*args, **kwargs)

        return noted

    def differences(self, cell: Cell) -> list[str]:
        """In what the call differs from the layer: "layout", "activation", "limit", ..."""
        read = self.resolved
        if read is None:
            return []
        wanted = ACTIVATIONS[cell.activation].oracle
        found = []
        if len(self.packed) > 1:
            found.append("packed twice")
        elif self.packed and self.packed[0] != read.w13_layout:
            found.append("layout")
        if read.activation != wanted["activation"]:
            found.append("activation")
        for name, kind in _CONSTANTS.items():
            stated = name in wanted or name == "limit"
            if stated and getattr(read, name) != wanted.get(name) and kind not in found:
                found.append(kind)
        if self._pads_cover_real_columns(cell):
            found.append("pads")
        if cell.bias and not (read.uses_bias1 and read.uses_bias2):
            found.append("bias")
        return found + [self.routing] * bool(self.routing)

    def _pads_cover_real_columns(self, cell: Cell) -> bool:
        part = columns(cell.rows, Rank.of(cell.parallel))
        read = self.resolved
        real = part.stop - part.start
        most = max(read.intermediate_skip_n, read.intermediate_skip_k)
        hidden = max(read.hidden_skip_n, read.hidden_skip_k)
        return self.inter - most < real or self.hidden - hidden < SIZES[cell.rows][0]
