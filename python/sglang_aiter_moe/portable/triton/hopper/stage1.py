"""Stage 1 of the Hopper A16W4 form: R rows (half gate, half up) of one expert times up to T tokens."""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.activation import gate_up
from sglang_aiter_moe.portable.triton.codecs import f32_to, inf_to_nan
from sglang_aiter_moe.portable.triton.hopper.decode import ACCUMULATOR_SCALE, prefetch_l2
from sglang_aiter_moe.portable.triton.hopper.operands import multiply_step, weight_step, x_step
from sglang_aiter_moe.portable.triton.layout import scale_offset, weight_offset, weight_row


@triton.jit
def permuted_column(i):
    """Where column ``i`` of ``a`` is stored: see ``x_step``, PERMUTED."""
    n = i % 8
    return i // 128 * 128 + n // 2 * 32 + i // 32 % 4 * 8 + n % 2 * 4 + i // 8 % 4


@triton.jit
def stage1_hopper(
    x_ptr,  # [M, X_STRIDE] bf16, in order or permuted
    words_ptr,  # w13 as int32
    w2_ptr,  # w2 as int32, for PREFETCH
    scale_ptr,
    bias_ptr,  # [E, 2I] fp32
    weights_ptr,  # [pairs] fp32
    ids_ptr,  # [pairs] int32, without LIST
    pairs_ptr,  # [blocks, T] int32, with LIST
    block_expert_ptr,
    num_blocks_ptr,
    a_ptr,  # [pairs, A_STRIDE] bf16, permuted
    num_pairs,
    topk,
    num_experts,
    limit,
    alpha,
    beta,
    linear_beta,
    H: tl.constexpr,
    I: tl.constexpr,
    H_USED: tl.constexpr,
    I_USED: tl.constexpr,  # columns of ``a`` that stage 2 reads
    X_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,  # multiply by the routing weight here
    LIST: tl.constexpr,  # blocks of a list; else one (token, slot) pair a program row
    PERMUTED: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,  # start w2 on its way to L2: stage 2 finds it there
    T: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,  # warps, which split K
    U: tl.constexpr,  # steps loaded together
    ASM: tl.constexpr,
):
    TILES: tl.constexpr = (I + R // 2 - 1) // (R // 2)
    K_BLOCKS: tl.constexpr = H_USED // 32
    STEPS: tl.constexpr = (K_BLOCKS + 4 * G - 1) // (4 * G)  # of each warp
    RAGGED: tl.constexpr = STEPS % U != 0
    MASKED: tl.constexpr = RAGGED or STEPS * G * 4 != K_BLOCKS
    b = tl.program_id(0) // TILES
    i0 = tl.program_id(0) % TILES * (R // 2)
    c = tl.arange(0, T)
    if PDL:
        if LIST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if LIST:
        live = b < tl.load(num_blocks_ptr)
        e = tl.load(block_expert_ptr + b, mask=live, other=0)
        pair = tl.load(pairs_ptr + b * T + c, mask=c + b * 0 < tl.where(live, T, 0), other=0)
        ok = pair < num_pairs
        row = tl.where(ok, pair, 0) // topk
    else:
        e = tl.load(ids_ptr + b)
        live = (e >= 0) & (e < num_experts)
        pair = b + c * 0
        ok = c == 0
        row = pair // topk
    if live:
        if PREFETCH:
            SHARE: tl.constexpr = H * I // 2 // TILES // 16 * 4  # words
            prefetch_l2(
                w2_ptr + e.to(tl.int64) * (H * I // 8) + tl.program_id(0) % TILES * SHARE, SHARE * 4
            )
        r8 = tl.arange(0, 8)[:, None, None]
        q = tl.arange(0, R // 8)[None, None, :]
        g = tl.arange(0, G)[None, :, None]
        # Row groups of 8: gate and up alternate, so that a lane holds a gate row and its up row.
        half = q % 2
        i = tl.minimum(i0 + q // 2 * 8 + r8 + g * 0, I - 1)
        stored = weight_row(half, i, I, LAYOUT)
        word_base = weight_offset(stored, 0, H // 2, LAYOUT) // 4
        scale_base = scale_offset(half, i, 0, I, H // 32, LAYOUT)
        words = words_ptr + e.to(tl.int64) * (I * H // 4)
        scales = scale_ptr + e.to(tl.int64) * (2 * I * ((H // 32 + 7) // 8 * 8))
        row_base = (row * X_STRIDE)[:, None] + tl.arange(0, G)[None, :] * 0

        acc = tl.zeros([G, R, T], tl.float32)
        for s in range(0, STEPS, U):
            for k in tl.static_range(U):
                step = g * STEPS + (s + k)
                gx = tl.arange(0, G)[None, None, :] * STEPS + (s + k)
                if RAGGED:  # what follows a warp's last step belongs to the next warp
                    step = tl.where(s + k < STEPS, step, K_BLOCKS)
                    gx = tl.where(s + k < STEPS, gx, K_BLOCKS)
                v, sc = weight_step(
                    words, scales, word_base, scale_base, step, K_BLOCKS, MASKED, ASM
                )
                x = x_step(x_ptr, row_base, gx, K_BLOCKS, MASKED, PERMUTED, ASM)
                acc = multiply_step(acc, v, sc, x, ASM)

        total = tl.sum(acc, axis=0)  # [R, T] = [R/16, 2, 8, T]
        if ASM:
            total = inf_to_nan(total * ACCUMULATOR_SCALE)
        halves = tl.permute(tl.reshape(total, (R // 16, 2, 8, T)), (0, 2, 3, 1))
        gate, up = tl.split(halves)  # [R/16, 8, T]
        gate = tl.reshape(gate, (R // 2, T))
        up = tl.reshape(up, (R // 2, T))
        col = i0 + tl.arange(0, R // 2)
        in_i = col < I
        if HAS_BIAS:
            bias = bias_ptr + e.to(tl.int64) * (2 * I) + col
            gate += tl.load(bias, mask=in_i, other=0.0)[:, None]
            up += tl.load(bias + I, mask=in_i, other=0.0)[:, None]
        y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
        if WEIGHTED:
            y = y * tl.load(weights_ptr + pair, mask=ok, other=0.0)[None, :]
        if I_USED < I:  # as below: padding rows of w13 may hold anything
            y = tl.where((col < I_USED)[:, None], y, 0.0)
        at = a_ptr + (pair * A_STRIDE)[None, :] + permuted_column(col)[:, None]
        DOT: tl.constexpr = "bf16" if ASM else "f32"
        tl.store(at, f32_to(y, tl.bfloat16, DOT), mask=ok[None, :] & in_i[:, None])
        if (
            A_STRIDE > I
        ):  # stage 2 reads whole steps; its weights are 0 there, but 0 times garbage may be NaN
            if i0 + R // 2 >= I:
                pad = I + tl.arange(0, 128)
                at_pad = a_ptr + (pair * A_STRIDE)[None, :] + permuted_column(pad)[:, None]
                zero = tl.zeros([128, T], tl.bfloat16)
                tl.store(at_pad, zero, mask=ok[None, :] & (pad < A_STRIDE)[:, None])
