"""Vector ALU on integers and bits.

Source: AMD, "CDNA3 ISA", sections VOP1, VOP2, VOP3, VOP3P; "CDNA4 ISA" for what gfx950 adds (v_bitop3).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.decode import Modifiers, refuse, vector, words, write
from sglang_aiter_moe.amdgpu.encoding import Row, build_row
from sglang_aiter_moe.amdgpu.scalar import (
    count_ones,
    leading_zeros,
    lowest_one,
    reversed_bits,
    sign_bits,
)
from sglang_aiter_moe.amdgpu.state import Batch

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def shl(a, n):
    return a << (n & n.dtype.type(8 * a.dtype.itemsize - 1)).astype(a.dtype)


def shr(a, n):
    return a >> (n & n.dtype.type(8 * a.dtype.itemsize - 1)).astype(a.dtype)


def _bfe(a, offset, width):
    return (a >> (offset & U32(31))) & ((U32(1) << (width & U32(31))) - U32(1))


def _bfe_signed(a, offset, width):
    offset, width = (offset & U32(31)).astype(I64), (width & U32(31)).astype(I64)
    field = (a.astype(I64) >> offset) & ((I64(1) << width) - 1)
    top = (I64(1) << width) >> 1
    return ((field ^ top) - top).astype(I32)


def perm(a, b, selector):
    """Bytes 0-3 are b's, 4-7 a's; 8-11 the signs of halves, 12 zero, 13 on ones."""
    joined = (a.astype(U64) << U64(32)) | b
    out = None
    for i in range(4):
        chosen = (selector >> U32(8 * i)) & U32(0xFF)
        byte = (joined >> (np.minimum(chosen, U32(7)).astype(U64) * U64(8))).astype(U32) & U32(0xFF)
        if np.max(chosen) > 7:
            half = np.clip(chosen, U32(8), U32(11)) - U32(8)
            sign = (joined >> (half.astype(U64) * U64(16) + U64(15))).astype(U32) & U32(1)
            special = np.where(
                chosen <= 11, sign * U32(0xFF), np.where(chosen == 12, U32(0), U32(0xFF))
            )
            byte = np.where(chosen > 7, special, byte)
        byte = byte << U32(8 * i)
        out = byte if out is None else out | byte
    return out


def _align(bits: int):
    def align(a, b, n):
        amount = (n & U32(31 if bits == 1 else 3)).astype(U64) * U64(bits)
        return (((a.astype(U64) << U64(32)) | b) >> amount).astype(U32)

    return align


def _below(half: int):
    """v_mbcnt: set bits of the mask below each lane, added to the second operand."""
    lanes = np.arange(64)
    visible = np.clip(lanes - 32 * half, 0, 32)
    keep = ((np.uint64(1) << visible.astype(U64)) - U64(1)).astype(U32)

    def count(mask, base):
        return (
            count_ones(
                np.broadcast_to(mask, (np.shape(mask)[0] if np.ndim(mask) else 1, 64)) & keep
            )
            + base
        )

    return count


def _s24(a):
    return (a << I32(8)) >> I32(8)


M24 = U32(0xFFFFFF)
TABLE: dict[str, Row] = {
    "v_mov_b32": ("u32", "u32", lambda a: a),
    "v_mov_b64": ("u64", "i64", lambda a: a),
    "v_accvgpr_read_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_write_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_mov_b32": ("u32", "u32", lambda a: a),
    "v_not_b32": ("u32", "u32", lambda a: ~a),
    "v_bfrev_b32": ("u32", "u32", lambda a: reversed_bits(np.ascontiguousarray(a))),
    "v_ffbh_u32": ("i32", "u32", lambda a: leading_zeros(np.ascontiguousarray(a))),
    "v_ffbl_b32": ("i32", "u32", lambda a: lowest_one(np.ascontiguousarray(a))),
    "v_ffbh_i32": ("i32", "u32", lambda a: sign_bits(np.ascontiguousarray(a))),
    "v_bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: count_ones(np.ascontiguousarray(a)) + b),
    "v_mbcnt_lo_u32_b32": ("u32", "u32 u32", _below(0)),
    "v_mbcnt_hi_u32_b32": ("u32", "u32 u32", _below(1)),
    "v_add_u32": ("u32", "u32 u32", lambda a, b: a + b),
    "v_sub_u32": ("u32", "u32 u32", lambda a, b: a - b),
    "v_subrev_u32": ("u32", "u32 u32", lambda a, b: b - a),
    "v_add_i32": ("i32", "i32 i32", lambda a, b: a + b),
    "v_sub_i32": ("i32", "i32 i32", lambda a, b: a - b),
    "v_mul_lo_u32": ("u32", "u32 u32", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32", "u32 u32", lambda a, b: ((a.astype(U64) * b) >> U64(32)).astype(U32)),
    "v_mul_hi_i32": ("i32", "i32 i32", lambda a, b: ((a.astype(I64) * b) >> I64(32)).astype(I32)),
    "v_mul_u32_u24": ("u32", "u32 u32", lambda a, b: (a & M24) * (b & M24)),
    "v_mul_i32_i24": ("i32", "i32 i32", lambda a, b: _s24(a) * _s24(b)),
    "v_mul_hi_u32_u24": (
        "u32",
        "u32 u32",
        lambda a, b: (((a & M24).astype(U64) * (b & M24)) >> U64(32)).astype(U32),
    ),
    "v_mad_u32_u24": ("u32", "u32 u32 u32", lambda a, b, c: (a & M24) * (b & M24) + c),
    "v_mad_i32_i24": ("i32", "i32 i32 i32", lambda a, b, c: _s24(a) * _s24(b) + c),
    "v_and_b32": ("u32", "u32 u32", lambda a, b: a & b),
    "v_or_b32": ("u32", "u32 u32", lambda a, b: a | b),
    "v_xor_b32": ("u32", "u32 u32", lambda a, b: a ^ b),
    "v_xnor_b32": ("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("u32", "u32 u32", lambda n, a: shl(a, n)),
    "v_lshrrev_b32": ("u32", "u32 u32", lambda n, a: shr(a, n)),
    "v_ashrrev_i32": ("i32", "u32 i32", lambda n, a: shr(a, n)),
    "v_lshlrev_b64": ("u64", "u32 u64", lambda n, a: a << (n & U32(63)).astype(U64)),
    "v_lshrrev_b64": ("u64", "u32 u64", lambda n, a: a >> (n & U32(63)).astype(U64)),
    "v_ashrrev_i64": ("i64", "u32 i64", lambda n, a: a >> (n & U32(63)).astype(I64)),
    "v_lshlrev_b16": ("u16", "u16 u16", lambda n, a: shl(a, n)),
    "v_lshrrev_b16": ("u16", "u16 u16", lambda n, a: shr(a, n)),
    "v_ashrrev_i16": ("i16", "u16 i16", lambda n, a: shr(a, n)),
    "v_add_u16": ("u16", "u16 u16", lambda a, b: a + b),
    "v_sub_u16": ("u16", "u16 u16", lambda a, b: a - b),
    "v_subrev_u16": ("u16", "u16 u16", lambda a, b: b - a),
    "v_mul_lo_u16": ("u16", "u16 u16", lambda a, b: a * b),
    "v_max_u16": ("u16", "u16 u16", np.maximum),
    "v_min_u16": ("u16", "u16 u16", np.minimum),
    "v_max_i16": ("i16", "i16 i16", np.maximum),
    "v_min_i16": ("i16", "i16 i16", np.minimum),
    "v_max_i32": ("i32", "i32 i32", np.maximum),
    "v_min_i32": ("i32", "i32 i32", np.minimum),
    "v_max_u32": ("u32", "u32 u32", np.maximum),
    "v_min_u32": ("u32", "u32 u32", np.minimum),
    "v_max3_i32": ("i32", "i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("i32", "i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_med3_i32": ("i32", "i32 i32 i32", lambda a, b, c: _median(a, b, c)),
    "v_med3_u32": ("u32", "u32 u32 u32", lambda a, b, c: _median(a, b, c)),
    "v_bfe_u32": ("u32", "u32 u32 u32", _bfe),
    "v_bfe_i32": ("i32", "i32 u32 u32", _bfe_signed),
    "v_bfi_b32": ("u32", "u32 u32 u32", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfm_b32": (
        "u32",
        "u32 u32",
        lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    ),
    "v_perm_b32": ("u32", "u32 u32 u32", perm),
    "v_alignbit_b32": ("u32", "u32 u32 u32", _align(1)),
    "v_alignbyte_b32": ("u32", "u32 u32 u32", _align(8)),
    "v_add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, c: shl(a + b, c)),
    "v_lshl_add_u32": ("u32", "u32 u32 u32", lambda a, b, c: shl(a, b) + c),
    "v_lshl_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: shl(a, b) | c),
    "v_and_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c),
}


def _median(a, b, c):
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _bitop3(instruction: Instruction):
    """Any function of three bits; bit 4a + 2b + c of the table is its value (CDNA4 ISA, V_BITOP3_B32).

    v_bitop3_b16 clears the high half of its destination here; whether hardware keeps it is not established.
    """
    modifiers = dict(instruction.modifiers)
    table = modifiers.pop("bitop3", 0)
    kind = "u16" if instruction.opcode.endswith("b16") else "u32"

    def pair(two: int, x):
        """The function of one bit whose value for 0 is bit 0 of ``two`` and for 1 bit 1."""
        return (np.zeros_like(x), ~x, x, ~np.zeros_like(x))[two]

    def f(a, b, c):
        low, high = (
            (pair(t & 3, c) & ~b) | (pair(t >> 2, c) & b) for t in (table & 15, table >> 4)
        )
        return (low & ~a) | (high & a)

    plain = replace(instruction, modifiers=modifiers)
    return build_row(plain, (kind, f"{kind} {kind} {kind}", f))


def _packed_move(instruction: Instruction):
    """v_pk_mov_b32: the low word is a word of the first source, the high one a word of the second."""
    modifiers = Modifiers(instruction)
    select, other = modifiers.take("op_sel", (0, 0)), modifiers.take("op_sel_hi", (1, 1))
    modifiers.done()
    target, a, c = instruction.operands
    del other  # LLVM prints it; the words are chosen by op_sel
    for operand in (a, c):
        if operand.kind not in "vas":
            raise refuse(instruction, "a constant")
    words(instruction, target, 2)
    reads = [
        vector(instruction, replace(o, index=o.index + s, count=1), "u32")
        for o, s in zip((a, c), select, strict=True)
    ]
    puts = [write(instruction, replace(target, index=target.index + i, count=1)) for i in (0, 1)]

    def move(b: Batch) -> None:
        values = [read(b) for read in reads]
        for put, value in zip(puts, values, strict=True):
            put(b, value)

    return move


SPECIAL = {"v_bitop3_b32": _bitop3, "v_bitop3_b16": _bitop3, "v_pk_mov_b32": _packed_move}


def build(instruction: Instruction):
    if instruction.opcode in SPECIAL:
        return SPECIAL[instruction.opcode](instruction)
    return build_row(instruction, TABLE[instruction.opcode])
