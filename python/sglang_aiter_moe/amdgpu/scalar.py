"""Scalar ALU: SOP1, SOP2, SOPC, SOPK, and the instructions that wait, sleep or hint.

A scalar register holds one number a wave: arrays [waves]. Source: AMD, "CDNA3 ISA" (and CDNA4), chapter "Instructions",
sections SOP2, SOPK, SOP1, SOPC, SOPP. Branches, barriers and ends are in ``control.py``.
"""

from __future__ import annotations

import re

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.decode import Modifiers, refuse, scalar, scalar_destination
from sglang_aiter_moe.amdgpu.state import EXEC, Batch

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def _shift(value, count, bits: int, left: bool):
    count = count & (bits - 1)
    return value << count.astype(value.dtype) if left else value >> count.astype(value.dtype)


def _add_u32(a, b, scc):
    wide = a.astype(U64) + b
    return wide.astype(U32), wide >> U64(32) != 0


def _addc_u32(a, b, scc):
    wide = a.astype(U64) + b + scc
    return wide.astype(U32), wide >> U64(32) != 0


def _sub_u32(a, b, scc):
    return a - b, b > a


def _subb_u32(a, b, scc):
    return a - b - scc, b.astype(U64) + scc > a


def _add_i32(a, b, scc):
    r = a + b
    return r, ((a ^ r) & (b ^ r)) < 0


def _sub_i32(a, b, scc):
    r = a - b
    return r, ((a ^ b) & (a ^ r)) < 0


def _bfe_u32(a, b):
    offset, width = b & U32(31), (b >> U32(16)) & U32(127)
    field = a.astype(U64) >> offset
    return (field & ((U64(1) << np.minimum(width, U32(32)).astype(U64)) - U64(1))).astype(U32)


def _bfe_i32(a, b):
    offset, width = b & U32(31), np.minimum((b >> U32(16)) & U32(127), U32(32))
    field = (a.astype(I64) >> offset.astype(I64)) & ((I64(1) << width.astype(I64)) - I64(1))
    top = I64(1) << (np.maximum(width, U32(1)) - U32(1)).astype(I64)
    return np.where(width == 0, 0, (field ^ top) - top).astype(I32)


def _bfe_u64(a, b):
    offset, width = (b & U32(63)).astype(U64), np.minimum((b >> U32(16)) & U32(127), U32(64))
    mask = np.where(
        width >= 64, U64(0xFFFFFFFFFFFFFFFF), (U64(1) << (width & U32(63)).astype(U64)) - U64(1)
    )
    return (a >> offset) & mask


def _bfm_b32(a, b):
    return ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))


def _mul_hi(a, b, wide):
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def _lshl_add(n: int):
    def add(a, b, scc):
        wide = (a.astype(U64) << U64(n)) + b
        return wide.astype(U32), wide >> U64(32) != 0

    return add


def _pack(low_half: int, high_half: int):
    return lambda a, b: (
        ((a >> U32(16 * low_half)) & U32(0xFFFF))
        | (((b >> U32(16 * high_half)) & U32(0xFFFF)) << U32(16))
    )


def reversed_bits(a):
    raw = np.atleast_1d(a).astype(a.dtype)
    bits = np.unpackbits(raw.view(np.uint8), bitorder="little").reshape(raw.size, -1)
    return np.packbits(bits[:, ::-1], bitorder="little").view(raw.dtype).reshape(np.shape(a))


def count_ones(a):
    raw = np.atleast_1d(a)
    bits = np.unpackbits(np.ascontiguousarray(raw).view(np.uint8)).reshape(raw.size, -1)
    return bits.sum(1).astype(U32).reshape(np.shape(a))


def lowest_one(a):
    """Position of the lowest set bit, -1 for none."""
    bits = 8 * a.dtype.itemsize
    lowest = a & (~a + a.dtype.type(1))
    return np.where(a == 0, -1, count_ones(lowest - a.dtype.type(1)).astype(I32) % bits).astype(I32)


def leading_zeros(a):
    """How many zeros precede the highest set bit, -1 for none."""
    return lowest_one(reversed_bits(a))


def sign_bits(a):
    """How many bits from the top equal the sign, -1 where all do (s_flbit_i32, v_ffbh_i32)."""
    a = a.astype(I32)
    flipped = np.where(a < 0, ~a, a).astype(U32)
    return leading_zeros(flipped)


