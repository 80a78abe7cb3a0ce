"""Scalar ALU, against Python integers."""

import operator
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import scalar
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = [0, 1, 2, 31, 33, 0x7FFF, 0x8000, 0xFFFF, 0x10003, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00080004, 0x00200000,
         0xDEADBEEF]  # fmt: skip
WIDE = [0, 1, M64, 1 << 63, 0x0123456789ABCDEF, 0xFFFFFFFF00000000, 1 << 32]


def s(x, n=32):
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


def nonzero(f, bits=32):
    """SCC: the result is not zero."""
    return lambda *x: (r := f(*x) & ((1 << bits) - 1), int(r != 0))


def keeps(f, bits=32):
    """SCC stays."""
    return lambda *x: (f(*x) & ((1 << bits) - 1), None)


def bfe_u32(a, b):
    return a >> (b & 31) & ((1 << min(b >> 16 & 127, 32)) - 1)


def bfe_i32(a, b):
    width = min(b >> 16 & 127, 32)
    return s(s(a) >> (b & 31), width) if width else 0


def bfe_u64(a, b):
    return a >> (b & 63) & ((1 << min(b >> 16 & 127, 64)) - 1)


def fits(r):
    return int(not -(1 << 31) <= r < 1 << 31)


WORDS = {
    "s_add_u32": lambda a, b: (a + b & M32, a + b >> 32),
    "s_sub_u32": lambda a, b: (a - b & M32, int(b > a)),
    "s_add_i32": lambda a, b: (a + b & M32, fits(s(a) + s(b))),
    "s_sub_i32": lambda a, b: (a - b & M32, fits(s(a) - s(b))),
    "s_mul_i32": keeps(lambda a, b: a * b),
    "s_mul_hi_u32": keeps(lambda a, b: a * b >> 32),
    "s_mul_hi_i32": keeps(lambda a, b: s(a) * s(b) >> 32),
    "s_lshl1_add_u32": lambda a, b: ((a << 1) + b & M32, int((a << 1) + b > M32)),
    "s_lshl2_add_u32": lambda a, b: ((a << 2) + b & M32, int((a << 2) + b > M32)),
    "s_lshl3_add_u32": lambda a, b: ((a << 3) + b & M32, int((a << 3) + b > M32)),
    "s_lshl4_add_u32": lambda a, b: ((a << 4) + b & M32, int((a << 4) + b > M32)),
    "s_bfe_u32": nonzero(bfe_u32),
    "s_bfe_i32": nonzero(bfe_i32),
    "s_bfm_b32": keeps(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "s_lshl_b32": nonzero(lambda a, b: a << (b & 31)),
    "s_lshr_b32": nonzero(lambda a, b: a >> (b & 31)),
    "s_ashr_i32": nonzero(lambda a, b: s(a) >> (b & 31)),
    "s_pack_ll_b32_b16": keeps(lambda a, b: a & 0xFFFF | b << 16),
    "s_pack_lh_b32_b16": keeps(lambda a, b: a & 0xFFFF | b >> 16 << 16),
    "s_pack_hh_b32_b16": keeps(lambda a, b: a >> 16 | b >> 16 << 16),
    "s_absdiff_i32": nonzero(lambda a, b: abs(s(s(a) - s(b)))),
    "s_min_i32": lambda a, b: (min(s(a), s(b)) & M32, int(s(a) <= s(b))),
    "s_max_i32": lambda a, b: (max(s(a), s(b)) & M32, int(s(a) >= s(b))),
    "s_min_u32": lambda a, b: (min(a, b), int(a <= b)),
    "s_max_u32": lambda a, b: (max(a, b), int(a >= b)),
    "s_mov_b32": keeps(lambda a: a),
    "s_not_b32": nonzero(lambda a: ~a),
    "s_abs_i32": nonzero(lambda a: abs(s(a))),
    "s_brev_b32": keeps(lambda a: int(f"{a:032b}"[::-1], 2)),
    "s_sext_i32_i8": keeps(lambda a: s(a, 8)),
    "s_sext_i32_i16": keeps(lambda a: s(a, 16)),
    "s_bcnt1_i32_b32": nonzero(lambda a: a.bit_count()),
    "s_ff1_i32_b32": keeps(lambda a: (a & -a).bit_length() - 1),
    "s_flbit_i32_b32": keeps(lambda a: 32 - a.bit_length() if a else -1),
    "s_flbit_i32": keeps(
        lambda a: 32 - max(s(a), ~s(a)).bit_length() if s(a) not in (0, -1) else -1
    ),
}
LOGIC = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
WORDS |= {f"s_{name}_b32": nonzero(f) for name, f in LOGIC.items()}
# (whether each operand is 64 bits wide, whether the result is, function)
LONGS = {f"s_{name}_b64": ((1, 1), 1, nonzero(f, 64)) for name, f in LOGIC.items()} | {
    "s_lshl_b64": ((1, 0), 1, nonzero(lambda a, b: a << (b & 63), 64)),
    "s_lshr_b64": ((1, 0), 1, nonzero(lambda a, b: a >> (b & 63), 64)),
    "s_ashr_i64": ((1, 0), 1, nonzero(lambda a, b: s(a, 64) >> (b & 63), 64)),
    "s_bfe_u64": ((1, 0), 1, nonzero(bfe_u64, 64)),
    "s_mov_b64": ((1,), 1, keeps(lambda a: a, 64)),
    "s_not_b64": ((1,), 1, nonzero(lambda a: ~a, 64)),
    "s_brev_b64": ((1,), 1, keeps(lambda a: int(f"{a:064b}"[::-1], 2), 64)),
    "s_bcnt1_i32_b64": ((1,), 0, nonzero(lambda a: a.bit_count())),
    "s_ff1_i32_b64": ((1,), 0, keeps(lambda a: (a & -a).bit_length() - 1)),
    "s_flbit_i32_b64": ((1,), 0, keeps(lambda a: 64 - a.bit_length() if a else -1)),
}
RELATIONS = {
    "eq": operator.eq, "lg": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
}  # fmt: skip


def each(values, count):
    """As many waves as there are cases, each with its own operands."""
    if count == 1:
        return [np.array(values, np.uint64)]
    grid = np.array([(a, b) for a in values for b in values], np.uint64)
    return [grid[:, 0], grid[:, 1]]


@pytest.mark.parametrize("opcode", sorted(WORDS))
@pytest.mark.parametrize("before", [0, 1])
def test_words(opcode, before):
    f = WORDS[opcode]
    count = 1 if opcode in scalar.SOP1 else 2
    columns = each(EDGES, count)
    w = Waves(columns[0].size)
    w.batch.set_scc(bool(before))
    for i, column in enumerate(columns):
        w.set(f"s{10 + i}", column.astype(np.uint32))
    w.do(f"{opcode} s0, " + ", ".join(f"s{10 + i}" for i in range(count)))
    for k, row in enumerate(zip(*columns, strict=True)):
        value, scc = f(*map(int, row))
        assert int(w.batch.s[0][k]) == value, row
        assert int(w.batch.scc[k]) == (before if scc is None else scc), row


@pytest.mark.parametrize("opcode", sorted(LONGS))
def test_longs(opcode):
    wide, wide_result, f = LONGS[opcode]
    first = WIDE
    second = (WIDE if wide[-1] else EDGES) if len(wide) == 2 else [0]
    cases = [(a, b) for a in first for b in second]
    w = Waves(len(cases))
    w.batch.set_scc(False)
    w.set("s10", np.array([a for a, _ in cases], np.uint64))
    w.set("s12", np.array([b for _, b in cases], np.uint64))
    names = ["s[10:11]", "s[12:13]" if wide[-1] else "s12"][: len(wide)]
    w.do(f"{opcode} {'s[0:1]' if wide_result else 's0'}, " + ", ".join(names))
    for k, case in enumerate(cases):
        value, scc = f(*case[: len(wide)])
        got = int(w.batch.s[0][k]) | (int(w.batch.s[1][k]) << 32 if wide_result else 0)
        assert got == value, case
        assert int(w.batch.scc[k]) == (0 if scc is None else scc), case


@pytest.mark.parametrize("carry", [0, 1])
def test_carries(carry):
    a, b = each(EDGES, 2)
    w = Waves(a.size).set("s10", a.astype(np.uint32)).set("s11", b.astype(np.uint32))
    for opcode, f in (
        ("s_addc_u32", lambda x, y: (x + y + carry & M32, x + y + carry > M32)),
        ("s_subb_u32", lambda x, y: (x - y - carry & M32, y + carry > x)),
    ):
        w.batch.set_scc(bool(carry))
        w.do(f"{opcode} s0, s10, s11")
        for k, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            assert (int(w.batch.s[0][k]), bool(w.batch.scc[k])) == f(x, y), (opcode, x, y)


@pytest.mark.parametrize("kind", ["u32", "i32", "u64"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons(relation, kind):
    if kind == "u64" and relation not in ("eq", "lg"):
        assert f"s_cmp_{relation}_u64" not in scalar.TABLE
        return
    a, b = each(WIDE if kind == "u64" else EDGES, 2)
    w = Waves(a.size)
    w.set("s10", a if kind == "u64" else a.astype(np.uint32)).set(
        "s12", b if kind == "u64" else b.astype(np.uint32)
    )
    text = "s[10:11], s[12:13]" if kind == "u64" else "s10, s12"
    w.do(f"s_cmp_{relation}_{kind} {text}")
    turn = s if kind == "i32" else int
    want = [
        RELATIONS[relation](turn(x), turn(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert w.batch.scc.tolist() == want


@pytest.mark.parametrize("kind", ["u32", "i32"])
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("immediate", [0, 0x7FFF, 0x8000, 0xFFFF])
def test_comparisons_with_an_immediate(relation, kind, immediate):
    w = (
        Waves(len(EDGES))
        .set("s1", np.array(EDGES, np.uint32))
        .do(f"s_cmpk_{relation}_{kind} s1, {immediate:#x}")
    )
    turn = s if kind == "i32" else int
    against = s(immediate, 16) if kind == "i32" else immediate
    assert w.batch.scc.tolist() == [RELATIONS[relation](turn(x), against) for x in EDGES]


@pytest.mark.parametrize("immediate", [0, 5, 0x7FFF, 0x8000, 0xFFFF])
def test_immediates(immediate):
    value = s(immediate, 16)
    for opcode, f in (
        ("movk", lambda x: value), ("addk", lambda x: s(x) + value), ("mulk", lambda x: x * value),
        ("cmovk", lambda x: x),
    ):  # fmt: skip
        w = (
            Waves(len(EDGES))
            .set("s1", np.array(EDGES, np.uint32))
            .do("s_cmp_eq_u32 s1, 3", f"s_{opcode}_i32 s1, {immediate:#x}")
        )
        assert w.batch.s[1].tolist() == [f(x) & M32 for x in EDGES], opcode
        if opcode == "addk":
            assert w.batch.scc.tolist() == [bool(fits(s(x) + value)) for x in EDGES]
    w = Waves().set("s1", 3)
    w.batch.set_scc(True)
    assert w.do(f"s_cmovk_i32 s1, {immediate:#x}").s(1) == value & M32


def test_bit_tests_and_sets():
    w = Waves().set("s2", 0x8000_0001_0000_0010).set("s4", 36)
    for opcode, register, bit, want in (
        ("s_bitcmp1_b32", "s2", 4, 1), ("s_bitcmp0_b32", "s2", 4, 0), ("s_bitcmp1_b32", "s2", "s4", 1),
        ("s_bitcmp1_b64", "s[2:3]", 63, 1), ("s_bitcmp1_b64", "s[2:3]", "s4", 0), ("s_bitcmp0_b64", "s[2:3]", 32, 0),
    ):  # fmt: skip
        assert w.do(f"{opcode} {register}, {bit}").scc == want, (opcode, bit)
    assert w.do("s_bitset1_b32 s2, 0").s(2) == 0x11
    assert w.do("s_bitset0_b32 s2, s4").s(2) == 0x01


@pytest.mark.parametrize("scc", [0, 1])
def test_selection(scc):
    w = Waves().set("s2", 5 | 7 << 32).set("s4", 1 << 40)
    w.batch.set_scc(bool(scc))
    w.do("s_cselect_b32 s0, s2, 9", "s_cselect_b64 s[6:7], s[4:5], -1", "s_mov_b64 s[8:9], 0")
    w.do("s_cmov_b32 s8, s2", "s_mov_b64 s[10:11], 0", "s_cmov_b64 s[10:11], s[2:3]")
    assert w.s(0) == (5 if scc else 9)
    assert w.s64(6) == (1 << 40 if scc else M64)
    assert w.s(8) == (5 if scc else 0)
    assert w.s64(10) == (5 | 7 << 32 if scc else 0)


SAVES = LOGIC | {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}


@pytest.mark.parametrize("name", SAVES)
def test_saving_exec(name):
    before, source = 0x00FF_F00F_1234_FFFF, 0xF0F0_0F0F_FFFF_0001
    w = Waves().set("s4", source).exec(before).do(f"s_{name}_saveexec_b64 s[6:7], s[4:5]")
    after = SAVES[name](source, before) & M64
    assert (w.s64(6), w.s64(126), w.scc) == (before, after, int(after != 0))
    assert w.batch.mask[0].tolist() == [bool(after >> i & 1) for i in range(64)]


def test_saving_exec_into_its_own_source():
    w = (
        Waves()
        .set("s4", 0xFF | 1 << 63)
        .exec(0x3F0F | 1 << 63)
        .do("s_and_saveexec_b64 s[4:5], s[4:5]")
    )
    assert (w.s64(4), w.s64(126)) == (0x3F0F | 1 << 63, 0x0F | 1 << 63)


@pytest.mark.parametrize(
    "line",
    ["s_nop 1", "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_sleep 2", "s_setprio 3", "buffer_inv sc0 sc1"],
)
def test_waits_and_hints_change_nothing(line):
    w = Waves().set("s4", 3).do(line)
    assert w.s(4) == 3


def test_every_opcode_of_the_table_is_in_this_file():
    here = set(WORDS) | set(LONGS) | {"s_addc_u32", "s_subb_u32", "s_bitset0_b32", "s_bitset1_b32"}
    assert set(scalar.SOP1) | set(scalar.SOP2) == here


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("s_add_u32 s0, v1, s2", "scalar operand v"),
        ("s_add_u32 v0, s1, s2", "not a scalar register"),
        ("s_wobble_b32 s0, s1", "s_wobble_b32"),
        ("s_add_u32 s0, s1", "2 operands"),
        ("s_mov_b64 s[0:1], s2", "1 registers"),
        ("s_mov_b32 s0, s1 glc", "glc"),
    ],
)
def test_what_is_not_modelled_is_named(line, named):
    with pytest.raises(AssemblyError, match=named):
        Waves().set("s1", 1).set("s2", 2).do(line)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
