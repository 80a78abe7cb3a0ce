"""MFMA: every element's place and format is computed here lane by lane, in Python numbers."""

import math
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import matrix
from sglang_aiter_moe.amdgpu.errors import AssemblyError, Fault
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-x for x in E2M1]


def fp8(exponents, mantissas, bias):
    """Code -> value, specials aside: the tests draw finite codes."""

    def value(code):
        sign = -1.0 if code >> 7 else 1.0
        e, m = code >> mantissas & ((1 << exponents) - 1), code & ((1 << mantissas) - 1)
        fraction = m / (1 << mantissas)
        return sign * (
            2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction)
        )

    return value


EIGHT = {
    ("gfx950", "fp8"): fp8(4, 3, 7), ("gfx950", "bf8"): fp8(5, 2, 15),
    ("gfx942", "fp8"): fp8(4, 3, 8), ("gfx942", "bf8"): fp8(5, 2, 16),
}  # fmt: skip


def drawn(rng, kind, count, target="gfx950"):
    """(codes as integers, their values) of ``count`` random numbers of a format."""
    if kind == "fp4":
        codes = rng.integers(0, 16, count)
        return codes, [E2M1[c] for c in codes]
    if kind in ("fp8", "bf8"):
        limit = 0x7B if kind == "bf8" else 0x7E
        codes = rng.integers(0, limit, count) | rng.integers(0, 2, count) << 7
        codes[codes == 0x80] = 0
        return codes, [EIGHT[target, kind](int(c)) for c in codes]
    x = (rng.standard_normal(count) * 4).astype(np.float32)
    if kind == "bf16":
        codes = x.view(np.uint32) >> 16
        return codes, (codes << 16).astype(np.uint32).view(np.float32).astype(float).tolist()
    if kind == "f16":
        x = x.astype(np.float16)
        return x.view(np.uint16), x.astype(float).tolist()
    return x.view(np.uint32), x.astype(float).tolist()


BITS = {"fp4": 4, "fp8": 8, "bf8": 8, "bf16": 16, "f16": 16, "f32": 32}


