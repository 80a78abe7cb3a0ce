"""Before stage 1 of the list form: blocks of pairs by expert, and the rows of x in the order of the fragments.

One launch. Program ``e`` of the first programs finds the pairs of expert ``e`` and reserves its blocks by one
atomic addition, so
that the order of blocks is free but what is in a block is not: the output has the same bits every time. The other
programs copy a row of x each.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import (
    e4m3_to_f32,
    e8m0_to_f32,
    f32_to,
    f32_to_e4m3,
    quantize_blocks,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_prepare import ids_here
from sglang_aiter_moe.portable.triton.sort import local_index, tokens_here


@triton.jit
def list_expert(
    g,
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    pairs_ptr,  # [blocks, T] int32, unused rows hold M * topk
    block_expert_ptr,
    num_blocks_ptr,  # zero on entry; combine_hopper leaves it so
    M,
    topk,
    groups,  # global experts
    num_experts,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The blocks of global expert ``g``."""
    local = local_index(mask_ptr, g, groups, num_experts, HAS_MASK, GROUPS)
    if local >= 0:
        n = tokens_here(tokens_ptr, M, HAS_TOKENS) * topk
        at = tl.arange(0, BLOCK)
        count = 0
        for start in range(0, n, BLOCK):
            id = tl.load(ids_ptr + start + at, mask=start + at < n, other=-1)
            count += tl.sum((id == g).to(tl.int32), axis=0)
        if count > 0:
            blocks = (count + T - 1) // T
            first = tl.atomic_add(num_blocks_ptr, blocks, sem="relaxed")
            for b in range(0, blocks):
                tl.store(block_expert_ptr + first + b, local)
            base = pairs_ptr + first * T
            rank0 = 0
            for start in range(0, n, BLOCK):
                hit = (tl.load(ids_ptr + start + at, mask=start + at < n, other=-1) == g).to(
                    tl.int32
                )
                rank = rank0 + tl.cumsum(hit, axis=0) - hit
                tl.store(base + rank, start + at, mask=hit != 0)
                rank0 += tl.sum(hit, axis=0)
            fill = count + tl.arange(0, T)
            tl.store(base + fill, tl.zeros([T], tl.int32) + M * topk, mask=fill < blocks * T)


