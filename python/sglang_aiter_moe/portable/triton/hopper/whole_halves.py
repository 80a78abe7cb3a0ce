"""Stage 1 of the one-launch form with both halves of K side by side (Gluon): a pass is two units and not four.

A slot of the ring holds two units of 32 rows, twice: warps 0 to 3 have their first half of K, warps 4 to 7 the second.
The tensor cores give all eight warps the same columns, so column ``4 h + 2 i + p`` holds part ``p`` of block ``i`` (of
two) of half ``h``: two products in a row are one sum, of which a warp uses the columns of its own half. A program with
three units then takes one and a half times as long as one with two, and not twice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton.hopper.fp8 import SCALE_BITS, barrier, operand, row_scale
from sglang_aiter_moe.portable.triton.hopper.ring import load_words, next_slot, pair_words
from sglang_aiter_moe.portable.triton.hopper.whole_parts import (
    ACC,
    COLUMNS,
    UNIT_WORDS,
    WARPS,
    _block_scales,
    _release,
    _select,
    _split_groups,
    view,
)


@gluon.constexpr_function
def half_blocks(blocks):
    """K blocks of a half: whole groups of eight, as scales are stored."""
    return (blocks + 15) // 16 * 8


@gluon.constexpr_function
def half_padding(blocks, per_step, quad, v):
    """Bit ``2 h + i``: in the step ``half_last``, block ``i`` of chain ``v`` of this quad of half ``h`` lies in the
    padding of its scale row, whose bytes may be anything. What lies past that bulk copies do not see: it is 0."""
    half = (blocks + 15) // 16 * 8
    h = 1 if blocks > half else 0
    left = blocks - h * half
    if left % 8 == 0 or left % per_step // 8 != quad // 2:
        return 0
    return sum(1 << (2 * h + i) for i in (0, 1) if quad % 2 * 4 + 2 * v + i >= left % 8)


@gluon.constexpr_function
def half_last(blocks, per_step):
    half = (blocks + 15) // 16 * 8
    return (blocks - half if blocks > half else blocks) // per_step


@gluon.jit
def _half_mask(step, quad: gl.constexpr, V: gl.constexpr, K_BLOCKS: gl.constexpr, SB: gl.constexpr):
    """As ``whole_parts._block_mask``, of a chain."""
    PADDING: gl.constexpr = half_padding(K_BLOCKS, SB, quad, V)
    LAST: gl.constexpr = half_last(K_BLOCKS, SB)
    if PADDING == 0:
        return SCALE_BITS
    else:
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, UNIT_WORDS)))
        padding = (((PADDING >> t) & 1) == 1) & (t * 0 + step == LAST)
        return gl.where(padding, 0, SCALE_BITS)[None, None, :]


@gluon.jit
def stage_halves(x_ptr, smem, H: gl.constexpr, HALF: gl.constexpr):
    """A bf16 row of H columns to ``smem [Q, 8, 128]`` (bytes as they lie), zeros elsewhere. Returns its scale.

    Slice ``u = 2 v + i`` of quad ``q`` is block ``4 q + u`` of each half. The swizzle moves 16 bytes of row ``n`` from
    place ``c`` to ``c ^ n``: of row ``4 h + 2 i + p`` to place ``4 (v ^ h) + (odd ^ p)``.
    """
    Q: gl.constexpr = smem.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, 2 * Q, layout=gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    h = row % 2
    block = row // 2 * 4 + (col // 32 % 2 ^ h) * 2 + col // 64
    column = (h * HALF + block) * 32 + col % 32
    v = gl.load(x_ptr + column, mask=(block < HALF) & (column < H), other=0.0).to(gl.float32)
    bits = v.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    largest = gl.max(gl.reshape(bits, (2 * Q * 128,)), axis=0)
    exponent = gl.minimum(gl.maximum((largest >> 23) - 7, 1), 253)
    v = v * ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    hi = v.to(gl.float8e4nv)
    lo = ((v - hi.to(gl.float32)) * 16.0).to(gl.float8e4nv)
    hi_even, hi_odd = gl.split(gl.reshape(hi.to(gl.uint8, bitcast=True), (2 * Q, 4, 16, 2)))
    lo_even, lo_odd = gl.split(gl.reshape(lo.to(gl.uint8, bitcast=True), (2 * Q, 4, 16, 2)))
    places = gl.join(gl.join(hi_even, lo_odd), gl.join(hi_odd, lo_even))  # [.., 16, part, place]
    places = gl.permute(gl.reshape(places, (2 * Q, 2, 2, 16, 2, 2)), (0, 1, 4, 2, 5, 3))
    rows = view(smem, gl.uint8, [Q, 16, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
    rows.slice(0, 32, dim=2).store(gl.reshape(places, (Q, 16, 32)))
    fence_async_shared()
    barrier()
    return row_scale(largest, exponent)


@gluon.constexpr_function
def _half_scales_layout(UNITS, SB):
    """As ``whole_parts._scales_layout``: lane ``4 g + t`` takes blocks ``t % 2``, ``t % 2 + 2`` and those 4 later."""
    groups = [[0, 0, 4 << b, 0] for b in range((SB // 8).bit_length() - 1)]
    both = UNITS == 8
    return gl.DistributedLinearLayout(
        reg_bases=([[0, 1, 0, 0]] if both else []) + [[0, 0, 2, 0]] + groups,
        lane_bases=[[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        warp_bases=[[0, 0, 0, 8], [0, 1 + both, 0, 0], [0, 2 + 2 * both, 0, 0]],
        block_bases=[],
        shape=[1, UNITS, SB // 2, 16],
    )


TWO_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 2]],
        lane_bases=[[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 8, 0], [1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, 4],
    )
)
"""``[unit, row of 16, block of 4]``: two blocks a lane."""
BOTH_HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=[[0, 8, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 16, 2, 2],
    )
)
"""``[unit, row of 16, half, block of 2]``."""


@gluon.jit
def _spread(v):
    """``[4, 16, 2]`` words of a lane's blocks to ``UNIT_WORDS``: the same for the columns of both halves."""
    v = gl.convert_layout(v, gl.SliceLayout(2, BOTH_HALVES), assert_trivial=True)
    v = gl.expand_dims(v, 2) + gl.zeros([4, 16, 2, 2], gl.int32, layout=BOTH_HALVES)
    return gl.convert_layout(gl.reshape(v, (4, 16, 4)), UNIT_WORDS, assert_trivial=True)


