"""cvt and cvt.pack. Source: PTX ISA 8.7, "Data Movement and Conversion Instructions: cvt"."""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu import formats
from sglang_aiter_moe.nvptx.decode import NUMPY, Operation, operands, refuse, target, value
from sglang_aiter_moe.nvptx.floats import (
    F32,
    F64,
    U16,
    U32,
    f16_of,
    flush,
    from_bf16,
    halves,
    joined,
    odd_f32,
    to_bf16,
    to_f16,
)
from sglang_aiter_moe.nvptx.text import Instruction

_INTEGERS = frozenset(("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"))
_FLOATS = frozenset(("f16", "bf16", "f32", "f64"))
_SMALL = {"e4m3x2": formats.E4M3, "e5m2x2": formats.E5M2}
_MODES = frozenset(
    ("rn", "rz", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu")
)
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def build(instruction: Instruction) -> Operation:
    *modes, to, of = instruction.modifiers
    if set(modes) - _MODES:
        raise refuse(instruction, "this form of cvt")
    given = frozenset(modes)
    if to in _INTEGERS and of in _INTEGERS:
        return _integer(instruction, given, to, of)
    if to == of and given & set(_TO_INTEGER):
        return _whole(instruction, given, to)
    if to in _FLOATS | {"tf32"} and of in _FLOATS | _INTEGERS:
        return _to_float(instruction, given, to, of)
    if to in _INTEGERS and of in _FLOATS:
        return _float_to_integer(instruction, given, to, of)
    if to in ("f16x2", "bf16x2") and of == "f32":
        return _pair(instruction, given, to)
    if to in _SMALL and of in ("f32", "f16x2"):
        return _to_small(instruction, given, to, of)
    if to == "f16x2" and of in _SMALL:
        return _from_small(instruction, given, of)
    raise refuse(instruction, f"cvt to {to} from {of}")


def _integer(instruction: Instruction, given: frozenset, to: str, of: str) -> Operation:
    if given - {"sat"}:
        raise refuse(instruction, "this form of cvt")
    d, x = operands(instruction, 2)
    read = value(instruction, x, of, wide=True)
    write = target(instruction, d, to, wide=True)
    dtype = NUMPY[to]
    if "sat" in given:
        limits = np.iinfo(dtype)
        held = np.iinfo(NUMPY[of])
        low, high = max(limits.min, held.min), min(limits.max, held.max)
        return lambda g: write(g, np.clip(read(g), low, high).astype(dtype))
    return lambda g: write(g, read(g).astype(dtype))


def _value(read, of: str, given: frozenset):
    """A source as a numpy float or integer."""
    if of == "bf16":
        return lambda g: from_bf16(read(g))
    if "ftz" in given and of == "f32":
        return lambda g: flush(read(g))
    return read


def _to_float(instruction: Instruction, given: frozenset, to: str, of: str) -> Operation:
    modes = given & {"rn", "rz", "rna"}
    if (
        given - {"rn", "rz", "rna", "sat", "ftz", "relu"}
        or len(modes) > 1
        or ("rz" in given and (to, of) not in (("bf16", "f32"), ("f16", "f32"), ("tf32", "f32")))
        or ("rna" in given and to != "tf32")
        or (to == "tf32" and (of != "f32" or not modes or "sat" in given))
    ):
        raise refuse(instruction, "this form of cvt")
    mode = next(iter(modes), "rn")
    d, x = operands(instruction, 2)
    read = _value(value(instruction, x, of, wide=of in _INTEGERS), of, given)
    write = target(instruction, d, "b32" if to == "tf32" else to)

    def run(g):
        value = read(g)
        if "relu" in given:
            value = np.where(value > 0, value, np.where(np.isnan(value), value, 0)).astype(
                value.dtype
            )
        if "sat" in given:
            value = np.where(value > 0, np.minimum(value, 1), 0).astype(value.dtype)
        out = rounded(value, to, mode)
        return write(g, flush(out) if "ftz" in given and to == "f32" else out)

    return run


def rounded(value, to: str, mode: str = "rn") -> np.ndarray:
    """A number in a float format, rounded once: f16, f32 and f64 as numpy's, bf16 as uint16, tf32 as float32.

    ``mode``: "rn" nearest even, "rz" toward zero (of float32), "rna" nearest, ties away (tf32).
    """
    value = np.asarray(value)
    if to == "bf16":
        narrow = value.dtype in (np.float16, F32)
        return to_bf16(value.astype(F32) if narrow else odd_f32(value), mode == "rz")
    if to == "tf32":
        bits = value.astype(F32).view(U32)
        even = U32(0xFFF) + ((bits >> U32(13)) & U32(1))
        cut = (bits + {"rn": even, "rna": U32(0x1000), "rz": U32(0)}[mode]) & U32(0xFFFFE000)
        return np.where(np.isfinite(value), cut, bits).astype(U32).view(F32)
    if to == "f16":
        if mode != "rz":
            return to_f16(value)
        near = to_f16(value)
        over = np.abs(near.astype(F32)) > np.abs(value)
        bits = near.view(U16) - over.astype(U16)
        return bits.astype(U16).view(np.float16)
    out = value.astype(NUMPY[to])
    return out


def _whole(instruction: Instruction, given: frozenset, kind: str) -> Operation:
    """cvt.rmi.f32.f32 and its like: to a whole number of the same type; a zero keeps the sign."""
    modes = given & set(_TO_INTEGER)
    if kind not in ("f16", "f32", "f64") or len(modes) != 1 or given - modes - {"ftz"}:
        raise refuse(instruction, "this form of cvt")
    d, x = operands(instruction, 2)
    read = _value(value(instruction, x, kind), kind, given)
    write, towards = target(instruction, d, kind), _TO_INTEGER[next(iter(modes))]
    return lambda g: write(g, towards(np.asarray(read(g))))


def _float_to_integer(instruction: Instruction, given: frozenset, to: str, of: str) -> Operation:
    """Out of range is the nearest integer of the type, NaN is 0, but the highest bit alone of f64 or in 64 bits."""
    modes = given & set(_TO_INTEGER)
    if len(modes) != 1 or given - modes - {"ftz", "sat"}:
        raise refuse(instruction, "this form of cvt")
    d, x = operands(instruction, 2)
    read = _value(value(instruction, x, of), of, given)
    write, dtype = target(instruction, d, to, wide=True), NUMPY[to]
    towards, limits = _TO_INTEGER[next(iter(modes))], np.iinfo(dtype)

    def run(g):
        value = towards(np.asarray(read(g)).astype(F64))
        inside = (value >= float(limits.min)) & (
            value < float(limits.max) + (0 if to in ("s64", "u64") else 1)
        )
        out = np.where(inside, value, 0).astype(dtype)
        out = np.where(inside, out, np.where(value > 0, dtype(limits.max), dtype(limits.min)))
        top = (
            np.uint64(1 << (limits.bits - 1)) if of == "f64" or limits.bits == 64 else np.uint64(0)
        )
        nothing = top.astype(dtype)
        return write(g, np.where(np.isnan(value), nothing, out).astype(dtype))

    return run


def _pair(instruction: Instruction, given: frozenset, to: str) -> Operation:
    """cvt.rn.bf16x2.f32 d, a, b: a is the high half."""
    if given - {"rn", "rz", "relu"} or ("rz" in given and to != "bf16x2"):
        raise refuse(instruction, "this form of cvt")
    d, x, y = operands(instruction, 3)
    a, b, write = (
        value(instruction, x, "f32"),
        value(instruction, y, "f32"),
        target(instruction, d, "b32"),
    )
    one = to[:-2]

    def run(g):
        parts = []
        for x in (b(g), a(g)):
            if "relu" in given:
                x = np.where(x > 0, x, np.where(x != x, x, F32(0)))
            parts.append(rounded(x, one, "rz" if "rz" in given else "rn").view(U16))
        return write(g, joined(*parts))

    return run


def _to_small(instruction: Instruction, given: frozenset, to: str, of: str) -> Operation:
    """To two 8-bit floats, the first operand or the high half in the high byte; magnitudes saturate."""
    if given - {"rn", "satfinite", "relu"} or "satfinite" not in given or "relu" in given:
        raise refuse(instruction, "this form of cvt")
    name = _SMALL[to]
    if of == "f32":
        d, x, y = operands(instruction, 3)
        a, b = value(instruction, x, "f32"), value(instruction, y, "f32")
        both = lambda g: (b(g), a(g))  # noqa: E731
    else:
        d, x = operands(instruction, 2)
        pair = value(instruction, x, "b32")
        both = lambda g: tuple(h.view(np.float16) for h in halves(pair(g)))  # noqa: E731
    write = target(instruction, d, "b16")

    def run(g):
        low, high = (encode(v, name).astype(U16) for v in both(g))
        return write(g, low | (high << U16(8)))

    return run


def encode(value, name: str) -> np.ndarray:
    """Nearest even with saturation; NaN is 0x7F, also a negative one."""
    value = np.asarray(value)
    return np.where(np.isnan(value), np.uint8(0x7F), formats.encode(value, name))


def _from_small(instruction: Instruction, given: frozenset, of: str) -> Operation:
    if given - {"rn", "relu"} or "relu" in given:
        raise refuse(instruction, "this form of cvt")
    d, x = operands(instruction, 2)
    read, write, table = (
        value(instruction, x, "b16"),
        target(instruction, d, "b32"),
        f16_of(_SMALL[of]).view(U16),
    )

    def run(g):
        codes = np.asarray(read(g))
        return write(g, joined(table[codes & U16(0xFF)], table[codes >> U16(8)]))

    return run


TABLE = {"cvt": build}
