"""Copies alone: a ring with nothing computed, one stage, in several orders."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from sglang_aiter_moe.portable.triton.hopper.ring import make_ring, fill, next_slot, part, evict_first_marker


@gluon.jit
def _eat(full, empty, n, STEPS: gl.constexpr, SLOTS: gl.constexpr):
    slot = 0
    phase = 0
    for i in range(n * STEPS):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def _feed(desc_w, desc_s, words, scales, full, empty, starts_ptr, lo, n, by, U: gl.constexpr, TILES: gl.constexpr, TILE16: gl.constexpr, STEPS: gl.constexpr,
          SLOTS: gl.constexpr, W: gl.constexpr, SB: gl.constexpr, BH: gl.constexpr):
    slot = 0
    phase = 1
    for i in range(n):
        tile = lo + i // U * by + i % U
        first = gl.load(starts_ptr + tile // TILES) * BH
        tile16 = tile % TILES * TILE16
        for step in range(STEPS):
            mbarrier.wait(empty.index(slot), phase)
            fill(desc_w, desc_s, words.index(slot), scales.index(slot), full.index(slot), first, tile16, step, W, SB)
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def copies(desc_w, desc_s, starts_ptr, blocks, TILES: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, W: gl.constexpr, SB: gl.constexpr,
           BH: gl.constexpr, U: gl.constexpr, FIRST: gl.constexpr):
    if FIRST:
        evict_first_marker()
    words, scales, full, empty = make_ring(desc_w, desc_s, W, SB, BH, SLOTS)
    total = blocks * TILES
    if U == 0:
        lo, hi = part(total, gl.program_id(0))
        n = hi - lo
        by = 1
        V: gl.constexpr = 1
    else:
        units = total // U
        lo = gl.program_id(0) * U
        by = gl.num_programs(0) * U
        n = (units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * U
        V: gl.constexpr = U
    gl.warp_specialize(
        [
            (_eat, (full, empty, n, STEPS, SLOTS)),
            (_feed, (desc_w, desc_s, words, scales, full, empty, starts_ptr, lo, n, by, V, TILES, W // BH, STEPS, SLOTS, W, SB, BH)),
        ],
        [1],
        [24],
    )
