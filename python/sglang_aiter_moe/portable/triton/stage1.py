"""Stage 1: gather, gate and up products, bias, clamp, activation, requantisation, in one launch."""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.activation import gate_up
from sglang_aiter_moe.portable.triton.codecs import f32_to, quantize_blocks
from sglang_aiter_moe.portable.triton.layout import scale_columns
from sglang_aiter_moe.portable.triton.operands import load_rows, load_weight, multiply
from sglang_aiter_moe.portable.triton.quantize import store_quantized


@triton.jit
def stage1_kernel(
    x_ptr,  # [M, H] bf16, e4m3 bytes or packed e2m1
    x_scale_ptr,  # [M, H/32]
    w_ptr,  # [E, 2I, H/2] in W_LAYOUT
    w_scale_ptr,
    w_scale_bytes,
    bias_ptr,  # [E, 2I] fp32
    weights_ptr,  # [M, topk] fp32
    pairs_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    y_ptr,  # [M * topk, I] bf16, e4m3 bytes or packed e2m1
    y_scale_ptr,  # [M * topk, I/32]
    num_pairs,
    topk,
    limit,
    alpha,
    beta,
    linear_beta,
    H: tl.constexpr,
    I: tl.constexpr,
    H_USED: tl.constexpr,
    I_USED: tl.constexpr,
    X_FORMAT: tl.constexpr,
    W_LAYOUT: tl.constexpr,
    W_SCALE_LAYOUT: tl.constexpr,
    DOT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    REQUANT_RULE: tl.constexpr,  # "none", "epilogue", "roundup", "even"
    Y_VIA_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TILES: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    b = tl.program_id(0) // TILES
    n0 = tl.program_id(0) % TILES * BLOCK_N
    if b < tl.load(num_blocks_ptr):
        e = tl.load(block_expert_ptr + b).to(tl.int64)
        pair = tl.load(pairs_ptr + b * BLOCK_M + tl.arange(0, BLOCK_M))
        ok = pair < num_pairs
        token = tl.where(ok, pair // topk, 0)
        i = n0 + tl.arange(0, BLOCK_N)
        in_n = i < I
        w = w_ptr + e * (I * H)
        first = e * (2 * I * scale_columns(H // 32, W_SCALE_LAYOUT))
        room = w_scale_bytes - first
        ws = w_scale_ptr + first

        g = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        u = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, H_USED, BLOCK_K):
            x, xs = load_rows(x_ptr, x_scale_ptr, token, ok, k, H, H_USED, BLOCK_K, X_FORMAT)
            wg, sg = load_weight(
                w, ws, room, 0, i, in_n, k, I, H, H_USED, BLOCK_K, W_LAYOUT, W_SCALE_LAYOUT
            )
            g = multiply(x, xs, wg, sg, g, X_FORMAT, DOT)
            wu, su = load_weight(
                w, ws, room, 1, i, in_n, k, I, H, H_USED, BLOCK_K, W_LAYOUT, W_SCALE_LAYOUT
            )
            u = multiply(x, xs, wu, su, u, X_FORMAT, DOT)

        if WEIGHT_ON_INPUT:
            rw = tl.load(weights_ptr + pair, mask=ok, other=0.0)[:, None]
            g = g * rw
            u = u * rw
        if HAS_BIAS:
            g += tl.load(bias_ptr + e * (2 * I) + i, mask=in_n, other=0.0)[None, :]
            u += tl.load(bias_ptr + e * (2 * I) + I + i, mask=in_n, other=0.0)[None, :]
        y = gate_up(g, u, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
        y = tl.where((i < I_USED)[None, :], y, 0.0)
        if Y_VIA_BF16:
            y = f32_to(y, tl.bfloat16, DOT).to(tl.float32)
        if REQUANT_RULE == "none":
            at = y_ptr + pair.to(tl.int64)[:, None] * I + i[None, :]
            tl.store(at, f32_to(y, tl.bfloat16, DOT), mask=ok[:, None] & in_n[None, :])
        else:
            codes, scale = quantize_blocks(y, X_FORMAT, REQUANT_RULE)
            store_quantized(codes, scale, y_ptr, y_scale_ptr, pair, n0, ok, I, X_FORMAT)