# name -> (destination kind, source kinds, function, what SCC becomes: None, "nonzero", "own" from the function, or
# "carry": from the function, which reads it too)
SOP2 = {
    "s_add_u32": ("u32", "u32", _add_u32, "own"),
    "s_sub_u32": ("u32", "u32", _sub_u32, "own"),
    "s_addc_u32": ("u32", "u32", _addc_u32, "carry"),
    "s_subb_u32": ("u32", "u32", _subb_u32, "carry"),
    "s_add_i32": ("i32", "i32", _add_i32, "own"),
    "s_sub_i32": ("i32", "i32", _sub_i32, "own"),
    "s_mul_i32": ("u32", "u32", lambda a, b: a * b, None),
    "s_mul_hi_u32": ("u32", "u32", lambda a, b: _mul_hi(a, b, U64), None),
    "s_mul_hi_i32": ("i32", "i32", lambda a, b: _mul_hi(a, b, I64), None),
    "s_lshl1_add_u32": ("u32", "u32", _lshl_add(1), "own"),
    "s_lshl2_add_u32": ("u32", "u32", _lshl_add(2), "own"),
    "s_lshl3_add_u32": ("u32", "u32", _lshl_add(3), "own"),
    "s_lshl4_add_u32": ("u32", "u32", _lshl_add(4), "own"),
    "s_bfe_u32": ("u32", "u32", _bfe_u32, "nonzero"),
    "s_bfe_i32": ("i32", "i32 u32", _bfe_i32, "nonzero"),
    "s_bfe_u64": ("u64", "u64 u32", _bfe_u64, "nonzero"),
    "s_bfm_b32": ("u32", "u32", _bfm_b32, None),
    "s_lshl_b32": ("u32", "u32", lambda a, b: _shift(a, b, 32, True), "nonzero"),
    "s_lshr_b32": ("u32", "u32", lambda a, b: _shift(a, b, 32, False), "nonzero"),
    "s_ashr_i32": ("i32", "i32 u32", lambda a, b: _shift(a, b, 32, False), "nonzero"),
    "s_lshl_b64": ("u64", "u64 u32", lambda a, b: _shift(a, b, 64, True), "nonzero"),
    "s_lshr_b64": ("u64", "u64 u32", lambda a, b: _shift(a, b, 64, False), "nonzero"),
    "s_ashr_i64": ("i64", "i64 u32", lambda a, b: _shift(a, b, 64, False), "nonzero"),
    "s_pack_ll_b32_b16": ("u32", "u32", _pack(0, 0), None),
    "s_pack_lh_b32_b16": ("u32", "u32", _pack(0, 1), None),
    "s_pack_hh_b32_b16": ("u32", "u32", _pack(1, 1), None),
    "s_absdiff_i32": ("i32", "i32", lambda a, b: np.abs(a - b), "nonzero"),
    "s_min_i32": ("i32", "i32", lambda a, b, scc: (np.minimum(a, b), a <= b), "own"),
    "s_min_u32": ("u32", "u32", lambda a, b, scc: (np.minimum(a, b), a <= b), "own"),
    "s_max_i32": ("i32", "i32", lambda a, b, scc: (np.maximum(a, b), a >= b), "own"),
    "s_max_u32": ("u32", "u32", lambda a, b, scc: (np.maximum(a, b), a >= b), "own"),
}
_LOGIC = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b, "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
for _name, _f in _LOGIC.items():
    SOP2[f"s_{_name}_b32"] = ("u32", "u32", _f, "nonzero")
    SOP2[f"s_{_name}_b64"] = ("u64", "u64", _f, "nonzero")

SOP1 = {
    "s_mov_b32": ("u32", "u32", lambda a: a, None),
    "s_mov_b64": ("u64", "i64", lambda a: a, None),
    "s_not_b32": ("u32", "u32", lambda a: ~a, "nonzero"),
    "s_not_b64": ("u64", "u64", lambda a: ~a, "nonzero"),
    "s_abs_i32": ("i32", "i32", np.abs, "nonzero"),
    "s_brev_b32": ("u32", "u32", reversed_bits, None),
    "s_brev_b64": ("u64", "u64", reversed_bits, None),
    "s_sext_i32_i8": ("i32", "u32", lambda a: a.astype(np.int8).astype(I32), None),
    "s_sext_i32_i16": ("i32", "u32", lambda a: a.astype(np.int16).astype(I32), None),
    "s_bcnt1_i32_b32": ("u32", "u32", count_ones, "nonzero"),
    "s_bcnt1_i32_b64": ("u32", "u64", count_ones, "nonzero"),
    "s_ff1_i32_b32": ("i32", "u32", lowest_one, None),
    "s_ff1_i32_b64": ("i32", "u64", lowest_one, None),
    "s_flbit_i32_b32": ("i32", "u32", leading_zeros, None),
    "s_flbit_i32_b64": ("i32", "u64", leading_zeros, None),
    "s_flbit_i32": ("i32", "u32", sign_bits, None),
    "s_bitset0_b32": ("u32", "u32", lambda d, a: d & ~(U32(1) << (a & U32(31))), "read"),
    "s_bitset1_b32": ("u32", "u32", lambda d, a: d | (U32(1) << (a & U32(31))), "read"),
}

