"""How the products of one matrix instruction are added.

Exactly, with one rounding to float32: all products of the types here are exact in float64, and a sum of 32 of them and
an accumulator loses nothing that float32 would show, but for cancellation beyond 2**-53 of the largest.

Or, for fp8, as Hopper's tensor cores are described: all addends, the accumulator among them, are shifted to the largest
one's exponent, cut off (not rounded) behind some bits, and added; the sum is cut off too. DeepSeek-V3's technical
report (section 3.3.2) names about 14 bits, docs/kernel-notes.md about 13. The exact rule is not published, so this is
a model of the error's size, not of its bits.
"""

from __future__ import annotations

import numpy as np

F32, F64, U32, I64 = np.float32, np.float64, np.uint32, np.int64


def add_product(
    left: np.ndarray,
    right: np.ndarray,
    bits: np.ndarray | None,
    integer: bool,
    kept: int | None = None,
) -> np.ndarray:
    """``left @ right`` plus the accumulator (bits as uint32 [n, 16, columns]; None: zero), as bits again.

    ``kept``: how many bits behind the leading one of the largest addend are kept; None: all.
    """
    if kept is not None and not integer:
        return _cut_sum(left, right, bits, kept)
    product = np.matmul(left.astype(F64), right.astype(F64))
    if integer:
        total = product.astype(I64)
        if bits is not None:
            total += bits.view(np.int32)
        return total.astype(U32)
    if bits is not None:
        product += bits.view(F32)
    return product.astype(F32).view(U32)


def _cut_sum(left: np.ndarray, right: np.ndarray, bits: np.ndarray | None, kept: int) -> np.ndarray:
    addends = left.astype(F64)[:, :, :, None] * right.astype(F64)[:, None, :, :]
    if bits is not None:
        addends = np.concatenate([addends, bits.view(F32).astype(F64)[:, :, None, :]], axis=2)
    largest = np.abs(addends).max(2, keepdims=True)
    _, exponent = np.frexp(np.where(np.isfinite(largest), largest, 1.0))
    unit = np.ldexp(1.0, exponent - 1 - kept)
    total = (np.trunc(addends / unit) * unit).sum(2)
    _, exponent = np.frexp(np.where(np.isfinite(total), total, 1.0))
    unit = np.ldexp(1.0, exponent - 1 - kept)
    cut = np.where(np.isfinite(total), np.trunc(total / unit) * unit, total)
    return cut.astype(F32).view(U32)
