"""Float arithmetic that numpy has no one function for, rounded as IEEE 754 asks.

numpy's float32 add, subtract, multiply, divide and sqrt round to nearest even and keep subnormal numbers: they are used
as they are. What is here follows AMD, "CDNA3 ISA", section VOP3 (V_FMA_F32, V_DIV_SCALE_F32, V_DIV_FMAS_F32,
V_DIV_FIXUP_F32, V_MAX_F32, V_MED3_F32, V_CMP_CLASS_F32).
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault

F32, F64, U32, I32, U64 = np.float32, np.float64, np.uint32, np.int32, np.uint64


def fma(a, b, c):
    """a * b + c with one rounding, float32.

    The product is exact in float64. Its sum with c is rounded to float64 and then to float32: that is wrong only where
    the float64 sum lies half-way between two float32 numbers, or is subnormal as one; there the sum is rounded to odd
    first (Boldo and Melquiond, 2008), after which the second rounding is right.
    """
    p = np.multiply(a, b, dtype=F64)
    r = p + c
    out = r.astype(F32)
    r = np.asarray(r)
    doubt = (r.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    doubt |= np.abs(r) < 1.2e-38
    if doubt.any():
        p, c = np.broadcast_to(p, r.shape)[doubt], np.broadcast_to(c, r.shape)[doubt].astype(F64)
        out = np.asarray(out)
        out[doubt] = to_odd(p, c).astype(F32)
    return out


def _two_sum(a, b):
    """(a + b rounded, what the rounding left out)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def to_odd(p, c):
    """p + c in float64, an inexact sum rounded to the neighbour with an odd last bit."""
    s, error = _two_sum(p, c)
    bits = np.asarray(s).view(np.int64)
    inexact = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    outward = (error > 0) == (s > 0)
    return np.where(inexact, bits + np.where(outward, 1, -1), bits).view(F64)


def _exact_product(a, b):
    """a * b as the sum of two float64 (Dekker); no overflow for numbers of about 1."""
    p = a * b
    parts = []
    for x in (a, b):
        shifted = x * F64(134217729.0)
        high = shifted - (shifted - x)
        parts += [high, x - high]
    ah, al, bh, bl = parts
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _subnormal(high, low, scale):
    """(high + low) * 2**scale, rounded once where that is below 2**-1022: to whole units of 2**-1074.

    ``low`` is at most half a unit of ``high`` and rounded to odd. Beside 2**52 units a sum has no smaller ones.
    """
    sign = np.copysign(1.0, high)
    base = np.ldexp(1.0, np.minimum(-1074 - scale, 400) + 52)
    s, error = _two_sum(base, high * sign)
    whole = (s + to_odd(error, low * sign)) - base
    return np.ldexp(np.copysign(whole, sign), scale)


def fma64(a, b, c):
    """a * b + c with one rounding, float64 (Boldo and Melquiond, 2008, on operands scaled to about 1)."""
    a, b, c = (np.ascontiguousarray(x, F64) for x in np.broadcast_arrays(a, b, c))
    plain = a * b + c
    ordinary = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)
    ma, ea = np.frexp(a)
    mb, eb = np.frexp(b)
    scale = ea + eb
    far = np.ldexp(c, -scale)
    # An addend that is far smaller than the product counts by its sign alone.
    far = np.where((np.abs(far) < 2.0**-300) & (c != 0), np.copysign(2.0**-300, c), far)
    large = np.abs(far) > 2.0**300
    uh, ul = _exact_product(ma, mb)
    th, tl = _two_sum(np.where(large, 0.0, far), ul)
    vh, vl = _two_sum(uh, th)
    rest = to_odd(tl, vl)
    near = np.ldexp(vh + rest, scale)
    subnormal = np.abs(to_odd(vh, rest)) < np.ldexp(1.0, -1022 - scale)
    near = np.where(subnormal, _subnormal(vh, rest, scale), near)
    return np.where(ordinary, np.where(large, c, near), plain)


