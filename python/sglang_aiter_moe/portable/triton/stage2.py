"""Stage 2: the down product of every pair, with bias and routing weight; ``combine`` adds them up."""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import f32_to
from sglang_aiter_moe.portable.triton.layout import scale_columns
from sglang_aiter_moe.portable.triton.operands import load_rows, load_weight, multiply


@triton.jit
def stage2_kernel(
    y_ptr,  # [M * topk, I] as stage 1 wrote it
    y_scale_ptr,
    w_ptr,  # [E, H, I/2] in W_LAYOUT
    w_scale_ptr,
    w_scale_bytes,
    bias_ptr,  # [E, H] fp32
    weights_ptr,  # [M, topk] fp32
    pairs_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    part_ptr,  # [M * topk, H]
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,
    I_USED: tl.constexpr,
    X_FORMAT: tl.constexpr,
    W_LAYOUT: tl.constexpr,
    W_SCALE_LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_ON_OUTPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TILES: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    b = tl.program_id(0) // TILES
    if b < tl.load(num_blocks_ptr):
        e = tl.load(block_expert_ptr + b).to(tl.int64)
        pair = tl.load(pairs_ptr + b * BLOCK_M + tl.arange(0, BLOCK_M))
        ok = pair < num_pairs
        n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < H
        w = w_ptr + e * (H * I // 2)
        first = e * (H * scale_columns(I // 32, W_SCALE_LAYOUT))
        room = w_scale_bytes - first
        ws = w_scale_ptr + first

        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, I_USED, BLOCK_K):
            y, ys = load_rows(y_ptr, y_scale_ptr, pair, ok, k, I, I_USED, BLOCK_K, X_FORMAT)
            wd, sd = load_weight(
                w, ws, room, 0, n, in_n, k, H, I, I_USED, BLOCK_K, W_LAYOUT, W_SCALE_LAYOUT
            )
            acc = multiply(y, ys, wd, sd, acc, X_FORMAT, DOT)

        if HAS_BIAS:
            acc += tl.load(bias_ptr + e * H + n, mask=in_n, other=0.0)[None, :]
        if WEIGHT_ON_OUTPUT:
            acc = acc * tl.load(weights_ptr + pair, mask=ok, other=0.0)[:, None]
        at = part_ptr + pair.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(at, f32_to(acc, part_ptr.dtype.element_ty, DOT), mask=ok[:, None] & in_n[None, :])
