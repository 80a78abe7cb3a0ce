"""The pieces of the one-launch form (Gluon): one token's columns, and products that keep scale blocks apart.

Eight warps, 16 rows each, multiply by eight columns of ``wgmma``. A slot of the ring holds four *units* of 32 rows:
a tile of gate and its tile of up in stage 1, two tiles of w2 in stage 2. Warp ``2 u + h`` has rows ``8 h ..`` of both
tiles of unit ``u``.

**Stage 1** has one token for all rows, so the eight columns are free to keep four scale blocks apart: column
``2 j + p`` holds part ``p`` (hi, lo) of block ``j`` of a quad, and zeros elsewhere. Four products in a row are one
sum, and lane ``4 g + t`` finds in it what block ``t`` gave: one scale a lane and row where four were needed.

**Stage 2** has another token (a slot's activations) for each unit: column ``2 s + p`` belongs to unit ``s``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    REINTERPRET_IS_PUBLIC,
    SCALE_BITS,
    acc_layout,
    add_quad,
    barrier,
    last_mask,
    operand,
    padding_of,
    quad_scales,
    row_scale,
    start_quad,
)
from sglang_aiter_moe.portable.triton.hopper.ring import (
    load_words,
    pair_scales,
    pair_words,
    ring_quads,
    ring_steps,
)

WARPS = gl.constexpr(8)
COLUMNS = gl.constexpr(8)
ACC = gl.constexpr(acc_layout(8, 8))
ABSENT = gl.constexpr(-(1 << 31))
"""In place of the factor of a slot without an expert. One with a routing weight of 0 has 0.0, and passes NaN on."""


@gluon.jit
def view(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory under another shape."""
    if REINTERPRET_IS_PUBLIC:
        return smem.reinterpret(dtype, shape, layout)
    else:
        return smem._reinterpret(dtype, shape, layout)


@gluon.constexpr_function
def narrow_half(blocks, per_step):
    """K blocks of a half in ``whole_narrow``: whole slots, so that none is copied that is of the other half."""
    return (blocks + 2 * per_step - 1) // (2 * per_step) * per_step


@gluon.jit
def clear(smem):
    """Zeros to ``smem [QUADS, 8, 128]`` (bytes as they lie): ``stage_token`` writes a quarter of it."""
    QUADS: gl.constexpr = smem.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    smem.store(gl.zeros([QUADS, 8, 128], gl.uint8, layout=L))
    barrier()


@gluon.jit
def stage_token(x_ptr, smem, H: gl.constexpr):
    """A bf16 row of H columns to ``smem [QUADS, 8, 128]`` (bytes as they lie), see above. Returns its scale.

    Block ``j`` stands in rows ``2 j`` and ``2 j + 1`` as [16 even columns][16 odd columns] from byte ``32 j`` on. The
    swizzle of 128 bytes moves 16 bytes of row ``n`` from place ``c`` to place ``c ^ n``: to the row's first 32 bytes,
    halves exchanged for ``lo``.
    """
    QUADS: gl.constexpr = smem.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    column = (gl.arange(0, QUADS, layout=gl.SliceLayout(1, L)) * 128)[:, None]
    column = column + gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    v = gl.load(x_ptr + column, mask=column < H, other=0.0).to(gl.float32)
    bits = v.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    largest = gl.max(gl.reshape(bits, (QUADS * 128,)), axis=0)
    exponent = gl.minimum(gl.maximum((largest >> 23) - 7, 1), 253)
    v = v * ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    hi = v.to(gl.float8e4nv)
    lo = ((v - hi.to(gl.float32)) * 16.0).to(gl.float8e4nv)
    hi_even, hi_odd = gl.split(gl.reshape(hi.to(gl.uint8, bitcast=True), (QUADS, 4, 16, 2)))
    lo_even, lo_odd = gl.split(gl.reshape(lo.to(gl.uint8, bitcast=True), (QUADS, 4, 16, 2)))
    places = gl.join(gl.join(hi_even, lo_odd), gl.join(hi_odd, lo_even))  # [.., 16, part, place]
    rows = gl.reshape(gl.permute(places, (0, 1, 3, 4, 2)), (QUADS, 8, 32))
    smem.slice(0, 32, dim=2).store(rows)
    fence_async_shared()
    barrier()
    return row_scale(largest, exponent)