def _is_nan(x):
    return x != x


def maximum(a, b):
    """The larger; of a NaN and a number the number; +0 over -0."""
    r = np.fmax(a, b)
    zero = r == 0
    if np.any(zero):
        both = np.where((np.asarray(a) == 0) & (np.asarray(b) == 0), np.add(a, b), r)
        r = np.where(zero, both, r)
    return r


def minimum(a, b):
    return -maximum(-np.asarray(a), -np.asarray(b))


def median(a, b, c):
    """The middle one; with a NaN among them the smallest (ISA: V_MED3_F32)."""
    low = minimum(minimum(a, b), c)
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(_is_nan(a) | _is_nan(b) | _is_nan(c), low, middle)


def propagating(f):
    """f, or NaN where an operand is (gfx950's v_maximum3_f32, v_minimum3_f32)."""
    return lambda a, b: np.where(_is_nan(a) | _is_nan(b), F32("nan"), f(a, b)).astype(F32)


def ldexp(a, n):
    return np.ldexp(a, np.clip(n, -400, 400)).astype(np.asarray(a).dtype)


def exponent(a):
    """V_FREXP_EXP_I32_F32: 0 for zero, infinity and NaN."""
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)


def mantissa(a):
    return np.where(np.isfinite(a), np.frexp(a)[0], a).astype(np.asarray(a).dtype)


def _exponent_field(x):
    if x.dtype == F64:
        return ((x.view(U64) >> U64(52)) & U64(0x7FF)).astype(I32)
    return ((x.view(U32) >> U32(23)) & U32(0xFF)).astype(I32)


def _same_shape(*values):
    dtype = np.result_type(*values)
    return [
        np.ascontiguousarray(x)
        for x in np.broadcast_arrays(*(np.asarray(x, dtype) for x in values))
    ]


# Of each width: the scaling power, the difference of exponents that asks for it, the largest exponent field of a tiny
# numerator, the bias, and from which difference on a quotient is zero.
_DIVISION = {F32: (64, 96, 23, 127, -150), F64: (128, 768, 53, 1023, -1075)}


def div_scale(s0, s1, s2):
    """(scaled operand, whether v_div_fmas has to scale back). s0 is s1 (denominator) or s2 (numerator).

    Raises:
        Fault: reciprocal and quotient both subnormal, float64: the manual scales the denominator up, which overflows.
    """
    s0, s1, s2 = _same_shape(s0, s1, s2)
    power, difference, tiny, _, _ = _DIVISION[s0.dtype.type]
    e1, e2 = _exponent_field(s1), _exponent_field(s2)
    smallest = np.finfo(s0.dtype).tiny
    quotient = (s2.astype(F64) / s1).astype(s0.dtype)
    # A float32's reciprocal is never subnormal as the float64 that the manual computes.
    inverse_subnormal = np.abs(1.0 / s1.astype(F64)) < 2.0**-1022
    up = np.ldexp(s0, power)
    out, flag = s0, np.zeros(s0.shape, bool)
    # From the manual's last case to its first, so that an earlier one stands.
    out = np.where(e2 <= tiny, up, out)
    subnormal = (np.abs(quotient) < smallest) & (s2 != 0)
    out = np.where(subnormal, np.where(s0 == s2, up, s0), out)
    flag = np.where(subnormal, True, flag)
    out = np.where(inverse_subnormal & ~subnormal, np.ldexp(s0, -power), out)
    denominator_subnormal = e1 == 0
    out, flag = np.where(denominator_subnormal, up, out), flag & ~denominator_subnormal
    near_maximum = e2 - e1 >= difference
    out = np.where(near_maximum, np.where(s0 == s1, up, s0), out)
    flag = flag | near_maximum
    both = inverse_subnormal & subnormal & np.isfinite(s1) & np.isfinite(s2)
    if both.any():
        raise Fault(
            "v_div_scale_f64 where the reciprocal and the quotient are both subnormal",
            allowed="a denominator below 2**1022, or a larger quotient",
            fix="check the operands: what hardware does here is not established",
            lane=int(np.flatnonzero(both)[0]) if both.ndim == 2 and both.shape[1] == 64 else None,
        )
    zero = (s1 == 0) | (s2 == 0)
    return np.where(zero, np.nan, out).astype(s0.dtype), flag & ~zero


