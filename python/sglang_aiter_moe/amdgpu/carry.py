"""Vector ALU with a lane mask as operand or second result: carries, selection, 64-bit multiply-add.

Source: AMD, "CDNA3 ISA", sections VOP2 and VOP3B.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.decode import Modifiers, refuse, vector, words, write
from sglang_aiter_moe.amdgpu.encoding import encoded_result, encoded_sources
from sglang_aiter_moe.amdgpu.lanes import under
from sglang_aiter_moe.amdgpu.state import Batch

U32, U64, I64 = np.uint32, np.uint64, np.int64


def _mask_index(instruction: Instruction, operand) -> int:
    if operand.kind != "s":
        raise refuse(instruction, "a lane mask that is not a pair of scalar registers")
    words(instruction, operand, 2)
    return operand.index


def _select(instruction: Instruction):
    """v_cndmask_b32: the second source where the mask is set."""
    modifiers = Modifiers(instruction)
    target, *sources, mask = instruction.operands
    kind = "u32" if all(o.plain for o in sources) else "f32"
    if instruction.encoding == "sdwa" and any(o.sext for o in sources):
        kind = "u32"
    (no, yes), dpp = encoded_sources(instruction, modifiers, sources, [kind, kind])
    if dpp is not None:
        raise refuse(instruction, "DPP of v_cndmask")
    put = encoded_result(instruction, modifiers, target, kind)
    modifiers.done()
    i = _mask_index(instruction, mask)

    def select(b: Batch) -> None:
        bits = b.bits(i)
        # A source is read in the lanes that select it: the others may hold what nothing wrote.
        put(b, np.where(bits, under(b, b.mask & bits, yes), under(b, b.mask & ~bits, no)))

    def quick(b: Batch) -> None:
        if all(b.v_known[r] is True for r in registers):
            put(b, np.where(b.bits(i), yes(b), no(b)))
        else:
            select(b)

    registers = [o.index for o in sources if o.kind == "v"]
    return quick if all(o.kind != "a" for o in sources) else select


def _sum(a, b, carry):
    r = a.astype(U64) + b + carry
    return r.astype(U32), r >> U64(32) != 0


def _difference(a, b, borrow):
    return a - b - np.asarray(borrow, U32), b.astype(U64) + borrow > a


_CARRIES = {
    "v_add_co_u32": (_sum, False, False), "v_addc_co_u32": (_sum, True, False),
    "v_sub_co_u32": (_difference, False, False), "v_subb_co_u32": (_difference, True, False),
    "v_subrev_co_u32": (_difference, False, True), "v_subbrev_co_u32": (_difference, True, True),
}  # fmt: skip


def _carry(instruction: Instruction):
    f, has_carry, reverse = _CARRIES[instruction.opcode]
    modifiers = Modifiers(instruction)
    target, out, *sources = instruction.operands
    carry = _mask_index(instruction, sources.pop()) if has_carry else None
    (a, c), dpp = encoded_sources(instruction, modifiers, sources, ["u32", "u32"])
    if dpp is not None:
        raise refuse(instruction, "DPP of an addition with carry")
    if reverse:
        a, c = c, a
    put = encoded_result(instruction, modifiers, target, "u32")
    modifiers.done()
    i = _mask_index(instruction, out)

    def execute(b: Batch) -> None:
        value, flag = f(a(b), c(b), b.bits(carry) if carry is not None else U32(0))
        put(b, value)
        b.set_bits(i, np.broadcast_to(flag, b.mask.shape) & b.mask)

    return execute


def _multiply_add(instruction: Instruction):
    """D (64 bits) = S0 * S1 + S2; the carry or overflow goes to a lane mask.

    LLVM leaves the high half of S2 unwritten where only the low half of D is used: then the high half of D and the
    carry count as unwritten, and only a read of those is an error.
    """
    signed = instruction.opcode == "v_mad_i64_i32"
    Modifiers(instruction).done()
    target, out, x, y, z = instruction.operands
    narrow, wide = ("i32", "i64") if signed else ("u32", "u64")
    a, c = vector(instruction, x, narrow), vector(instruction, y, narrow)
    if z.kind == "int" and not -16 <= z.value <= 64:
        raise refuse(instruction, "a literal as 64-bit operand")
    d = vector(instruction, z, "i64" if z.kind == "int" else wide)
    put = write(instruction, target, wide)
    i = _mask_index(instruction, out)
    dtype = I64 if signed else U64
    high = z.index + 1 if z.kind == "v" else None

    def execute(b: Batch) -> None:
        held = True if high is None else b.v_known[high]
        if held is True:
            run(b)
            return
        b.v_known[high] = True
        try:
            run(b)
        finally:
            after, b.v_known[high] = b.v_known[target.index + 1], held
        lost = b.mask & np.logical_not(held)
        if lost.any():
            # Where target and S2 are the same registers, what the other lanes hold is as known as it was.
            kept = np.logical_or(held, b.mask) if target.index + 1 == high else after
            b.v_known[target.index + 1] = kept & ~lost
            b.forget_bits(i, lost.any(axis=1))
        elif target.index + 1 == high:
            b.v_known[high] = np.logical_or(held, b.mask)

    def run(b: Batch) -> None:
        product, addend = a(b).astype(dtype) * c(b).astype(dtype), d(b).astype(dtype)
        value = product + addend
        # Unsigned: the carry. Signed: bit 64 of the sum of the operands extended to 65 bits, its true sign.
        overflow = (product ^ value) & (addend ^ value)
        flag = (value ^ overflow) < 0 if signed else value < product
        put(b, value)
        b.set_bits(i, np.broadcast_to(flag, b.mask.shape) & b.mask)

    return execute


TABLE = {"v_cndmask_b32": _select, "v_mad_u64_u32": _multiply_add, "v_mad_i64_i32": _multiply_add}
TABLE |= dict.fromkeys(_CARRIES, _carry)


def build(instruction: Instruction):
    return TABLE[instruction.opcode](instruction)
