"""From operands to functions of a group: done once an instruction, not once an execution."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.nvptx.operands import Operand
from sglang_aiter_moe.nvptx.state import DTYPES, LANES, Group
from sglang_aiter_moe.nvptx.text import CLASSES, Instruction

Read = Callable[[Group], np.ndarray]
Write = Callable[[Group, np.ndarray], None]
Operation = Callable[[Group], "np.ndarray | None"]
NUMPY = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f64": np.float64,
}  # fmt: skip
"""PTX type -> dtype of what ``source`` gives. bf16 and pairs are bits."""


def refuse(instruction: Instruction, what: str) -> PtxError:
    """The error for an opcode, modifier or operand that is not modelled."""
    return PtxError(
        f"line {instruction.line}: {what} is not modelled ({instruction.text[:160]})",
        allowed="the instructions in docs/hopper-execution.md",
        fix="add its semantics to sglang_aiter_moe/nvptx, from the PTX ISA",
    )


def operands(instruction: Instruction, count: int) -> tuple[Operand, ...]:
    """The operands, refused unless there are ``count``."""
    if len(instruction.operands) != count:
        raise refuse(instruction, f"{len(instruction.operands)} operands instead of {count}")
    return instruction.operands


def constant(instruction: Instruction, operand: Operand, kind: str) -> np.generic:
    """An immediate as ``kind`` sees it: integers are cut to its width, floats have its width's bits."""
    dtype = np.dtype(NUMPY[kind])
    if kind == "pred":
        return np.bool_(operand.value != 0)
    if operand.kind == "float":
        if operand.bits is not None and CLASSES.get(operand.type) == CLASSES[kind]:
            return np.frombuffer(operand.bits.to_bytes(dtype.itemsize, "little"), dtype)[0]
        if dtype.kind != "f":
            raise refuse(instruction, f"the float {operand.name} as {kind}")
        packed = struct.pack({2: "<e", 4: "<f", 8: "<d"}[dtype.itemsize], operand.value)
        return np.frombuffer(packed, dtype)[0]
    if dtype.kind == "f":
        raise refuse(instruction, f"the integer {operand.name} as {kind}")
    bits = int(operand.value) & ((1 << 8 * dtype.itemsize) - 1)
    return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0]


def value(instruction: Instruction, operand: Operand, kind: str, *, wide: bool = False) -> Read:
    """As :func:`source`, but what nothing has written makes the result unknown, and is no Fault by itself.

    Arithmetic reads so: compilers compute with lanes whose results nobody takes.
    """
    return source(instruction, operand, kind, wide=wide, soft=True)


def source(
    instruction: Instruction, operand: Operand, kind: str, *, wide: bool = False, soft: bool = False
) -> Read:
    """Reads an operand as ``kind``: an array [n, 32], or a scalar for a constant.

    ``wide`` takes the low bits of a larger register, as cvt and st do.
    """
    check = Group.soften if soft else Group.check
    dtype = NUMPY[kind]
    if operand.kind in ("int", "float"):
        fixed = constant(instruction, operand, kind)
        return lambda g: fixed
    if operand.kind == "symbol":
        address = np.dtype(dtype).type(operand.value)
        return lambda g: address
    if operand.kind == "param":
        offset = np.uint64(operand.value)
        if np.dtype(dtype).itemsize == 4:  # an address in the parameters' own space
            return lambda g: np.uint32(offset).view(dtype)
        return lambda g: g.state.params + offset
    if operand.kind == "special":
        return _special(instruction, operand, dtype)
    if operand.kind != "reg":
        raise refuse(instruction, f"the operand {operand.kind} {operand.name}")
    slot = operand.slot
    held = DTYPES[operand.type]
    if CLASSES[kind] != operand.type:
        size = np.dtype(dtype).itemsize
        if not wide or kind == "pred" or operand.type == "pred" or size > np.dtype(held).itemsize:
            raise refuse(instruction, f"{operand.name} ({operand.type}) as {kind}")
        low, low_bytes = np.dtype(f"u{size}"), (1 << size) - 1

        def cut(g: Group) -> np.ndarray:
            state = g.state
            if state.known[slot] & g.bits != g.bits:
                check(g, slot, low_bytes)
            return state.values[slot][g.rows].astype(low).view(dtype)

        return cut
    if operand.negate:

        def negated(g: Group) -> np.ndarray:
            state = g.state
            if state.known[slot] & g.bits != g.bits:
                check(g, slot)
            return ~state.values[slot][g.rows]

        return negated
    if dtype == held:

        def plain(g: Group) -> np.ndarray:
            state = g.state
            if state.known[slot] & g.bits != g.bits:
                check(g, slot)
            return state.values[slot][g.rows]

        return plain

    def viewed(g: Group) -> np.ndarray:
        state = g.state
        if state.known[slot] & g.bits != g.bits:
            check(g, slot)
        return state.values[slot][g.rows].view(dtype)

    return viewed