_RELATIONS = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip
SOPC = {f"s_cmp_{n}_{t}": (t, f) for n, f in _RELATIONS.items() for t in ("u32", "i32")}
SOPC |= {f"s_cmp_{n}_u64": ("u64", _RELATIONS[n]) for n in ("eq", "lg")}

NOTHING = (
    "s_nop", "s_waitcnt", "s_sleep", "s_setprio", "s_dcache_inv", "s_dcache_wb", "s_icache_inv",
    "buffer_inv", "buffer_wbl2",
)  # fmt: skip
"""Timing, scheduling and caches: without effect where memory is synchronous."""


def _result(instruction: Instruction, kind: str):
    wide = kind.endswith("64")
    i = scalar_destination(instruction, instruction.operands[0], 2 if wide else 1)
    if not wide:
        return lambda b, value: b.set_s(i, value.view(U32))

    def pair(b: Batch, value) -> None:
        value = value.view(U64)
        b.set_s64(i, value.astype(U32), (value >> U64(32)).astype(U32))

    return pair


def _sop2(instruction: Instruction):
    destination, sources, f, scc = SOP2[instruction.opcode]
    kinds = (sources.split() * 2)[:2]
    a, c = (scalar(instruction, o, k) for o, k in zip(instruction.operands[1:], kinds, strict=True))
    put = _result(instruction, destination)
    if scc in ("own", "carry"):
        reads = scc == "carry"

        def own(b: Batch) -> None:
            value, flag = f(a(b), c(b), b.scc if reads else None)
            put(b, value)
            b.set_scc(flag)

        return own
    if scc is None:
        return lambda b: put(b, f(a(b), c(b)))

    def nonzero(b: Batch) -> None:
        value = f(a(b), c(b))
        put(b, value)
        b.set_scc(value != 0)

    return nonzero


def _sop1(instruction: Instruction):
    destination, source, f, scc = SOP1[instruction.opcode]
    a = scalar(instruction, instruction.operands[1], source)
    put = _result(instruction, destination)
    if scc == "read":
        old = scalar(instruction, instruction.operands[0], destination)
        return lambda b: put(b, f(old(b), a(b)))
    if scc is None:
        return lambda b: put(b, f(a(b)))

    def nonzero(b: Batch) -> None:
        value = f(a(b))
        put(b, value)
        b.set_scc(value != 0)

    return nonzero


def _compare(instruction: Instruction):
    kind, f = SOPC[instruction.opcode]
    a, c = (scalar(instruction, o, kind) for o in instruction.operands)
    return lambda b: b.set_scc(f(a(b), c(b)))


def _bit_test(instruction: Instruction):
    wide = instruction.opcode.endswith("b64")
    wanted = int(instruction.opcode[len("s_bitcmp")])
    a = scalar(instruction, instruction.operands[0], "u64" if wide else "u32")
    n = scalar(instruction, instruction.operands[1])

    def test(b: Batch) -> None:
        value = a(b)
        at = (n(b) & U32(63 if wide else 31)).astype(value.dtype)
        b.set_scc(((value >> at) & value.dtype.type(1)) == wanted)

    return test


def _select(instruction: Instruction):
    kind = "u64" if instruction.opcode.endswith("b64") else "u32"
    read = "i64" if kind == "u64" else "u32"
    a, c = (scalar(instruction, o, read) for o in instruction.operands[1:])
    put = _result(instruction, kind)
    return lambda b: put(b, np.where(b.scc, a(b), c(b)))


def _conditional_move(instruction: Instruction):
    kind = "u64" if instruction.opcode.endswith("b64") else "u32"
    a, old = (
        scalar(instruction, o, kind) for o in (instruction.operands[1], instruction.operands[0])
    )
    put = _result(instruction, kind)
    return lambda b: put(b, np.where(b.scc, a(b), old(b)))


