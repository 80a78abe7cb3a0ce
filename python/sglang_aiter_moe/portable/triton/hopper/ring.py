"""Weights of the fp8 form through a ring in shared memory (Gluon).

A program takes a contiguous share of the row tiles of all blocks. One of its warps copies: each slot of the ring is one
bulk copy (TMA) of words and one of scales, as AITER stored them, started as soon as the slot is free and so many steps
ahead, across tiles and blocks. The other warps multiply. Slots change hands by a pair of barriers in shared memory.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    acc_layout,
    add_quad,
    last_mask,
    padding_of,
    quad_scales,
    scale_word_layout,
    start_quad,
    word_layout,
)
from sglang_aiter_moe.portable.triton.hopper.tail import take_run

# Triton 3.9 renamed it.
bulk_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.constexpr_function
def _bits(n):
    return [1 << b for b in range(n.bit_length() - 1)]


@gluon.constexpr_function
def words_layout(W, BH):
    """``[BH, W / BH, 16, 128]`` bytes: eight blocks of W tiles."""
    tiles = [[0, b, 0, 0] for b in _bits(W // BH)] + ([[1, 0, 0, 0]] if BH == 2 else [])
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], tiles[0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0]],
        lane_bases=[[0, 0, 0, b] for b in (4, 8, 16, 32, 64)],
        warp_bases=[[0, 0, 1, 0], *tiles[1:]],
        block_bases=[],
        shape=[BH, W // BH, 16, 128],
    )


@gluon.constexpr_function
def scales_layout(W, SB, BH):
    """``[BH, W / 2 / BH, SB / 4, 32]`` scale words of a slot."""
    groups = [[0, b, 0, 0] for b in _bits(W // 2 // BH)] + ([[1, 0, 0, 0]] if BH == 2 else [])
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 16], *[[0, 0, b, 0] for b in _bits(SB // 4)]],
        lane_bases=[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        warp_bases=[[0, 0, 0, 8], *groups],
        block_bases=[],
        shape=[BH, W // 2 // BH, SB // 4, 32],
    )


@gluon.jit
def _halves(v, n: gl.constexpr, m: gl.constexpr):
    """``[n, m, K]`` to the halves of the last dimension."""
    K: gl.constexpr = v.shape[2]
    return gl.split(gl.permute(gl.reshape(v, (n, m, 2, K // 2)), (0, 1, 3, 2)))


@gluon.jit
def _quad(v, W: gl.constexpr):
    """``[16 W, 16, 4]`` to four blocks."""
    lo, hi = _halves(v, 16 * W, 16)
    a, b = gl.split(lo)
    c, d = gl.split(hi)
    L: gl.constexpr = word_layout(W)
    return (
        gl.convert_layout(a, L, assert_trivial=True),
        gl.convert_layout(b, L, assert_trivial=True),
        gl.convert_layout(c, L, assert_trivial=True),
        gl.convert_layout(d, L, assert_trivial=True),
    )


@gluon.jit
def load_words(words, W: gl.constexpr, BH: gl.constexpr):
    """Eight blocks of a slot, ``[16 W, 16, 8]``."""
    v = gl.reshape(words.load(words_layout(W, BH)), (W // 2, 2, 8, 2, 8, 16))
    return gl.reshape(gl.permute(v, (0, 3, 1, 4, 5, 2)), (16 * W, 16, 8))


@gluon.jit
def load_scales(scales, W: gl.constexpr, SB: gl.constexpr, BH: gl.constexpr):
    """A slot's scale words ``[8 W, 4, SB / 8]``."""
    s = gl.reshape(scales.load(scales_layout(W, SB, BH)), (W // 2, SB // 8, 4, 16))
    return gl.reshape(gl.permute(s, (0, 3, 2, 1)), (8 * W, 4, SB // 8))


@gluon.jit
def pair_words(v, W: gl.constexpr):
    """``[16 W, 16, 8]`` to two quads."""
    lo, hi = _halves(v, 16 * W, 16)
    return _quad(lo, W), _quad(hi, W)


@gluon.jit
def pair_scales(s, W: gl.constexpr):
    """``[8 W, 4]`` to the scale words of blocks j and j + 4, j = 0..3."""
    lo, hi = gl.split(gl.permute(gl.reshape(s, (8 * W, 2, 2)), (0, 2, 1)))
    a, b = gl.split(lo)
    c, d = gl.split(hi)
    L: gl.constexpr = scale_word_layout(W)
    return (
        gl.convert_layout(a, L, assert_trivial=True),
        gl.convert_layout(b, L, assert_trivial=True),
        gl.convert_layout(c, L, assert_trivial=True),
        gl.convert_layout(d, L, assert_trivial=True),
    )


@gluon.jit
def make_ring(
    desc_w, desc_s, W: gl.constexpr, SB: gl.constexpr, BH: gl.constexpr, SLOTS: gl.constexpr
):
    """Slots of words and scales, and a barrier each for full and for empty."""
    words = gl.allocate_shared_memory(gl.uint8, [SLOTS, BH, W // BH, 2 * SB, 128], desc_w.layout)
    scales = gl.allocate_shared_memory(
        gl.int32, [SLOTS, BH, W // 2 // BH, SB // 4, 32], desc_s.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return words, scales, full, empty


@gluon.jit
def fill(desc_w, desc_s, words, scales, bar, first, tile, step, W: gl.constexpr, SB: gl.constexpr):
    """Starts the copy of SB blocks of K of W 16-row tiles to a slot. ``first``: outermost coordinate (expert, half)."""
    mbarrier.expect(bar, W * SB * 256 + W * SB * 16)
    bulk_copy(desc_w, [first, tile, step * (2 * SB), 0], bar, words)
    bulk_copy(desc_s, [first, tile // 2, step * (SB // 4), 0], bar, scales)


@gluon.jit
def produce(
    desc_w,
    desc_s,
    words,
    scales,
    full,
    empty,
    starts_ptr,
    num_pairs,
    lo,
    hi,
    TILES: gl.constexpr,
    TILE16: gl.constexpr,  # 16-row tiles from one row tile to the next
    STEPS: gl.constexpr,
    SLOTS: gl.constexpr,
    W: gl.constexpr,
    SB: gl.constexpr,
    BH: gl.constexpr,
    TAIL: gl.constexpr = 0,  # these: see ``tail``
    UNIT: gl.constexpr = 1,
    begins=None,
    queue_ptr=None,
    total=0,
):
    """One warp: all steps of row tiles ``lo .. hi``, then of what it takes from the queue, as slots become free."""
    slot = 0
    phase = 1
    if not TAIL:
        total = hi
    while lo < total:
        for tile in range(lo, hi):
            first = gl.load(starts_ptr + tile // TILES) // num_pairs * BH
            tile16 = tile % TILES * TILE16
            for step in range(STEPS):
                mbarrier.wait(empty.index(slot), phase)
                fill(
                    desc_w, desc_s, words.index(slot), scales.index(slot), full.index(slot), first, tile16, step, W, SB
                )  # fmt: skip
                slot, phase = next_slot(slot, phase, SLOTS)
        if TAIL:
            lo, hi = take_run(queue_ptr, begins, full, empty, slot, phase, total, TAIL, UNIT)
        else:
            lo = total


@gluon.jit
def ring_row(
    words,
    scales,
    full,
    empty,
    slot,
    phase,
    smem,
    cols,
    K_BLOCKS: gl.constexpr,
    SLOTS: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    SB: gl.constexpr,
    BH: gl.constexpr,
    COL_SCALES: gl.constexpr,
):
    """One row tile ``[16 W, N]``, and the ring's next slot and phase."""
    STEPS: gl.constexpr = ring_steps(K_BLOCKS, SB)
    acc = gl.zeros([16 * W, N], gl.float32, layout=acc_layout(N, W))
    if STEPS == 1:  # a loop of one step does not build in Triton 3.6
        acc = ring_step(
            acc, words.index(slot), scales.index(slot), full.index(slot), empty.index(slot), phase, smem, cols, 0,
            K_BLOCKS, N, W, SB, BH, COL_SCALES,
        )  # fmt: skip
        slot, phase = next_slot(slot, phase, SLOTS)
    else:
        for step in range(STEPS):
            acc = ring_step(
                acc, words.index(slot), scales.index(slot), full.index(slot), empty.index(slot), phase, smem, cols,
                step, K_BLOCKS, N, W, SB, BH, COL_SCALES,
            )  # fmt: skip
            slot, phase = next_slot(slot, phase, SLOTS)
    return acc, slot, phase


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    last = (slot == SLOTS - 1).to(gl.int32)
    return slot + 1 - last * SLOTS, phase ^ last


@gluon.jit
def ring_step(
    acc,
    words,
    scales,
    full,
    empty,
    phase,
    smem,
    cols,
    step,
    K_BLOCKS: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    SB: gl.constexpr,
    BH: gl.constexpr,
    COL_SCALES: gl.constexpr,
):
    """``acc [16 W, N]`` plus one step from one slot."""
    QUADS: gl.constexpr = ring_quads(K_BLOCKS, SB)  # of x; where STEPS is 1 a slot may hold more
    P0: gl.constexpr = padding_of(K_BLOCKS, SB, 0)
    P1: gl.constexpr = padding_of(K_BLOCKS, SB, 1)
    mask = last_mask(step, ring_steps(K_BLOCKS, SB))
    mbarrier.wait(full, phase)
    s = load_scales(scales, W, SB, BH)
    q = step * (SB // 4)
    if SB == 8:
        v = load_words(words, W, BH)
        s0 = gl.reshape(s, (8 * W, 4))
        acc = ring_pair(acc, v, s0, smem, cols, q, mask, P0, QUADS >= 2, N, W, COL_SCALES)
    else:
        s0, s1 = gl.split(s)
        v = load_words(words.slice(0, 16, dim=2), W, BH)
        acc = ring_pair(acc, v, s0, smem, cols, q, mask, P0, QUADS >= 2, N, W, COL_SCALES)
        if QUADS > 2:
            v = load_words(words.slice(16, 16, dim=2), W, BH)
            acc = ring_pair(acc, v, s1, smem, cols, q + 2, mask, P1, QUADS >= 4, N, W, COL_SCALES)
    # What was read must have arrived before the next copy may overwrite it.
    fence_async_shared()
    mbarrier.arrive(empty, count=1)
    return acc


@gluon.jit
def ring_pair(
    acc,
    words,  # [16 W, 16, 8]
    scales,  # [8 W, 4]
    smem,
    cols,
    q,
    mask,
    PADDING: gl.constexpr,
    BOTH: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    COL_SCALES: gl.constexpr,
):
    a, b = pair_words(words, W)
    s = pair_scales(scales, W)
    pa = start_quad(a, smem.index(q), N, W)
    if BOTH and (N == 8 or (N == 16 and not COL_SCALES)):
        pb = start_quad(b, smem.index(q + 1), N, W)
        sa = quad_scales(s, cols + q * 4, mask, PADDING, False, N, W, COL_SCALES)
        pa = warpgroup_mma_wait(4, deps=[pa[0], pa[1], pa[2], pa[3]])
        acc = add_quad(acc, pa, sa)
        sb = quad_scales(s, cols + q * 4 + 4, mask, PADDING, True, N, W, COL_SCALES)
        pb = warpgroup_mma_wait(0, deps=[pb[0], pb[1], pb[2], pb[3]])
        acc = add_quad(acc, pb, sb)
    else:  # eight products and what scales them would not fit the registers
        sa = quad_scales(s, cols + q * 4, mask, PADDING, False, N, W, COL_SCALES)
        pa = warpgroup_mma_wait(0, deps=[pa[0], pa[1], pa[2], pa[3]])
        acc = add_quad(acc, pa, sa)
        if BOTH:
            pb = start_quad(b, smem.index(q + 1), N, W)
            sb = quad_scales(s, cols + q * 4 + 4, mask, PADDING, True, N, W, COL_SCALES)
            pb = warpgroup_mma_wait(0, deps=[pb[0], pb[1], pb[2], pb[3]])
            acc = add_quad(acc, pb, sb)
    return acc


@triton.constexpr_function
def ring_steps(blocks, per_step):
    """Steps of a row tile with ``blocks`` K blocks."""
    return (blocks + per_step - 1) // per_step


@triton.constexpr_function
def ring_quads(blocks, per_step):
    """Quads of x that a row tile reads: whole steps, unless one step is all."""
    steps = (blocks + per_step - 1) // per_step
    return (blocks + 3) // 4 if steps == 1 else steps * per_step // 4


@gluon.jit
def block_of(starts_ptr, counter_ptr, b, num_pairs):
    """Block ``b`` of ``prepare.list_pairs``: its expert (int64), where its pairs begin, where its expert's end."""
    start = gl.load(starts_ptr + b)
    e = start // num_pairs
    return e.to(gl.int64), start, e * num_pairs + gl.load(counter_ptr + 1 + e)


@gluon.jit
def share(total):
    """This program's part of ``total`` row tiles: first and end."""
    return part(total, gl.program_id(0))


@gluon.jit
def part(total, p):
    """Part ``p`` of as many as there are programs: first and end."""
    n = gl.num_programs(0)
    each = total // n
    rest = total % n
    lo = p * each + gl.minimum(p, rest)
    return lo, lo + each + (p < rest).to(gl.int32)
