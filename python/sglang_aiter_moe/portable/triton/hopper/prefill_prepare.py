"""Before stage 1 of the prefill form: blocks of up to T pairs by expert, and the rows of x in the operand's order.

Three launches, each a few microseconds: count the pairs of each expert by atomic additions, which also rank them; lay
out the blocks; put the pairs in. The order of pairs within an expert is free, which no output depends on: a pair is a
column of its own in every product, and the sum over a token's experts goes by slot.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import (
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_to_f32,
    quantize_blocks,
)
from sglang_aiter_moe.portable.triton.sort import local_index, tokens_here


@triton.jit
def ids_here(ids_ptr, at, n, groups):
    """Global experts of pairs ``at``, and which of them name one."""
    id = tl.load(ids_ptr + at, mask=at < n, other=-1)
    ok = (id >= 0) & (id < groups)
    return tl.where(ok, id, 0), ok


@triton.jit
def rank_pairs(
    chunk,
    ids_ptr,
    tokens_ptr,
    counts_ptr,
    ranks_ptr,
    M,
    topk,
    groups,
    HAS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts BLOCK pairs and ranks them among their expert's."""
    n = tokens_here(tokens_ptr, M, HAS_TOKENS) * topk
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    id, ok = ids_here(ids_ptr, at, n, groups)
    rank = tl.atomic_add(counts_ptr + id, 1, mask=ok, sem="relaxed")
    tl.store(ranks_ptr + at, rank, mask=ok)


@triton.jit
def rank_kernel(
    x_ptr,  # [M, H] bf16
    xp_ptr,  # [M, X_STRIDE] bf16, in prefill order
    ids_ptr,
    tokens_ptr,
    counts_ptr,  # [groups] int32, zero on entry; place_kernel leaves it so
    ranks_ptr,  # [pairs] int32
    M,
    topk,
    groups,
    H: tl.constexpr,
    X_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,  # "bf16", or what x is quantised to first, by RULE
    RULE: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program m copies row m of x; the programs after M count BLOCK pairs each."""
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
            v = tl.load(x_ptr + row * H + p, mask=p < H, other=0.0)
            if FORMAT != "bf16":  # the quantised values; bf16 holds them exactly
                codes, scale = quantize_blocks(
                    tl.reshape(v.to(tl.float32), (1, WIDTH)), FORMAT, RULE
                )
                value = e4m3_to_f32(codes) if FORMAT == "e4m3" else e2m1_to_f32(codes)
                value = tl.reshape(value, (WIDTH // 32, 32)) * tl.reshape(
                    e8m0_to_f32(scale), (WIDTH // 32, 1)
                )
                v = tl.reshape(value, (WIDTH,)).to(tl.bfloat16)
            # Columns [t][w][l][v][h] to [w][v][h][t][l]: prefill.prefill_column.
            v = tl.reshape(v, (WIDTH // 128, 4, 4, 2, 2, 2))
            v = tl.reshape(tl.permute(v, (0, 2, 4, 5, 1, 3)), (WIDTH,))
            tl.store(xp_ptr + row * X_STRIDE + p, v, mask=p < X_STRIDE)


@triton.jit
def blocks_kernel(
    mask_ptr,
    counts_ptr,
    first_ptr,  # [groups] int32: where the pairs of a global expert begin, -1 if it is not here
    pairs_ptr,  # [blocks, T] int32, unused places hold ``num_pairs``
    block_expert_ptr,
    block_rows_ptr,
    num_blocks_ptr,
    num_pairs,
    groups,
    num_experts,
    HAS_MASK: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two >= groups
    T: tl.constexpr,
    FILL: tl.constexpr,  # a power of two >= T
):
    """One program a global expert."""
    g = tl.program_id(0)
    all_g = tl.arange(0, GROUPS)
    count = tl.load(counts_ptr + all_g, mask=all_g < groups, other=0)
    if HAS_MASK:
        here = tl.load(mask_ptr + all_g, mask=all_g < groups, other=0) != 0
        here = here & (tl.cumsum(here.to(tl.int32), axis=0) <= num_experts)
        count = tl.where(here, count, 0)
    blocks = (count + T - 1) // T
    first = tl.sum(tl.where(all_g < g, blocks, 0), axis=0)
    mine = tl.sum(tl.where(all_g == g, count, 0), axis=0)
    local = local_index(mask_ptr, g, groups, num_experts, HAS_MASK, GROUPS)
    tl.store(first_ptr + g, tl.where(local >= 0, first * T, -1))
    if g == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for b in range(0, (mine + T - 1) // T):
        tl.store(block_expert_ptr + first + b, local)
        tl.store(block_rows_ptr + first + b, tl.minimum(mine - b * T, T))
    fill = mine + tl.arange(0, FILL)
    end = (mine + T - 1) // T * T
    tl.store(pairs_ptr + first * T + fill, tl.zeros([FILL], tl.int32) + num_pairs, mask=fill < end)


@triton.jit
def place_kernel(
    ids_ptr,
    tokens_ptr,
    counts_ptr,
    ranks_ptr,
    first_ptr,
    pairs_ptr,
    M,
    topk,
    groups,
    HAS_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tokens_here(tokens_ptr, M, HAS_TOKENS) * topk
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id, ok = ids_here(ids_ptr, at, n, groups)
    first = tl.load(first_ptr + id, mask=ok, other=-1)
    rank = tl.load(ranks_ptr + at, mask=ok, other=0)
    tl.store(pairs_ptr + first + rank, at, mask=ok & (first >= 0))
    if tl.program_id(0) == 0:
        all_g = tl.arange(0, GROUPS)
        tl.store(counts_ptr + all_g, tl.zeros([GROUPS], tl.int32), mask=all_g < groups)
