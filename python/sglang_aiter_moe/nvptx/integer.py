"""Integer and bit arithmetic. Source: PTX ISA 8.7, "Integer Arithmetic", "Logic and Shift", "prmt"."""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx.decode import (
    NUMPY,
    Operation,
    applied,
    operands,
    refuse,
    target,
    unknown_bytes,
    value,
)
from sglang_aiter_moe.nvptx.text import Instruction

TYPES = frozenset(
    ("u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64", "pred")
)
_INTEGERS = TYPES - {"pred"}
U32, U64, I64 = np.uint32, np.uint64, np.int64
_DOUBLE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
"""Type -> type of twice the width."""


def _kind(instruction: Instruction) -> str:
    return instruction.modifiers[-1]


def _plain(f, arity: int, allowed: frozenset = TYPES):
    """A builder for an operation with one type and no other modifier; ``f`` on arrays of that type."""

    def build(instruction: Instruction) -> Operation:
        kind = _kind(instruction)
        if kind not in allowed or len(instruction.modifiers) != 1:
            raise refuse(instruction, f"this form of {instruction.opcode}")
        d, *sources = operands(instruction, arity + 1)
        write = target(instruction, d, kind)
        reads = [value(instruction, s, kind) for s in sources]
        return applied(write, f, reads)

    return build


def _sum(f):
    """add and sub; with .sat of s32 what is out of range is the nearest integer of the type."""
    plain = _plain(f, 2, _INTEGERS)

    def build(instruction: Instruction) -> Operation:
        if instruction.modifiers != ("sat", "s32"):
            return plain(instruction)
        d, x, y = operands(instruction, 3)
        a, b, write = (
            value(instruction, x, "s32"),
            value(instruction, y, "s32"),
            target(instruction, d, "s32"),
        )
        limits = np.iinfo(np.int32)
        exact = lambda g: f(a(g), b(g), dtype=I64)  # noqa: E731
        return lambda g: write(g, np.clip(exact(g), limits.min, limits.max).astype(np.int32))

    return build


def high(a, b, kind: str):
    """The upper half of the product."""
    if kind in _DOUBLE:
        wide = NUMPY[_DOUBLE[kind]]
        product = np.multiply(a, b, dtype=wide)
        return (product >> wide(8 * np.dtype(NUMPY[kind]).itemsize)).astype(NUMPY[kind])
    # 64 bits: from four products of halves.
    x, y = np.asarray(a).view(U64), np.asarray(b).view(U64)
    low = U64(0xFFFFFFFF)
    xl, xh, yl, yh = x & low, x >> U64(32), y & low, y >> U64(32)
    middle = xh * yl + (xl * yl >> U64(32))
    other = xl * yh + (middle & low)
    out = xh * yh + (middle >> U64(32)) + (other >> U64(32))
    if kind == "s64":
        out = out - np.where(np.asarray(a) < 0, y, U64(0)) - np.where(np.asarray(b) < 0, x, U64(0))
        return out.view(I64)
    return out


def _multiply(instruction: Instruction) -> Operation:
    """mul and mad, .lo .hi .wide."""
    part, kind = instruction.modifiers if len(instruction.modifiers) == 2 else ("", "")
    adds = instruction.opcode == "mad"
    if part not in ("lo", "hi", "wide") or (part == "wide" and kind not in _DOUBLE):
        raise refuse(instruction, f"this form of {instruction.opcode}")
    d, x, y, *rest = operands(instruction, 3 + adds)
    result = _DOUBLE[kind] if part == "wide" else kind
    a, b = value(instruction, x, kind), value(instruction, y, kind)
    write, dtype = target(instruction, d, result), NUMPY[result]
    if part == "wide":
        product = lambda g: np.multiply(a(g), b(g), dtype=dtype)  # noqa: E731
    elif part == "hi":
        product = lambda g: high(a(g), b(g), kind)  # noqa: E731
    else:
        product = lambda g: a(g) * b(g)  # noqa: E731
    if not adds:
        return lambda g: write(g, product(g))
    c = value(instruction, rest[0], result)
    return lambda g: write(g, product(g) + c(g))


