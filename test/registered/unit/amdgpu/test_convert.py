"""Conversions, against the formats' definitions in Python numbers."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import convert
from sglang_aiter_moe.testing.amdgpu_floats import conversion_numbers as data
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


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


def test_every_opcode_of_the_table_is_in_this_file():
    text = Path(__file__).read_text()
    named = {re.sub("_(e32|e64|sdwa)$", "", n) for n in re.findall(r"v_cvt_\w+", text)}
    assert {
        n for n in convert.TABLE if n not in named and not n.startswith("v_cvt_f32_ubyte")
    } == set()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
