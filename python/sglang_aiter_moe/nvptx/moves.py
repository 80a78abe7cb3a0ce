"""mov, selections and comparisons. Source: PTX ISA 8.7, "Comparison and Selection" and "mov"."""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx.decode import (
    NUMPY,
    Operation,
    operands,
    refuse,
    target,
    unknown_bytes,
    value,
)
from sglang_aiter_moe.nvptx.floats import flush, from_bf16
from sglang_aiter_moe.nvptx.state import LANES
from sglang_aiter_moe.nvptx.text import CLASSES, Instruction

_WIDTH = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


def _mov(instruction: Instruction) -> Operation:
    if len(instruction.modifiers) != 1:
        raise refuse(instruction, "this form of mov")
    kind = instruction.modifiers[0]
    d, x = operands(instruction, 2)
    if x.kind == "vector":
        return _join(instruction, kind, d, x.items)
    if d.kind == "vector":
        return _part(instruction, kind, d.items, x)
    read, write = value(instruction, x, kind), target(instruction, d, kind)
    return lambda g: write(g, read(g))


def _part_kind(instruction: Instruction, kind: str, count: int) -> str:
    size = _WIDTH[CLASSES[kind]]
    if count not in (2, 4, 8) or size // count < 1:
        raise refuse(instruction, f"mov of {count} parts of {kind}")
    return f"b{8 * size // count}"


