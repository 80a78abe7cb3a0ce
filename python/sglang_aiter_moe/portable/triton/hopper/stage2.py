"""Stage 2 of the Hopper A16W4 form: rows of w2 times the stage-1 output ``a``.

Two kernels over the same fragments. ``stage2_token``: one token's whole sum in one program (slots and K parts over the
warps), so that nothing is left to combine; best up to 8 tokens. ``stage2_list``: one expert's rows times up to T
pairs of a list, weighted parts to ``part``.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import f32_to
from sglang_aiter_moe.portable.triton.hopper.decode import ACCUMULATOR_SCALE
from sglang_aiter_moe.portable.triton.hopper.operands import multiply_step, weight_step, x_step
from sglang_aiter_moe.portable.triton.layout import scale_offset, weight_offset


@triton.jit
def stage2_token(
    a_ptr,  # [pairs, A_STRIDE] bf16, permuted, times the routing weight
    words_ptr,  # w2 as int32
    scale_ptr,
    bias_ptr,  # [E, H] fp32
    weights_ptr,  # [pairs] fp32
    ids_ptr,  # [pairs] int32
    out_ptr,  # [M, H]
    stride_out,
    topk,
    num_experts,
    H: tl.constexpr,
    I: tl.constexpr,
    H_USED: tl.constexpr,
    I_USED: tl.constexpr,
    A_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two >= topk
    PARTS: tl.constexpr,  # K parts
    U: tl.constexpr,
    ASM: tl.constexpr,
):
    TILES: tl.constexpr = (H + R - 1) // R
    K_BLOCKS: tl.constexpr = I_USED // 32
    G: tl.constexpr = SLOTS * PARTS
    STEPS: tl.constexpr = (K_BLOCKS + 4 * PARTS - 1) // (4 * PARTS)  # of each part
    RAGGED: tl.constexpr = (STEPS - 1) % U != 0
    MASKED: tl.constexpr = RAGGED or STEPS * PARTS * 4 != K_BLOCKS
    m = tl.program_id(0) // TILES
    n0 = tl.program_id(0) % TILES * R
    g = tl.arange(0, G)
    slot = g // PARTS
    e = tl.load(ids_ptr + m * topk + slot, mask=slot < topk, other=-1)
    here = (e >= 0) & (e < num_experts)
    e = tl.where(here, e, 0)[None, :, None]
    n = n0 + tl.arange(0, R // 8)[None, None, :] * 8 + tl.arange(0, 8)[:, None, None]
    n = tl.minimum(n, H - 1)
    word_base = weight_offset(n, 0, I // 2, "separated") // 4 + e * (H * I // 8)
    scale_base = scale_offset(0, n, 0, H, I // 32, "separated") + e * (H * ((I // 32 + 7) // 8 * 8))
    first = g % PARTS * STEPS
    step = first[None, :, None]
    v, sc = weight_step(words_ptr, scale_ptr, word_base, scale_base, step, K_BLOCKS, MASKED, ASM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row_base = ((m * topk + tl.where(slot < topk, slot, 0)) * A_STRIDE)[None, :] + tl.zeros(
        [T, 1], tl.int32
    )

    acc = tl.zeros([G, R, T], tl.float32)
    x = x_step(a_ptr, row_base, first[None, None, :], K_BLOCKS, MASKED, True, ASM)
    acc = multiply_step(acc, v, sc, x, ASM)
    for s in range(1, STEPS, U):
        for k in tl.static_range(U):
            at = first + (s + k)
            if RAGGED:  # what follows the last step of a part belongs to the next part
                at = tl.where(s + k < STEPS, at, K_BLOCKS)
            v, sc = weight_step(
                words_ptr,
                scale_ptr,
                word_base,
                scale_base,
                at[None, :, None],
                K_BLOCKS,
                MASKED,
                ASM,
            )
            x = x_step(a_ptr, row_base, at[None, None, :], K_BLOCKS, MASKED, True, ASM)
            acc = multiply_step(acc, v, sc, x, ASM)

    acc = tl.where(
        here[:, None, None], acc, 0.0
    )  # a slot without an expert read memory that nothing wrote
    y = tl.sum(acc, axis=0)  # [R, T], all columns alike
    if ASM:
        y = y * ACCUMULATOR_SCALE
    y = tl.sum(tl.where(tl.arange(0, T)[None, :] == 0, y, 0.0), axis=1)
    n = n0 + tl.arange(0, R)
    if HAS_BIAS:
        for k in range(topk):
            ek = tl.load(ids_ptr + m * topk + k)
            w = tl.load(weights_ptr + m * topk + k)
            if (ek >= 0) & (ek < num_experts):
                y += w * tl.load(bias_ptr + ek.to(tl.int64) * H + n, mask=n < H, other=0.0)
    DOT: tl.constexpr = "bf16" if ASM else "f32"
    y = tl.where(n < H_USED, y, 0.0)
    at = out_ptr + m.to(tl.int64) * stride_out + n
    tl.store(at, f32_to(y, out_ptr.dtype.element_ty, DOT), mask=n < H)


@triton.jit
def stage2_list(
    a_ptr,  # [pairs, A_STRIDE] bf16, permuted
    words_ptr,
    scale_ptr,
    bias_ptr,
    weights_ptr,
    pairs_ptr,  # [blocks, T] int32
    block_expert_ptr,
    num_blocks_ptr,
    part_ptr,  # [pairs, H] bf16
    num_pairs,
    H: tl.constexpr,
    I: tl.constexpr,
    I_USED: tl.constexpr,
    A_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,  # warps, R rows each
    U: tl.constexpr,
    ASM: tl.constexpr,
):
    TILES: tl.constexpr = (H + R * G - 1) // (R * G)
    K_BLOCKS: tl.constexpr = I_USED // 32
    STEPS: tl.constexpr = (K_BLOCKS + 3) // 4
    MASKED: tl.constexpr = (STEPS + U - 1) // U * U * 4 != K_BLOCKS
    b = tl.program_id(0) // TILES
    n0 = tl.program_id(0) % TILES * (R * G)
    live = b < tl.load(
        num_blocks_ptr
    )  # the list is complete: stage 1 lets this kernel start once it has waited for it
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if live:
        e = tl.load(block_expert_ptr + b)
        pair = tl.load(pairs_ptr + b * T + tl.arange(0, T))
        ok = pair < num_pairs
        g = tl.arange(0, G)
        n = n0 + g[None, :, None] * R + tl.arange(0, R // 8)[None, None, :] * 8
        n = tl.minimum(n + tl.arange(0, 8)[:, None, None], H - 1)
        words = words_ptr + e.to(tl.int64) * (H * I // 8)
        scales = scale_ptr + e.to(tl.int64) * (H * ((I // 32 + 7) // 8 * 8))
        word_base = weight_offset(n, 0, I // 2, "separated") // 4
        scale_base = scale_offset(0, n, 0, H, I // 32, "separated")
        row_base = (tl.where(ok, pair, 0) * A_STRIDE)[:, None] + (g * 0)[None, :]
        zero = g * 0

        acc = tl.zeros([G, R, T], tl.float32)
        for s in range(0, STEPS, U):
            for k in tl.static_range(U):
                at = zero + (s + k)
                v, sc = weight_step(
                    words, scales, word_base, scale_base, at[None, :, None], K_BLOCKS, MASKED, ASM
                )
                x = x_step(a_ptr, row_base, at[None, None, :], K_BLOCKS, MASKED, True, ASM)
                acc = multiply_step(acc, v, sc, x, ASM)

        if ASM:
            acc = acc * ACCUMULATOR_SCALE
        n = n0 + g[:, None] * R + tl.arange(0, R)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + e.to(tl.int64) * H + n, mask=n < H, other=0.0)[:, :, None]
        acc = acc * tl.load(weights_ptr + pair, mask=ok, other=0.0)[None, None, :]
        at = part_ptr + (pair.to(tl.int64) * H)[None, None, :] + n[:, :, None]
        DOT: tl.constexpr = "bf16" if ASM else "f32"
        tl.store(
            at,
            f32_to(acc, part_ptr.dtype.element_ty, DOT),
            mask=ok[None, None, :] & (n < H)[:, :, None],
        )
