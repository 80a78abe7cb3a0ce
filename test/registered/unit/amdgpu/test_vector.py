"""Integer and bit instructions of the vector ALU, against Python integers, lane by lane."""

import itertools
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import vector
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = (0, 1, 2, 5, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000,
         0xFFFFFFFE, 0xFFFFFFFF, 0x0C0D0E0F, 0x00800000)  # fmt: skip


def s(x, n=32):
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


def field(x, offset, width):
    return x >> offset & ((1 << width) - 1)


def bit_list(x, n=32):
    return [x >> i & 1 for i in range(n)]


def from_bits(bits):
    return sum(b << i for i, b in enumerate(bits))


def perm(a, b, c):
    source = [b >> 8 * i & 255 for i in range(4)] + [a >> 8 * i & 255 for i in range(4)]
    out = 0
    for i in range(4):
        k = c >> 8 * i & 255
        if k < 8:
            byte = source[k]
        elif k < 12:
            byte = 255 if source[(1, 3, 5, 7)[k - 8]] & 0x80 else 0
        else:
            byte = 0 if k == 12 else 255
        out |= byte << 8 * i
    return out


def middle(*x):
    return sorted(x)[1]


# opcode -> function of unsigned 32-bit operands; the result's low 32 bits count
WORDS = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: from_bits(reversed(bit_list(a))),
    "v_ffbh_u32": lambda a: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32": lambda a: bit_list(a).index(1) if a else -1,
    "v_ffbh_i32": lambda a: (
        32 - (a if s(a) >= 0 else ~a & M32).bit_length() if s(a) not in (0, -1) else -1
    ),
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: s(a) * s(b) >> 32,
    "v_mul_u32_u24": lambda a, b: (a % (1 << 24)) * (b % (1 << 24)),
    "v_mul_hi_u32_u24": lambda a, b: (a % (1 << 24)) * (b % (1 << 24)) >> 32,
    "v_mul_i32_i24": lambda a, b: s(a, 24) * s(b, 24),
    "v_mad_u32_u24": lambda a, b, c: (a % (1 << 24)) * (b % (1 << 24)) + c,
    "v_mad_i32_i24": lambda a, b, c: s(a, 24) * s(b, 24) + c,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: s(b) >> (a & 31),
    "v_max_i32": lambda a, b: max(s(a), s(b)),
    "v_min_i32": lambda a, b: min(s(a), s(b)),
    "v_max_u32": lambda a, b: max(a, b),
    "v_min_u32": lambda a, b: min(a, b),
    "v_max3_i32": lambda a, b, c: max(s(a), s(b), s(c)),
    "v_min3_i32": lambda a, b, c: min(s(a), s(b), s(c)),
    "v_max3_u32": lambda a, b, c: max(a, b, c),
    "v_min3_u32": lambda a, b, c: min(a, b, c),
    "v_med3_i32": lambda a, b, c: middle(s(a), s(b), s(c)),
    "v_med3_u32": lambda a, b, c: middle(a, b, c),
    "v_bfe_u32": lambda a, b, c: field(a, b & 31, c & 31),
    "v_bfe_i32": lambda a, b, c: s(field(s(a), b & 31, c & 31), c & 31) if c & 31 else 0,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_perm_b32": perm,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M32) << (c & 31),
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
}
# the low halves of the operands; the result's high half is 0
HALVES = {
    "v_lshlrev_b16": lambda a, b: b << (a & 15),
    "v_lshrrev_b16": lambda a, b: b >> (a & 15),
    "v_ashrrev_i16": lambda a, b: s(b, 16) >> (a & 15),
    "v_add_u16": lambda a, b: a + b,
    "v_sub_u16": lambda a, b: a - b,
    "v_subrev_u16": lambda a, b: b - a,
    "v_mul_lo_u16": lambda a, b: a * b,
    "v_max_u16": max,
    "v_min_u16": min,
    "v_max_i16": lambda a, b: max(s(a, 16), s(b, 16)),
    "v_min_i16": lambda a, b: min(s(a, 16), s(b, 16)),
}
# 64-bit ones: (operand text, function)
DOUBLES = {
    "v_lshlrev_b64": ("v10, v[2:3]", lambda a, b, c: b << (a & 63)),
    "v_lshrrev_b64": ("v10, v[2:3]", lambda a, b, c: b >> (a & 63)),
    "v_ashrrev_i64": ("v10, v[2:3]", lambda a, b, c: s(b, 64) >> (a & 63)),
    "v_lshl_add_u64": ("v[2:3], v10, v[4:5]", lambda a, b, c: (b << (a & 7)) + c),
    "v_mov_b64": ("v[2:3]", lambda a, b, c: b),
}