def _join(instruction: Instruction, kind: str, d, items) -> Operation:
    """mov.b32 d, {low, high}."""
    part = _part_kind(instruction, kind, len(items))
    reads = [value(instruction, x, part) for x in items]
    write, dtype = target(instruction, d, kind), np.dtype(f"u{_WIDTH[CLASSES[kind]]}").type
    width = 8 * _WIDTH[part]

    def run(g):
        out = dtype(0)
        for i, read in enumerate(reads):
            out = out | (np.asarray(read(g)).astype(dtype) << dtype(i * width))
        if g.state.unknown is not None:
            found = [unknown_bytes(g, x) << np.uint8(i * width // 8) for i, x in enumerate(items)]
            g.state.unknown = np.bitwise_or.reduce(found).astype(np.uint8)
        return write(g, out)

    return run


def _part(instruction: Instruction, kind: str, items, x) -> Operation:
    """mov.b32 {low, high}, x."""
    part = _part_kind(instruction, kind, len(items))
    unsigned = f"b{8 * _WIDTH[CLASSES[kind]]}"
    read, dtype = value(instruction, x, unsigned), NUMPY[unsigned]
    writes = [target(instruction, d, part) for d in items]
    width = 8 * _WIDTH[part]

    def run(g):
        value = np.asarray(read(g))
        # All parts are taken before the first is written: a destination may be the source.
        parts = [(value >> dtype(i * width)).astype(NUMPY[part]) for i in range(len(writes))]
        unknown = None if g.state.unknown is None else unknown_bytes(g, x)
        for i, (write, one) in enumerate(zip(writes, parts, strict=True)):
            if unknown is not None:
                here = (unknown >> np.uint8(i * width // 8)) & np.uint8((1 << width // 8) - 1)
                g.state.unknown = here
            write(g, one)

    return run


def _selp(instruction: Instruction) -> Operation:
    if len(instruction.modifiers) != 1:
        raise refuse(instruction, "this form of selp")
    kind = instruction.modifiers[0]
    d, x, y, p = operands(instruction, 4)
    first, second = value(instruction, x, kind), value(instruction, y, kind)
    choice, write = value(instruction, p, "pred"), target(instruction, d, kind)

    def run(g):
        state = g.state
        chosen = choice(g)
        doubt, state.unknown = state.unknown, None
        a = first(g)
        doubt_a, state.unknown = state.unknown, None
        b = second(g)
        if doubt is not None or doubt_a is not None or state.unknown is not None:
            state.unknown = _either(g, chosen, doubt_a, state.unknown, doubt)
        return write(g, np.where(chosen, a, b))

    return run


def _either(g, chosen, first, second, doubt) -> np.ndarray:
    """Where the side that is chosen is unknown, or the choice itself."""
    nowhere = np.zeros((g.n, LANES), np.uint8)
    first, second, doubt = (nowhere if x is None else x for x in (first, second, doubt))
    return np.where(chosen, first, second) | doubt


def _slct(instruction: Instruction) -> Operation:
    """slct.b32.s32 d, a, b, c: a where c >= 0."""
    kind, of = instruction.modifiers[-2:]
    if of not in ("s32", "f32") or len(instruction.modifiers) != 2:
        raise refuse(instruction, "this form of slct")
    d, x, y, z = operands(instruction, 4)
    a, b, c = value(instruction, x, kind), value(instruction, y, kind), value(instruction, z, of)
    write = target(instruction, d, kind)
    return lambda g: write(g, np.where(c(g) >= 0, a(g), b(g)))


def _ordered(f):
    return lambda a, b: f(a, b) & (a == a) & (b == b)


def _unordered(f):
    return lambda a, b: f(a, b) | (a != a) | (b != b)


_INTEGER = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_FLOAT = {
    "eq": np.equal, "ne": _ordered(np.not_equal), "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "equ": _unordered(np.equal), "neu": np.not_equal, "ltu": _unordered(np.less),
    "leu": _unordered(np.less_equal), "gtu": _unordered(np.greater), "geu": _unordered(np.greater_equal),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compared(instruction: Instruction, modifiers: tuple[str, ...]):
    """The comparison of the first two sources as a function of a group, and what combines it with a third."""
    compare, *rest, kind = modifiers
    floats = kind in ("f16", "bf16", "f32", "f64")
    ftz = "ftz" in rest
    rest = [x for x in rest if x != "ftz"]
    f = (_FLOAT if floats else _INTEGER).get(compare)
    if f is None or len(rest) > 1 or (rest and rest[0] not in _COMBINE):
        raise refuse(instruction, f"this form of {instruction.opcode}")
    _, x, y, *last = instruction.operands
    a, b = value(instruction, x, kind), value(instruction, y, kind)
    if kind == "bf16":
        test = lambda g: f(from_bf16(a(g)), from_bf16(b(g)))  # noqa: E731
    elif ftz and kind == "f32":
        test = lambda g: f(flush(a(g)), flush(b(g)))  # noqa: E731
    else:
        test = lambda g: f(a(g), b(g))  # noqa: E731
    if bool(rest) != bool(last):
        raise refuse(instruction, f"this form of {instruction.opcode}")
    if not rest:
        return test, None, None
    return test, _COMBINE[rest[0]], value(instruction, last[0], "pred")


def _setp(instruction: Instruction) -> Operation:
    test, combine, third = _compared(instruction, instruction.modifiers)
    d = instruction.operands[0]
    if d.kind != "pair":
        write = target(instruction, d, "pred")
        if combine is None:
            return lambda g: write(g, np.asarray(test(g)))
        return lambda g: write(g, combine(test(g), third(g)))
    first, second = (target(instruction, x, "pred") for x in d.items)

    def both(g):
        found = np.asarray(test(g))
        p, q = found, ~found
        if combine is not None:
            c = third(g)
            p, q = combine(p, c), combine(q, c)
        first(g, p)
        second(g, q)

    return both


def _set(instruction: Instruction) -> Operation:
    """set.lt.u32.f32 d, a, b: all ones for true, 1.0 in f32; 0 for false."""
    *others, to, of = instruction.modifiers
    test, combine, third = _compared(instruction, (*others, of))
    if to not in ("u32", "s32", "f32"):
        raise refuse(instruction, "this form of set")
    write = target(instruction, instruction.operands[0], to)
    yes, no = (
        (np.float32(1), np.float32(0)) if to == "f32" else (np.uint32(0xFFFFFFFF), np.uint32(0))
    )

    def run(g):
        found = test(g) if combine is None else combine(test(g), third(g))
        return write(g, np.where(found, yes, no))

    return run


def _cvta(instruction: Instruction) -> Operation:
    """Generic addresses of global memory are the addresses themselves.

    So are those of parameters, where ``mov`` gave them in 64 bits; in 32 it gave the offset among the parameters.
    """
    space, kind = instruction.modifiers[-2:]
    if space not in ("param", "global") or kind != "u64":
        raise refuse(instruction, f"generic addresses of {space}")
    d, x = operands(instruction, 2)
    read, write = value(instruction, x, "u64"), target(instruction, d, "u64")
    if space == "global":
        return lambda g: write(g, read(g))
    near = np.uint64(1 << 32)

    def generic(g) -> None:
        at = read(g)
        write(g, np.where(at < near, g.state.params + at, at))

    return generic


TABLE = {"mov": _mov, "selp": _selp, "slct": _slct, "setp": _setp, "set": _set, "cvta": _cvta}