@triton.jit
def prepare_kernel(
    x_ptr,  # [M, H] bf16
    xp_ptr,  # [M, X_STRIDE] bf16, columns in planes
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    pairs_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    M,
    topk,
    groups,
    num_experts,
    H: tl.constexpr,
    H_USED: tl.constexpr,
    X_STRIDE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    GROUPS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.program_id(0)
    if g < groups:
        list_expert(
            g, ids_ptr, mask_ptr, tokens_ptr, pairs_ptr, block_expert_ptr, num_blocks_ptr, M, topk, groups,
            num_experts, HAS_MASK, HAS_TOKENS, GROUPS, T, BLOCK,
        )  # fmt: skip
    else:
        row = (g - groups).to(tl.int64)
        for c in range(0, X_STRIDE, WIDTH):
            p = c + tl.arange(0, WIDTH)
            # operands.x_step: [4 plane pairs][4 K blocks][2 planes][4 words] of 128 columns
            col = p // 128 * 128 + p // 8 % 4 * 32 + p % 4 * 8 + p // 32 % 4 * 2 + p // 4 % 2
            v = tl.load(x_ptr + row * H + col, mask=(col < H_USED) & (p < X_STRIDE), other=0.0)
            tl.store(xp_ptr + row * X_STRIDE + p, v, mask=p < X_STRIDE)


@triton.jit
def list_pairs(
    chunk,
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    pairs_ptr,  # [num_experts, M * topk] int32: an expert's pairs, in any order
    starts_ptr,  # [blocks] int32: where in ``pairs_ptr`` a block begins
    counter_ptr,  # [1 + num_experts ..] int32: blocks, pairs of each expert; zero on entry, combine_hopper leaves it so
    M,
    topk,
    groups,
    num_experts,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ranks BLOCK pairs by atomic additions; whoever gets a rank that T divides opens a block.

    No output depends on the order: a pair is a column of its own in every product, and a token's sum goes by slot.
    """
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    e, ok = ids_here(ids_ptr, at, tokens_here(tokens_ptr, M, HAS_TOKENS) * topk, groups)
    if HAS_MASK:
        ok = ok & (tl.load(mask_ptr + e) != 0)
        local = tl.zeros([BLOCK], tl.int32)
        for first in range(0, groups, 32):
            g = first + tl.arange(0, 32)
            here = (tl.load(mask_ptr + g, mask=g < groups, other=0) != 0).to(tl.int32)
            local += tl.sum(tl.where(g[None, :] < e[:, None], here[None, :], 0), axis=1)
        ok = ok & (local < num_experts)
        e = tl.where(ok, local, 0)
    rank = tl.atomic_add(counter_ptr + 1 + e, 1, mask=ok, sem="relaxed")
    where = e * (M * topk) + rank
    tl.store(pairs_ptr + where, at, mask=ok)
    opens = ok & (rank % T == 0)
    block = tl.atomic_add(counter_ptr + e * 0, 1, mask=opens, sem="relaxed")
    tl.store(starts_ptr + block, where, mask=opens)


@triton.jit
def prepare_fp8(
    x_ptr,  # [M, H] bf16
    x8_ptr,  # [M, PARTS, X_STRIDE] e4m3 bytes: each 32 columns as [16 even][16 odd]
    scale_ptr,  # float32, BY_ROW: [M]; else [M, X_STRIDE / 32]
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    pairs_ptr,
    starts_ptr,
    counter_ptr,
    M,
    topk,
    groups,
    num_experts,
    H: tl.constexpr,
    X_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,  # 2: hi and lo of bf16; 1: MXFP8
    RULE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two >= X_STRIDE
    BY_ROW: tl.constexpr,  # one scale a row, with PARTS == 1 of MXFP8 values coded again
):
    """Program m quantises row m of x; the programs before list BLOCK pairs each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.program_id(0)
    chunks = tl.num_programs(0) - M
    if g < chunks:
        list_pairs(
            g, ids_ptr, mask_ptr, tokens_ptr, pairs_ptr, starts_ptr, counter_ptr, M, topk, groups, num_experts,
            HAS_MASK, HAS_TOKENS, T, BLOCK,
        )  # fmt: skip
    else:
        row = (g - chunks).to(tl.int64)
        p = tl.arange(0, WIDTH)
        col = p // 32 * 32 + p % 16 * 2 + p // 16 % 2
        x = tl.load(x_ptr + row * H + col, mask=col < H, other=0.0).to(tl.float32)
        out = x8_ptr + row * (PARTS * X_STRIDE) + p
        if PARTS == 1 and BY_ROW:
            codes, scale = quantize_blocks(tl.reshape(x, (1, WIDTH)), "e4m3", RULE)
            x = e4m3_to_f32(tl.reshape(codes, (WIDTH // 32, 32)))
            x = x * tl.reshape(e8m0_to_f32(scale), (WIDTH // 32, 1))
            x = tl.reshape(x, (WIDTH,))
        if BY_ROW:
            bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
            exponent = tl.minimum(tl.maximum((bits >> 23) - 7, 1), 253)
            tl.store(scale_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))
            scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            hi = f32_to_e4m3(scaled)
            tl.store(out, hi.to(tl.uint8), mask=p < X_STRIDE)
            if PARTS == 2:
                lo = f32_to_e4m3((scaled - e4m3_to_f32(hi)) * 16.0)
                tl.store(out + X_STRIDE, lo.to(tl.uint8), mask=p < X_STRIDE)
        else:
            codes, scale = quantize_blocks(tl.reshape(x, (1, WIDTH)), "e4m3", RULE)
            tl.store(out, tl.reshape(codes, (WIDTH,)).to(tl.uint8), mask=p < X_STRIDE)
            j = tl.arange(0, WIDTH // 32)
            value = e8m0_to_f32(tl.reshape(scale, (WIDTH // 32,)))
            tl.store(scale_ptr + row * (X_STRIDE // 32) + j, value, mask=j < X_STRIDE // 32)


@triton.jit
def discard(ptr, mask):
    """Lets L2 drop lines of 128 bytes instead of writing them to device memory: what they hold is lost."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p discard.global.L2 [$1], 128; mov.b32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def combine_hopper(
    part_ptr,  # [M * topk, H] bf16
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    num_blocks_ptr,
    weights_ptr,  # [M * TOPK] fp32, for WEIGHTED
    out_ptr,
    stride_out,
    M,
    groups,
    H: tl.constexpr,
    H_USED: tl.constexpr,
    WEIGHTED: tl.constexpr,  # parts lack their routing weight
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DOT: tl.constexpr,
    COUNTERS: tl.constexpr = 1,
    STREAMED: tl.constexpr = False,  # there are more parts than L2 holds
    DISCARD: tl.constexpr = False,  # L2 need not keep the parts, whole lines of 128 bytes, for device memory
):
    """Sums a token's parts, all of them in flight at once, and clears the COUNTERS of the listing for the next call."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    if m == 0:
        for first in range(tl.program_id(1) * BLOCK_H, COUNTERS, tl.num_programs(1) * BLOCK_H):
            at = first + tl.arange(0, BLOCK_H)
            tl.store(num_blocks_ptr + at, tl.zeros([BLOCK_H], tl.int32), mask=at < COUNTERS)
    slot = tl.arange(0, SLOTS)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    id = tl.load(ids_ptr + m * TOPK + slot, mask=slot < TOPK, other=-1)
    here = (id >= 0) & (id < groups)
    if HAS_MASK:
        here = here & (tl.load(mask_ptr + tl.where(here, id, 0)) != 0)
    end = tl.where(m < tokens_here(tokens_ptr, M, HAS_TOKENS), H_USED, 0)
    row = part_ptr + (m * TOPK + slot).to(tl.int64) * H
    part = tl.load(
        row[:, None] + col[None, :],
        mask=here[:, None] & (col < end)[None, :],
        other=0.0,
        eviction_policy="evict_first" if STREAMED else "",
    )
    part = part.to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights_ptr + m * TOPK + slot, mask=here & (end > 0), other=0.0)
        part = part * weight[:, None]
    acc = tl.sum(part, axis=0)
    at = out_ptr + m.to(tl.int64) * stride_out + col
    tl.store(at, f32_to(acc, out_ptr.dtype.element_ty, DOT), mask=col < H)
    if DISCARD:
        tl.debug_barrier()  # everybody has loaded what is discarded here
        line = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H // 64) * 64
        discard(row[:, None] + line[None, :], here[:, None] & (line < end)[None, :])
