"""Before stage 1 of the fp8 prefill form: rows of x quantised as the mode asks, then brought to one scale in each group
of 128 columns.

A value of E2M1 or E4M3 times its block's scale is written relative to the largest scale of its group. For E2M1 that is
exact while the group's scales lie within 14 binades; beyond, and for E4M3 where a value falls below 2**-6 of its new
scale, it is rounded to a multiple of 2**-9: an error of at most 2**-10 where the group's largest is 224 to 448 (E4M3;
2**-10 of 192 to 384 for E2M1), so under 2**-17 of the group's largest value.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import (
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_to_f32,
    quantize_blocks,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_prepare import rank_pairs


@triton.jit
def fold(value, scale, SHIFT: tl.constexpr):
    """Values float32 ``[G, A, 4, B]``, a scale (int32 E8M0 ``[G, 4]``) along axis 2, relative to the group's largest:
    E4M3 values ``[G, A, 4, B]`` and the group's float32 scale ``[G]``.

    SHIFT: the largest scale stands at 2**SHIFT. E4M3 holds 448, E2M1's 6 comes to 384 with 6."""
    largest = tl.max(scale, axis=1)
    down = tl.maximum(127 + SHIFT + scale - largest[:, None], 0) << 23
    down = down.to(tl.float32, bitcast=True)
    return value * down[:, None, :, None], e8m0_to_f32(largest) * (1.0 / (1 << SHIFT))


@triton.jit
def e4m3_bytes(value):
    """By the conversion instruction; ``codecs.f32_to_e4m3`` takes 20."""
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def rank_mx_kernel(
    x_ptr,  # [M, H] bf16
    x8_ptr,  # [M, X_STRIDE] e4m3 bytes in the operand's order
    x_scale_ptr,  # [M, X_STRIDE / 128] float32
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
    WIDTH: tl.constexpr,
):
    """``rank_kernel`` with rows of bytes and scales."""
    g = tl.program_id(0)
    chunks = tl.num_programs(0) - M
    if g < chunks:
        rank_pairs(
            g, ids_ptr, tokens_ptr, counts_ptr, ranks_ptr, M, topk, groups, HAS_TOKENS, BLOCK
        )
    else:
        row = (g - chunks).to(tl.int64)
        for c in range(0, X_STRIDE, WIDTH):
            p = c + tl.arange(0, WIDTH)
            v = tl.load(x_ptr + row * H + p, mask=p < H, other=0.0).to(tl.float32)
            codes, scale = quantize_blocks(tl.reshape(v, (1, WIDTH)), FORMAT, RULE)
            value = e4m3_to_f32(codes) if FORMAT == "e4m3" else e2m1_to_f32(codes)
            # Columns [t][i][h][j] to [i][h][t][j] (mx_prefill).
            value = tl.permute(tl.reshape(value, (WIDTH // 128, 4, 8, 4)), (0, 2, 1, 3))
            value, scale = fold(
                value, tl.reshape(scale, (WIDTH // 128, 4)), 0 if FORMAT == "e4m3" else 6
            )
            value = tl.reshape(value, (WIDTH,))
            tl.store(x8_ptr + row * X_STRIDE + p, e4m3_bytes(value), mask=p < X_STRIDE)
            k = c // 128 + tl.arange(0, WIDTH // 128)
            at = x_scale_ptr + row * (X_STRIDE // 128) + k
            tl.store(at, scale, mask=k < X_STRIDE // 128)


@triton.jit
def fold_kernel(
    a_ptr,  # [groups of 128 columns, 128] e4m3 in the operand's order, changed in place
    block_scale_ptr,  # [groups of 128 columns, 4] E8M0
    scale_ptr,  # [groups of 128 columns] float32
    count,
    SHIFT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Stage 1's columns, GROUPS groups a program. Rows that stage 1 left alone hold anything, and nobody reads them."""
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    k = tl.arange(0, 128)
    at = a_ptr + (g * 128)[:, None] + k[None, :]
    codes = tl.load(at, mask=(g < count)[:, None], other=0).to(tl.float8e4nv, bitcast=True)
    t = tl.arange(0, 4)
    scale = tl.load(
        block_scale_ptr + (g * 4)[:, None] + t[None, :], mask=(g < count)[:, None], other=0
    )
    value, scale = fold(
        tl.reshape(codes.to(tl.float32), (GROUPS, 8, 4, 4)), scale.to(tl.int32), SHIFT
    )
    tl.store(at, e4m3_bytes(tl.reshape(value, (GROUPS, 128))), mask=(g < count)[:, None])
    tl.store(scale_ptr + g, scale, mask=g < count)
