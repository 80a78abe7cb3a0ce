"""Microscaling arithmetic in exact rationals, one number at a time: what the vectorised numerics are tested against.

It enumerates the values of each format from its definition and searches them; it shares nothing with ``numerics``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> list[Fraction]:
    """Magnitudes of codes 0..codes-1 of a small floating-point format with subnormals."""
    values = []
    for code in range(codes):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = Fraction(mantissa, 1 << mantissa_bits)
        assert exponent < 1 << exponent_bits
        if exponent == 0:
            values.append(fraction * Fraction(2) ** (1 - bias))
        else:
            values.append((1 + fraction) * Fraction(2) ** (exponent - bias))
    return values


E2M1 = _magnitudes(2, 1, 1, 8)
E4M3FN = _magnitudes(4, 3, 7, 127)  # code 127 is NaN
E4M3FNUZ = _magnitudes(4, 3, 8, 128)


def nearest(x: Fraction, magnitudes: Sequence[Fraction]) -> int:
    """Code of the magnitude nearest to ``|x|``, the even code on a tie, the largest if ``|x|`` is beyond it."""
    x = abs(x)
    above = bisect_left(magnitudes, x)
    candidates = range(max(above - 1, 0), min(above + 1, len(magnitudes)))
    return min(candidates, key=lambda code: (abs(magnitudes[code] - x), code % 2))


def floor_log2(x: Fraction) -> int:
    """The largest k with ``2**k <= x``."""
    k = x.numerator.bit_length() - x.denominator.bit_length()
    return k if Fraction(2) ** k <= x else k - 1


def ceil_log2(x: Fraction) -> int:
    """The smallest k with ``2**k >= x``."""
    k = floor_log2(x)
    return k if Fraction(2) ** k == x else k + 1


def scale_exponent(amax: Fraction, magnitudes: Sequence[Fraction], rule: str) -> int:
    """Exponent of the block scale for a positive ``amax``, unbounded.

    ``rule``: "down", "up", "even", "ceil" or "epilogue".
    """
    largest = magnitudes[-1]
    emax = floor_log2(largest)
    exponent = floor_log2(amax)
    mantissa = amax / Fraction(2) ** exponent
    if rule == "up":
        return ceil_log2(amax / largest)
    if rule == "ceil":
        return ceil_log2(amax / Fraction(2) ** emax)
    if rule == "even":
        # A mantissa of the format with half a unit of its last place added reaches 2.
        unit = Fraction(1, 2) if len(magnitudes) == 8 else Fraction(1, 8)
        return exponent - emax + (mantissa + unit / 2 >= 2)
    if rule == "epilogue":
        return exponent - emax + (mantissa >= Fraction(3, 2))
    assert rule == "down"
    return exponent - emax


def quantize_block(
    values: Sequence[float], magnitudes: Sequence[Fraction], rule: str
) -> tuple[list[int], int]:
    """Magnitude codes and E8M0 byte of one block of finite values, not all zero, of unremarkable size."""
    exact = [Fraction(v) for v in values]
    exponent = scale_exponent(max(abs(v) for v in exact), magnitudes, rule)
    assert -126 <= exponent <= 127, "outside of this reference's range"
    return [nearest(v / Fraction(2) ** exponent, magnitudes) for v in exact], exponent + 127


def decode_e2m1(code: int) -> float:
    """Value of a code 0..15."""
    return (-1.0 if code & 8 else 1.0) * float(E2M1[code & 7])


def decode_mxfp4_row(packed: Sequence[int], scales: Sequence[int]) -> list[float]:
    """Values of a row of bytes, low nibble first, one scale byte (0..254) for each 32."""
    codes = [nibble for byte in packed for nibble in (byte & 0xF, byte >> 4)]
    return [decode_e2m1(code) * 2.0 ** (scales[i // 32] - 127) for i, code in enumerate(codes)]
