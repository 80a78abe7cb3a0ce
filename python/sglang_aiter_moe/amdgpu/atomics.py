"""Atomic operations on memory or LDS, executed lane after lane in ascending order.

The order of lanes and waves is not established on hardware; here it is fixed, so results repeat. Source: AMD,
"CDNA3 ISA", sections "Flat", "MUBUF" and "DS" instructions.
"""

from __future__ import annotations

import numpy as np

U32, F32 = np.uint32, np.float32


def bf16_to_f32(bits):
    return (bits.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(value):
    """Nearest even; NaN stays NaN, quiet."""
    bits = np.ascontiguousarray(value, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(value != value, (bits >> U32(16)) | U32(0x40), rounded).astype(np.uint16)


def _typed(dtype, f):
    def apply(old, new):
        return f(old.view(dtype), new.view(dtype)).astype(dtype).view(U32)

    return apply


def _pairs(f):
    def apply(old, new):
        return f(old.view(np.uint16), new.view(np.uint16)).view(U32)

    return apply


def _add_bf16(a, b):
    return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b))


def _add_f16(a, b):
    return (a.view(np.float16) + b.view(np.float16)).view(np.uint16)


OPERATIONS = {
    "add": (4, np.add), "sub": (4, np.subtract), "and": (4, np.bitwise_and), "or": (4, np.bitwise_or),
    "xor": (4, np.bitwise_xor), "umax": (4, np.maximum), "umin": (4, np.minimum),
    "smax": (4, _typed(np.int32, np.maximum)), "smin": (4, _typed(np.int32, np.minimum)),
    "swap": (4, lambda old, new: new), "add_f32": (4, _typed(F32, np.add)),
    "pk_add_bf16": (4, _pairs(_add_bf16)), "pk_add_f16": (4, _pairs(_add_f16)),
}  # fmt: skip
"""Name after ``_atomic_`` -> (bytes, function of old and new words)."""


def rounds(addresses: np.ndarray):
    """Positions in groups without a repeated address: the first lane of each address, then the second, ..."""
    order = np.argsort(addresses, kind="stable")
    ordered = addresses[order]
    start = np.r_[True, ordered[1:] != ordered[:-1]]
    first = np.maximum.accumulate(np.where(start, np.arange(order.size), 0))
    rank = np.arange(order.size) - first
    for n in range(int(rank.max()) + 1):
        yield order[rank == n]


def apply_atomic(
    memory, addresses: np.ndarray, data: np.ndarray, name: str, checked: bool
) -> np.ndarray:
    """``data`` uint32 [1, n] into memory at ``addresses`` uint64 [n]; gives what was there before, uint32 [n]."""
    nbytes, f = OPERATIONS[name]
    before = np.empty(addresses.size, np.uint32)
    for lanes in rounds(addresses):
        before[lanes] = old = memory.gather(addresses[lanes], nbytes, checked)[0]
        memory.scatter(addresses[lanes], [f(old, data[0][lanes])], nbytes, checked)
    return before