@gluon.jit
def _two(v):
    """``[4, 16, 4]`` words to those of blocks 0, 1 and of blocks 2, 3."""
    a, b = gl.split(gl.permute(gl.reshape(v, (4, 16, 2, 2)), (0, 1, 3, 2)))
    return _spread(a), _spread(b)


@gluon.jit
def half_scales(v, first, TILES: gl.constexpr, LAYOUT: gl.constexpr, SB: gl.constexpr):
    """Scale words of a slot, as ``halves_head`` loads them: of the first and of the last eight blocks, two each."""
    if LAYOUT == "separated":
        v = gl.reshape(v, (4, 2, SB // 2, 16))
        gate, up = gl.split(gl.permute(v, (0, 2, 3, 1)))
        g0, g1 = _split_groups(gate, 4)
        u0, u1 = _split_groups(up, 4)
        unit = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, TWO_WORDS)))
        odd = ((first + unit % 2) % TILES % 2)[:, None, None]
        odd = odd + gl.zeros([4, 16, 4], gl.int32, layout=TWO_WORDS)
        a = _select(
            gl.convert_layout(g0, TWO_WORDS, assert_trivial=True),
            gl.convert_layout(u0, TWO_WORDS, assert_trivial=True), odd,
        )  # fmt: skip
        b = _select(
            gl.convert_layout(g1, TWO_WORDS, assert_trivial=True),
            gl.convert_layout(u1, TWO_WORDS, assert_trivial=True), odd,
        )  # fmt: skip
    else:
        a, b = _split_groups(v, 4)
        a = gl.convert_layout(a, TWO_WORDS, assert_trivial=True)
        b = gl.convert_layout(b, TWO_WORDS, assert_trivial=True)
    a0, a1 = _two(a)
    b0, b1 = _two(b)
    return a0, a1, b0, b1


