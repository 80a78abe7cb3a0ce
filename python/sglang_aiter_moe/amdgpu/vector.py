"""Vector ALU on integers and bits, and the machinery by which every table of vector instructions is executed.

A table's row is (destination kind, source kinds, function of arrays). :func:`build_row` gives the function its operands
as e32, e64, SDWA or DPP encode them, and writes the result. Source: AMD, "CDNA3 ISA", chapters "Vector ALU" and
"Instructions", sections VOP1, VOP2, VOP3; "CDNA4 ISA" for what gfx950 adds (v_bitop3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.decode import (
    DTYPES,
    Modifiers,
    Read,
    kept,
    refuse,
    vector,
    words,
    write,
)
from sglang_aiter_moe.amdgpu.lanes import Dpp, under
from sglang_aiter_moe.amdgpu.scalar import _count, _first_one, _first_one_high, _high_sign, _reverse
from sglang_aiter_moe.amdgpu.state import Batch

U16, U32, I32, U64, I64 = np.uint16, np.uint32, np.int32, np.uint64, np.int64
Row = tuple[str, str, Callable]
_FIELDS = {f"BYTE_{i}": (8 * i, 8) for i in range(4)} | {
    f"WORD_{i}": (16 * i, 16) for i in range(2)
}


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
            _count(np.broadcast_to(mask, (np.shape(mask)[0] if np.ndim(mask) else 1, 64)) & keep)
            + base
        )

    return count


def _s24(a):
    return (a << I32(8)) >> I32(8)


def _wide(f):
    return lambda a, b: f(a.astype(U64), b.astype(U64))


M24 = U32(0xFFFFFF)
TABLE: dict[str, Row] = {
    "v_mov_b32": ("u32", "u32", lambda a: a),
    "v_mov_b64": ("u64", "i64", lambda a: a),
    "v_accvgpr_read_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_write_b32": ("u32", "u32", lambda a: a),
    "v_accvgpr_mov_b32": ("u32", "u32", lambda a: a),
    "v_not_b32": ("u32", "u32", lambda a: ~a),
    "v_bfrev_b32": ("u32", "u32", lambda a: _reverse(np.ascontiguousarray(a))),
    "v_ffbh_u32": ("i32", "u32", lambda a: _first_one_high(np.ascontiguousarray(a))),
    "v_ffbl_b32": ("i32", "u32", lambda a: _first_one(np.ascontiguousarray(a))),
    "v_ffbh_i32": ("i32", "u32", lambda a: _high_sign(np.ascontiguousarray(a))),
    "v_bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: _count(np.ascontiguousarray(a)) + b),
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


def _saturate(dtype, f):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return lambda a, b: np.clip(f(a.astype(I64), b.astype(I64)), low, high).astype(dtype)


SATURATING = {
    f"v_{name}_{kind}": _saturate(DTYPES[kind], f)
    for name, f in (("add", np.add), ("sub", np.subtract), ("subrev", lambda a, b: b - a))
    for kind in ("u32", "i32", "u16")
}
"""What clamp makes of integer sums."""


def _median(a, b, c):
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _bitop3(instruction: Instruction):
    """Any function of three bits; bit 4a + 2b + c of the table is its value (CDNA4 ISA, V_BITOP3_B32)."""
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