def operands(count):
    """64 lanes: pairs of edges, then random numbers."""
    rng = np.random.default_rng(count)
    pairs = list(itertools.product(EDGES, repeat=2))
    picked = rng.choice(len(pairs), 48, replace=False)
    rows = [[pairs[i][0], pairs[i][1], EDGES[i % len(EDGES)]] for i in picked]
    rows += rng.integers(0, 1 << 32, (16, 3)).tolist()
    return np.array(rows, np.uint32).T[:count]


@pytest.mark.parametrize("opcode", sorted(WORDS))
def test_words(opcode):
    f = WORDS[opcode]
    count = f.__code__.co_argcount
    data = operands(count)
    w = Waves()
    for i, row in enumerate(data):
        w.set(f"v{i + 1}", row)
    w.do(
        f"{opcode}{'_e32' if count < 3 else ''} v0, " + ", ".join(f"v{i + 1}" for i in range(count))
    )
    want = [f(*(int(x) for x in lane)) & M32 for lane in data.T]
    assert w.v(0).tolist() == want


@pytest.mark.parametrize("opcode", sorted(HALVES))
def test_halves(opcode):
    data = operands(2)
    w = Waves().set("v1", data[0]).set("v2", data[1]).set("v0", 0xFFFFFFFF)
    w.do(f"{opcode}_e32 v0, v1, v2")
    want = [HALVES[opcode](int(a) & 0xFFFF, int(b) & 0xFFFF) & 0xFFFF for a, b in data.T]
    assert w.v(0).tolist() == want


@pytest.mark.parametrize("opcode", sorted(DOUBLES))
def test_doubles(opcode):
    text, f = DOUBLES[opcode]
    rng = np.random.default_rng(3)
    a = rng.integers(0, 128, 64).astype(np.uint32)
    b, c = rng.integers(0, 1 << 64, (2, 64), np.uint64)
    b[:4] = 0, M64, 1 << 63, 1
    w = Waves().set("v10", a).set("v2", b).set("v4", c).do(f"{opcode} v[0:1], {text}")
    assert w.v64(0).tolist() == [f(*map(int, row)) & M64 for row in zip(a, b, c, strict=True)]


def test_every_opcode_of_the_table_is_in_this_file():
    elsewhere = {"v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32", "v_mbcnt_lo_u32_b32",
                 "v_mbcnt_hi_u32_b32"}  # fmt: skip
    assert set(vector.TABLE) == set(WORDS) | set(HALVES) | set(DOUBLES) | elsewhere


def test_accumulation_registers():
    data = operands(1)[0]
    w = Waves().set("v1", data)
    w.do("v_accvgpr_write_b32 a3, v1", "v_accvgpr_mov_b32 a4, a3", "v_accvgpr_read_b32 v0, a4")
    assert w.v(3, kind="a").tolist() == w.v(0).tolist() == data.tolist()


def test_mbcnt_counts_the_lanes_below():
    mask = 0xF0F0_1234_8001_00FF
    w = Waves().set("s4", mask & M32).set("s5", mask >> 32).set("v1", 100)
    w.do("v_mbcnt_lo_u32_b32 v0, s4, v1", "v_mbcnt_hi_u32_b32 v0, s5, v0")
    assert w.v(0).tolist() == [100 + (mask & ((1 << i) - 1)).bit_count() for i in range(64)]


@pytest.mark.parametrize("table", [0x00, 0xFF, 0xF0, 0xCC, 0xAA, 0x36, 0xEC, 0x96, 0x1D, 0x80])
def test_bitop3_is_the_table(table):
    data = operands(3)
    w = Waves()
    for i, row in enumerate(data):
        w.set(f"v{i + 1}", row)
    w.do(
        f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table:#x}",
        f"v_bitop3_b16 v4, v1, v2, v3 bitop3:{table:#x}",
    )
    want = [
        from_bits(
            table >> (4 * x + 2 * y + z) & 1
            for x, y, z in zip(*map(bit_list, map(int, lane)), strict=True)
        )
        for lane in data.T
    ]
    assert w.v(0).tolist() == want
    assert w.v(4).tolist() == [x & 0xFFFF for x in want]


def test_packed_move_takes_the_chosen_words():
    w = Waves()
    for i in range(1, 5):
        w.set(f"v{i + 1}", 10 * i)
    w.do(
        "v_pk_mov_b32 v[6:7], v[2:3], v[4:5] op_sel:[1,0]",
        "v_pk_mov_b32 v[8:9], v[2:3], v[4:5] op_sel:[0,1]",
    )
    assert [w.v(i)[5] for i in (6, 7, 8, 9)] == [20, 30, 10, 40]


