"""How a vector instruction's operands reach its function: the encodings e32, e64, SDWA and DPP.

A table's row is (destination kind, source kinds, function of arrays). :func:`build_row` gives the function its operands
and writes the result. Sources: AMD, "CDNA3 ISA", chapters "Vector ALU", "SDWA" and "DPP"; LLVM, "AMDGPU Modifiers".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.decode import DTYPES, Modifiers, Read, kept, refuse, vector, write
from sglang_aiter_moe.amdgpu.lanes import Dpp, under
from sglang_aiter_moe.amdgpu.state import Batch

U16, U32, I32, I64 = np.uint16, np.uint32, np.int32, np.int64
Row = tuple[str, str, Callable]
_FIELDS = {f"BYTE_{i}": (8 * i, 8) for i in range(4)} | {
    f"WORD_{i}": (16 * i, 16) for i in range(2)
}


def _saturate(dtype, f):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return lambda a, b: np.clip(f(a.astype(I64), b.astype(I64)), low, high).astype(dtype)


SATURATING = {
    f"v_{name}_{kind}": _saturate(DTYPES[kind], f)
    for name, f in (("add", np.add), ("sub", np.subtract), ("subrev", lambda a, b: b - a))
    for kind in ("u32", "i32", "u16")
}
"""What clamp makes of integer sums."""


def build_row(instruction: Instruction, row: Row):
    """The function of a batch for one instruction of a table."""
    destination, kinds, f = row
    modifiers = Modifiers(instruction)
    if instruction.opcode in SATURATING and modifiers.take("clamp"):
        f = SATURATING[instruction.opcode]
    target, *sources = instruction.operands
    kinds = kinds.split()
    if len(kinds) != len(sources):
        raise refuse(instruction, f"{instruction.opcode} with {len(sources)} sources")
    reads, dpp = encoded_sources(instruction, modifiers, sources, kinds)
    put = encoded_result(instruction, modifiers, target, destination)
    modifiers.done()
    if len(reads) == 1:
        (a,) = reads

        def execute(b: Batch) -> None:
            put(b, f(a(b)))

    elif len(reads) == 2:
        a, c = reads

        def execute(b: Batch) -> None:
            put(b, f(a(b), c(b)))

    else:
        a, c, d = reads

        def execute(b: Batch) -> None:
            put(b, f(a(b), c(b), d(b)))

    if dpp is None:
        return execute
    return lambda b: _under_dpp(b, dpp, reads, f, put)


def _under_dpp(b: Batch, dpp: Dpp, reads: list[Read], f, put) -> None:
    value = f(*(read(b) for read in reads))
    under(b, dpp.writes(b), put, value)


def encoded_sources(
    instruction: Instruction, modifiers: Modifiers, sources: list[Operand], kinds: list[str]
) -> tuple[list[Read], Dpp | None]:
    """Readers of the sources, by encoding; the DPP control if there is one."""
    if instruction.encoding == "sdwa":
        reads = []
        for i, (operand, kind) in enumerate(zip(sources, kinds, strict=True)):
            select = modifiers.take(f"src{i}_sel", "DWORD")
            reads.append(_selected(instruction, operand, kind, select))
        return reads, None
    if instruction.encoding == "dpp":
        dpp = Dpp(modifiers, instruction)
        first, *rest = (vector(instruction, o, k) for o, k in zip(sources, kinds, strict=True))
        return [dpp.source(first), *rest], dpp
    if any(o.sext for o in sources):
        raise refuse(instruction, "sext outside SDWA")
    halves = modifiers.take("op_sel", None)
    if halves is not None and not all(np.dtype(DTYPES[k]).itemsize == 2 for k in kinds):
        raise refuse(instruction, "op_sel of an instruction without 16-bit operands")
    reads = []
    for i, (operand, kind) in enumerate(zip(sources, kinds, strict=True)):
        if halves is not None and halves[i]:
            reads.append(_selected(instruction, operand, kind, "WORD_1"))
        else:
            reads.append(vector(instruction, operand, kind))
    if halves is not None and len(halves) > len(kinds) and halves[len(kinds)]:
        raise refuse(instruction, "op_sel of the destination")
    return reads, None


def _selected(instruction: Instruction, operand: Operand, kind: str, select: str) -> Read:
    """SDWA's choice of a byte or half of a source, sign-extended under sext, then neg and abs."""
    if operand.kind in ("int", "float") and select != "DWORD":
        raise refuse(instruction, "a part of a constant")
    dtype = np.dtype(DTYPES[kind])
    if dtype.itemsize > 4:
        raise refuse(instruction, "SDWA of a 64-bit operand")
    if operand.kind in ("int", "float"):
        return vector(instruction, operand, kind)
    raw = vector(instruction, replace(operand, negate=False, absolute=False, sext=False), "u32")
    if select == "DWORD":
        field = raw
    elif select in _FIELDS:
        shift, bits = (U32(n) for n in _FIELDS[select])
        if operand.sext:
            up = I32(32 - bits - shift)
            down = I32(32 - bits)

            def field(b: Batch) -> np.ndarray:
                return ((raw(b).view(I32) << up) >> down).view(U32)

        else:
            keep = U32((1 << int(bits)) - 1)

            def field(b: Batch) -> np.ndarray:
                return (raw(b) >> shift) & keep

    else:
        raise refuse(instruction, f"the selection {select}")
    if dtype.itemsize == 2:
        if select == "DWORD" and operand.sext:
            raise refuse(instruction, "sext of a whole register")

        def typed(b: Batch) -> np.ndarray:
            return field(b).astype(U16).view(dtype)

    else:

        def typed(b: Batch) -> np.ndarray:
            return field(b).view(dtype)

    if not (operand.negate or operand.absolute):
        return typed
    if dtype.kind != "f":
        raise refuse(instruction, "neg or abs of an integer operand")
    if operand.absolute and operand.negate:
        return lambda b: -np.abs(typed(b))
    return (lambda b: np.abs(typed(b))) if operand.absolute else (lambda b: -typed(b))


