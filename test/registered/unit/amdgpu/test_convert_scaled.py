"""FP8, BF8 and FP4: the formats' tables, and conversions to and from them with and without scales."""

import itertools
import math
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import convert_scaled, formats
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.testing.amdgpu_floats import conversion_numbers as data
from sglang_aiter_moe.testing.amdgpu_wave import Waves, bf16
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    sign, e, m = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if e == 15 and m == 7:
        return math.nan
    return sign * (2.0**-6 * m / 8 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8))


def e5m2(code: int) -> float:
    sign, e, m = (-1) ** (code >> 7), code >> 2 & 31, code & 3
    if e == 31:
        return sign * math.inf if m == 0 else math.nan
    return sign * (2.0**-14 * m / 4 if e == 0 else 2.0 ** (e - 15) * (1 + m / 4))


def fnuz(code: int, bits: int, bias: int) -> float:
    if code == 0x80:
        return math.nan
    mantissas = 7 - bits
    sign, e, m = (
        (-1) ** (code >> 7),
        code >> mantissas & ((1 << bits) - 1),
        code & ((1 << mantissas) - 1),
    )
    fraction = m / (1 << mantissas)
    return sign * (2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction))


FORMATS = {
    formats.E4M3: [e4m3(c) for c in range(256)],
    formats.E5M2: [e5m2(c) for c in range(256)],
    formats.E4M3_FNUZ: [fnuz(c, 4, 8) for c in range(256)],
    formats.E5M2_FNUZ: [fnuz(c, 5, 16) for c in range(256)],
    formats.E2M1: E2M1 + [-x for x in E2M1],
}


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_small_formats(name):
    np.testing.assert_array_equal(formats.values(name), FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_to_the_small_formats(name):
    values = FORMATS[name]
    half = len(values) // 2
    finite = [(v, c) for c, v in enumerate(values[:half]) if math.isfinite(v)]
    grid = sorted(v for v, _ in finite)
    x = [*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid)), grid[-1] * 1.5, 1e-30]
    x += [np.nextafter(v, 0) for v in x[1:]] + [np.nextafter(v, 1e9) for v in x]
    for v in x:
        best = min(abs(v - g) for g in grid)
        nearest = [c for g, c in finite if abs(v - g) == best]
        code = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        assert formats.encode(np.array([v]), name)[0] == code, v
        negative = code + half if code or not name.endswith("fnuz") else 0
        assert formats.encode(np.array([-v]), name)[0] == negative, -v


CODES = np.random.default_rng(3).integers(0, 1 << 32, 64, np.uint64).astype(np.uint32)
CODES[:4] = 0x80FF7F00, 0x7C7DFCFE, 0x01081020, 0x88888888
SMALL = {
    "gfx950": {"fp8": formats.E4M3, "bf8": formats.E5M2, "fp4": formats.E2M1},
    "gfx942": {"fp8": formats.E4M3_FNUZ, "bf8": formats.E5M2_FNUZ},
}


def scale_bits():
    """float32 bits whose exponent fields are 100 to 163; sign and mantissa do not count."""
    return ((np.arange(64, dtype=np.uint32) + 100) << 23) | (
        np.arange(64, dtype=np.uint32) * 0x80012345 & 0x807FFFFF
    )


def at(word, shift, bits):
    return int(word) >> shift & ((1 << bits) - 1)


@pytest.mark.parametrize("target", SMALL)
@pytest.mark.parametrize("small", ["fp8", "bf8"])
def test_unpacking_eight_bits(target, small):
    table = FORMATS[SMALL[target][small]]
    w = Waves(target=target).set("v1", CODES)
    w.do(f"v_cvt_f32_{small}_e32 v0, v1")
    np.testing.assert_array_equal(
        w.v(0, np.float32), np.float32([table[at(c, 0, 8)] for c in CODES])
    )
    for i in range(4):
        w.do(f"v_cvt_f32_{small}_sdwa v0, v1 src0_sel:BYTE_{i}")
        np.testing.assert_array_equal(
            w.v(0, np.float32), np.float32([table[at(c, 8 * i, 8)] for c in CODES])
        )
    for line, shift in (("_e32 v[4:5], v1", 0), ("_sdwa v[4:5], v1 src0_sel:WORD_1", 16)):
        w.do(f"v_cvt_pk_f32_{small}{line}")
        for k in (0, 1):
            want = np.float32([table[at(c, shift + 8 * k, 8)] for c in CODES])
            np.testing.assert_array_equal(w.v(4 + k, np.float32), want)


