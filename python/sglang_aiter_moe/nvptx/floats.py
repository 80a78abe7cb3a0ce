"""Float helpers: bfloat16 as bits, subnormal flush, small formats by table.

PTX gives one NaN for each format where it converts (0x7FFFFFFF, 0x7FFF, 0x7F); arithmetic here keeps numpy's NaN,
whose bits may differ from the hardware's.
"""

from __future__ import annotations

import functools

import numpy as np

from sglang_aiter_moe.amdgpu import formats
from sglang_aiter_moe.amdgpu.floats import to_odd

F32, F64, U16, U32 = np.float32, np.float64, np.uint16, np.uint32
_SMALLEST = F32(2.0**-126)


def from_bf16(bits) -> np.ndarray:
    """uint16 to float32, exact."""
    return (np.asarray(bits).astype(U32) << U32(16)).view(F32)


def to_bf16(value, toward_zero: bool = False) -> np.ndarray:
    """float32 to uint16, nearest even; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(value, F32).view(U32).reshape(np.shape(value))
    nearest = U32(0) if toward_zero else U32(0x7FFF) + ((bits >> U32(16)) & U32(1))
    out = (bits + nearest) >> U32(16)
    return np.where(value != value, U32(0x7FFF), out).astype(U16)


def odd_f32(value) -> np.ndarray:
    """Integers or float64 to float32, inexact ones to the neighbour with an odd last bit.

    Rounding that again to a format of at most 22 bits is as rounding once (Boldo and Melquiond, 2008).
    """
    value = np.asarray(value)
    if value.dtype.itemsize == 8 and value.dtype.kind in "iu":
        # What float64 cannot hold: 53 bits, the last one odd where bits are left out.
        low = value.dtype.type(0x7FF)
        cut = (value & ~low) | np.where(value & low, low + value.dtype.type(1), 0).astype(
            value.dtype
        )
        wide = (value >= 1 << 53) | (value <= -(1 << 53) if value.dtype.kind == "i" else False)
        value = np.where(wide, cut, value)
    value = value.astype(F64)
    near = value.astype(F32)
    back = near.astype(F64)
    bits = near.view(np.int32)
    inexact = (back != value) & np.isfinite(near) & (bits & 1 == 0)
    outward = np.abs(value) > np.abs(back)
    return np.where(inexact, bits + np.where(outward, 1, -1), bits).astype(np.int32).view(F32)


def exact_fma(a, b, c):
    """a * b + c of float16 or bfloat16 values in float64, rounded to odd: the product is exact, the sum may not be."""
    return to_odd(np.multiply(a, b, dtype=F64), np.asarray(c).astype(F64))


def to_f16(value) -> np.ndarray:
    """float32 or float64 to float16, nearest even; NaN becomes 0x7FFF."""
    out = np.asarray(value).astype(np.float16)
    bits = np.where(np.isnan(value), U16(0x7FFF), out.view(U16))
    return bits.view(np.float16)


def flush(value: np.ndarray) -> np.ndarray:
    """Subnormal float32 to zero of the same sign."""
    small = np.abs(value) < _SMALLEST
    return np.where(small, np.copysign(F32(0), value), value).astype(F32)


@functools.cache
def f16_of(name: str) -> np.ndarray:
    """float16 values of a small format's 256 codes; its NaN is 0x7FFF."""
    return to_f16(formats.values(name))


def halves(bits) -> tuple[np.ndarray, np.ndarray]:
    """uint32 to its low and high uint16."""
    bits = np.asarray(bits)
    return bits.astype(U16), (bits >> U32(16)).astype(U16)


def joined(low, high) -> np.ndarray:
    """Two uint16 to a uint32."""
    return np.asarray(low).astype(U32) | (np.asarray(high).astype(U32) << U32(16))


def maximum(a, b, propagate: bool = False):
    """The larger, +0 over -0; of a NaN and a number the number, or with ``propagate`` the NaN."""
    out = np.maximum(a, b) if propagate else np.fmax(a, b)
    tie = (out == 0) & (a == b)
    if np.any(tie):
        out = np.where(tie, np.where(np.signbit(a), b, a), out)
    return out


def minimum(a, b, propagate: bool = False):
    """The smaller, -0 below +0; NaN as in :func:`maximum`."""
    return -maximum(-a, -b, propagate)
