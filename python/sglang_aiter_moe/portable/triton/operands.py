"""Loads of the two operands of a matrix product, in the form that the product takes.

``DOT`` says how (``launch.dot_kind``):
- "bf16": both operands are decoded to bf16, exactly (E2M1 and E4M3 times a power of two fit), for ``tl.dot``;
  runs anywhere.
- "scaled": codes and scales go to ``tl.dot_scaled``: one scaled MFMA (gfx950) or WMMA (gfx1250) a step.
- "f32": as "bf16", then widened; for Triton's interpreter, which multiplies bf16 as the integers it keeps them in.
The products are the same numbers in all three.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import e2m1_to_f32, e4m3_to_f32, e8m0_to_f32
from sglang_aiter_moe.portable.triton.layout import scale_offset, weight_offset, weight_row


@triton.jit
def unpack_e2m1(packed):
    """``[R, C]`` uint8 to float32 ``[R, 2C]``, low nibble first."""
    R: tl.constexpr = packed.shape[0]
    C: tl.constexpr = packed.shape[1]
    p = packed.to(tl.int32)
    return tl.reshape(tl.join(e2m1_to_f32(p & 0xF), e2m1_to_f32(p >> 4)), (R, 2 * C))


@triton.jit
def times_scale(values, scale):
    """``values [R, C]`` float32 times ``scale [R, C/32]`` E8M0 bytes, in bf16."""
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    s = e8m0_to_f32(scale)
    scaled = tl.reshape(values, (R, C // 32, 32)) * s[:, :, None]
    return tl.reshape(scaled, (R, C)).to(tl.bfloat16)


@triton.jit
def load_rows(
    codes_ptr,
    scale_ptr,
    row,
    ok,
    k,
    K: tl.constexpr,
    K_USED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Activations ``[rows, BLOCK_K]`` from column ``k``: bf16 twice, or codes and scales.

    Columns from K_USED on read as zero. FORMAT "bf16", "e4m3" or "e2m1".
    """
    base = row.to(tl.int64)[:, None]
    if FORMAT == "bf16":
        col = k + tl.arange(0, BLOCK_K)
        ok2 = ok[:, None] & (col < K_USED)[None, :]
        x = tl.load(codes_ptr + base * K + col[None, :], mask=ok2, other=0.0)
        return x, x
    else:
        block = k // 32 + tl.arange(0, BLOCK_K // 32)
        ok2 = ok[:, None] & (block < (K_USED + 31) // 32)[None, :]
        scale = tl.load(scale_ptr + base * (K // 32) + block[None, :], mask=ok2, other=127)
        PER: tl.constexpr = 2 if FORMAT == "e2m1" else 1
        at = k // PER + tl.arange(0, BLOCK_K // PER)
        ok2 = ok[:, None] & (at < (K_USED + 31) // 32 * 32 // PER)[None, :]
        return tl.load(codes_ptr + base * (K // PER) + at[None, :], mask=ok2, other=0), scale


@triton.jit
def load_weight(
    w_ptr,  # of this expert
    scale_ptr,  # of this expert
    scale_room,  # bytes from scale_ptr to the end of the tensor
    half: tl.constexpr,
    i,
    ok,
    k,
    HALF_ROWS: tl.constexpr,
    K: tl.constexpr,
    K_USED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCALE_LAYOUT: tl.constexpr,
):
    """Packed E2M1 ``[rows, BLOCK_K/2]`` and E8M0 ``[rows, BLOCK_K/32]`` of rows ``i`` of ``half``.

    Past K_USED codes read as 0 and scales as 1. A scale byte past the end of its tensor reads as NaN.
    """
    kbyte = k // 2 + tl.arange(0, BLOCK_K // 2)
    row = weight_row(half, i, HALF_ROWS, LAYOUT)
    at = weight_offset(row[:, None], kbyte[None, :], K // 2, LAYOUT)
    j = k // 32 + tl.arange(0, BLOCK_K // 32)
    s_at = scale_offset(half, i[:, None], j[None, :], HALF_ROWS, K // 32, SCALE_LAYOUT)
    BLOCKS: tl.constexpr = (K_USED + 31) // 32
    inside = ok[:, None] & (j < BLOCKS)[None, :]
    if K_USED % BLOCK_K == 0:
        packed = tl.load(w_ptr + at, mask=ok[:, None], other=0)
    else:
        packed = tl.load(w_ptr + at, mask=ok[:, None] & (kbyte < BLOCKS * 16)[None, :], other=0)
    scale = tl.load(scale_ptr + s_at, mask=inside & (s_at < scale_room), other=255)
    return packed, tl.where(inside, scale, 127)


@triton.jit
def multiply(a, a_scale, w, w_scale, acc, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """``acc [rows, N] += a [rows, BLOCK_K] @ w [N, BLOCK_K].T``."""
    if DOT == "scaled" and FORMAT != "bf16":
        return tl.dot_scaled(a, a_scale, FORMAT, tl.trans(w), w_scale, "e2m1", acc=acc)
    else:
        if FORMAT == "e4m3":
            a = times_scale(e4m3_to_f32(a.to(tl.int32)), a_scale)
        elif FORMAT == "e2m1":
            a = times_scale(unpack_e2m1(a), a_scale)
        w = times_scale(unpack_e2m1(w), w_scale)
        if DOT == "f32":
            return tl.dot(
                a.to(tl.float32), tl.trans(w.to(tl.float32)), acc=acc, input_precision="ieee"
            )
        else:
            return tl.dot(a, tl.trans(w), acc=acc)
