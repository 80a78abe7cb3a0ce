"""Instructions on lines of a cache: prefetches and policies change nothing that a program can see, ``discard`` does.

Source: PTX ISA 8.7, "discard": the 128 bytes are what they happen to be until something writes them. Here they become
all ones, NaN in every floating-point type, and count as never written.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx.decode import Operation, address, fault, operands, refuse, target
from sglang_aiter_moe.nvptx.memory_ops import store_global
from sglang_aiter_moe.nvptx.state import LANES, Group
from sglang_aiter_moe.nvptx.text import Instruction

LINE = 128


def _nothing(instruction: Instruction) -> Operation:
    return lambda g: None


def _policy(instruction: Instruction) -> Operation:
    """``createpolicy``: a number that loads, stores and copies take and nothing looks at."""
    write = target(instruction, operands(instruction, len(instruction.operands))[0], "b64")
    return lambda g: write(g, np.full((g.n, LANES), 1 << 60, np.uint64))


def _discard(instruction: Instruction) -> Operation:
    where, size = operands(instruction, 2)
    if instruction.modifiers != ("global", "L2") or size.kind != "int" or size.value != LINE:
        raise refuse(instruction, f"other than discard.global.L2 of {LINE} bytes")
    read = address(instruction, where, "global")

    def run(g: Group) -> None:
        at = read(g)
        odd = np.flatnonzero((at % LINE != 0) & g.lanes)
        if odd.size:
            raise fault(
                f"{int(at.reshape(-1)[odd[0]]):#x} is discarded",
                f"multiples of {LINE}",
                lane=int(odd[0]),
            )
        for first in range(0, LINE, 16):
            store_global(g, at + first, np.full((g.n, LANES, 16), 0xFF, np.uint8))
        lost = np.broadcast_to(g.lanes[..., None], (g.n, LANES, LINE))
        g.state.memory.forget_bytes(at.view(np.uint64), lost)

    return run


TABLE = {
    "prefetch": _nothing, "prefetchu": _nothing, "applypriority": _nothing, "discard": _discard,
    "createpolicy": _policy,
}  # fmt: skip
