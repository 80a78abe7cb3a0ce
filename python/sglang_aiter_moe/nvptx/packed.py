"""Arithmetic on two 16-bit floats a register: f16x2 and bf16x2. Source: PTX ISA 8.7, "Half Precision"."""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx.decode import Operation, operands, refuse, target, value
from sglang_aiter_moe.nvptx.floats import exact_fma, from_bf16, maximum, minimum, odd_f32, to_bf16
from sglang_aiter_moe.nvptx.text import Instruction

TYPES = frozenset(("f16x2", "bf16x2"))
F64, U16, U32 = np.float64, np.uint16, np.uint32


def _values(bits, kind: str) -> np.ndarray:
    """uint32 [...] to float64 [..., 2], low half first."""
    parts = np.ascontiguousarray(bits).view(U16).reshape(*np.shape(bits), 2)
    return (from_bf16(parts) if kind == "bf16x2" else parts.view(np.float16)).astype(F64)


def _packed(values, kind: str) -> np.ndarray:
    """float64 [..., 2], rounded once. (A sum that float64 does not hold is too far from a tie to matter.)"""
    if kind == "bf16x2":
        parts = to_bf16(odd_f32(values))
    else:
        half = values.astype(np.float16).view(U16)
        parts = np.where(np.isnan(values), U16(0x7FFF), half)
    return np.ascontiguousarray(parts).view(U32)[..., 0]


def _build(f, arity: int):
    def build(instruction: Instruction) -> Operation:
        *given, kind = instruction.modifiers
        if kind not in TYPES or set(given) - {"rn", "NaN"}:
            raise refuse(instruction, f"this form of {instruction.opcode}")
        d, *sources = operands(instruction, arity + 1)
        reads = [value(instruction, s, kind) for s in sources]
        write, propagate = target(instruction, d, kind), "NaN" in given

        def run(g):
            values = [_values(read(g), kind) for read in reads]
            out = f(*values, propagate) if f in (maximum, minimum) else f(*values)
            return write(g, _packed(out, kind))

        return run

    return build


def _signs(clear: bool):
    def build(instruction: Instruction) -> Operation:
        if instruction.modifiers not in (("f16x2",), ("bf16x2",)):
            raise refuse(instruction, f"this form of {instruction.opcode}")
        d, x = operands(instruction, 2)
        a, write = value(instruction, x, "b32"), target(instruction, d, "b32")
        if clear:
            return lambda g: write(g, a(g) & U32(0x7FFF7FFF))
        return lambda g: write(g, a(g) ^ U32(0x80008000))

    return build


TABLE = {
    "add": _build(np.add, 2), "sub": _build(np.subtract, 2), "mul": _build(np.multiply, 2),
    "fma": _build(exact_fma, 3), "max": _build(maximum, 2), "min": _build(minimum, 2),
    "abs": _signs(True), "neg": _signs(False),
}  # fmt: skip