def _with_immediate(instruction: Instruction):
    """SOPK: a 16-bit immediate, sign-extended but in unsigned comparisons."""
    operation = instruction.opcode[2:]
    immediate = int(instruction.operands[1].value)
    signed = (immediate & 0xFFFF) - ((immediate & 0x8000) << 1)
    if operation == "movk_i32":
        i = scalar_destination(instruction, instruction.operands[0], 1)
        value = U32(signed & 0xFFFFFFFF)
        return lambda b: b.set_s(i, value)
    if operation.startswith("cmpk_"):
        relation, kind = operation.removeprefix("cmpk_").split("_")
        a = scalar(instruction, instruction.operands[0], kind)
        against = U32(immediate & 0xFFFF) if kind == "u32" else I32(signed)
        f = _RELATIONS[relation]
        return lambda b: b.set_scc(f(a(b), against))
    i = scalar_destination(instruction, instruction.operands[0], 1)
    old = scalar(instruction, instruction.operands[0], "i32")
    if operation == "mulk_i32":
        return lambda b: b.set_s(i, (old(b) * I32(signed)).view(U32))
    if operation == "cmovk_i32":
        return lambda b: b.set_s(i, np.where(b.scc, I32(signed), old(b)).view(U32))

    def add(b: Batch) -> None:
        value, flag = _add_i32(old(b), I32(signed), None)
        b.set_s(i, value.view(U32))
        b.set_scc(flag)

    return add


def _save_exec(instruction: Instruction):
    """D = EXEC; EXEC = S op EXEC; SCC = EXEC is not 0. andn2 is S & ~EXEC, andn1 ~S & EXEC."""
    name = instruction.opcode.split("_")[1]
    operation = {
        "andn1": lambda s, e: ~s & e, "orn1": lambda s, e: ~s | e,
        "andn2": lambda s, e: s & ~e, "orn2": lambda s, e: s | ~e,
    }.get(name) or _LOGIC[name]  # fmt: skip
    source = scalar(instruction, instruction.operands[1], "u64")
    i = scalar_destination(instruction, instruction.operands[0], 2)

    def save(b: Batch) -> None:
        low, high = b.s[EXEC], b.s[EXEC + 1]
        value = operation(source(b), low.astype(U64) | (high.astype(U64) << U64(32)))
        b.set_s64(i, low, high)
        b.set_s64(EXEC, value.astype(U32), (value >> U64(32)).astype(U32))
        b.set_scc(value != 0)

    return save


_COUNTER = re.compile(r"(vm|exp|lgkm)cnt\(\d+\)")


def _nothing(instruction: Instruction):
    for operand in instruction.operands:
        counter = operand.kind == "name" and _COUNTER.fullmatch(operand.value)
        if operand.kind != "int" and not (counter and instruction.opcode == "s_waitcnt"):
            raise refuse(instruction, f"the operand {operand.value!r}")
    return lambda b: None


_SOPK = {f"s_{n}_i32" for n in ("movk", "addk", "mulk", "cmovk")}
_SOPK |= {f"s_cmpk_{n}_{t}" for n in _RELATIONS for t in ("u32", "i32")}
TABLE = dict.fromkeys(SOP2, _sop2) | dict.fromkeys(SOP1, _sop1)
TABLE |= dict.fromkeys(SOPC, _compare) | dict.fromkeys(_SOPK, _with_immediate)
TABLE |= {f"s_bitcmp{v}_b{w}": _bit_test for v in (0, 1) for w in (32, 64)}
TABLE |= {f"s_cselect_b{w}": _select for w in (32, 64)}
TABLE |= {f"s_cmov_b{w}": _conditional_move for w in (32, 64)}
TABLE |= {f"s_{n}_saveexec_b64": _save_exec for n in (*_LOGIC, "andn1", "orn1")}
TABLE |= dict.fromkeys(NOTHING, _nothing)


def build(instruction: Instruction):
    """The function of a batch that executes one scalar instruction."""
    modifiers = Modifiers(instruction)
    if instruction.opcode in ("buffer_inv", "buffer_wbl2"):
        for name in ("sc0", "sc1"):
            modifiers.take(name)
    modifiers.done()
    wanted = {"_sop2": 3, "_sop1": 2, "_select": 3}.get(TABLE[instruction.opcode].__name__)
    if wanted is not None and len(instruction.operands) != wanted:
        raise refuse(instruction, f"{instruction.opcode} with {len(instruction.operands)} operands")
    return TABLE[instruction.opcode](instruction)
