"""The division sequences that LLVM prints divide; fused multiply-add of doubles rounds once."""

import math
import sys
from fractions import Fraction

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.testing.amdgpu_floats import EDGES, INF, near, quotient, rounded, same
from sglang_aiter_moe.testing.amdgpu_wave import Waves
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


def divide(numerators, denominators):
    """LLVM's sequence for a float32 division that rounds correctly."""
    w = (
        Waves()
        .set("v1", np.asarray(numerators, np.float32))
        .set("v2", np.asarray(denominators, np.float32))
    )
    w.do(
        "v_div_scale_f32 v3, s[0:1], v2, v2, v1", "v_div_scale_f32 v4, vcc, v1, v2, v1", "v_rcp_f32_e32 v5, v3",
        "v_fma_f32 v6, -v3, v5, 1.0", "v_fmac_f32_e32 v5, v6, v5", "v_mul_f32_e32 v6, v4, v5",
        "v_fma_f32 v7, -v3, v6, v4", "v_fmac_f32_e32 v6, v7, v5", "v_fma_f32 v3, -v3, v6, v4",
        "v_div_fmas_f32 v3, v3, v5, v6", "v_div_fixup_f32 v0, v3, v2, v1",
    )  # fmt: skip
    return w.v(0, np.float32)


def test_the_division_sequence_divides():
    """Everywhere: also where an operand or the quotient is subnormal or close to the largest number."""
    special = [near(x) for x in EDGES if not math.isnan(x)]
    pairs = [(a, b) for a in special for b in special]
    rng = np.random.default_rng(4)
    for _ in range(64 * 12):
        mantissas = 1 + rng.integers(0, 1 << 23, 2) * 2.0**-23
        exponents = rng.integers(-126, 128, 2)
        pairs.append(
            tuple(float(np.float32(m * 2.0**e)) for m, e in zip(mantissas, exponents, strict=True))
        )
    pairs = pairs[: len(pairs) // 64 * 64]
    for start in range(0, len(pairs), 64):
        a, b = zip(*pairs[start : start + 64], strict=True)
        same(divide(a, b), [quotient(*p) for p in pairs[start : start + 64]])


def test_division_of_ordinary_numbers_needs_no_scaling():
    w = Waves().set("v1", np.full(64, 3.0, np.float32)).set("v2", np.full(64, 7.0, np.float32))
    w.do("v_div_scale_f32 v3, vcc, v1, v2, v1")
    assert (w.v(3, np.float32) == 3.0).all() and w.s64(106) == 0
    w.set("v1", np.full(64, 3 * 2.0**90, np.float32)).set(
        "v2", np.full(64, 7 * 2.0**-60, np.float32)
    )
    w.do("v_div_scale_f32 v3, vcc, v2, v2, v1")
    assert (w.v(3, np.float32) == 7 * 2.0**4).all() and w.s64(106) == (1 << 64) - 1


def exact64(x: Fraction) -> float:
    return rounded(x, 52, -1022, 1023)


def test_fma_of_doubles():
    rng = np.random.default_rng(6)
    cases = [
        (1 + 2.0**-27, 1 + 2.0**-26, 2.0**-120),
        (1 + 2.0**-27, 1 + 2.0**-26, -(2.0**-120)),
        (2.0**-540, 2.0**-535, 0.0),
        (3 * 2.0**-540, 2.0**-535, 2.0**-1074),
        (2.0**600, 2.0**400, -1.0),
        (2.0**1000, 2.0**23, -(2.0**1023)),
        (1e300, 1e-300, -1.0),
        (2.0**-700, 2.0**-700, 1.0),
        (2.0**-700, 2.0**-700, 2.0**-1074),
        (0.0, 5.0, -0.0),
        (1.5, 2.0**-53, 1.0),
        (1.0, 2.0**-53, 1.0),
        (1.0, 2.0**-53, 1 + 2.0**-52),
        (2.0**512, 2.0**512, 1.0),
        (3.0, -(2.0**-1074), 2.0**-1022),
        (2.0**-1074, 2.0**-1074, 2.0**-1074),
    ]
    while len(cases) < 62:
        a, b = (1 + rng.integers(0, 1 << 27, 2) * 2.0**-27).tolist()
        cases.append(
            (
                a * 2.0 ** rng.integers(-40, 40),
                b,
                float(rng.choice([-1, 1])) * 2.0 ** rng.integers(-140, 60),
            )
        )
    cases += [(INF, 1.0, 2.0), (INF, 0.0, 1.0)]
    a, b, c = (np.array(x) for x in zip(*cases, strict=True))
    w = Waves().set("v2", a).set("v4", b).set("v6", c).set("v8", c)
    w.do("v_fma_f64 v[0:1], v[2:3], -v[4:5], v[6:7]", "v_fmac_f64_e32 v[8:9], v[2:3], v[4:5]")
    for i, (x, y, z) in enumerate(cases[:62]):
        for got, product in (
            (w.v64(0, np.float64)[i], -Fraction(x) * Fraction(y)),
            (w.v64(8, np.float64)[i], Fraction(x) * Fraction(y)),
        ):
            assert got == exact64(product + Fraction(z)), (x, y, z)
    assert w.v64(8, np.float64)[62] == INF and np.isnan(w.v64(8, np.float64)[63])


def test_the_division_sequence_of_doubles_divides():
    """Two Newton steps after v_rcp_f64, as LLVM prints them."""
    rng = np.random.default_rng(7)
    special = [
        0.0,
        -0.0,
        1.0,
        -3.0,
        0.1,
        1e-310,
        2.0**-1074,
        2.0**-1022,
        1.7e308,
        1e290,
        1e-290,
        INF,
        -INF,
        7.0,
    ]
    pairs = [(a, b) for a in special for b in special]
    for _ in range(64 * 8):
        m, e = 1 + rng.integers(0, 1 << 52, 2) * 2.0**-52, rng.integers(-1022, 1022, 2)
        pairs.append((float(m[0] * 2.0 ** e[0]), float(m[1] * 2.0 ** e[1])))
    pairs = [p for p in pairs if not (abs(p[1]) >= 2.0**1022 and math.isfinite(p[1]))]
    pairs = pairs[: len(pairs) // 64 * 64]
    for start in range(0, len(pairs), 64):
        block = pairs[start : start + 64]
        a, b = (np.array(x) for x in zip(*block, strict=True))
        w = Waves().set("v2", a).set("v4", b)
        w.do(
            "v_div_scale_f64 v[6:7], s[0:1], v[4:5], v[4:5], v[2:3]", "v_rcp_f64_e32 v[8:9], v[6:7]",
            "v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0", "v_fmac_f64_e32 v[8:9], v[8:9], v[10:11]",
            "v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0", "v_fmac_f64_e32 v[8:9], v[8:9], v[10:11]",
            "v_div_scale_f64 v[10:11], vcc, v[2:3], v[4:5], v[2:3]", "v_mul_f64 v[12:13], v[10:11], v[8:9]",
            "v_fma_f64 v[6:7], -v[6:7], v[12:13], v[10:11]", "v_div_fmas_f64 v[6:7], v[6:7], v[8:9], v[12:13]",
            "v_div_fixup_f64 v[0:1], v[6:7], v[4:5], v[2:3]",
        )  # fmt: skip
        for (x, y), got in zip(block, w.v64(0, np.float64).tolist(), strict=True):
            if math.isfinite(x) and math.isfinite(y) and x != 0 and y != 0:
                q = Fraction(x) / Fraction(y)
                want = math.copysign(exact64(q), -1 if q < 0 else 1)
                # A subnormal quotient is rounded twice: to 53 bits, then scaled down.
                exactly = abs(want) >= 2.0**-1022
                assert got == want if exactly else abs(got - want) <= 2.0**-1074, (x, y)
            else:
                with np.errstate(all="ignore"):
                    want = float(np.float64(x) / np.float64(y))
                assert (
                    got == want and math.copysign(1, got) == math.copysign(1, want)
                ) or np.isnan([got, want]).all()


def test_a_double_division_that_the_manual_leaves_open_is_reported():
    w = Waves().set("v2", np.full(64, 2.0**-30)).set("v4", np.full(64, 1.5 * 2.0**1022))
    with pytest.raises(Fault, match="both subnormal"):
        w.do("v_div_scale_f64 v[6:7], s[0:1], v[4:5], v[4:5], v[2:3]")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
