"""The DS instructions, including those that only move data between lanes.

Source: AMD, "CDNA3 ISA", section "LDS Instructions"; "CDNA4 ISA" for ds_read_b64_tr_b16.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.atomics import OPERATIONS, rounds
from sglang_aiter_moe.amdgpu.decode import Modifiers, kept, refuse, vector, words
from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.lds import load, store
from sglang_aiter_moe.amdgpu.state import LANES, Batch

U8, U16, U32, I32 = np.uint8, np.uint16, np.uint32, np.int32
# suffix -> (bytes, alignment, what becomes of the word)
_READS = {
    "b32": (4, 4, ""), "b64": (8, 8, ""), "b96": (12, 4, ""), "b128": (16, 16, ""),
    "u8": (1, 1, ""), "i8": (1, 1, "i8"), "u16": (2, 2, ""), "i16": (2, 2, "i16"),
    "u8_d16": (1, 1, "low"), "u8_d16_hi": (1, 1, "high"), "u16_d16": (2, 2, "low"), "u16_d16_hi": (2, 2, "high"),
    "i8_d16": (1, 1, "i8 low"), "i8_d16_hi": (1, 1, "i8 high"),
}  # fmt: skip
_WRITES = {
    "b8": (1, 1, 0), "b16": (2, 2, 0), "b32": (4, 4, 0), "b64": (8, 8, 0), "b96": (12, 4, 0), "b128": (16, 16, 0),
    "b8_d16_hi": (1, 1, 16), "b16_d16_hi": (2, 2, 16),
}  # fmt: skip


def _plain_modifiers(instruction: Instruction) -> Modifiers:
    modifiers = Modifiers(instruction)
    if modifiers.take("gds"):
        raise refuse(instruction, "the modifier gds")
    return modifiers


def _put(instruction: Instruction, target: Operand, count: int):
    words(instruction, target, count)
    if target.kind not in "va":
        raise refuse(instruction, "a destination that is not a vector register")
    put, i = (Batch.set_v if target.kind == "v" else Batch.set_a), target.index

    def write(b: Batch, value) -> None:
        for k in range(count):
            put(b, i + k, value[k])

    return write


def _read(instruction: Instruction):
    nbytes, align, how = _READS[instruction.opcode.removeprefix("ds_read_")]
    modifiers = _plain_modifiers(instruction)
    offset = U32(modifiers.take("offset"))
    modifiers.done()
    target, where = instruction.operands
    address = vector(instruction, where, "u32")
    write = _put(instruction, target, max(1, nbytes // 4))
    old = kept(instruction, target) if "low" in how or "high" in how else None

    def read(b: Batch) -> None:
        value = load(b, address(b) + offset, nbytes, align)
        if how.startswith("i"):
            narrow = np.int8 if how.startswith("i8") else np.int16
            value = value.astype(narrow).astype(I32).view(U32)
        if how.endswith("low"):
            value = (value & U32(0xFFFF)) | (old(b) & U32(0xFFFF0000))
        elif how.endswith("high"):
            value = (value << U32(16)) | (old(b) & U32(0xFFFF))
        write(b, value)

    return read


def _two(instruction: Instruction) -> tuple[int, tuple[U32, U32]]:
    """(bytes, the two offsets in bytes) of ds_read2*, ds_write2*."""
    size = 8 if instruction.opcode.endswith("b64") else 4
    scale = size * (64 if "st64" in instruction.opcode else 1)
    modifiers = _plain_modifiers(instruction)
    offsets = tuple(U32(modifiers.take(f"offset{i}") * scale) for i in (0, 1))
    modifiers.done()
    return size, offsets


def _read_two(instruction: Instruction):
    size, offsets = _two(instruction)
    target, where = instruction.operands
    address = vector(instruction, where, "u32")
    write = _put(instruction, target, size // 2)

    def read(b: Batch) -> None:
        base = address(b)
        write(b, np.concatenate([load(b, base + o, size, size) for o in offsets]))

    return read


def _words(instruction: Instruction, source: Operand, count: int):
    words(instruction, source, count)
    return [
        vector(instruction, Operand(source.kind, source.index + k), "u32") for k in range(count)
    ]


def _write(instruction: Instruction):
    nbytes, align, shift = _WRITES[instruction.opcode.removeprefix("ds_write_")]
    modifiers = _plain_modifiers(instruction)
    offset = U32(modifiers.take("offset"))
    modifiers.done()
    where, source = instruction.operands
    address = vector(instruction, where, "u32")
    reads = _words(instruction, source, max(1, nbytes // 4))

    def write(b: Batch) -> None:
        values = [read(b) for read in reads]
        if shift:
            values = [values[0] >> U32(shift)]
        store(b, address(b) + offset, values, nbytes, align)

    return write


def _write_two(instruction: Instruction):
    size, offsets = _two(instruction)
    where, first, second = instruction.operands
    address = vector(instruction, where, "u32")
    sources = [_words(instruction, s, size // 4) for s in (first, second)]

    def write(b: Batch) -> None:
        base = address(b)
        for reads, offset in zip(sources, offsets, strict=True):
            store(b, base + offset, [read(b) for read in reads], size, size)

    return write


def _transposed_read(instruction: Instruction):
    """ds_read_b64_tr_b16, _b8: 16 lanes read rows of 16 elements, 8 bytes a lane; lane l gets column l, row after row.

    Inferred: with it Triton's programs for matrix products multiply right.
    """
    bits = int(instruction.opcode.removeprefix("ds_read_b64_tr_b"))
    modifiers = _plain_modifiers(instruction)
    offset = U32(modifiers.take("offset"))
    modifiers.done()
    target, where = instruction.operands
    address = vector(instruction, where, "u32")
    write = _put(instruction, target, 2)
    rows = 64 // bits
    # Element e of lane l is the one of row e, column l % 16 of its 16 lanes.
    lane, row = np.arange(LANES)[:, None], np.arange(rows)
    place = 16 * row + lane % 16
    source, element = lane // 16 * 16 + place // rows, place % rows
    unit = U16 if bits == 16 else U8

    def read(b: Batch) -> None:
        _all_or_none(b, instruction)
        value = load(b, address(b) + offset, 8, 8)
        elements = np.ascontiguousarray(value.transpose(1, 2, 0)).view(unit)
        moved = np.ascontiguousarray(elements[:, source, element]).view(U32)
        write(b, (moved[..., 0], moved[..., 1]))

    return read


def _all_or_none(b: Batch, instruction: Instruction) -> None:
    if not b.full:
        some = b.mask.any(1) & ~b.mask.all(1)
        if some.any():
            raise Fault(
                f"{instruction.opcode} with some lanes switched off",
                allowed="all lanes or none: what the others give is not modelled",
                fix="check EXEC",
                wave=int(np.flatnonzero(some)[0]),
            )


def _permute(instruction: Instruction):
    """ds_bpermute: lane l gets the value of lane (address / 4) % 64; ds_permute: it gives its own to that lane."""
    modifiers = _plain_modifiers(instruction)
    offset = U32(modifiers.take("offset"))
    modifiers.done()
    target, where, source = instruction.operands
    address, value = vector(instruction, where, "u32"), vector(instruction, source, "u32")
    write = _put(instruction, target, 1)
    backward = instruction.opcode == "ds_bpermute_b32"

    def permute(b: Batch) -> None:
        lane = np.broadcast_to(((address(b) + offset) >> U32(2)) & U32(63), b.mask.shape).astype(
            np.int64
        )
        data = np.broadcast_to(value(b), b.mask.shape)
        if not b.full:
            data = np.where(b.mask, data, U32(0))
        if backward:
            moved = np.take_along_axis(data, lane, 1)
        else:
            moved = np.zeros(b.mask.shape, U32)
            wave = np.broadcast_to(np.arange(b.waves)[:, None], b.mask.shape)
            moved[wave[b.mask], lane[b.mask]] = data[b.mask]
        write(b, (moved,))

    return permute


def _swizzle(instruction: Instruction):
    """ds_swizzle_b32: in groups of four by a table (bit 15 of the offset), else in groups of 32 by and, or, xor."""
    modifiers = _plain_modifiers(instruction)
    pattern = modifiers.take("offset")
    modifiers.done()
    if not isinstance(pattern, int) or pattern >= 0xC000:
        raise refuse(instruction, f"the pattern {pattern}")
    target, source = instruction.operands
    value = vector(instruction, source, "u32")
    write = _put(instruction, target, 1)
    lane = np.arange(LANES)
    if pattern & 0x8000:
        chosen = lane // 4 * 4 + (pattern >> (2 * (lane % 4)) & 3)
    else:
        low = (lane & (pattern & 31) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31)
        chosen = lane // 32 * 32 + low

    def swizzle(b: Batch) -> None:
        data = np.broadcast_to(value(b), b.mask.shape)
        if not b.full:
            data = np.where(b.mask, data, U32(0))
        write(b, (data[:, chosen],))

    return swizzle


_ATOMICS = {
    "add_u32": "add", "sub_u32": "sub", "and_b32": "and", "or_b32": "or", "xor_b32": "xor", "max_u32": "umax",
    "min_u32": "umin", "max_i32": "smax", "min_i32": "smin", "add_f32": "add_f32",
    "pk_add_bf16": "pk_add_bf16", "pk_add_f16": "pk_add_f16",
}  # fmt: skip


def _atomic(instruction: Instruction):
    """Lanes in ascending order; a name with rtn gives each the word that was there before."""
    name = instruction.opcode.removeprefix("ds_")
    returns = "_rtn_" in name
    _, f = OPERATIONS[_ATOMICS[name.replace("_rtn_", "_")]]
    modifiers = _plain_modifiers(instruction)
    offset = U32(modifiers.take("offset"))
    modifiers.done()
    operands = list(instruction.operands)
    write = _put(instruction, operands.pop(0), 1) if returns else None
    where, source = operands
    address, value = vector(instruction, where, "u32"), vector(instruction, source, "u32")

    def execute(b: Batch) -> None:
        at = np.broadcast_to(address(b) + offset, b.mask.shape)
        load(b, at, 4, 4)  # the checks
        lanes = np.flatnonzero(b.mask)
        place = (at + b.lds_base).reshape(-1)[lanes] // 4
        data = np.broadcast_to(value(b), b.mask.shape).reshape(-1)[lanes]
        view, before = b.lds.view(U32), np.zeros(b.mask.size, U32)
        for some in rounds(place) if lanes.size else ():
            before[lanes[some]] = old = view[place[some]]
            view[place[some]] = f(old, data[some])
        if write is not None:
            write(b, (before.reshape(b.mask.shape),))

    return execute


TABLE = {f"ds_read_{n}": _read for n in _READS} | {f"ds_write_{n}": _write for n in _WRITES}
for _n in ("2_b32", "2_b64", "2st64_b32", "2st64_b64"):
    TABLE |= {f"ds_read{_n}": _read_two, f"ds_write{_n}": _write_two}
for _n in _ATOMICS:
    TABLE |= {f"ds_{_n}": _atomic, "ds_{}_rtn_{}".format(*_n.rsplit("_", 1)): _atomic}
TABLE |= {
    "ds_bpermute_b32": _permute, "ds_permute_b32": _permute, "ds_swizzle_b32": _swizzle,
    "ds_read_b64_tr_b16": _transposed_read, "ds_read_b64_tr_b8": _transposed_read,
}  # fmt: skip


def build(instruction: Instruction):
    return TABLE[instruction.opcode](instruction)