@gluon.jit
def _chain(quad, smem_q, V: gl.constexpr):
    """Two blocks of one sum, in columns of their own."""
    p = gl.zeros([128, 8], gl.float32, layout=ACC)
    for i in gl.static_range(2):
        x = smem_q.slice((2 * V + i) * 32, 32, dim=1).permute((1, 0))
        p = warpgroup_mma(
            operand(quad[2 * V + i], COLUMNS, WARPS), x, p, use_acc=i > 0, is_async=True
        )
    return p


@gluon.jit
def _quad(quad, smem_q):
    return _chain(quad, smem_q, 0), _chain(quad, smem_q, 1)


@gluon.jit
def _add(
    acc, p, s0, s1, step, quad: gl.constexpr, K_BLOCKS: gl.constexpr, SB: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    """``acc`` plus a quad's products, of which LEFT later ones may still run."""
    p0, p1 = warpgroup_mma_wait(LEFT, deps=[p[0], p[1]])
    acc += p0 * _block_scales(s0, _half_mask(step, quad, 0, K_BLOCKS, SB), quad % 2 == 1)
    acc += p1 * _block_scales(s1, _half_mask(step, quad, 1, K_BLOCKS, SB), quad % 2 == 1)
    return acc


@gluon.jit
def halves_head(words, scales, full, phase, LAYOUT: gl.constexpr, SB: gl.constexpr):
    """What a step needs first of its slot, once it is there: words of eight blocks, and scale words."""
    mbarrier.wait(full, phase)
    v = load_words(words.slice(0, 16, dim=2), WARPS, 1)
    UNITS: gl.constexpr = 8 if LAYOUT == "separated" else 4
    return v, scales.slice(0, UNITS, dim=1).load(_half_scales_layout(UNITS, SB))


@gluon.jit
def halves_step(
    acc, v, s, words, scales, full, empty, slot, phase, smem, first, step: gl.constexpr,
    TILES: gl.constexpr, K_BLOCKS: gl.constexpr, LAYOUT: gl.constexpr, SB: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """``acc [128, 8]`` of stage 1 plus one slot; the head of the pass's next slot, its number and its phase."""
    HALF: gl.constexpr = half_blocks(K_BLOCKS)
    LAST: gl.constexpr = step + 1 == (HALF + SB - 1) // SB
    WHOLE: gl.constexpr = (
        not LAST or HALF % SB == 0
    )  # or the half of the slot that a half of K may end with
    a0, a1, b0, b1 = half_scales(s, first, TILES, LAYOUT, SB)
    q: gl.constexpr = step * (SB // 4)
    here = words.index(slot)
    free = empty.index(slot)
    slot, phase = next_slot(slot, phase, SLOTS)
    a, b = pair_words(v, WARPS)
    pa = _quad(a, smem.index(q))
    pb = _quad(b, smem.index(q + 1))
    if WHOLE:
        c, d = pair_words(load_words(here.slice(16, 16, dim=2), WARPS, 1), WARPS)
        acc = _add(acc, pa, a0, a1, step, 0, K_BLOCKS, SB, 4)
        pc = _quad(c, smem.index(q + 2))
        acc = _add(acc, pb, a0, a1, step, 1, K_BLOCKS, SB, 4)
        pd = _quad(d, smem.index(q + 3))
        _release(free, True)
        if not LAST:
            v, s = halves_head(
                words.index(slot), scales.index(slot), full.index(slot), phase, LAYOUT, SB
            )
        acc = _add(acc, pc, b0, b1, step, 2, K_BLOCKS, SB, 4)
        acc = _add(acc, pd, b0, b1, step, 3, K_BLOCKS, SB, 0)
    else:
        _release(free, True)
        acc = _add(acc, pa, a0, a1, step, 0, K_BLOCKS, SB, 4)
        acc = _add(acc, pb, a0, a1, step, 1, K_BLOCKS, SB, 0)
    return acc, v, s, slot, phase