def div_fmas(a, b, c, scale_back):
    """fma, scaled back where v_div_scale asked for it: by 2**64 or 2**-64, float64 by 2**128 or 2**-128.

    The manual prints 2**32 (2**64); with it LLVM's division sequence gives wrong quotients in the scaled cases. Which
    of the two powers undoes v_div_scale follows from which operand was scaled: the denominator if c is above 1.
    """
    a, b, c = _same_shape(a, b, c)
    double = a.dtype == F64
    r = (fma64 if double else fma)(a, b, c)
    if not np.any(scale_back):
        return r
    power, _, _, bias, _ = _DIVISION[a.dtype.type]
    power = np.where(_exponent_field(c) > bias, power, -power)
    # float32 with one rounding: the sum is scaled in float64, whose exponents are wide enough.
    exact = r if double else to_odd(a.astype(F64) * b, c.astype(F64))
    return np.where(scale_back, np.ldexp(exact, power).astype(r.dtype), r)


def div_fixup(s0, s1, s2):
    """The quotient s0 with the special cases of numerator s2 over denominator s1."""
    s0, s1, s2 = _same_shape(s0, s1, s2)
    underflow = _DIVISION[s0.dtype.type][-1]
    negative = np.signbit(s1) != np.signbit(s2)

    def signed(x):
        return np.copysign(np.asarray(x, s0.dtype), np.where(negative, -1.0, 1.0).astype(s0.dtype))

    e1, e2 = _exponent_field(s1), _exponent_field(s2)
    infinity = s0.dtype.type(np.inf)
    out = signed(np.where(_is_nan(s0), infinity, s0))
    out = np.where(e2 - e1 < underflow, signed(np.zeros_like(s0)), out)
    out = np.where(np.isinf(s1) | (s2 == 0), signed(np.zeros_like(s0)), out)
    out = np.where((s1 == 0) | np.isinf(s2), signed(np.full_like(s0, infinity)), out)
    undefined = ((s1 == 0) & (s2 == 0)) | (np.isinf(s1) & np.isinf(s2))
    out = np.where(undefined, -np.abs(s0.dtype.type(np.nan)), out)
    out = np.where(_is_nan(s1), s1, out)
    return np.where(_is_nan(s2), s2, out).astype(s0.dtype)


def is_class(x, wanted):
    """V_CMP_CLASS: bits of ``wanted`` are sNaN, qNaN, -Inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +Inf."""
    x = np.asarray(x)
    wide, top = {2: (np.uint16, 10), 4: (U32, 23), 8: (U64, 52)}[x.dtype.itemsize]
    bits = np.ascontiguousarray(x).view(wide)
    mantissa_bits = bits & wide((1 << top) - 1)
    size = 8 * x.dtype.itemsize
    field = (bits >> wide(top)) & wide((1 << (size - 1 - top)) - 1)
    highest = (1 << (size - 1 - top)) - 1
    negative = bits >> wide(size - 1) != 0
    special, none = field == highest, mantissa_bits == 0
    quiet = (mantissa_bits >> wide(top - 1)) & wide(1) != 0
    kind = np.where(special & none, 0, np.where(field != 0, 1, np.where(none, 3, 2)))
    number = np.where(negative, 2 + kind, 9 - kind)
    number = np.where(special & ~none, np.where(quiet, 1, 0), number)
    return ((np.asarray(wanted).astype(U32) >> number.astype(U32)) & U32(1)) != 0
