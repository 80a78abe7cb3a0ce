"""Small float formats as tables: every code's value, and rounding to them.

Sources: OCP, "Microscaling Formats (MX) v1.0", section 5 (E2M1, E4M3, E5M2, E8M0); AMD, "CDNA3 ISA", section "Data
types": gfx942's FP8 and BF8 are the FNUZ forms (bias one higher, no negative zero, 0x80 is NaN), gfx950's are OCP's.
"""

from __future__ import annotations

import functools

import numpy as np

E2M1, E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ = "e2m1", "e4m3", "e5m2", "e4m3_fnuz", "e5m2_fnuz"
_SHAPES = {
    E2M1: (2, 1, 1),
    E4M3: (4, 3, 7),
    E5M2: (5, 2, 15),
    E4M3_FNUZ: (4, 3, 8),
    E5M2_FNUZ: (5, 2, 16),
}
"""Format -> (exponent bits, mantissa bits, bias)."""


@functools.cache
def values(name: str) -> np.ndarray:
    """float64 values of all codes, 16 for E2M1, 256 for the others."""
    exponents, mantissas, bias = _SHAPES[name]
    count = 1 << (1 + exponents + mantissas)
    out = np.empty(count)
    for code in range(count):
        sign = -1.0 if code >> (exponents + mantissas) else 1.0
        e, m = code >> mantissas & ((1 << exponents) - 1), code & ((1 << mantissas) - 1)
        fraction = m / (1 << mantissas)
        out[code] = sign * (
            2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction)
        )
    if name == E4M3:
        out[[0x7F, 0xFF]] = np.nan
    elif name == E5M2:
        out[[0x7C, 0xFC]] = np.inf, -np.inf
        out[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    elif name != E2M1:
        out[0x80] = np.nan
    return out


@functools.cache
def e2m1_pairs() -> np.ndarray:
    """complex64 [256]: the two values of a byte, low nibble first (real part)."""
    v = values(E2M1).astype(np.float32)
    byte = np.arange(256)
    return np.stack([v[byte & 15], v[byte >> 4]], 1).view(np.complex64)[:, 0]


@functools.cache
def scales() -> np.ndarray:
    """float64 values of E8M0 bytes; 255 is NaN."""
    out = np.ldexp(1.0, np.arange(256) - 127)
    out[255] = np.nan
    return out


@functools.cache
def _magnitudes(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite magnitudes in order, and the midpoints between neighbours."""
    v = values(name)[: values(name).size // 2]
    v = v[np.isfinite(v)]
    return v, (v[1:] + v[:-1]) / 2


def encode(x: np.ndarray, name: str, *, saturate: bool = True) -> np.ndarray:
    """float to codes (uint8): nearest, ties to the even code, magnitudes beyond the largest become the largest.

    With ``saturate=False`` what rounds to beyond the largest becomes infinity in E5M2 and NaN in the other 8-bit
    formats.
    NaN becomes the format's NaN; E2M1 has none and gets its largest magnitude.
    """
    x = np.asarray(x, np.float64)
    v, middle = _magnitudes(name)
    a = np.abs(x)
    code = np.searchsorted(middle, a, side="left")
    tie = (code < middle.size) & (a == middle[np.minimum(code, middle.size - 1)])
    code = code + (tie & (code % 2 == 1))
    code = np.where(np.isnan(x), v.size - 1, code)
    if name != E2M1 and not saturate:
        beyond = a >= v[-1] + (v[-1] - v[-2]) / 2
        if name == E5M2:
            code = np.where(beyond, 0x7C, code)
        else:
            x = np.where(beyond, np.copysign(np.nan, x), x)
    sign_bit = values(name).size // 2
    out = code + np.where(np.signbit(x), sign_bit, 0)
    if name.endswith("fnuz"):
        out = np.where(code == 0, 0, out)
        out = np.where(np.isnan(x), 0x80, out)
    elif name != E2M1:
        out = np.where(np.isnan(x), 0x7F + np.where(np.signbit(x), sign_bit, 0), out)
    return out.astype(np.uint8)
