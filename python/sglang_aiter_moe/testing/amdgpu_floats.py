"""Arithmetic of binary floats for the AMD interpreter's tests: exact fractions, rounded to nearest even."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from sglang_aiter_moe.testing.amdgpu_wave import bits

INF, NAN = math.inf, math.nan
TINY, SMALLEST, LARGEST = 2.0**-126, 2.0**-149, float(np.finfo(np.float32).max)
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.0**-24,
    1 + 2.0**-23,
    3.0,
    TINY,
    -TINY * 0.75,
    SMALLEST,
    LARGEST,
    -LARGEST,
    INF,
    -INF,
    NAN,
    0.1,
    1e-40,
    6e37,
    2.0**24 + 2,
    -7.25,
]


def rounded(x: Fraction, mantissa=23, lowest=-126, highest=127) -> float:
    """The nearest float of a binary format, ties to even; subnormal numbers included."""
    if x == 0:
        return 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    e = max(x.numerator.bit_length() - x.denominator.bit_length() - 1, lowest)
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    while e > lowest and Fraction(2) ** e > x:
        e -= 1
    step = Fraction(2) ** (e - mantissa)
    n = x / step
    whole = n.numerator // n.denominator
    rest = n - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    value = whole * step
    return sign * (INF if value >= Fraction(2) ** (highest + 1) else float(value))


def fma(a, b, c) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        if (
            any(map(math.isnan, (a, b, c)))
            or (math.isinf(a) and b == 0)
            or (math.isinf(b) and a == 0)
        ):
            return NAN
        product = a * b if math.isinf(a) or math.isinf(b) else 0.0
        return product + c if not (math.isinf(c) and not math.isinf(product)) else c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product = (
            math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b))
            if a == 0 or b == 0
            else None
        )
        if product is not None and c == 0:
            return product + c
        return 0.0
    return math.copysign(rounded(exact), exact)


def larger(a, b):
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if a == b == 0:
        return 0.0 if math.copysign(1, a) > 0 or math.copysign(1, b) > 0 else -0.0
    return max(a, b)


def smaller(a, b):
    return -larger(-a, -b)


def middle(a, b, c):
    if any(map(math.isnan, (a, b, c))):
        return smaller(smaller(a, b), c)
    return sorted((a, b, c))[1]


def lanes(count, seed=0):
    """[count][64] float32: edges against edges, and random bits."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(np.array(EDGES, np.float32), (count, 40))
    noise = rng.integers(0, 1 << 32, (count, 12), np.uint32).view(np.float32)
    near = (rng.standard_normal((count, 12)) * 4).astype(np.float32)
    return np.concatenate([rows, noise, near], 1)


def same(got, want):
    """Equal by bits; any NaN for NaN."""
    for i, (g, w) in enumerate(zip(np.asarray(got, np.float32), want, strict=True)):
        if math.isnan(w):
            assert math.isnan(g), (i, g, w)
        else:
            assert bits(float(g)) == bits(w), (i, g, w)


def product(a, b):
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    return math.copysign(
        rounded(Fraction(a) * Fraction(b)), math.copysign(1, a) * math.copysign(1, b)
    )


def near(exact_value: float) -> float:
    return float(np.float32(exact_value))


def quotient(a, b):
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        with np.errstate(all="ignore"):
            return float(np.float64(a) / np.float64(b))
    exact_quotient = Fraction(a) / Fraction(b)
    return math.copysign(rounded(exact_quotient), exact_quotient)


CONVERSIONS = [
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


def conversion_numbers() -> np.ndarray:
    """64 float32: what conversions have to get right, and random numbers."""
    rng = np.random.default_rng(0)
    return np.concatenate([CONVERSIONS, rng.standard_normal(64 - len(CONVERSIONS)) * 50]).astype(
        np.float32
    )