def encoded_result(instruction: Instruction, modifiers: Modifiers, target: Operand, kind: str):
    """Writer of the destination: omod and clamp of floats, SDWA's part of a register."""
    multiply, divide = modifiers.take("mul"), modifiers.take("div")
    clamp = modifiers.take("clamp")
    dtype = np.dtype(DTYPES[kind])
    if instruction.encoding == "sdwa":
        put = _sdwa_result(instruction, modifiers, target, kind)
    else:
        put = write(instruction, target, kind)
    if not (multiply or divide or clamp):
        return put
    if dtype.kind != "f":
        raise refuse(instruction, "clamp or an output multiplier of an integer result")
    factor = dtype.type(multiply or (1 / divide if divide else 1))

    def adjusted(b: Batch, value: np.ndarray) -> None:
        value = value * factor
        if clamp:
            value = np.where(
                value != value, dtype.type(0), np.clip(value, dtype.type(0), dtype.type(1))
            )
        put(b, value.astype(dtype))

    return adjusted


def _sdwa_result(instruction: Instruction, modifiers: Modifiers, target: Operand, kind: str):
    select, unused = modifiers.take("dst_sel", "DWORD"), modifiers.take("dst_unused", "UNUSED_PAD")
    if select == "DWORD":
        return write(instruction, target, kind)
    if select not in _FIELDS or unused not in ("UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"):
        raise refuse(instruction, f"dst_sel:{select} dst_unused:{unused}")
    shift, bits = _FIELDS[select]
    keep = U32((1 << bits) - 1)
    old = kept(instruction, target)

    def put(b: Batch, value: np.ndarray) -> None:
        value = value.view(f"u{value.dtype.itemsize}").astype(U32) & keep
        if unused == "UNUSED_SEXT":
            sign = value >> U32(bits - 1)
            value = (value | np.where(sign != 0, ~keep, U32(0))) << U32(shift)
        else:
            value = value << U32(shift)
            if unused == "UNUSED_PRESERVE":
                value = value | (old(b) & ~U32((int(keep) << shift) & 0xFFFFFFFF))
        b.set_v(target.index, value)

    return put