@gluon.constexpr_function
def _scales_layout(UNITS, SB, APART):
    """``[1, UNITS, SB / 2, 16]`` scale words of a slot, four rows for eight blocks: lane ``4 g + t`` takes blocks
    ``t`` and ``t`` + 4 (APART), or all of them."""
    blocks = [[0, 0, 1, 0], [0, 0, 2, 0]]
    groups = [[0, 0, 4 << b, 0] for b in range((SB // 8).bit_length() - 1)]
    both = UNITS == 8  # gate and up have words of their own
    units = [[0, 1 + both, 0, 0], [0, 2 + 2 * both, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=([[0, 1, 0, 0]] if both else []) + ([] if APART else blocks) + groups,
        lane_bases=(blocks if APART else [[0, 0, 0, 0]] * 2)
        + [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        warp_bases=[[0, 0, 0, 8], *units],
        block_bases=[],
        shape=[1, UNITS, SB // 2, 16],
    )


UNIT_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 8, 0], [1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, 4],
    )
)
"""``[unit, row of 16, block of 4]``."""


@gluon.jit
def _split_groups(v, n: gl.constexpr):
    """``[1, n, 8, 16]`` words to the two groups of eight blocks, ``[n, 16, 4]`` each."""
    v = gl.permute(gl.reshape(v, (n, 2, 4, 16)), (0, 3, 2, 1))
    return gl.split(v)


@gluon.jit
def _select(gate, up, odd):
    """Words of separate gate and up groups to one of both: bytes (gate, up) of block j, then of j + 4; ``odd``: which
    tile of the group."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 s; mad.lo.u32 s, $3, 0x1111, 0x6240; prmt.b32 $0, $1, $2, s; }",
        "=r,r,r,r",
        [gate, up, odd],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def lane_scales(scales, first, TILES: gl.constexpr, LAYOUT: gl.constexpr, SB: gl.constexpr):
    """Scale words of a slot for ``_block_scales``: two, for the first and the last eight blocks."""
    if LAYOUT == "separated":
        v = gl.reshape(scales.load(_scales_layout(8, SB, True)), (4, 2, SB // 2, 16))
        gate, up = gl.split(gl.permute(v, (0, 2, 3, 1)))
        g0, g1 = _split_groups(gate, 4)
        u0, u1 = _split_groups(up, 4)
        unit = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, UNIT_WORDS)))
        odd = ((first + unit) % TILES % 2)[:, None, None]
        odd = odd + gl.zeros([4, 16, 4], gl.int32, layout=UNIT_WORDS)
        a = _select(
            gl.convert_layout(g0, UNIT_WORDS, assert_trivial=True),
            gl.convert_layout(u0, UNIT_WORDS, assert_trivial=True), odd,
        )  # fmt: skip
        b = _select(
            gl.convert_layout(g1, UNIT_WORDS, assert_trivial=True),
            gl.convert_layout(u1, UNIT_WORDS, assert_trivial=True), odd,
        )  # fmt: skip
        return a, b
    else:
        a, b = _split_groups(scales.slice(0, 4, dim=1).load(_scales_layout(4, SB, True)), 4)
        return (
            gl.convert_layout(a, UNIT_WORDS, assert_trivial=True),
            gl.convert_layout(b, UNIT_WORDS, assert_trivial=True),
        )


@gluon.jit
def _block_mask(step, quad: gl.constexpr, K_BLOCKS: gl.constexpr, SB: gl.constexpr):
    """``fp8.last_mask`` of the lanes' own blocks, ``[1, 1, 4]``, or all of SCALE_BITS where no lane's is padding."""
    PADDING: gl.constexpr = padding_of(K_BLOCKS, SB, quad // 2) >> quad % 2 * 4 & 15
    if PADDING == 0:
        return SCALE_BITS
    else:
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, UNIT_WORDS)))
        last = gl.where(
            ((PADDING >> t) & 1) == 1, last_mask(step, ring_steps(K_BLOCKS, SB)), SCALE_BITS
        )
        return last[None, None, :]


@gluon.jit
def _block_scales(word, mask, ODD: gl.constexpr):
    """float32 ``[128, 8]``: of each row and of each column's block. By shift and mask, as ``fp8.scale_f32``."""
    if ODD:
        a = (word << 7) & mask
        b = (word >> 1) & mask
    else:
        a = (word << 23) & mask
        b = (word << 15) & mask
    both = gl.join(a.to(gl.float32, bitcast=True), b.to(gl.float32, bitcast=True))
    both = gl.reshape(gl.permute(gl.reshape(both, (4, 2, 8, 4, 2)), (0, 1, 4, 2, 3)), (128, 4))
    return gl.convert_layout(gl.reshape(gl.join(both, both), (128, 8)), ACC, assert_trivial=True)


@gluon.jit
def _chain(quad, smem_q):
    """Four blocks of one sum, in columns of their own."""
    p = gl.zeros([128, 8], gl.float32, layout=ACC)
    for u in gl.static_range(4):
        x = smem_q.slice(u * 32, 32, dim=1).permute((1, 0))
        p = warpgroup_mma(operand(quad[u], COLUMNS, WARPS), x, p, use_acc=u > 0, is_async=True)
    return p


@gluon.jit
def token_step(
    acc, words, scales, full, empty, phase, smem, first, step,
    TILES: gl.constexpr, K_BLOCKS: gl.constexpr, LAYOUT: gl.constexpr, SB: gl.constexpr,
):  # fmt: skip
    """``acc [128, 8]`` of stage 1 plus one slot."""
    mask0 = _block_mask(step, 0, K_BLOCKS, SB)
    mask1 = _block_mask(step, 1, K_BLOCKS, SB)
    mask2 = _block_mask(step, 2, K_BLOCKS, SB)
    mask3 = _block_mask(step, 3, K_BLOCKS, SB)
    mbarrier.wait(full, phase)
    s0, s1 = lane_scales(scales, first, TILES, LAYOUT, SB)
    q = step * (SB // 4)
    a, b = pair_words(load_words(words.slice(0, 16, dim=2), WARPS, 1), WARPS)
    pa = _chain(a, smem.index(q))
    pb = _chain(b, smem.index(q + 1))
    c, d = pair_words(load_words(words.slice(16, 16, dim=2), WARPS, 1), WARPS)
    pa = warpgroup_mma_wait(4, deps=[pa])
    acc += pa * _block_scales(s0, mask0, False)
    pc = _chain(c, smem.index(q + 2))
    pb = warpgroup_mma_wait(4, deps=[pb])
    acc += pb * _block_scales(s0, mask1, True)
    pd = _chain(d, smem.index(q + 3))
    _release(empty, True)
    pc = warpgroup_mma_wait(4, deps=[pc])
    acc += pc * _block_scales(s1, mask2, False)
    pd = warpgroup_mma_wait(0, deps=[pd])
    acc += pd * _block_scales(s1, mask3, True)
    return acc


@gluon.jit
def _release(empty, wanted):
    """Lets a slot go once all of it is in registers, before the last products end: the other warps' next slot then
    overlaps them. Not ``wanted``: nothing will be copied to it any more."""
    if wanted:
        fence_async_shared()  # what was read must have arrived before the next copy may overwrite it
        mbarrier.arrive(empty, count=1)
    barrier()  # here, where all have just met: Triton otherwise puts it before the next wait, behind those products


@gluon.jit
def _quad_products(acc, s, mask, PADDING: gl.constexpr, ODD: gl.constexpr, p, LEFT: gl.constexpr):
    """``acc`` plus a quad's products, of which LEFT later ones may still run."""
    sa = quad_scales(s, 0, mask, PADDING, ODD, COLUMNS, WARPS, False)
    p = warpgroup_mma_wait(LEFT, deps=[p[0], p[1], p[2], p[3]])
    return add_quad(acc, p, sa)


@gluon.jit
def slots_step(
    acc, words, scales, full, empty, phase, smem, group, step, wanted,
    GROUPS: gl.constexpr, K_BLOCKS: gl.constexpr, SB: gl.constexpr,
):  # fmt: skip
    """``acc [128, 8]`` of stage 2 plus one slot of the ring: slots ``4 * group ..`` of a token.
    ``smem [quads * GROUPS, 8, 128]``."""
    QUADS: gl.constexpr = min(ring_quads(K_BLOCKS, SB), SB // 4)
    P0: gl.constexpr = padding_of(K_BLOCKS, SB, 0)
    P1: gl.constexpr = padding_of(K_BLOCKS, SB, 1)
    mask = last_mask(step, ring_steps(K_BLOCKS, SB))
    mbarrier.wait(full, phase)
    s = gl.reshape(scales.load(_scales_layout(4, SB, False)), (4, 2, 4, 16))
    s0, s1 = gl.split(gl.reshape(gl.permute(s, (0, 3, 2, 1)), (64, 4, 2)))
    at = step * (SB // 4) * GROUPS + group
    a, b = pair_words(load_words(words.slice(0, 16, dim=2), WARPS, 1), WARPS)
    if QUADS == 1:
        pa = start_quad(a, smem.index(at), COLUMNS, WARPS)
        _release(empty, wanted)
        return _quad_products(acc, pair_scales(s0, WARPS), mask, P0, False, pa, 0)
    elif QUADS == 2:
        pa = start_quad(a, smem.index(at), COLUMNS, WARPS)
        pb = start_quad(b, smem.index(at + GROUPS), COLUMNS, WARPS)
        s0 = pair_scales(s0, WARPS)
        _release(empty, wanted)
        acc = _quad_products(acc, s0, mask, P0, False, pa, 4)
        return _quad_products(acc, s0, mask, P0, True, pb, 0)
    else:
        pa = start_quad(a, smem.index(at), COLUMNS, WARPS)
        pb = start_quad(b, smem.index(at + GROUPS), COLUMNS, WARPS)
        s0 = pair_scales(s0, WARPS)
        c, d = pair_words(load_words(words.slice(16, 16, dim=2), WARPS, 1), WARPS)
        acc = _quad_products(acc, s0, mask, P0, False, pa, 4)
        pc = start_quad(c, smem.index(at + 2 * GROUPS), COLUMNS, WARPS)
        acc = _quad_products(acc, s0, mask, P0, True, pb, 4)
        s1 = pair_scales(s1, WARPS)
        if QUADS == 3:
            _release(empty, wanted)
            return _quad_products(acc, s1, mask, P1, False, pc, 0)
        else:
            pd = start_quad(d, smem.index(at + 3 * GROUPS), COLUMNS, WARPS)
            _release(empty, wanted)
            acc = _quad_products(acc, s1, mask, P1, False, pc, 4)
            return _quad_products(acc, s1, mask, P1, True, pd, 0)


def _split() -> str:
    """PTX: four words of two bf16 ($4..$7) times a float32 ($8) to e4m3 parts, even columns ($0 hi, $2 lo) and odd
    ones ($1, $3). By way of float16, which holds a bf16 below 256 to 2**-24."""
    lines = ["{ .reg .f32 f0, f1, f2, f3; .reg .b32 t, v0, v1; .reg .b16 h0, h1;"]
    for odd in (0, 1):
        for i in range(4):
            take = "and.b32 t, ${}, 0xFFFF0000;" if odd else "shl.b32 t, ${}, 16;"
            lines.append(take.format(4 + i) + f"mov.b32 f{i}, t; mul.f32 f{i}, f{i}, $8;")
        lines.append("cvt.rn.f16x2.f32 v0, f1, f0; cvt.rn.f16x2.f32 v1, f3, f2;")
        for part in (odd, 2 + odd):
            for i in (0, 1):
                lines.append(f"cvt.rn.satfinite.e4m3x2.f16x2 h{i}, v{i};")
            lines.append(f"mov.b32 ${part}, {{h0, h1}};")
            if part < 2:
                for i in (0, 1):
                    lines.append(f"cvt.rn.f16x2.e4m3x2 t, h{i}; sub.rn.f16x2 v{i}, v{i}, t;")
                    lines.append(f"mov.b32 t, 0x4C004C00; mul.rn.f16x2 v{i}, v{i}, t;")  # 16
    return "".join(lines) + "}"


SPLIT = gl.constexpr(_split())


@gluon.jit
def stage_slots(a_ptr, ok, smem, I: gl.constexpr, T: gl.constexpr, CHUNKS: gl.constexpr):
    """bf16 rows ``[T, I]`` as ``fp8.split_rows`` does it, but loaded once and in half the instructions: this is what
    everything waits for after the meeting. ``smem``: the same bytes as int16. Returns the scales."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 2], [1, 0])
    WORDS: gl.constexpr = CHUNKS * 256
    QUADS: gl.constexpr = CHUNKS * 4
    row = gl.arange(0, T, layout=gl.SliceLayout(1, L))[:, None]
    k = gl.arange(0, WORDS, layout=gl.SliceLayout(0, L))[None, :]
    at = a_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + row * (I // 2) + k
    v = gl.load(at, mask=ok[:, None] & (k < I // 2), other=0)
    largest = gl.max(gl.maximum(v & 0x7FFF0000, (v << 16) & 0x7FFF0000), axis=1)
    exponent = gl.minimum(gl.maximum((largest >> 23) - 7, 1), 253)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    inverse = inverse + gl.zeros([T, WORDS], gl.float32, layout=L)
    hi, lo = gl.inline_asm_elementwise(
        SPLIT,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [v, inverse],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=4,
    )
    # Not left to a v of 0: what ptxas makes of constants here is no 0 (wide_stage2).
    here = (k < I // 2) & (row >= 0)
    hi, lo = gl.where(here, hi, 0), gl.where(here, lo, 0)
    # A block of 32 columns is stored as [16 even][16 odd], here by two.
    both = gl.reshape(gl.join(hi, lo), (T, QUADS, 4, 4, 2, 2, 2))
    smem.store(gl.reshape(gl.permute(both, (1, 0, 6, 2, 4, 3, 5)), (QUADS * T * 2, 64)))
    return row_scale(largest, exponent)


FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 8]],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 16], [1, 0], [2, 0]],
        block_bases=[],
        shape=[4, 32],
    )
)
"""``[unit, row]``, as the rows of ``ACC``."""


@gluon.jit
def row_factors(smem):
    """Four int32 of shared memory, one a unit, to the rows ``[128, 1]``."""
    f = smem.load(gl.SliceLayout(1, FACTORS))[:, None]
    f = gl.reshape(f + gl.zeros([4, 32], gl.int32, layout=FACTORS), (128,))
    return gl.convert_layout(f, gl.SliceLayout(1, ACC), assert_trivial=True)[:, None]
