"""Loads, stores and atomics on global memory: global, flat and buffer addressing.

Memory is synchronous: a load is complete when its instruction is, and waits have no effect. Sources: AMD, "CDNA3 ISA"
and "CDNA4 ISA", chapters "Vector Memory Operations" (buffer resource descriptor, range
checking) and "Flat Memory Instructions".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_aiter_moe.amdgpu import lds
from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.atomics import OPERATIONS, apply_atomic
from sglang_aiter_moe.amdgpu.decode import (
    Modifiers,
    kept,
    refuse,
    scalar,
    vector,
    words,
)
from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.state import LANES, M0, Batch

U8, U16, U32, I32, U64, I64 = np.uint8, np.uint16, np.uint32, np.int32, np.uint64, np.int64
_RAW = U32(0x27000)
"""Word 3 of a raw buffer of 32-bit words, as Triton and FlyDSL set it; with others hardware does other things."""
_BASE_BITS = U64((1 << 48) - 1)

# suffix -> bytes, and how a loaded word becomes a register: "" as it is, a sign extension, or which half it replaces
LOADS = {
    "dword": (4, ""), "dwordx2": (8, ""), "dwordx3": (12, ""), "dwordx4": (16, ""),
    "ubyte": (1, ""), "sbyte": (1, "i8"), "ushort": (2, ""), "sshort": (2, "i16"),
    "short_d16": (2, "low"), "short_d16_hi": (2, "high"), "ubyte_d16": (1, "low"), "ubyte_d16_hi": (1, "high"),
}  # fmt: skip
STORES = {
    "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0), "byte": (1, 0), "short": (2, 0),
    "byte_d16_hi": (1, 16), "short_d16_hi": (2, 16),
}  # fmt: skip
Address = Callable[[Batch], tuple[np.ndarray, np.ndarray | None]]
"""uint64 [waves, 64], and which lanes access memory (None: those that act)."""


def take_cache_bits(modifiers: Modifiers) -> None:
    """Cache hints: without effect where memory is synchronous."""
    for name in ("sc0", "sc1", "nt", "glc", "slc"):
        modifiers.take(name)


def _at(flat: np.ndarray | None, f, *arguments):
    """``f(*arguments)``; the lane of a fault is put back to its place among all lanes."""
    try:
        return f(*arguments)
    except Fault as fault:
        if flat is not None and fault.lane is not None:
            fault.lane = int(flat[fault.lane])
        raise


def fetch(b: Batch, address: np.ndarray, nbytes: int, mask: np.ndarray | None) -> np.ndarray:
    """uint32 [words, waves, 64]; lanes without access get 0."""
    count = max(1, nbytes // 4)
    if mask is None and b.full:
        flat = np.ascontiguousarray(np.broadcast_to(address, b.mask.shape)).reshape(-1)
        return b.memory.gather(flat, nbytes, b.checked).reshape(count, b.waves, LANES)
    lanes = np.flatnonzero(b.mask if mask is None else mask)
    out = np.zeros((count, b.waves * LANES), U32)
    if lanes.size:
        chosen = np.broadcast_to(address, b.mask.shape).reshape(-1)[lanes]
        out[:, lanes] = _at(lanes, b.memory.gather, chosen, nbytes, b.checked)
    return out.reshape(count, b.waves, LANES)


def _global_address(
    instruction: Instruction, modifiers: Modifiers, where: Operand, base: Operand
) -> Address:
    offset = modifiers.take("offset")
    step = U64(offset & 0xFFFFFFFFFFFFFFFF)
    if base.kind == "off":
        read = vector(instruction, where, "u64")
        return lambda b: (read(b) + step, None)
    start = scalar(instruction, base, "u64")
    if where.kind == "off":
        return lambda b: (start(b)[:, None] + step, None)
    low = vector(instruction, where, "u32")
    return lambda b: (start(b)[:, None] + low(b) + step, None)


def check_raw(b: Batch, i: int) -> tuple[np.ndarray, np.ndarray]:
    """(address, number of bytes), uint64 [waves], of the buffer resources in s[i:i+3].

    Raises:
        Fault: a resource with stride, swizzle, thread ids or another format.
    """
    for k in range(4):
        if b.s_known[i + k] is not True:
            b.check_s(i + k)
    low, high, size, flags = (b.s[i + k] for k in range(4))
    odd = ((high >> U32(16)) & U32(0xBFFF)) | (flags ^ _RAW)
    if b.active is not None:
        odd = odd * b.active
    if odd.any():
        raise Fault(
            "a buffer resource with stride, swizzle, thread ids or another format",
            allowed=f"a raw buffer: stride 0, word 3 {int(_RAW):#x}",
            fix="check words 1 and 3 of the resource",
            wave=int(np.flatnonzero(odd)[0]),
        )
    return (low.astype(U64) | (high.astype(U64) << U64(32))) & _BASE_BITS, size.astype(U64)


class _Buffer:
    """The address of a buffer instruction, and its range check per dword."""

    def __init__(
        self, instruction: Instruction, modifiers: Modifiers, operands, nbytes: int
    ) -> None:
        where, resource, soffset = operands
        words(instruction, resource, 4)
        if resource.kind != "s":
            raise refuse(instruction, "a buffer resource that is not in scalar registers")
        if modifiers.take("idxen"):
            raise refuse(instruction, "the modifier idxen")
        offen = modifiers.take("offen")
        if bool(offen) != (where.kind != "off"):
            raise refuse(instruction, "an offset register without offen")
        self._imm = U64(modifiers.take("offset"))
        self._voffset = vector(instruction, where, "u32") if offen else None
        self._soffset = scalar(instruction, soffset, "u32")
        self._resource, self._nbytes = resource.index, nbytes

    def offsets(self, b: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(base address [waves, 1], offset [waves, 64], number of bytes [waves, 1]), all uint64."""
        base, size = check_raw(b, self._resource)
        soffset = np.broadcast_to(self._soffset(b), b.waves)
        beyond = soffset > size if b.active is None else (soffset > size) & b.active
        if beyond.any():
            raise Fault(
                "a buffer's scalar offset that is larger than its number of bytes",
                allowed="a scalar offset inside the buffer: what the range check makes of others is not modelled",
                fix="check the soffset operand",
                wave=int(np.flatnonzero(beyond)[0]),
            )
        # The manual compares the other offsets with num_records - sgpr_offset.
        base, size = base + soffset.astype(U64), size - soffset
        offset = self._imm if self._voffset is None else self._voffset(b).astype(U64) + self._imm
        return base[:, None], np.broadcast_to(offset, b.mask.shape), size[:, None]

    def load(self, b: Batch) -> np.ndarray:
        base, offset, size = self.offsets(b)
        n = self._nbytes
        inside = offset + U64(n) <= size
        if n > 4 and ((offset + U64(4) <= size) & ~inside & b.mask).any():
            parts = []
            for k in range(n // 4):
                here = offset + U64(4 * k)
                parts.append(fetch(b, base + here, 4, b.mask & (here + U64(4) <= size))[0])
            return np.stack(parts)
        if inside.all():
            return fetch(b, base + offset, n, None)
        return fetch(b, base + offset, n, b.mask & inside)

    def masks(self, b: Batch) -> list[tuple[np.ndarray, np.ndarray, int, int]]:
        """What is stored: (address, lanes, first word, bytes) for each part with one answer of the range check."""
        base, offset, size = self.offsets(b)
        n = self._nbytes
        if n <= 4:
            return [(base + offset, b.mask & (offset + U64(n) <= size), 0, n)]
        whole = offset + U64(n) <= size
        parts = [(base + offset, b.mask & whole, 0, n)]
        for k in range(n // 4):
            here = offset + U64(4 * k)
            lanes = b.mask & ~whole & (here + U64(4) <= size)
            if lanes.any():
                parts.append((base + here, lanes, k, 4))
        return parts


def register_writes(instruction: Instruction, target: Operand, nbytes: int, how: str):
    words(instruction, target, max(1, nbytes // 4))
    if target.kind not in "va":
        raise refuse(instruction, "a destination that is not a vector register")
    i, put = target.index, Batch.set_v if target.kind == "v" else Batch.set_a
    if how in ("low", "high"):
        old = kept(instruction, target)
        keep, shift = (U32(0xFFFF0000), U32(0)) if how == "low" else (U32(0xFFFF), U32(16))
        return lambda b, value: put(b, i, (old(b) & keep) | (value[0] << shift))
    if how:
        narrow = np.int8 if how == "i8" else np.int16
        return lambda b, value: put(b, i, value[0].astype(narrow).astype(I32).view(U32))

    def write(b: Batch, value: np.ndarray) -> None:
        for k, word in enumerate(value):
            put(b, i + k, word)

    return write


def register_sources(instruction: Instruction, source: Operand, nbytes: int, shift: int = 0):
    count = max(1, nbytes // 4)
    words(instruction, source, count)
    reads = [
        vector(instruction, Operand(source.kind, source.index + k), "u32") for k in range(count)
    ]
    if shift:
        return lambda b: [reads[0](b) >> U32(shift)]
    return lambda b: [read(b) for read in reads]


def put_memory(b: Batch, address, mask, values: list[np.ndarray], nbytes: int) -> None:
    lanes = np.flatnonzero(b.mask if mask is None else mask)
    if lanes.size:
        shape = b.mask.shape
        chosen = np.broadcast_to(address, shape).reshape(-1)[lanes]
        data = [np.broadcast_to(v, shape).reshape(-1)[lanes] for v in values]
        _at(lanes, b.memory.scatter, chosen, data, nbytes, b.checked)


def _global_load(instruction: Instruction):
    nbytes, how = LOADS[instruction.opcode.split("_load_")[1]]
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    flat = instruction.opcode.startswith("flat")
    target, where, *rest = instruction.operands
    address = _global_address(instruction, modifiers, where, Operand("off") if flat else rest[0])
    modifiers.done()
    write = register_writes(instruction, target, nbytes, how)
    return lambda b: write(b, fetch(b, address(b)[0], nbytes, None))


def _global_store(instruction: Instruction):
    nbytes, shift = STORES[instruction.opcode.split("_store_")[1]]
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    flat = instruction.opcode.startswith("flat")
    where, source, *rest = instruction.operands
    address = _global_address(instruction, modifiers, where, Operand("off") if flat else rest[0])
    modifiers.done()
    values = register_sources(instruction, source, nbytes, shift)
    return lambda b: put_memory(b, address(b)[0], None, values(b), nbytes)


def _buffer_load(instruction: Instruction):
    nbytes, how = LOADS[instruction.opcode.removeprefix("buffer_load_")]
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    to_lds = modifiers.take("lds")
    operands = instruction.operands if to_lds else instruction.operands[1:]
    imm = modifiers.take("offset")
    buffer = _Buffer(instruction, _with_offset(modifiers, imm), operands, nbytes)
    modifiers.done()
    if not to_lds:
        write = register_writes(instruction, instruction.operands[0], nbytes, how)
        return lambda b: write(b, buffer.load(b))
    return _into_lds(nbytes, how, imm, buffer.load, instruction)


def _with_offset(modifiers: Modifiers, offset: int) -> Modifiers:
    modifiers.put("offset", offset)
    return modifiers


def _into_lds(nbytes: int, how: str, imm: int, load, instruction: Instruction):
    """Loads that write LDS: M0[17:0] + instruction offset + lane * bytes, each lane its word or words."""
    if how or nbytes == 8:
        raise refuse(instruction, "this width of a load into LDS")
    step = max(4, nbytes)
    lane = np.arange(LANES, dtype=U32) * U32(step)

    def execute(b: Batch) -> None:
        b.check_s(M0)
        value = load(b)
        address = (b.s[M0] & U32(0x3FFFF))[:, None] + U32(imm) + lane
        lds.store(b, address, list(value), step, 4)

    return execute


def _global_load_lds(instruction: Instruction):
    nbytes, how = LOADS[instruction.opcode.removeprefix("global_load_lds_")]
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    imm = modifiers.take("offset")
    where, base = instruction.operands
    address = _global_address(instruction, _with_offset(modifiers, imm), where, base)
    modifiers.done()
    return _into_lds(nbytes, how, imm, lambda b: fetch(b, address(b)[0], nbytes, None), instruction)


def _buffer_store(instruction: Instruction):
    nbytes, shift = STORES[instruction.opcode.removeprefix("buffer_store_")]
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    buffer = _Buffer(instruction, modifiers, instruction.operands[1:], nbytes)
    modifiers.done()
    values = register_sources(instruction, instruction.operands[0], nbytes, shift)

    def store(b: Batch) -> None:
        data = values(b)
        for address, lanes, first, n in buffer.masks(b):
            put_memory(b, address, lanes, data[first : first + max(1, n // 4)], n)

    return store


def _atomic(instruction: Instruction):
    """Lanes in ascending order; with sc0 each gets the word that was there before."""
    space, _, name = instruction.opcode.partition("_atomic_")
    nbytes = OPERATIONS[name][0]
    modifiers = Modifiers(instruction)
    returns = modifiers.take("sc0") or modifiers.take("glc")
    take_cache_bits(modifiers)
    operands = list(instruction.operands)
    if space == "buffer":
        target, source, *rest = operands[0], *operands
        buffer = _Buffer(instruction, modifiers, rest, nbytes)

        def address(b: Batch):
            where, lanes, _, _ = buffer.masks(b)[0]
            return where, lanes
    else:
        target = operands.pop(0) if returns else None
        where, source, *rest = operands
        base = Operand("off") if space == "flat" else rest[0]
        address = _global_address(instruction, modifiers, where, base)
    modifiers.done()
    values = register_sources(instruction, source, nbytes)
    write = register_writes(instruction, target, nbytes, "") if returns else None

    def execute(b: Batch) -> None:
        where, mask = address(b)
        lanes = np.flatnonzero(b.mask if mask is None else mask)
        before = np.zeros((1, b.mask.size), U32)
        if lanes.size:
            chosen = np.broadcast_to(where, b.mask.shape).reshape(-1)[lanes]
            data = np.stack(
                [np.broadcast_to(v, b.mask.shape).reshape(-1)[lanes] for v in values(b)]
            )
            before[0, lanes] = _at(lanes, apply_atomic, b.memory, chosen, data, name, b.checked)
        if write is not None:
            write(b, before.reshape(1, *b.mask.shape))

    return execute


TABLE = {f"{space}_load_{name}": _global_load for space in ("global", "flat") for name in LOADS}
TABLE |= {f"{space}_store_{name}": _global_store for space in ("global", "flat") for name in STORES}
TABLE |= {f"buffer_load_{name}": _buffer_load for name in LOADS}
TABLE |= {f"buffer_store_{name}": _buffer_store for name in STORES}
TABLE |= {
    f"{space}_atomic_{n}": _atomic for space in ("global", "flat", "buffer") for n in OPERATIONS
}
TABLE |= {f"global_load_lds_{n}": _global_load_lds for n in ("dword", "dwordx3", "dwordx4")}


def build(instruction: Instruction):
    return TABLE[instruction.opcode](instruction)
