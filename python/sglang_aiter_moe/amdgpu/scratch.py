"""Private memory of each lane: scratch loads and stores, which is where spilled registers go.

Every lane has ``Kernel.scratch_bytes`` bytes of its own, which the machine reserves; an address is an offset in them.
The flat aperture of scratch is not modelled: a flat instruction names global memory. Source: AMD, "CDNA3 ISA", chapter
"Flat Memory Instructions", section "Scratch Instructions".
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.decode import Modifiers, scalar, vector
from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.memory_ops import (
    LOADS,
    STORES,
    fetch,
    put_memory,
    register_sources,
    register_writes,
    take_cache_bits,
)
from sglang_aiter_moe.amdgpu.state import Batch

I64, U64 = np.int64, np.uint64


def _address(
    instruction: Instruction, modifiers: Modifiers, where: Operand, base: Operand, nbytes: int
):
    """uint64 [waves, 64]: vector offset, scalar offset and immediate, each of which may be absent."""
    imm = I64(modifiers.take("offset"))
    lanes = None if where.kind == "off" else vector(instruction, where, "i32")
    waves = None if base.kind == "off" else scalar(instruction, base, "i32")

    def address(b: Batch) -> np.ndarray:
        offset = np.full(b.mask.shape, imm)
        if lanes is not None:
            offset = offset + lanes(b)
        if waves is not None:
            offset = offset + waves(b)[:, None]
        outside = ((offset < 0) | (offset + nbytes > b.scratch_bytes)) & b.mask
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            raise Fault(
                f"{nbytes} bytes of scratch at {int(offset.reshape(-1)[lane])} of {b.scratch_bytes}",
                allowed="offsets inside the private segment that the kernel declares",
                fix="check the offset, and .amdhsa_private_segment_fixed_size",
                lane=lane,
            )
        return b.scratch_at + np.where(b.mask, offset, 0).astype(U64)

    return address


def _load(instruction: Instruction):
    nbytes, how = LOADS[instruction.opcode.removeprefix("scratch_load_")]
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    target, where, base = instruction.operands
    address = _address(instruction, modifiers, where, base, nbytes)
    modifiers.done()
    write = register_writes(instruction, target, nbytes, how)
    return lambda b: write(b, fetch(b, address(b), nbytes, None))


def _store(instruction: Instruction):
    nbytes, shift = STORES[instruction.opcode.removeprefix("scratch_store_")]
    modifiers = Modifiers(instruction)
    take_cache_bits(modifiers)
    where, source, base = instruction.operands
    address = _address(instruction, modifiers, where, base, nbytes)
    modifiers.done()
    values = register_sources(instruction, source, nbytes, shift)
    return lambda b: put_memory(b, address(b), None, values(b), nbytes)


TABLE = {f"scratch_load_{n}": _load for n in LOADS} | {f"scratch_store_{n}": _store for n in STORES}


def build(instruction: Instruction):
    return TABLE[instruction.opcode](instruction)