SELECT = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "DWORD": (0, 32),
}


@pytest.mark.parametrize(
    ("select", "signed"), [(k, False) for k in SELECT] + [(k, True) for k in SELECT if k != "DWORD"]
)
def test_sdwa_sources(select, signed):
    a, b = operands(2)
    source = "sext(v2)" if signed else "v2"
    w = Waves().set("v1", a).set("v2", b)
    w.do(
        f"v_add_u32_sdwa v0, v1, {source} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:{select}"
    )
    offset, width = SELECT[select]
    part = [field(int(x), offset, width) for x in b]
    want = [int(x) + (s(y, width) if signed else y) & M32 for x, y in zip(a, part, strict=True)]
    assert w.v(0).tolist() == want


@pytest.mark.parametrize("select", [k for k in SELECT if k != "DWORD"])
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
def test_sdwa_destination(select, unused):
    a, b = operands(2)
    w = Waves().set("v1", a).set("v2", b).set("v0", 0x13579BDF)
    w.do(
        f"v_or_b32_sdwa v0, v1, v2 dst_sel:{select} dst_unused:{unused} src0_sel:DWORD src1_sel:DWORD"
    )
    offset, width = SELECT[select]
    keep = ((1 << width) - 1) << offset
    want = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        value = field(x | y, 0, width)
        if unused == "UNUSED_SEXT":
            want.append(s(value, width) << offset & M32)
        else:
            want.append(
                value << offset | (0x13579BDF & ~keep if unused == "UNUSED_PRESERVE" else 0)
            )
    assert w.v(0).tolist() == want


def test_clamp_saturates_sums():
    a, b = operands(2)
    w = Waves().set("v1", a).set("v2", b)
    w.do(
        "v_sub_u32_e64 v0, v1, v2 clamp",
        "v_add_u32_e64 v3, v1, v2 clamp",
        "v_add_i32 v4, v1, v2 clamp",
    )
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    assert w.v(0).tolist() == [max(x - y, 0) for x, y in pairs]
    assert w.v(3).tolist() == [min(x + y, M32) for x, y in pairs]
    assert w.v(4, np.int32).tolist() == [
        min(max(s(x) + s(y), -(1 << 31)), (1 << 31) - 1) for x, y in pairs
    ]


def test_scalar_and_constant_operands():
    a = operands(1)[0]
    w = Waves().set("v1", a).set("s3", 0xDEADBEEF)
    w.do("v_add_u32_e32 v0, s3, v1", "v_add_u32_e32 v2, -16, v1")
    w.do("v_and_b32_e32 v4, 0xff00ff, v1", "v_mov_b32_e32 v5, 1.0")
    assert w.v(0).tolist() == [(int(x) + 0xDEADBEEF) & M32 for x in a]
    assert w.v(2).tolist() == [(int(x) - 16) & M32 for x in a]
    assert w.v(4).tolist() == [int(x) & 0xFF00FF for x in a]
    assert w.v(5).tolist() == [0x3F800000] * 64


def test_lanes_that_exec_switches_off_keep_their_value():
    a = operands(1)[0]
    mask = 0x8000_0001_F0F0_00FF
    w = Waves().set("v1", a).set("v0", 7).exec(mask).do("v_not_b32_e32 v0, v1")
    assert w.v(0).tolist() == [~int(x) & M32 if mask >> i & 1 else 7 for i, x in enumerate(a)]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("v_add_u32_e32 v0, v1, v2 mul:2", "multiplier"),
        ("v_add_u32_e64 v0, v1, -v2", "neg or abs"),
        ("v_add_u32_e64 v0, v1, v2 op_sel:[0,1,0]", "op_sel"),
        ("v_add_u32_e32 v0, v1, v2 wobble:3", "wobble:3"),
        ("v_wobble_b32 v0, v1", "v_wobble_b32"),
        ("v_add_u32_e32 v[0:1], v1, v2", "2 registers"),
        ("v_mov_b64_e32 v[0:1], 0x80000000", "literal"),
        (
            "v_add_u32_sdwa v0, v1, v2 dst_sel:BYTE_4 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
            "BYTE_4",
        ),
    ],
)
def test_what_is_not_modelled_is_named(line, named):
    with pytest.raises(AssemblyError, match=named):
        Waves().set("v1", 1).set("v2", 2).do(line)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
