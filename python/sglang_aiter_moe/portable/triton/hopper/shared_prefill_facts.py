"""What a tile of the shared prefill form needs once, read ahead by one warp: rows' largest scales, pairs, tokens'
scales (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sglang_aiter_moe.portable.triton.hopper.fp8 import barrier
from sglang_aiter_moe.portable.triton.hopper.mx_prefill import REFERENCE_EXPONENT
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_decode import product_rows
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_rings import FACTS, advance, group_pairs


@gluon.constexpr_function
def fact_layout():
    """``[4, 4, 16]`` scale words of 32-row groups in one warp: 16 bytes a lane."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [2, 0, 0]],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [1, 0, 0]],
        [],
        [],
        [4, 4, 16],
    )


@gluon.jit
def max2(a, b):
    """Of two 16-bit numbers each."""
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def block_facts(x_scale_ptr, pairs_ptr, num_pairs, topk, T: gl.constexpr):
    """The block's T pairs, and their tokens' scales. Unused places have none: a pair that nobody computes has none."""
    c = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [1], [0]))
    pair = gl.load(pairs_ptr + c, mask=c < T, other=num_pairs)
    return pair, gl.load(x_scale_ptr + pair // topk, mask=pair < num_pairs, other=0.0)


@gluon.jit
def tile_facts(
    facts, here, phase, scale_ptr, first, further, MOST: gl.constexpr, GROUP: gl.constexpr, EACH: gl.constexpr, pair,
    token_scale, K_BLOCKS: gl.constexpr, BH: gl.constexpr, BESIDE: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """One tile's facts, as its place becomes free.

    Args:
        first: ``[4]``, the 32-row groups whose scales the first two groups of consumers need: ``further`` is added
            to those of at most MOST. The next two need those that come EACH after them.
        GROUP: words of a 32-row group.
    """
    references, factors, pairs, token_scales, bars = facts
    full, empty = bars
    C: gl.constexpr = group_pairs(G)
    for c in range(C):
        group = gl.minimum(first + c * EACH, MOST) + further
        reference = row_references(scale_ptr, group * GROUP, K_BLOCKS, BH, BESIDE)
        if c == 0:
            mbarrier.wait(empty.index(here), phase ^ 1)
        nan = reference == 255
        bits = gl.where(nan, 255, gl.maximum(reference - REFERENCE_EXPONENT, 0)) << 23
        factor = gl.where(nan, bits | 0x400000, bits).to(gl.float32, bitcast=True)
        references.index(here * C + c).store(reference)
        factors.index(here * C + c).store(factor)
    pairs.index(here).store(pair)
    token_scales.index(here).store(token_scale)
    barrier()
    mbarrier.arrive(full.index(here))
    return advance(here, phase, FACTS)


@gluon.jit
def row_references(
    scale_ptr, group_at, K_BLOCKS: gl.constexpr, BH: gl.constexpr, BESIDE: gl.constexpr
):
    """The largest scale of each of 128 rows, in the product's order."""
    L: gl.constexpr = fact_layout()
    GROUPS: gl.constexpr = (K_BLOCKS + 7) // 8
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = group_at[:, None, None] + (j * 16)[None, :, None] + r[None, None, :]
    even = gl.zeros([4, 4, 16], gl.int32, layout=L)
    odd = gl.zeros([4, 4, 16], gl.int32, layout=L)
    for g in range((GROUPS + 1) // 2):
        for u in gl.static_range(2):
            k = (g * 2 + u) * 8 + j
            here_k = gl.where(k < K_BLOCKS, 0xFF, 0) | gl.where(k + 4 < K_BLOCKS, 0xFF0000, 0)
            there = gl.minimum(g * 2 + u, GROUPS - 1)
            w = gl.load(scale_ptr + (at + there * 64))
            even = max2(even, w & here_k[None, :, None])
            odd = max2(odd, (w >> 8) & here_k[None, :, None])
    even = gl.maximum(even & 0xFFFF, even >> 16)
    odd = gl.maximum(odd & 0xFFFF, odd >> 16)
    reference = gl.max(gl.join(even, odd), axis=1)  # [4, 16, 2]
    return product_rows(gl.reshape(gl.permute(reference, (0, 2, 1)), (4, 2, 2, 8)), BH, BESIDE)
