"""The warp that copies in the one-launch form: a program's shares of w13, then of w2, into the slots of its ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sglang_aiter_moe.portable.triton.hopper.ring import bulk_copy, next_slot, part, ring_steps
from sglang_aiter_moe.portable.triton.hopper.whole_halves import half_blocks
from sglang_aiter_moe.portable.triton.hopper.whole_parts import narrow_half, view

UNITS = gl.constexpr(4)
"""Of a slot of the ring."""
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4))
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=4))


@gluon.constexpr_function
def scale_rows(apart, narrow):
    """Of 32 rows' scales that a slot has room for, how many for each 32 rows of its weights: tiles of gate and of up
    (``apart``), and those of stage 2 (``narrow``), are 16 rows each that bring their group's scales."""
    return 2 if narrow else apart


@gluon.jit
def stage1_share(M, TOKEN: gl.constexpr):
    """This program's part of all tokens' TOKEN units each: first and end. Most programs have one token of several."""
    return part(M * TOKEN, gl.program_id(0))


@gluon.jit
def stage2_share(M, TOKEN: gl.constexpr):
    """As ``stage1_share``, from the other end: who has a unit more there has one less here."""
    return part(M * TOKEN, gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def tokens_of(lo, hi, TOKEN: gl.constexpr, ONE: gl.constexpr):
    """First token and end of a share."""
    if ONE:
        return 0, (hi > lo).to(gl.int32)
    else:
        return lo // TOKEN, (hi + TOKEN - 1) // TOKEN


@gluon.jit
def units_of(lo, hi, m, TOKEN: gl.constexpr, ONE: gl.constexpr):
    """First unit and end of a share in token ``m``."""
    if ONE:
        return lo, hi
    else:
        return gl.maximum(lo - m * TOKEN, 0), gl.minimum(hi - m * TOKEN, TOKEN)


@gluon.jit
def _expert(ids_ptr, pair, num_experts):
    """Of a pair; 0 where it has none (what it yields is left out later)."""
    e = gl.load(ids_ptr + pair)
    return gl.where((e >= 0) & (e < num_experts), e, 0)


@gluon.jit
def _expect(bar, units, BYTES: gl.constexpr):
    """Bytes must be a constant."""
    for n in gl.static_range(1, UNITS + 1):
        mbarrier.expect(bar, n * BYTES, pred=units == n)


@gluon.jit
def _copy_unit(
    desc_w, desc_s, words, scales, bar, outer, tile, group, step, ok, SB: gl.constexpr, BLOCK: gl.constexpr = 0
):  # fmt: skip
    """``step`` slots after K block BLOCK."""
    bulk_copy(desc_w, [outer, tile, step * (2 * SB) + 2 * BLOCK, 0], bar, words, pred=ok)
    bulk_copy(desc_s, [outer, group, step * (SB // 2) + BLOCK // 2, 0], bar, scales, pred=ok)


@gluon.jit
def produce(
    desc_w1, desc_s1, desc_w2, desc_s2, words, scales, full, empty, known, ids_ptr, M, num_experts,
    H: gl.constexpr, I: gl.constexpr, LAYOUT: gl.constexpr, TOPK: gl.constexpr, SB: gl.constexpr,
    SLOTS: gl.constexpr, HALVES: gl.constexpr, NARROW: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """One warp: what ``_consume`` will ask for, in its order, as slots become free."""
    APART: gl.constexpr = 2 if LAYOUT == "separated" else 1
    TILES: gl.constexpr = I // 16
    GROUPS: gl.constexpr = (TOPK + 3) // 4
    HALF: gl.constexpr = half_blocks(H // 32)
    STEPS1: gl.constexpr = ring_steps(HALF if HALVES else H // 32, SB)
    PASS: gl.constexpr = UNITS // 2 if HALVES else UNITS
    ROWS2: gl.constexpr = 16 if NARROW else 32
    SPREAD: gl.constexpr = scale_rows(APART, NARROW)
    BYTES1: gl.constexpr = 2 * SB * 256 + APART * SB * 32
    BYTES2: gl.constexpr = 2 * SB * 256 + (2 if NARROW else 1) * SB * 32
    words1 = view(words, words.dtype, [SLOTS * UNITS, APART, 2 // APART, 2 * SB, 128], WORDS)
    scales1 = view(
        scales, scales.dtype, [SLOTS * UNITS * SPREAD // APART, APART, 1, SB // 2, 16], SCALES
    )
    words2 = view(words, words.dtype, [SLOTS * 128 // ROWS2, 1, ROWS2 // 16, 2 * SB, 128], WORDS)
    scales2 = view(scales, scales.dtype, [SLOTS * UNITS * SPREAD, 1, 1, SB // 2, 16], SCALES)
    # Copies of what lies outside, all zeros: the descriptors are fetched while the experts are.
    mbarrier.expect(known, BYTES1 + (BYTES2 // 2 if NARROW else BYTES2))
    _copy_unit(
        desc_w1, desc_s1, words1.index(0), scales1.index(0), known, 0, 0, 0, ring_steps(H // 32, SB) + 8, True, SB
    )  # fmt: skip
    _copy_unit(
        desc_w2, desc_s2, words2.index(32 // ROWS2), scales2.index(2), known, 0, 0, 0, ring_steps(I // 32, SB) + 8,
        True, SB,
    )  # fmt: skip
    slot = 0
    phase = 1
    lo1, hi1 = stage1_share(M, TOPK * TILES)
    from1, to1 = tokens_of(lo1, hi1, TOPK * TILES, ONE)
    for m in range(from1, to1):
        lo, hi = units_of(lo1, hi1, m, TOPK * TILES, ONE)
        for first in range(lo, hi, PASS):
            e0 = _expert(ids_ptr, m * TOPK + first // TILES, num_experts) * APART
            e1 = (
                _expert(ids_ptr, m * TOPK + gl.minimum(first + 1, hi - 1) // TILES, num_experts)
                * APART
            )
            e2 = (
                _expert(ids_ptr, m * TOPK + gl.minimum(first + 2, hi - 1) // TILES, num_experts)
                * APART
            )
            e3 = (
                _expert(ids_ptr, m * TOPK + gl.minimum(first + 3, hi - 1) // TILES, num_experts)
                * APART
            )
            mbarrier.wait(known, 0)
            for step in range(STEPS1):
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                _expect(bar, gl.minimum(hi - first, PASS) * (UNITS // PASS), BYTES1)
                for u in gl.static_range(UNITS):
                    tile = (first + u % PASS) % TILES
                    _copy_unit(
                        desc_w1, desc_s1, words1.index(slot * UNITS + u),
                        scales1.index(slot * (UNITS * SPREAD // APART) + u), bar,
                        (e0, e1, e2, e3)[u % PASS], tile if APART == 2 else tile * 2, tile // APART, step,
                        first + u % PASS < hi, SB, u // PASS * HALF,
                    )  # fmt: skip
                slot, phase = next_slot(slot, phase, SLOTS)
    # All of w13 first: what others still wait for should not share the bandwidth with w2, which nobody needs yet.
    wrapped = (slot == 0).to(gl.int32)
    last = slot - 1 + wrapped * SLOTS
    mbarrier.wait(full.index(last), phase ^ wrapped ^ 1, pred=(slot != 0) | (phase == 0))
    lo2, hi2 = stage2_share(M, H // ROWS2)
    from2, to2 = tokens_of(lo2, hi2, H // ROWS2, ONE)
    for m in range(from2, to2):
        first, end = units_of(lo2, hi2, m, H // ROWS2, ONE)
        for unit in range(first, end):
            for group in range(GROUPS):
                slot, phase = _copy_slots(
                    desc_w2, desc_s2, words2, scales2, full, empty, slot, phase, ids_ptr + m * TOPK, group, unit,
                    num_experts, SPREAD, I // 32, BYTES2, TOPK, SB, SLOTS, NARROW,
                )  # fmt: skip


@gluon.jit
def _copy_slots(
    desc_w, desc_s, words, scales, full, empty, slot, phase, ids_ptr, group, unit, num_experts,
    SPREAD: gl.constexpr, K_BLOCKS: gl.constexpr, BYTES: gl.constexpr, TOPK: gl.constexpr, SB: gl.constexpr,
    SLOTS: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """32 rows of w2 of four slots of a token, or (NARROW) 16 rows, the halves of K side by side."""
    COPIES: gl.constexpr = 2 * UNITS if NARROW else UNITS
    HALF: gl.constexpr = narrow_half(K_BLOCKS, SB)
    first = group * UNITS
    e0 = _expert(ids_ptr, first, num_experts)
    e1 = _expert(ids_ptr, gl.minimum(first + 1, TOPK - 1), num_experts)
    e2 = _expert(ids_ptr, gl.minimum(first + 2, TOPK - 1), num_experts)
    e3 = _expert(ids_ptr, gl.minimum(first + 3, TOPK - 1), num_experts)
    for step in range(ring_steps(HALF if NARROW else K_BLOCKS, SB)):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        _expect(bar, gl.minimum(TOPK - first, UNITS), BYTES)
        for u in gl.static_range(COPIES):
            _copy_unit(
                desc_w, desc_s, words.index(slot * COPIES + u), scales.index(slot * (UNITS * SPREAD) + u), bar,
                (e0, e1, e2, e3)[u % UNITS], unit if NARROW else unit * 2, unit // 2 if NARROW else unit, step,
                first + u % UNITS < TOPK, SB, u // UNITS * HALF,
            )  # fmt: skip
        slot, phase = next_slot(slot, phase, SLOTS)
    return slot, phase
