"""Around the products of the shared form: rows of x and of ``a`` as e4m3 with one scale a row, columns in the
operand's order.

A value of E2M1 or E4M3 times its block's scale is written relative to the largest scale of its row
(``mx_prefill_prepare.fold``, there for 128 columns): exact where the row's scales lie within 14 binades (E2M1), else an
error of at most 2**-10 where the row's largest is 224 to 448 (192 to 384), under 2**-17 of the row's largest value.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import (
    e2m1_to_f32,
    e8m0_to_f32,
    mx_scale,
    quantize_blocks,
)
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_prepare import e4m3_bytes, fold
from sglang_aiter_moe.portable.triton.hopper.prefill_prepare import rank_pairs


@triton.jit
def operand_order(v):
    """``[R, C]``, C a multiple of 128: columns [t][i][h][j] of 128 to [i][h][t][j] (``mx_prefill``)."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    return tl.reshape(tl.permute(tl.reshape(v, (R, C // 128, 4, 8, 4)), (0, 1, 3, 2, 4)), (R, C))


@triton.jit
def nearest_e4m3(v):
    """float32 to the nearest finite E4M3 number as float32, ties to even; ``codecs`` goes by codes, three times the
    instructions. Triton's interpreter truncates where a GPU's conversion rounds."""
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (v + 24576.0) - 24576.0  # multiples of 2**-9
    return tl.clamp(tl.where(tl.abs(v) < 0.015625, small, normal), -448.0, 448.0)


@triton.jit
def row_blocks(v, FORMAT: tl.constexpr, RULE: tl.constexpr):
    """``codecs.quantize_blocks``, elements as float32. What a scale of 255 makes of them is not used: it makes its row
    NaN."""
    if FORMAT == "e4m3":
        blocks = tl.reshape(v, (v.shape[0], v.shape[1] // 32, 32))
        largest = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
        scale = mx_scale(largest.to(tl.float32, bitcast=True), FORMAT, RULE)
        value = nearest_e4m3(blocks * e8m0_to_f32(254 - scale)[:, :, None])
    else:
        codes, scale = quantize_blocks(v, FORMAT, RULE)
        value = e2m1_to_f32(codes)
    return value, scale


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
        value, scale = row_blocks(tl.reshape(v, (1, WIDTH)), FORMAT, RULE)
        value, scale = fold(
            tl.reshape(value, (1, 1, WIDTH // 32, 32)),
            tl.reshape(scale, (1, WIDTH // 32)),
            0 if FORMAT == "e4m3" else 6,
        )
        value = tl.reshape(operand_order(tl.reshape(value, (1, WIDTH))), (WIDTH,))
        tl.store(x8_ptr + row * X_STRIDE + p, e4m3_bytes(value), mask=p < X_STRIDE)
        tl.store(x_scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def fold_rows_kernel(
    a_ptr,  # [rows, A_STRIDE] e4m3, changed in place
    block_scale_ptr,  # [rows, A_STRIDE / 32] E8M0
    scale_ptr,  # [rows] float32
    count,
    I: tl.constexpr,
    A_STRIDE: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two >= A_STRIDE / 32
):
    """ROWS rows a program, zeros past I. Rows that stage 1 left alone hold anything, and nobody reads them."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.arange(0, BLOCKS)
    k = tl.arange(0, BLOCKS * 32)
    here = (r < count)[:, None]
    at = a_ptr + (r * A_STRIDE)[:, None] + k[None, :]
    codes = tl.load(at, mask=here & (k < I)[None, :], other=0).to(tl.float8e4nv, bitcast=True)
    at_scale = block_scale_ptr + (r * (A_STRIDE // 32))[:, None] + b[None, :]
    scale = tl.load(at_scale, mask=here & (b < I // 32)[None, :], other=0)
    value, scale = fold(
        tl.reshape(codes.to(tl.float32), (ROWS, 1, BLOCKS, 32)), scale.to(tl.int32), SHIFT
    )
    value = e4m3_bytes(operand_order(tl.reshape(value, (ROWS, BLOCKS * 32))))
    tl.debug_barrier()  # all have been read
    tl.store(at, value, mask=here & (k < A_STRIDE)[None, :])
    tl.store(scale_ptr + r, scale, mask=r < count)
