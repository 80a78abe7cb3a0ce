"""Conversions, against the formats' definitions in Python numbers."""

import itertools
import math
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import formats
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

VALUES = [
    0.0,
    -0.0,
    0.4,
    -0.5,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.75,
    1e9,
    -1e9,
    2.0**31,
    -(2.0**31),
    2.0**32,
    1e20,
    -1e20,
    math.inf,
    -math.inf,
    math.nan,
    65504.0,
    65520.0,
    1e-8,
    -1e-8,
    2.0**-24,
    2.0**-25,
    3 * 2.0**-26,
    100.0,
    255.5,
    32767.5,
    -32768.7,
    1 + 2.0**-8,
    1 + 3 * 2.0**-8,
    1e-40,
]


def data():
    rng = np.random.default_rng(0)
    return np.concatenate([VALUES, rng.standard_normal(64 - len(VALUES)) * 50]).astype(np.float32)


def truncated(low, high):
    def f(x):
        if math.isnan(x):
            return 0
        return int(max(low, min(high, math.trunc(x) if math.isfinite(x) else x)))

    return f


to_i32, to_u32 = truncated(-(1 << 31), (1 << 31) - 1), truncated(0, (1 << 32) - 1)


@pytest.mark.parametrize(
    ("opcode", "f"),
    [
        ("v_cvt_i32_f32", to_i32),
        ("v_cvt_u32_f32", to_u32),
        ("v_cvt_flr_i32_f32", lambda x: to_i32(math.floor(x) if math.isfinite(x) else x)),
        ("v_cvt_rpi_i32_f32", lambda x: to_i32(math.floor(x + 0.5) if math.isfinite(x) else x)),
    ],
)
def test_float_to_integer(opcode, f):
    w = Waves().set("v1", data()).do(f"{opcode}_e32 v0, v1")
    assert w.v(0).tolist() == [f(float(x)) & 0xFFFFFFFF for x in data()]


def test_double_to_integer_and_float():
    x = data().astype(np.float64) * (1 + 2.0**-40)
    w = (
        Waves()
        .set("v2", x)
        .do("v_cvt_i32_f64 v0, v[2:3]", "v_cvt_u32_f64 v1, v[2:3]", "v_cvt_f32_f64 v4, v[2:3]")
    )
    assert w.v(0).tolist() == [to_i32(v) & 0xFFFFFFFF for v in x.tolist()]
    assert w.v(1).tolist() == [to_u32(v) for v in x.tolist()]
    np.testing.assert_array_equal(w.v(4, np.float32), x.astype(np.float32))


def test_integer_to_float():
    n = np.random.default_rng(1).integers(0, 1 << 32, 64, np.uint64).astype(np.uint32)
    n[:6] = 0, 1, 0xFFFFFFFF, 0x80000000, (1 << 24) + 1, (1 << 24) + 3
    w = Waves().set("v1", n)
    w.do(
        "v_cvt_f32_i32 v0, v1",
        "v_cvt_f32_u32 v2, v1",
        "v_cvt_f64_i32 v[4:5], v1",
        "v_cvt_f64_u32 v[6:7], v1",
    )
    signed = n.view(np.int32).tolist()
    # Python's float(int) is exact here, and struct's narrowing to single rounds to nearest even.
    np.testing.assert_array_equal(
        w.v(0, np.float32), np.array([float(x) for x in signed]).astype(np.float32)
    )
    np.testing.assert_array_equal(
        w.v(2, np.float32), np.array([float(x) for x in n.tolist()]).astype(np.float32)
    )
    assert w.v64(4, np.float64).tolist() == [float(x) for x in signed]
    assert w.v64(6, np.float64).tolist() == [float(x) for x in n.tolist()]
    for i in range(4):
        w.do(f"v_cvt_f32_ubyte{i} v0, v1")
        assert w.v(0, np.float32).tolist() == [float(x >> 8 * i & 255) for x in n.tolist()]