def _special(instruction: Instruction, operand: Operand, dtype) -> Read:
    name = operand.name

    def read(g: Group) -> np.ndarray:
        value = g.state.special(name, g)
        return value.astype(dtype) if value.dtype != dtype else value

    return read


def target(instruction: Instruction, operand: Operand, kind: str, *, wide: bool = False) -> Write:
    """Writes an operand; a value may be of ``kind``'s dtype or of another one of its size.

    ``wide``: the register may be larger, as ld and cvt allow: the value is then extended by its sign or by zeros.
    """
    if operand.kind == "sink":
        return lambda g, value: None
    if operand.kind != "reg":
        raise refuse(instruction, f"the destination {operand.kind} {operand.name}")
    slot, held = operand.slot, DTYPES[operand.type]
    if CLASSES[kind] == operand.type:
        return lambda g, value: g.put(slot, value.view(held))
    if not wide or "pred" in (kind, operand.type):
        raise refuse(instruction, f"{operand.name} ({operand.type}) as {kind}")
    dtype = np.dtype(NUMPY[kind])
    if dtype.itemsize > np.dtype(held).itemsize or dtype.kind == "f":
        raise refuse(instruction, f"{operand.name} ({operand.type}) as {kind}")
    extended = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{np.dtype(held).itemsize}")
    return lambda g, value: g.put(slot, value.view(dtype).astype(extended).view(held))


def full(g: Group, value) -> np.ndarray:
    """A value as an array [n, 32]."""
    return np.broadcast_to(value, (g.n, LANES))


def address(instruction: Instruction, operand: Operand, space: str = "global") -> Read:
    """The address in brackets: int64 [n, 32]."""
    if operand.kind != "address" or operand.base is None:
        raise refuse(instruction, "an operand that is not an address")
    base = operand.base
    wide = space == "global" or (base.kind == "reg" and base.type == "b64")
    kind = "u64" if wide else "u32"
    read = source(instruction, base, kind)
    offset = np.int64(operand.offset)
    return lambda g: full(g, read(g).astype(np.int64) + offset).view(np.int64)


def applied(write, function, reads: Sequence[Read]) -> Operation:
    """``function`` of what is read, written; unrolled, since it runs for every instruction executed."""
    if len(reads) == 1:
        (a,) = reads
        return lambda g: write(g, function(a(g)))
    if len(reads) == 2:
        a, b = reads
        return lambda g: write(g, function(a(g), b(g)))
    a, b, c = reads
    return lambda g: write(g, function(a(g), b(g), c(g)))


def fault(
    what: str,
    allowed: str,
    fix: str = "check what the instruction is given",
    lane: int | None = None,
) -> Fault:
    """A Fault with a usual ``fix``."""
    return Fault(what, allowed=allowed, fix=fix, lane=lane)


def unknown_bytes(g: Group, operand: Operand) -> np.ndarray:
    """uint8 [n, 32]: which bytes of an operand nothing has written, bit i for byte i."""
    if operand.kind != "reg":
        return np.zeros((g.n, LANES), np.uint8)
    return g.unknown_bytes(operand.slot)
