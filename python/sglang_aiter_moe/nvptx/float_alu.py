"""float32, float64, float16 and bfloat16 arithmetic, one value a register.

Source: PTX ISA 8.7, "Floating-Point Instructions". Exact operations round to nearest even. Of the approximate ones
(``ex2.approx``, ``lg2.approx``, ``rcp.approx``, ``div.full``, ...), for which PTX promises a number of correct bits,
the result is the exact function's, rounded to float32: hardware may differ in the last places.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.floats import fma as fma32
from sglang_aiter_moe.amdgpu.floats import fma64
from sglang_aiter_moe.nvptx.decode import Operation, Read, applied, operands, refuse, target, value
from sglang_aiter_moe.nvptx.floats import (
    exact_fma,
    flush,
    from_bf16,
    maximum,
    minimum,
    odd_f32,
    to_bf16,
)
from sglang_aiter_moe.nvptx.operands import Operand
from sglang_aiter_moe.nvptx.text import Instruction

TYPES = frozenset(("f16", "bf16", "f32", "f64"))
F32, F64 = np.float32, np.float64


def _fma(a, b, c):
    a, b, c = (np.asarray(x) for x in (a, b, c))
    if a.dtype == F64:
        return fma64(a, b, c)
    if a.dtype == np.float16:
        return exact_fma(a, b, c).astype(np.float16)
    return np.asarray(fma32(a, b, c))


def read_float(instruction: Instruction, operand: Operand, kind: str, ftz: bool) -> Read:
    """Reads f16, f32, f64 as they are, bf16 as float64: results are rounded to bf16 once."""
    read = value(instruction, operand, kind)
    if kind == "bf16":
        return lambda g: from_bf16(read(g)).astype(F64)
    if ftz and kind == "f32":
        return lambda g: flush(read(g))
    return read


def _build(f, arity: int, modifiers: frozenset = frozenset(), kinds: frozenset = TYPES):
    """A builder; ``f`` is a function of arrays, or of the modifiers to one (``f.chooses``)."""

    def build(instruction: Instruction) -> Operation:
        *given, kind = instruction.modifiers
        if kind not in kinds or set(given) - modifiers - {"ftz"}:
            raise refuse(instruction, f"this form of {instruction.opcode}")
        if {"rz", "rm", "rp"} & set(given):
            raise refuse(instruction, "rounding other than to nearest even")
        ftz = "ftz" in given
        if ftz and kind != "f32":
            raise refuse(instruction, f"ftz of {kind}")
        d, *sources = operands(instruction, arity + 1)
        reads = [read_float(instruction, s, kind, ftz) for s in sources]
        write = target(instruction, d, kind)
        function = f(frozenset(given), kind) if getattr(f, "chooses", False) else f
        if f is _fma and kind == "bf16":
            function = exact_fma
        saturates = "sat" in given

        def run(g):
            out = function(*[read(g) for read in reads])
            if saturates:
                out = np.where(out > 0, np.minimum(out, 1), 0).astype(out.dtype)
            if kind == "bf16":
                out = to_bf16(odd_f32(out))
            elif ftz:
                out = flush(out)
            return write(g, out)

        if kind == "f32" and not ftz and not saturates:
            return applied(write, function, reads)
        return run

    return build


def _chooses(f):
    f.chooses = True
    return f


@_chooses
def _maximum(given, kind):
    return _extreme(maximum, given, kind)


@_chooses
def _minimum(given, kind):
    return _extreme(minimum, given, kind)


def _extreme(f, given: frozenset, kind: str):
    """With .xorsign.abs of magnitudes, and negative where one source is and the other is not."""
    signs = {"xorsign", "abs"} & given
    if signs and (len(signs) != 2 or kind != "f32"):
        raise ValueError("xorsign")

    def run(a, b):
        a, b = np.asarray(a), np.asarray(b)
        if not signs:
            return f(a, b, "NaN" in given).astype(a.dtype)
        out = f(np.abs(a), np.abs(b), "NaN" in given)
        return np.where(np.signbit(a) != np.signbit(b), -out, out).astype(F32)

    return run


def _exactly(f):
    """The exact function, rounded once."""

    def run(a):
        a = np.asarray(a)
        return f(a.astype(F64)).astype(a.dtype)

    return run


def _signs(clear: bool):
    """abs and neg change the sign bit alone, of NaN too."""

    def build(instruction: Instruction) -> Operation:
        *given, kind = instruction.modifiers
        if kind not in TYPES or set(given) - {"ftz"}:
            raise refuse(instruction, f"this form of {instruction.opcode}")
        bits = {"f16": "b16", "bf16": "b16", "f32": "b32", "f64": "b64"}[kind]
        dtype = {"b16": np.uint16, "b32": np.uint32, "b64": np.uint64}[bits]
        sign = dtype(1 << (8 * np.dtype(dtype).itemsize - 1))
        d, x = operands(instruction, 2)
        a, write, flushes = (
            value(instruction, x, kind),
            target(instruction, d, kind),
            "ftz" in given,
        )

        def run(g):
            value = np.asarray(a(g))
            if flushes and kind == "f32":
                value = flush(value)
            value = value.view(dtype)
            return write(g, value & ~sign if clear else value ^ sign)

        return run

    return build


def _copysign(instruction: Instruction) -> Operation:
    """The sign of the first source, all else of the second."""
    if instruction.modifiers not in (("f32",), ("f64",)):
        raise refuse(instruction, "this form of copysign")
    kind = instruction.modifiers[0]
    d, x, y = operands(instruction, 3)
    a, b, write = (
        value(instruction, x, kind),
        value(instruction, y, kind),
        target(instruction, d, kind),
    )
    return lambda g: write(g, np.copysign(b(g), a(g)))


def _divide(a, b):
    return np.divide(a, b)


_ROUND = frozenset(("rn", "rz", "rm", "rp", "sat"))
_APPROX = frozenset(("approx", "full", "rn"))
_EXTREME = frozenset(("NaN", "xorsign", "abs"))
TABLE = {
    "add": _build(np.add, 2, _ROUND), "sub": _build(np.subtract, 2, _ROUND), "mul": _build(np.multiply, 2, _ROUND),
    "fma": _build(_fma, 3, _ROUND), "mad": _build(_fma, 3, _ROUND, frozenset(("f32", "f64"))),
    "div": _build(_divide, 2, _APPROX, frozenset(("f32", "f64"))),
    "rcp": _build(_exactly(lambda a: 1 / a), 1, _APPROX, frozenset(("f32", "f64"))),
    "sqrt": _build(np.sqrt, 1, _APPROX, frozenset(("f32", "f64"))),
    "rsqrt": _build(_exactly(lambda a: 1 / np.sqrt(a)), 1, _APPROX, frozenset(("f32",))),
    "ex2": _build(_exactly(np.exp2), 1, _APPROX, frozenset(("f32", "f16"))),
    "lg2": _build(_exactly(np.log2), 1, _APPROX, frozenset(("f32",))),
    "tanh": _build(_exactly(np.tanh), 1, _APPROX, frozenset(("f32", "f16"))),
    "sin": _build(_exactly(np.sin), 1, _APPROX, frozenset(("f32",))),
    "cos": _build(_exactly(np.cos), 1, _APPROX, frozenset(("f32",))),
    "max": _build(_maximum, 2, _EXTREME), "min": _build(_minimum, 2, _EXTREME),
    "abs": _signs(True), "neg": _signs(False), "copysign": _copysign,
}  # fmt: skip