def test_half_precision():
    x = data()
    w = (
        Waves()
        .set("v1", x)
        .do("v_cvt_f16_f32_e32 v0, v1", "v_cvt_f32_f16_e32 v2, v0", "v_cvt_f64_f32 v[4:5], v1")
    )
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    np.testing.assert_array_equal(w.v(0).astype(np.uint16).view(np.float16), half)
    np.testing.assert_array_equal(w.v(2, np.float32), half.astype(np.float32))
    np.testing.assert_array_equal(w.v64(4, np.float64), x.astype(np.float64))
    n = np.arange(-32, 32).astype(np.int16)
    w = Waves().set("v1", n.view(np.uint16).astype(np.uint32))
    w.do(
        "v_cvt_f16_i16 v0, v1",
        "v_cvt_f16_u16 v2, v1",
        "v_cvt_i16_f16 v3, v0",
        "v_cvt_u16_f16 v4, v0",
    )
    assert w.v(0).astype(np.uint16).view(np.float16).tolist() == [float(i) for i in n]
    with np.errstate(all="ignore"):
        assert w.v(2).tolist() == [int(np.float16(int(i) & 0xFFFF).view(np.uint16)) for i in n]
    assert w.v(3).astype(np.uint16).view(np.int16).tolist() == n.tolist()
    assert w.v(4).tolist() == [max(int(i), 0) for i in n]


def bf16(x: float) -> int:
    """By its definition: the nearest of the two bf16 numbers around x, the even one of a tie."""
    bits = int(np.float32(x).view(np.uint32))
    if math.isnan(x):
        return bits >> 16 | 0x40
    low, rest = bits >> 16, bits & 0xFFFF
    return low + (rest > 0x8000 or (rest == 0x8000 and low % 2))


def test_packed_bf16():
    x = data()
    w = Waves().set("v1", x).set("v2", x[::-1].copy()).do("v_cvt_pk_bf16_f32 v0, v1, v2")
    assert w.v(0).tolist() == [
        bf16(float(a)) | bf16(float(b)) << 16 for a, b in zip(x, x[::-1], strict=True)
    ]
    w.do("v_cvt_f32_bf16_e32 v3, v0")
    assert w.v(3).tolist() == [bf16(float(a)) << 16 for a in x]


def test_packed_half_precision():
    x = data()
    w = (
        Waves()
        .set("v1", x)
        .set("v2", -x)
        .do("v_cvt_pk_f16_f32 v0, v1, v2", "v_cvt_pkrtz_f16_f32 v3, v1, v2")
    )
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    finite = ~np.isnan(x)
    got = w.v(0)[finite]
    assert (got & 0xFFFF).tolist() == half.view(np.uint16)[finite].tolist()
    assert (got >> 16).tolist() == (-half).view(np.uint16)[finite].tolist()
    for value, word in zip(x.tolist(), w.v(3).tolist(), strict=True):
        low = float(np.array(word & 0xFFFF, np.uint16).view(np.float16))
        if math.isnan(value):
            assert math.isnan(low)
        elif math.isinf(value):
            assert low == value
        elif abs(value) > 65504:
            assert abs(low) == 65504
        else:  # the largest magnitude that is not above
            assert (
                abs(low)
                <= abs(value)
                < abs(low) + max(2.0**-24, 2.0 ** (math.frexp(value)[1] - 11))
            )


def test_packed_integers():
    n = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000] * 8, np.uint32)
    w = (
        Waves()
        .set("v1", n)
        .set("v2", n[::-1].copy())
        .do("v_cvt_pk_u16_u32 v0, v1, v2", "v_cvt_pk_i16_i32 v3, v1, v2")
    )
    signed = lambda x: min(max(x - (x >> 31 << 32), -32768), 32767) & 0xFFFF  # noqa: E731
    pairs = list(zip(n.tolist(), n[::-1].tolist(), strict=True))
    assert w.v(0).tolist() == [min(a, 0xFFFF) | min(b, 0xFFFF) << 16 for a, b in pairs]
    assert w.v(3).tolist() == [signed(a) | signed(b) << 16 for a, b in pairs]


def test_normalised():
    x = np.array([0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, math.nan] * 8, np.float32)
    w = (
        Waves()
        .set("v1", x)
        .do("v_cvt_pknorm_i16_f32 v0, v1, v1", "v_cvt_pknorm_u16_f32 v2, v1, v1")
    )
    # 16383.5 and 32767.5 are ties: to even.
    signed = [0, 32767, -32767, 16384, -16384, 32767, -32767, 0] * 8
    unsigned = [0, 65535, 0, 32768, 0, 65535, 0, 0] * 8
    assert (w.v(0) & 0xFFFF).tolist() == [v & 0xFFFF for v in signed]
    assert (w.v(0) >> 16).tolist() == [v & 0xFFFF for v in signed]
    assert (w.v(2) & 0xFFFF).tolist() == unsigned


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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