def nearest_code(values, half, x):
    """The code of the nearest value; overflow: infinity if there is one, else NaN, else the largest."""
    if math.isnan(x):
        return None
    finite = [(abs(v), c) for c, v in enumerate(values[:half]) if math.isfinite(v)]
    top, below = sorted((v for v, _ in finite), reverse=True)[:2]
    negative = math.copysign(1, x) < 0
    if abs(x) >= top + (top - below) / 2 and half == 128:
        infinite = [c for c, v in enumerate(values[:half]) if math.isinf(v)]
        return infinite[0] + half * negative if infinite else None
    magnitude = min(abs(x), top)
    best = min(abs(v - magnitude) for v, _ in finite)
    near = [c for v, c in finite if abs(v - magnitude) == best]
    code = min(near, key=lambda c: c % 2)
    return code + half * negative if code or values[half] == 0 else code


def check_codes(got, values, numbers):
    half = len(values) // 2
    for code, x in zip(got, numbers, strict=True):
        want = nearest_code(values, half, x)
        if want is None and half == 128:
            assert math.isnan(values[code]), x
        elif want is not None:
            assert code == want, (x, code, want)


@pytest.mark.parametrize("target", SMALL)
@pytest.mark.parametrize("small", ["fp8", "bf8"])
def test_packing_eight_bits(target, small):
    x, y = data(), data()[::-1].copy()
    x[:6] = 448, 464, 463.9, 240, 248, 57344
    w = Waves(target=target).set("v1", x).set("v2", y).set("v0", 0x12345678)
    w.do(f"v_cvt_pk_{small}_f32 v0, v1, v2 op_sel:[0,0,1]")
    assert {int(c) & 0xFFFF for c in w.v(0)} == {0x5678}
    values = FORMATS[SMALL[target][small]]
    check_codes([at(c, 16, 8) for c in w.v(0)], values, x.tolist())
    check_codes([at(c, 24, 8) for c in w.v(0)], values, y.tolist())
    w.do(f"v_cvt_pk_{small}_f32 v3, v1, v2")  # v3 was never written: its other half is not read
    check_codes([at(c, 0, 8) for c in w.v(3)], values, x.tolist())


def widened(word, half, wide):
    raw = np.uint16(at(word, 16 * half, 16))
    return (
        float(raw.view(np.float16))
        if wide == "f16"
        else float(np.uint32(int(raw) << 16).view(np.float32))
    )