def divide(a, b, kind: str, remainder: bool):
    """Toward zero. Division by zero gives all ones, its remainder the dividend, as sm_90 code does.

    PTX leaves it unspecified; the lanes of a guard's other side may come here.
    """
    dtype = NUMPY[kind]
    zero = np.equal(b, 0)
    safe = np.where(zero, dtype(1), b)
    if kind[0] == "u":
        return (
            np.where(zero, a, a % safe) if remainder else np.where(zero, ~dtype(0), a // safe)
        ).astype(dtype)
    left = np.fmod(a, safe)
    if remainder:
        return np.where(zero, a, left).astype(dtype)
    return np.where(zero, dtype(-1), (a - left) // safe).astype(dtype)


def _divide(instruction: Instruction) -> Operation:
    kind = _kind(instruction)
    if len(instruction.modifiers) != 1 or kind not in ("u16", "s16", "u32", "s32", "u64", "s64"):
        raise refuse(instruction, f"this form of {instruction.opcode}")
    remainder = instruction.opcode == "rem"
    d, x, y = operands(instruction, 3)
    a, b, write = (
        value(instruction, x, kind),
        value(instruction, y, kind),
        target(instruction, d, kind),
    )
    return lambda g: write(g, divide(a(g), b(g), kind, remainder))


def _shift(instruction: Instruction) -> Operation:
    """shl, shr: amounts from the width on give zero, or all copies of the sign."""
    kind = _kind(instruction)
    bits = 8 * np.dtype(NUMPY[kind]).itemsize
    if len(instruction.modifiers) != 1 or kind == "pred":
        raise refuse(instruction, f"this form of {instruction.opcode}")
    d, x, y = operands(instruction, 3)
    a, b, write = (
        value(instruction, x, kind),
        value(instruction, y, "u32"),
        target(instruction, d, kind),
    )
    left, signed, dtype = instruction.opcode == "shl", kind[0] == "s", NUMPY[kind]
    shift = np.left_shift if left else np.right_shift
    if y.kind == "int" and 0 <= y.value < bits:
        amount = dtype(y.value)
        return lambda g: write(g, shift(a(g), amount))

    def run(g):
        amount = b(g)
        if signed and not left:
            return write(g, shift(a(g), np.minimum(amount, U32(bits - 1)).astype(dtype)))
        out = shift(a(g), np.minimum(amount, U32(bits - 1)).astype(dtype))
        return write(g, np.where(amount >= bits, dtype(0), out))

    return run


def extract(a, position, length, kind: str):
    """bfe: ``length`` bits from ``position`` on; what lies beyond is zeros, or copies of the field's sign."""
    dtype = NUMPY[kind]
    bits = 8 * np.dtype(dtype).itemsize
    p = (np.asarray(position) & U32(255)).astype(np.int64)
    n = (np.asarray(length) & U32(255)).astype(np.int64)
    top = bits - 1
    # A field that reaches the top is a shift to the right; another one is moved up first.
    cut = np.asarray(a) >> np.minimum(p, top).astype(dtype)
    if kind[0] == "u":
        cut = np.where(p > top, dtype(0), cut)
    up = np.clip(bits - p - n, 0, top).astype(dtype)
    down = np.clip(bits - n, 0, top).astype(dtype)
    inner = (np.asarray(a) << up) >> down
    return np.where(n == 0, dtype(0), np.where(p + n > top, cut, inner))


def _extract(instruction: Instruction) -> Operation:
    kind = _kind(instruction)
    if len(instruction.modifiers) != 1 or kind not in ("u32", "s32", "u64", "s64"):
        raise refuse(instruction, "this form of bfe")
    d, x, y, z = operands(instruction, 4)
    a, write = value(instruction, x, kind), target(instruction, d, kind)
    p, n = value(instruction, y, "u32"), value(instruction, z, "u32")
    bits = 64 if kind.endswith("64") else 32
    if y.kind == z.kind == "int" and z.value > 0 and y.value + z.value <= bits and y.value >= 0:
        dtype = NUMPY[kind]
        up, down = dtype(bits - y.value - z.value), dtype(bits - z.value)
        return lambda g: write(g, (a(g) << up) >> down)
    return lambda g: write(g, extract(a(g), p(g), n(g), kind))


def insert(a, b, position, length, kind: str):
    """bfi: the low ``length`` bits of a into b at ``position``."""
    bits = 8 * np.dtype(NUMPY[kind]).itemsize
    one = NUMPY[kind](1)
    top = NUMPY[kind](bits - 1)
    p = (np.asarray(position) & U32(255)).astype(NUMPY[kind])
    n = (np.asarray(length) & U32(255)).astype(NUMPY[kind])
    field = np.where(n > top, ~NUMPY[kind](0), (one << np.minimum(n, top)) - one)
    mask = np.where(p > top, NUMPY[kind](0), field << np.minimum(p, top))
    return (b & ~mask) | ((a << np.minimum(p, top)) & mask)


def _insert(instruction: Instruction) -> Operation:
    kind = _kind(instruction)
    if instruction.modifiers not in (("b32",), ("b64",)):
        raise refuse(instruction, "this form of bfi")
    d, x, y, z, w = operands(instruction, 5)
    a, b, write = (
        value(instruction, x, kind),
        value(instruction, y, kind),
        target(instruction, d, kind),
    )
    p, n = value(instruction, z, "u32"), value(instruction, w, "u32")
    return lambda g: write(g, insert(a(g), b(g), p(g), n(g), kind))


def lop3(a, b, c, table: int):
    """The function of three bits whose truth table is ``table``: bit 4a + 2b + c."""
    out = U32(0)
    for i in range(8):
        if table >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return out


_LOP3 = {
    0xEA: lambda a, b, c: (a & b) | c, 0xF8: lambda a, b, c: a | (b & c), 0x96: lambda a, b, c: a ^ b ^ c,
    0xFE: lambda a, b, c: a | b | c, 0x80: lambda a, b, c: a & b & c, 0xCA: lambda a, b, c: (a & b) | (~a & c),
}  # fmt: skip
"""Truth tables that compilers write."""


def _lop3(instruction: Instruction) -> Operation:
    d, *sources, table = operands(instruction, 5)
    if instruction.modifiers != ("b32",) or table.kind != "int" or not 0 <= table.value < 256:
        raise refuse(instruction, "this form of lop3")
    a, b, c = (value(instruction, s, "b32") for s in sources)
    write, number = target(instruction, d, "b32"), int(table.value)
    f = _LOP3.get(number, lambda x, y, z: lop3(x, y, z, number))
    return lambda g: write(g, f(a(g), b(g), c(g)))


def permute(a, b, selector):
    """prmt: each nibble of ``selector`` picks a byte of b:a; its top bit asks for the byte's sign instead."""
    both = np.asarray(a).astype(U64) | (np.asarray(b).astype(U64) << U64(32))
    out = U32(0)
    for i in range(4):
        nibble = (np.asarray(selector) >> U32(4 * i)) & U32(15)
        byte = (both >> ((nibble & U32(7)).astype(U64) * U64(8))).astype(U32) & U32(0xFF)
        byte = np.where(nibble & U32(8), (byte >> U32(7)) * U32(0xFF), byte)
        out = out | (byte << U32(8 * i))
    return out


def _permute(instruction: Instruction) -> Operation:
    if instruction.modifiers != ("b32",):
        raise refuse(instruction, "this form of prmt")
    d, x, y, z = operands(instruction, 4)
    a, b, c = (value(instruction, s, "b32") for s in (x, y, z))
    write = target(instruction, d, "b32")
    if z.kind == "int" and not int(z.value) & 0x8888:
        nibbles = [int(z.value) >> 4 * i & 7 for i in range(4)]

        def chosen(g):
            sides, out = (a(g), b(g)), None
            for i, nibble in enumerate(nibbles):
                byte = sides[nibble >> 2] >> U32(8 * (nibble & 3))
                byte = (byte & U32(0xFF)) << U32(8 * i)
                out = byte if out is None else out | byte
            if g.state.unknown is not None:
                both = unknown_bytes(g, x) & 15 | (unknown_bytes(g, y) & 15) << 4
                parts = [(both >> nibble & 1) << i for i, nibble in enumerate(nibbles)]
                g.state.unknown = np.bitwise_or.reduce(parts).astype(np.uint8)
            return write(g, out)

        return chosen
    return lambda g: write(g, permute(a(g), b(g), c(g)))


def _count(f):
    """popc, clz, brev: results are u32, but brev's have the operand's width."""

    def build(instruction: Instruction) -> Operation:
        kind = _kind(instruction)
        if len(instruction.modifiers) != 1 or kind not in ("b32", "b64", "u32", "u64"):
            raise refuse(instruction, f"this form of {instruction.opcode}")
        d, x = operands(instruction, 2)
        a = value(instruction, x, kind)
        write = target(instruction, d, kind if instruction.opcode == "brev" else "u32")
        return lambda g: write(g, f(np.asarray(a(g))))

    return build


def _bits(a) -> np.ndarray:
    """uint8 [..., width], lowest bit first."""
    raw = np.ascontiguousarray(a).view(np.uint8).reshape(*np.shape(a), -1)
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _popc(a):
    return _bits(a).sum(-1).astype(U32)


def _clz(a):
    bits = _bits(a)[..., ::-1]
    return np.where(bits.any(-1), bits.argmax(-1), bits.shape[-1]).astype(U32)


def _brev(a):
    raw = np.packbits(_bits(a)[..., ::-1], axis=-1, bitorder="little")
    return np.ascontiguousarray(raw).view(a.dtype)[..., 0]


def _bfind(instruction: Instruction) -> Operation:
    """The highest bit that is no copy of the sign, all ones for none; .shiftamt: the shift that moves it to the top."""
    *given, kind = instruction.modifiers
    if given not in ([], ["shiftamt"]) or kind not in ("u32", "s32", "u64", "s64"):
        raise refuse(instruction, "this form of bfind")
    d, x = operands(instruction, 2)
    a, write = value(instruction, x, kind), target(instruction, d, "u32")
    top = U32(8 * np.dtype(NUMPY[kind]).itemsize - 1)

    def run(g):
        value = np.asarray(a(g))
        shift = _clz(np.where(value < 0, ~value, value))
        return write(g, np.where(shift > top, U32(0xFFFFFFFF), shift if given else top - shift))

    return run


def _extreme(f):
    def build(instruction: Instruction) -> Operation:
        kind, relu = _kind(instruction), "relu" in instruction.modifiers
        if set(instruction.modifiers[:-1]) - {"relu"} or (relu and kind != "s32"):
            raise refuse(instruction, f"this form of {instruction.opcode}")
        d, x, y = operands(instruction, 3)
        a, b, write = (
            value(instruction, x, kind),
            value(instruction, y, kind),
            target(instruction, d, kind),
        )
        if relu:
            return lambda g: write(g, np.maximum(f(a(g), b(g)), np.int32(0)))
        return lambda g: write(g, f(a(g), b(g)))

    return build


def _funnel(instruction: Instruction) -> Operation:
    """shf.l/.r with .wrap or .clamp: 32 bits out of the pair b:a."""
    if len(instruction.modifiers) != 3 or instruction.modifiers[2] != "b32":
        raise refuse(instruction, "this form of shf")
    side, mode, _ = instruction.modifiers
    d, x, y, z = operands(instruction, 4)
    a, b, c = (value(instruction, s, "b32") for s in (x, y, z))
    write = target(instruction, d, "b32")

    def run(g):
        both = np.asarray(a(g)).astype(U64) | (np.asarray(b(g)).astype(U64) << U64(32))
        n = c(g) & U32(31) if mode == "wrap" else np.minimum(c(g), U32(32))
        n = np.asarray(n).astype(U64)
        out = (both << n) >> U64(32) if side == "l" else both >> n
        return write(g, out.astype(U32))

    return run


TABLE = {
    "add": _sum(np.add), "sub": _sum(np.subtract),
    "neg": _plain(np.negative, 1, _INTEGERS), "abs": _plain(np.abs, 1, _INTEGERS),
    "and": _plain(np.bitwise_and, 2), "or": _plain(np.bitwise_or, 2), "xor": _plain(np.bitwise_xor, 2),
    "not": _plain(np.invert, 1), "cnot": _plain(lambda a: np.equal(a, 0).astype(np.asarray(a).dtype), 1, _INTEGERS),
    "mul": _multiply, "mad": _multiply, "div": _divide, "rem": _divide, "min": _extreme(np.minimum),
    "max": _extreme(np.maximum), "shl": _shift, "shr": _shift, "bfe": _extract, "bfi": _insert, "lop3": _lop3,
    "prmt": _permute, "popc": _count(_popc), "clz": _count(_clz), "brev": _count(_brev), "bfind": _bfind,
    "shf": _funnel,
}  # fmt: skip
