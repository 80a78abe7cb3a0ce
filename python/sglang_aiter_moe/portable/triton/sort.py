"""Which rows each expert computes: (token, slot) pairs grouped by expert, in blocks of ``BLOCK_M``.

A *pair* is ``token * topk + slot``. Two launches with one program an expert, no atomics: the order of pairs
and of blocks depends on the ids alone. Ids that name no local expert (-1, out of range, masked) and
tokens from ``num_local_tokens`` on are in no block.
"""

import triton
import triton.language as tl


@triton.jit
def local_index(mask_ptr, g, G, E, HAS_MASK: tl.constexpr, GROUPS: tl.constexpr):
    """Local index of global expert ``g``, or -1. GROUPS: a power of two >= G."""
    if HAS_MASK:
        at = tl.arange(0, GROUPS)
        here = tl.load(mask_ptr + at, mask=at < G, other=0) != 0
        before = tl.sum((here & (at < g)).to(tl.int32), axis=0)
        mine = tl.sum((here & (at == g)).to(tl.int32), axis=0)
        return tl.where((mine > 0) & (before < E), before, -1)
    else:
        return g


@triton.jit
def tokens_here(tokens_ptr, M, HAS_TOKENS: tl.constexpr):
    if HAS_TOKENS:
        return tl.minimum(tl.load(tokens_ptr).to(tl.int32), M)
    else:
        return M


@triton.jit
def count_kernel(
    ids_ptr,  # [M, topk] int32
    mask_ptr,
    tokens_ptr,
    counts_ptr,  # [E] int32, all zeroed by program 0 of a masked run, else written
    M,
    topk,
    G,
    E,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g = tl.program_id(0)
    if HAS_MASK:
        # Experts that the mask leaves without a global id must still read as empty.
        all_g = tl.arange(0, GROUPS)
        here = tl.load(mask_ptr + all_g, mask=all_g < G, other=0) != 0
        present = tl.sum(here.to(tl.int32), axis=0)
        if g == 0:
            tl.store(
                counts_ptr + all_g,
                tl.zeros([GROUPS], tl.int32),
                mask=(all_g >= present) & (all_g < E),
            )
    local = local_index(mask_ptr, g, G, E, HAS_MASK, GROUPS)
    if local >= 0:
        n = tokens_here(tokens_ptr, M, HAS_TOKENS) * topk
        total = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            id = tl.load(ids_ptr + at, mask=at < n, other=-1)
            total += (id == g).to(tl.int32)
        tl.store(counts_ptr + local, tl.sum(total, axis=0))


@triton.jit
def place_kernel(
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    counts_ptr,
    pairs_ptr,  # [blocks * BLOCK_M] int32, unused rows hold M * topk
    block_expert_ptr,  # [blocks] int32
    num_blocks_ptr,  # [1] int32
    M,
    topk,
    G,
    E,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two >= E
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts_ptr + e, mask=e < E, other=0) + (BLOCK_M - 1)) // BLOCK_M
    if g == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    local = local_index(mask_ptr, g, G, E, HAS_MASK, GROUPS)
    if local >= 0:
        first = tl.sum(tl.where(e < local, blocks, 0), axis=0)
        mine = tl.sum(tl.where(e == local, blocks, 0), axis=0)
        for b in range(mine):
            tl.store(block_expert_ptr + first + b, local)
        n = tokens_here(tokens_ptr, M, HAS_TOKENS) * topk
        base = pairs_ptr + first * BLOCK_M
        rank0 = 0
        if mine > 0:
            for start in range(0, n, BLOCK):
                at = start + tl.arange(0, BLOCK)
                hit = (tl.load(ids_ptr + at, mask=at < n, other=-1) == g).to(tl.int32)
                rank = rank0 + tl.cumsum(hit, axis=0) - hit
                tl.store(base + rank, at, mask=hit != 0)
                rank0 += tl.sum(hit, axis=0)
        fill = rank0 + tl.arange(0, BLOCK_M)
        tl.store(base + fill, tl.zeros([BLOCK_M], tl.int32) + M * topk, mask=fill < mine * BLOCK_M)
