"""Scalar memory: s_load and s_buffer_load, one address a wave.

Source: AMD, "CDNA3 ISA", chapter "Scalar Memory Operations".
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.decode import Modifiers, refuse, scalar, scalar_destination, words
from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.memory_ops import check_raw, take_cache_bits
from sglang_aiter_moe.amdgpu.state import Batch

U32, U64 = np.uint32, np.uint64


def _parts(instruction: Instruction, prefix: str):
    """(first register, how many, source operand, reader of the offset in bytes)."""
    suffix = instruction.opcode.removeprefix(prefix)
    count = int(suffix[1:]) if suffix else 1
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    imm = U64(modifiers.take("offset") & 0xFFFFFFFFFFFFFFFF)
    modifiers.done()
    target, base, offset = instruction.operands
    i = scalar_destination(instruction, target, count)
    extra = scalar(instruction, offset, "i64" if offset.kind == "int" else "u32")
    return i, count, base, lambda b: np.asarray(extra(b)).astype(U64) + imm


def _fetch(b: Batch, address: np.ndarray, waves: np.ndarray) -> np.ndarray:
    """A dword for each of some waves (their numbers); 0 for the others."""
    value = np.zeros(b.waves, U32)
    if waves.size:
        try:
            value[waves] = b.memory.gather(address[waves], 4, b.checked)[0]
        except Fault as fault:
            fault.wave, fault.lane = int(waves[fault.lane]), None
            raise
    return value


def _acting(b: Batch) -> np.ndarray:
    return np.arange(b.waves) if b.active is None else np.flatnonzero(b.active)


def _load(instruction: Instruction):
    i, count, base, offset = _parts(instruction, "s_load_dword")
    start = scalar(instruction, base, "u64")

    def load(b: Batch) -> None:
        address, waves = start(b) + offset(b), _acting(b)
        # All are read before one is written: the address may be among the registers that are loaded.
        found = [_fetch(b, address + U64(4 * k), waves) for k in range(count)]
        for k, value in enumerate(found):
            b.set_s(i + k, value)

    return load


def _buffer_load(instruction: Instruction):
    """Each dword is compared with the buffer's number of bytes; out of range ones are 0."""
    i, count, base, offset = _parts(instruction, "s_buffer_load_dword")
    words(instruction, base, 4)
    if base.kind != "s":
        raise refuse(instruction, "a buffer resource that is not in scalar registers")

    def load(b: Batch) -> None:
        start, size = check_raw(b, base.index)
        at, waves, found = np.broadcast_to(offset(b), b.waves), _acting(b), []
        for k in range(count):
            inside = at + U64(4 * k + 4) <= size
            found.append(_fetch(b, start + at + U64(4 * k), waves[inside[waves]]))
        for k, value in enumerate(found):
            b.set_s(i + k, value)

    return load


TABLE = {"s_load_dword" + n: _load for n in ("", "x2", "x4", "x8", "x16")}
TABLE |= {"s_buffer_load_dword" + n: _buffer_load for n in ("", "x2", "x4", "x8", "x16")}


def build(instruction: Instruction):
    return TABLE[instruction.opcode](instruction)