def registers(codes_of_lane, bits):
    """[64][elements] codes to uint32 [registers][64], the first element in the lowest bits."""
    per = 32 // bits
    codes = np.asarray(codes_of_lane, np.uint64)
    words = np.zeros((codes.shape[1] // per, 64), np.uint64)
    for i in range(codes.shape[1]):
        words[i // per] |= codes[:, i] << np.uint64(bits * (i % per))
    return words.astype(np.uint32)


def contiguous(size, k_total):
    """Lane and element -> (row, k): a lane holds a run of K."""
    run = k_total * size // 64
    return lambda lane, j: (lane % size, lane // size * run + j)


def in_runs_of_sixteen(size, k_total):
    """8-bit operands of f8f6f4: two runs of 16, half of K apart."""
    return lambda lane, j: (lane % size, 16 * (lane // size) + j % 16 + k_total // 2 * (j // 16))


def operand(rng, kind, size, k_total, place, target="gfx950"):
    """(registers, values [size][K])."""
    count = k_total * size // 64
    codes, values = drawn(rng, kind, 64 * count, target)
    table = np.zeros((size, k_total))
    for lane in range(64):
        for j in range(count):
            table[place(lane, j)] = values[lane * count + j]
    return registers(np.reshape(codes, (64, count)), BITS[kind]), table


def row_and_column(size, lane, register):
    """Where D's element is (32x32: docs of V_MFMA_F32_32X32X8, four rows a group, groups 8 apart)."""
    if size == 16:
        return 4 * (lane // 16) + register, lane % 16
    return 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32


def check(w, first, size, product, c, kind="v"):
    """The result is within a float32 rounding of the exact sum; c [size][size]."""
    for register in range(size * size // 64):
        got = w.v(first + register, np.float32, kind)
        for lane in range(64):
            i, j = row_and_column(size, lane, register)
            want = math.fsum([product[i, j], c[i, j]])
            assert got[lane] == np.float32(want) or abs(got[lane] - want) <= abs(want) * 2.0**-24, (
                i,
                j,
            )


def accumulator(rng, w, first, size, kind="v"):
    c = np.zeros((size, size))
    for register in range(size * size // 64):
        values = (rng.standard_normal(64) * 10).astype(np.float32)
        w.set(f"{kind}{first + register}", values)
        for lane in range(64):
            c[row_and_column(size, lane, register)] = values[lane]
    return c


def put(w, first, words):
    for i, word in enumerate(words):
        w.set(f"v{first + i}", word)
    return f"v[{first}:{first + len(words) - 1}]" if len(words) > 1 else f"v{first}"


DENSE = [
    ("16x16x16", "bf16", "16x16x16_bf16"), ("16x16x16", "f16", "16x16x16_f16"), ("32x32x8", "bf16", "32x32x8_bf16"),
    ("32x32x8", "f16", "32x32x8_f16"), ("16x16x32", "bf16", "16x16x32_bf16"), ("16x16x32", "f16", "16x16x32_f16"),
    ("32x32x16", "bf16", "32x32x16_bf16"), ("32x32x16", "f16", "32x32x16_f16"), ("16x16x4", "f32", "16x16x4_f32"),
    ("32x32x2", "f32", "32x32x2_f32"), ("16x16x16", "f16", "16x16x16f16"), ("32x32x8", "f16", "32x32x8f16"),
    ("16x16x16", "bf16", "16x16x16bf16_1k"), ("32x32x8", "bf16", "32x32x8bf16_1k"), ("16x16x4", "f32", "16x16x4f32"),
    ("32x32x2", "f32", "32x32x2f32"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "kind", "name"), DENSE)
def test_dense(shape, kind, name):
    size, _, k_total = map(int, shape.split("x"))
    rng = np.random.default_rng(1)
    w = Waves()
    a, left = operand(rng, kind, size, k_total, contiguous(size, k_total))
    b, right = operand(rng, kind, size, k_total, contiguous(size, k_total))
    c = accumulator(rng, w, 16, size)
    last = 16 + size * size // 64 - 1
    w.do(f"v_mfma_f32_{name} v[40:{40 + last - 16}], {put(w, 0, a)}, {put(w, 8, b)}, v[16:{last}]")
    check(w, 40, size, left @ right.T, c)


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("shape", ["16x16x32", "32x32x16"])
@pytest.mark.parametrize("kinds", ["fp8_fp8", "fp8_bf8", "bf8_fp8", "bf8_bf8"])
def test_dense_eight_bits(target, shape, kinds):
    size, _, k_total = map(int, shape.split("x"))
    rng = np.random.default_rng(2)
    w = Waves(target=target)
    first, second = kinds.split("_")
    a, left = operand(rng, first, size, k_total, contiguous(size, k_total), target)
    b, right = operand(rng, second, size, k_total, contiguous(size, k_total), target)
    last = size * size // 64 - 1
    w.do(f"v_mfma_f32_{shape}_{kinds} v[40:{40 + last}], {put(w, 0, a)}, {put(w, 8, b)}, 0")
    check(w, 40, size, left @ right.T, np.zeros((size, size)))


CODE = {"fp8": 0, "bf8": 1, "fp4": 4}


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
@pytest.mark.parametrize("first", CODE)
@pytest.mark.parametrize("second", CODE)
@pytest.mark.parametrize("byte_a", [0, 3])
@pytest.mark.parametrize("byte_b", [1, 2])
def test_scaled(shape, first, second, byte_a, byte_b):
    size, _, k_total = map(int, shape.split("x"))
    rng = np.random.default_rng(3)
    w = Waves()
    parts = []
    for kind, start in ((first, 0), (second, 8)):
        place = (contiguous if kind == "fp4" else in_runs_of_sixteen)(size, k_total)
        words, values = operand(rng, kind, size, k_total, place)
        parts.append((put(w, start, words), values))
    scales = []
    for register, byte in ((32, byte_a), (33, byte_b)):
        codes = rng.integers(117, 137, (64, 4))
        w.set(f"v{register}", registers(codes, 8)[0])
        table = np.zeros((size, k_total))
        for lane in range(64):
            block = 32 * (lane // size)
            table[lane % size, block : block + 32] = 2.0 ** (int(codes[lane, byte]) - 127)
        scales.append(table)
    c = accumulator(rng, w, 16, size)
    last = size * size // 64 - 1
    select = f"op_sel:[{byte_a & 1},{byte_b & 1},0] op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0]"
    w.do(
        f"v_mfma_scale_f32_{shape}_f8f6f4 v[40:{40 + last}], {parts[0][0]}, {parts[1][0]}, v[16:{16 + last}], v32, v33 "
        f"{select} cbsz:{CODE[first]} blgp:{CODE[second]}"
    )
    check(w, 40, size, (parts[0][1] * scales[0]) @ (parts[1][1] * scales[1]).T, c)


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
def test_without_scales_and_in_accumulation_registers(shape):
    size, _, k_total = map(int, shape.split("x"))
    rng = np.random.default_rng(4)
    w = Waves()
    place = contiguous(size, k_total)
    a, left = operand(rng, "fp4", size, k_total, place)
    b, right = operand(rng, "fp4", size, k_total, place)
    c = accumulator(rng, w, 0, size, "a")
    last = size * size // 64 - 1
    w.do(
        f"v_mfma_f32_{shape}_f8f6f4 a[0:{last}], {put(w, 0, a)}, {put(w, 8, b)}, a[0:{last}] cbsz:4 blgp:4"
    )
    check(w, 0, size, left @ right.T, c, "a")


def test_a_scale_byte_that_is_not_printed_is_byte_two():
    """LLVM prints no op_sel_hi where all of its bits are set."""
    w = Waves()
    for i in range(8):
        w.set(f"v{i}", 0x22222222)  # ones
    w.set("v32", 0x7F807F7F).set("v33", 0x7F817F7F)
    w.do("v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[0:3], v[4:7], 0, v32, v33 cbsz:4 blgp:4")
    assert w.v(40, np.float32)[0] == 128 * 2 * 4


def test_nan_scales_make_their_row_nan():
    w = Waves()
    for i in range(8):
        w.set(f"v{i}", 0x22222222)
    scale = np.full(64, 127, np.uint32)
    scale[5] = 255  # row 5, block 0
    w.set("v32", scale).set("v33", 127)
    w.do(
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[0:3], v[4:7], 0, v32, v33 op_sel_hi:[0,0,0] cbsz:4 blgp:4"
    )
    for register in range(4):
        rows = 4 * (np.arange(64) // 16) + register
        assert (np.isnan(w.v(40 + register, np.float32)) == (rows == 5)).all()


def test_exec_is_ignored():
    rng = np.random.default_rng(5)
    w = Waves()
    a, left = operand(rng, "bf16", 16, 16, contiguous(16, 16))
    b, right = operand(rng, "bf16", 16, 16, contiguous(16, 16))
    names = put(w, 0, a), put(w, 8, b)
    w.exec(1).do(f"v_mfma_f32_16x16x16_bf16 v[40:43], {names[0]}, {names[1]}, 0")
    check(w, 40, 16, left @ right.T, np.zeros((16, 16)))


def test_a_lane_that_nothing_wrote_is_reported_whatever_exec_says():
    w = Waves().set("v0", 0).set("v1", 0).set("v8", 0).exec(0xFF).do("v_mov_b32_e32 v9, 0")
    with pytest.raises(Fault, match="v9 is read"):
        w.do("v_mfma_f32_16x16x16_bf16 v[40:43], v[0:1], v[8:9], 0")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("v_mfma_f32_16x16x128_f8f6f4 v[40:43], v[0:5], v[8:15], 0 cbsz:2", "operand format 2"),
        ("v_mfma_f32_16x16x128_f8f6f4 v[40:43], v[0:3], v[8:15], 0", "4 registers where 8"),
        ("v_mfma_f32_16x16x16_bf16 v[40:43], v[0:1], v[8:9], 0 cbsz:1", "cbsz"),
        ("v_mfma_f32_16x16x16_bf16 v[40:47], v[0:1], v[8:9], 0", "8 registers where 4"),
        ("v_mfma_f32_4x4x4_16b_f16 v[40:43], v[0:1], v[8:9], 0", "v_mfma_f32_4x4x4_16b_f16"),
        ("v_smfmac_f32_16x16x32_f16 v[40:43], v[0:1], v[8:11], v3", "v_smfmac"),
    ],
)
def test_what_is_not_modelled_is_named(line, named):
    with pytest.raises(AssemblyError, match=named):
        Waves().do(line)


def test_every_opcode_of_the_table_is_in_this_file():
    here = {f"v_mfma_f32_{name}" for _, _, name in DENSE}
    here |= {
        f"v_mfma_f32_{s}_{a}_{b}"
        for s in ("16x16x32", "32x32x16")
        for a in ("fp8", "bf8")
        for b in ("fp8", "bf8")
    }
    here |= {f"v_mfma{x}_f32_{s}_f8f6f4" for x in ("", "_scale") for s in ("16x16x128", "32x32x64")}
    assert set(matrix.TABLE) == here


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
