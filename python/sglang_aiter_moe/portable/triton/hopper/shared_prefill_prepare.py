"""Around the products of the shared form: rows of x and of ``a`` as e4m3 with one scale a row.

A value of E2M1 or E4M3 times its block's scale is written relative to the largest scale of its row
(``mx_prefill_prepare.fold``, there for 128 columns): exact where the row's scales lie within 14 binades (E2M1), else an
error of at most 2**-10 where the row's largest is 224 to 448 (192 to 384), under 2**-17 of the row's largest value.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import (
    e2m1_to_f32,
    e4m3_to_f32,
    quantize_blocks,
)
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_prepare import e4m3_bytes, fold
from sglang_aiter_moe.portable.triton.hopper.prefill_prepare import rank_pairs


@triton.jit
def rank_rows_kernel(
    x_ptr,  # [M, H] bf16
    x8_ptr,  # [M, X_STRIDE] e4m3 bytes
    x_scale_ptr,  # [M] float32
    ids_ptr,
    tokens_ptr,
    counts_ptr,
    ranks_ptr,
    M,
    topk,
    groups,
    H: tl.constexpr,
    X_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two >= X_STRIDE
):
    """``rank_kernel`` with whole rows of bytes, a scale each."""
    g = tl.program_id(0)
    chunks = tl.num_programs(0) - M
    if g < chunks:
        rank_pairs(
            g, ids_ptr, tokens_ptr, counts_ptr, ranks_ptr, M, topk, groups, HAS_TOKENS, BLOCK
        )
    else:
        row = (g - chunks).to(tl.int64)
        p = tl.arange(0, WIDTH)
        v = tl.load(x_ptr + row * H + p, mask=p < H, other=0.0).to(tl.float32)
        codes, scale = quantize_blocks(tl.reshape(v, (1, WIDTH)), FORMAT, RULE)
        value = e4m3_to_f32(codes) if FORMAT == "e4m3" else e2m1_to_f32(codes)
        value, scale = fold(
            tl.reshape(value, (1, 1, WIDTH // 32, 32)),
            tl.reshape(scale, (1, WIDTH // 32)),
            0 if FORMAT == "e4m3" else 6,
        )
        value = tl.reshape(value, (WIDTH,))
        tl.store(x8_ptr + row * X_STRIDE + p, e4m3_bytes(value), mask=p < X_STRIDE)
        tl.store(x_scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def fold_rows_kernel(
    a_ptr,  # [rows, A_STRIDE] e4m3, changed in place
    block_scale_ptr,  # [rows, A_STRIDE / 32] E8M0
    scale_ptr,  # [rows] float32
    count,
    A_STRIDE: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two >= A_STRIDE / 32
):
    """ROWS rows a program. Rows that stage 1 left alone hold anything, and nobody reads them."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, BLOCKS)
    k = tl.arange(0, BLOCKS * 32)
    here = (r < count)[:, None]
    at = a_ptr + (r * A_STRIDE)[:, None] + k[None, :]
    codes = tl.load(at, mask=here & (k < A_STRIDE)[None, :], other=0).to(
        tl.float8e4nv, bitcast=True
    )
    at_scale = block_scale_ptr + (r * (A_STRIDE // 32))[:, None] + b[None, :]
    scale = tl.load(at_scale, mask=here & (b < A_STRIDE // 32)[None, :], other=0)
    value, scale = fold(
        tl.reshape(codes.to(tl.float32), (ROWS, 1, BLOCKS, 32)), scale.to(tl.int32), SHIFT
    )
    value = e4m3_bytes(tl.reshape(value, (ROWS, BLOCKS * 32)))
    tl.store(at, value, mask=here & (k < A_STRIDE)[None, :])
    tl.store(scale_ptr + r, scale, mask=r < count)