@pytest.mark.parametrize("wide", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("small", ["fp4", "fp8", "bf8"])
def test_unpacking_with_a_scale(wide, small):
    table, bits = FORMATS[SMALL["gfx950"][small]], 4 if small == "fp4" else 8
    choices = (
        {(a, b): a * 8 + b * 16 for a in (0, 1) for b in (0, 1)}
        if small == "fp4"
        else {(0, 0): 0, (1, 0): 16}
    )
    scales = [2.0 ** (e - 27) for e in range(64)]
    for (a, b), shift in choices.items():
        w = Waves().set("v1", CODES).set("v2", scale_bits())
        w.do(
            f"v_cvt_scalef32_pk_{wide}_{small} {'v[4:5]' if wide == 'f32' else 'v4'}, v1, v2 op_sel:[{a},{b},0]"
        )
        for k in (0, 1):
            exact = [
                table[at(c, shift + bits * k, bits)] * s for c, s in zip(CODES, scales, strict=True)
            ]
            if wide == "f32":
                got = w.v(4 + k, np.float32)
                want = np.float32(exact)
            else:
                got = [widened(c, k, wide) for c in w.v(4)]
                with np.errstate(over="ignore"):
                    want = (
                        np.float16(exact) if wide == "f16" else np.float32(exact)
                    )  # 8 bits of mantissa hold them
            np.testing.assert_array_equal(np.float32(got), np.float32(want))


@pytest.mark.parametrize("small", ["fp8", "bf8"])
def test_unpacking_one_with_a_scale(small):
    table = FORMATS[SMALL["gfx950"][small]]
    w = Waves().set("v1", CODES).set("v2", scale_bits())
    for i in range(4):
        w.do(f"v_cvt_scalef32_f32_{small} v0, v1, v2 op_sel:[{i & 1},{i >> 1},0]")
        want = [table[at(c, 8 * i, 8)] * 2.0 ** (e - 27) for e, c in enumerate(CODES)]
        np.testing.assert_array_equal(w.v(0, np.float32), np.float32(want))


@pytest.mark.parametrize("wide", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("small", ["fp4", "fp8", "bf8"])
def test_packing_with_a_scale(wide, small):
    values, bits = FORMATS[SMALL["gfx950"][small]], 4 if small == "fp4" else 8
    scales = np.array([2.0 ** (e - 27) for e in range(64)])
    numbers = np.random.default_rng(8).choice(
        [*values[:7], 0.25, -1.25, 2.5, 3.4, 5.0, 0.8, -7.0], (2, 64)
    )
    numbers = np.nan_to_num(numbers) * np.where(scales > 2.0**15, 1.0, scales)
    if wide == "f32":
        raw = numbers.astype(np.float32)
        w, sources = Waves().set("v1", raw[0]).set("v2", raw[1]), "v1, v2"
        numbers = raw.astype(np.float64)
    else:
        halves = np.array([[bf16(float(np.float32(x))) for x in row] for row in numbers], np.uint32)
        if wide == "f16":
            halves = (
                np.clip(numbers, -65504, 65504).astype(np.float16).view(np.uint16).astype(np.uint32)
            )
        words = halves[0] | halves[1] << 16
        w, sources = Waves().set("v1", words), "v1"
        numbers = np.array([[widened(c, k, wide) for c in words] for k in (0, 1)])
    w.set("v3", scale_bits())
    if small == "fp4":
        selects = {f"0,0,{a},{b}": 8 * a + 16 * b for a in (0, 1) for b in (0, 1)}
    else:
        selects = {"0,0,0,0": 0, "0,0,0,1": 16} if wide == "f32" else {"0,0,0": 0, "0,0,1": 16}
    for select, shift in selects.items():
        w.set("v0", 0x13579BDF).do(
            f"v_cvt_scalef32_pk_{small}_{wide} v0, {sources}, v3 op_sel:[{select}]"
        )
        for k in (0, 1):
            got = [at(c, shift + bits * k, bits) for c in w.v(0)]
            check_codes(got, values, (numbers[k] / scales).tolist())
        keep = ~(((1 << 2 * bits) - 1) << shift) & 0xFFFFFFFF
        assert {int(c) & keep for c in w.v(0)} == {0x13579BDF & keep}


def test_eight_bits_need_a_target():
    for line in ("v_cvt_f32_fp8_e32 v0, v1", "v_cvt_scalef32_pk_f32_fp4 v[2:3], v1, v1"):
        with pytest.raises(AssemblyError, match="not modelled"):
            Waves(target="").set("v1", 0).do(line)
    with pytest.raises(AssemblyError, match="fp4 on gfx942"):
        Waves(target="gfx942").set("v1", 0).do("v_cvt_scalef32_pk_f32_fp4 v[2:3], v1, v1")


def test_every_opcode_of_the_table_is_in_this_file():
    made = {f"v_cvt_{p}f32_{s}" for p in ("", "pk_", "scalef32_") for s in ("fp8", "bf8")}
    made |= {f"v_cvt_pk_{s}_f32" for s in ("fp8", "bf8")}
    for wide in ("f32", "bf16", "f16"):
        for small in ("fp4", "fp8", "bf8"):
            made |= {f"v_cvt_scalef32_pk_{wide}_{small}", f"v_cvt_scalef32_pk_{small}_{wide}"}
    assert set(convert_scaled.TABLE) == made


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
