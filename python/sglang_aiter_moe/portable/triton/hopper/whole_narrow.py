"""Stage 2 of the one-launch form in tiles of 16 rows (Gluon), both halves of K side by side: up to four slots a token.

A warp has a tile: warps 0 to 3 those of slots 0 to 3 with their first half of K, warps 4 to 7 the same rows with the
second. Eight columns hold four slots' activations (``2 s + p``, as in ``whole_parts``), so each warp group of four
chooses the columns that it multiplies by: what stands in shared memory for its half of K. Units of half the size leave
less to who has one more: two tokens of gpt-oss are 360 of them for 132 programs, and not 180.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sglang_aiter_moe.portable.triton.hopper.fp8 import SCALE_BITS, padding_of, start_quad
from sglang_aiter_moe.portable.triton.hopper.ring import (
    next_slot,
    pair_scales,
    pair_words,
)
from sglang_aiter_moe.portable.triton.hopper.whole_parts import (
    ABSENT,
    ACC,
    COLUMNS,
    WARPS,
    _quad_products,
    _release,
    _select,
    narrow_half,
)


@gluon.jit
def warp_group(scalar):
    """Which four warps these are: the same in all lanes of a warp, not in all warps. ``scalar``: any; a new one keeps
    what follows from it from being computed far ahead, in registers."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; shfl.sync.idx.b32 $0, t, 0, 31, -1; }",
        "=r,r",
        [scalar],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


TILE_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0]],
        lane_bases=[[0, 0, 0, 4 << b] for b in range(5)],
        warp_bases=[[0, 1 << b, 0, 0] for b in range(3)],
        block_bases=[],
        shape=[1, 8, 16, 128],
    )
)  # fmt: skip
"""``ring.words_layout`` of a tile a warp, not half the rows of two."""
FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 8]],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0]],
        block_bases=[],
        shape=[2, 4, 16],
    )
)
"""``[warp group, slot, row]``, as the rows of ``ACC``."""


@gluon.constexpr_function
def _scales_layout(SB):
    """``[1, 8, SB / 2, 16]`` scale words of a slot: all blocks of a warp's tile."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 8], *[[0, 0, 1 << b, 0] for b in range((SB // 2).bit_length() - 1)]],
        lane_bases=[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        warp_bases=[[0, 1 << b, 0, 0] for b in range(3)],
        block_bases=[],
        shape=[1, 8, SB // 2, 16],
    )


@gluon.jit
def _load_words(words):
    """Eight blocks of a slot, ``[128, 16, 8]``."""
    v = gl.reshape(words.load(TILE_WORDS), (8, 8, 2, 8, 16))
    return gl.reshape(gl.permute(v, (0, 2, 3, 4, 1)), (128, 16, 8))


@gluon.jit
def _load_scales(scales, odd, SB: gl.constexpr):
    """Scale words of a slot, ``[64, 4]`` of the first and of the last eight blocks: rows 8 apart and blocks 4 apart in
    one, where AITER has rows 16 apart. ``odd``: which tile of its 32 rows."""
    v = gl.reshape(scales.load(_scales_layout(SB)), (8, SB // 2, 2, 8))
    first, last = gl.split(gl.permute(v, (0, 1, 3, 2)))
    v = gl.reshape(_select(first, last, odd + gl.zeros_like(first)), (8, 2, 4, 8))
    return gl.split(gl.reshape(gl.permute(v, (0, 3, 2, 1)), (64, 4, 2)))


@gluon.jit
def _mask(group, K_BLOCKS: gl.constexpr):
    """Of the scales among ``padding_of`` the ``group``-th eight blocks of K."""
    if K_BLOCKS % 8 == 0:
        return SCALE_BITS
    else:
        return gl.where(group == K_BLOCKS // 8, 0, SCALE_BITS)


@gluon.jit
def _step(
    acc, words, scales, full, empty, phase, smem, group, odd, wanted,
    K_BLOCKS: gl.constexpr, SB: gl.constexpr,
):  # fmt: skip
    """``acc [128, 8]`` plus one slot of the ring, from the ``group``-th eight blocks of K on."""
    PADDING: gl.constexpr = padding_of(K_BLOCKS, 8, 0)
    mask = _mask(group, K_BLOCKS)
    q = 2 * group
    mbarrier.wait(full, phase)
    s0, s1 = _load_scales(scales, odd, SB)
    a, b = pair_words(_load_words(words.slice(0, 16, dim=2)), WARPS)
    pa = start_quad(a, smem.index(q), COLUMNS, WARPS)
    pb = start_quad(b, smem.index(q + 1), COLUMNS, WARPS)
    s0 = pair_scales(s0, WARPS)
    c, d = pair_words(_load_words(words.slice(16, 16, dim=2)), WARPS)
    acc = _quad_products(acc, s0, mask, PADDING, False, pa, 4)
    pc = start_quad(c, smem.index(q + 2), COLUMNS, WARPS)
    acc = _quad_products(acc, s0, mask, PADDING, True, pb, 4)
    s1 = pair_scales(s1, WARPS)
    pd = start_quad(d, smem.index(q + 3), COLUMNS, WARPS)
    _release(empty, wanted)
    mask = _mask(group + 1, K_BLOCKS)
    acc = _quad_products(acc, s1, mask, PADDING, False, pc, 4)
    return _quad_products(acc, s1, mask, PADDING, True, pd, 0)


@gluon.jit
def narrow_slots(
    words, scales, full, empty, slot, phase, left, smem, factors, half, odd,
    K_BLOCKS: gl.constexpr, SB: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """What four slots of a token give to 16 rows, ``[128, 8]``: in each row a warp's own half of K and slot, which two
    of the columns are. Then the ring's next slot and phase, and how many are left."""
    STEPS: gl.constexpr = narrow_half(K_BLOCKS, SB) // SB
    first = half * (STEPS * (SB // 8))
    acc = gl.zeros([128, 8], gl.float32, layout=ACC)
    for step in range(STEPS - 1):
        acc = _step(
            acc, words.index(slot), scales.index(slot), full.index(slot), empty.index(slot), phase, smem,
            first + step * (SB // 8), odd, left > SLOTS, K_BLOCKS, SB,
        )  # fmt: skip
        slot, phase = next_slot(slot, phase, SLOTS)
        left -= 1
    acc = _step(
        acc, words.index(slot), scales.index(slot), full.index(slot), empty.index(slot), phase, smem,
        first + (STEPS - 1) * (SB // 8), odd, left > SLOTS, K_BLOCKS, SB,
    )  # fmt: skip
    slot, phase = next_slot(slot, phase, SLOTS)
    left -= 1
    f = factors.load(gl.SliceLayout(0, gl.SliceLayout(2, FACTORS)))
    f = gl.expand_dims(gl.expand_dims(f, 0), 2) + gl.zeros([2, 4, 16], gl.int32, layout=FACTORS)
    f = gl.convert_layout(gl.reshape(f, (128,)), gl.SliceLayout(1, ACC), assert_trivial=True)
    y = acc * f.to(gl.float32, bitcast=True)[:, None]
    # Without an expert anything may have been read.
    return gl.where((f == ABSENT)[:, None], 0.0, y), slot, phase, left
