"""Arithmetic on two 16-bit integers a register (``.s16x2``, ``.u16x2``). Source: PTX ISA 8.7, "add", "min", "max"."""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx.decode import Operation, full, operands, refuse, target, value
from sglang_aiter_moe.nvptx.text import Instruction

TYPES = frozenset(("s16x2", "u16x2"))


def _build(f):
    def build(instruction: Instruction) -> Operation:
        if instruction.modifiers not in (("s16x2",), ("u16x2",)):
            raise refuse(instruction, f"this form of {instruction.opcode}")
        d, *sources = operands(instruction, 3)
        a, b = (value(instruction, s, "b32") for s in sources)
        write = target(instruction, d, "b32")
        half = np.int16 if instruction.modifiers[0] == "s16x2" else np.uint16

        def run(g) -> None:
            x, y = (np.ascontiguousarray(full(g, read(g))).view(half) for read in (a, b))
            write(g, f(x, y).view(np.uint32))

        return run

    return build


TABLE = {
    "add": _build(np.add),
    "sub": _build(np.subtract),
    "min": _build(np.minimum),
    "max": _build(np.maximum),
}
