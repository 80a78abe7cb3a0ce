"""Stage 2 of the wide form (Gluon): row tiles of 16 W rows of w2 of one expert (W warps) times the pairs of a block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_aiter_moe.portable.triton.hopper.fp8 import NAN_BITS, barrier, columns_ready
from sglang_aiter_moe.portable.triton.hopper.read_once import read_once
from sglang_aiter_moe.portable.triton.hopper.ring import (
    block_of,
    make_ring,
    produce,
    ring_steps,
    share,
)
from sglang_aiter_moe.portable.triton.hopper.wide import (
    SB,
    column,
    fetch,
    quads_of,
    shared_rows,
    views,
    wide_row,
    words_at,
)


@gluon.constexpr_function
def _store_layout(W):
    return gl.BlockedLayout([2, 1], [32, 1], [1, W], [0, 1])


RESCALE = gl.constexpr(
    "{ .reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;"
    "mul.f16x2 a, a, $2; mul.f16x2 b, b, $2; cvt.rn.satfinite.e4m3x2.f16x2 l, a; cvt.rn.satfinite.e4m3x2.f16x2 h, b;"
    "mov.b32 $0, {l, h}; }"
)
"""Four e4m3 values times a power of two. What float16 rounds here is below half of e4m3's smallest."""


@gluon.constexpr_function
def _word_layout(W):
    """``[N, 32]`` words of a row's 128 columns, 16 bytes a lane."""
    return gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])


@gluon.jit
def _scale_word(a_scale_ptr, row, ok, q: gl.constexpr, K_BLOCKS: gl.constexpr):
    """The scales of quad q of rows ``[N]``, a byte each; 0 past I, where there may be anything."""
    at = a_scale_ptr + row * (quads_of(K_BLOCKS) * 4) + q * 4
    if 4 * q + 4 <= K_BLOCKS:
        return gl.load(at.to(gl.pointer_type(gl.int32)), mask=ok, other=0)
    else:
        word = gl.load(at, mask=ok, other=0).to(gl.int32)
        for j in gl.static_range(1, K_BLOCKS % 4):
            word |= gl.load(at + j, mask=ok, other=0).to(gl.int32) << (8 * j)
        return word


@gluon.jit
def _largest(word):
    return gl.maximum(
        gl.maximum(word & 255, word >> 8 & 255), gl.maximum(word >> 16 & 255, word >> 24 & 255)
    )


@gluon.jit
def _load_quad(
    a_ptr,
    a_scale_ptr,
    row,
    ok,
    q: gl.constexpr,
    K_BLOCKS: gl.constexpr,
    W: gl.constexpr,
):
    """Words ``[N, 32]`` of quad q of rows ``[N]``, and their scale words ``[N]``."""
    QUADS: gl.constexpr = quads_of(K_BLOCKS)
    NEAR: gl.constexpr = min(q, QUADS - 1)
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, _word_layout(W)))
    there = (c >= 0) if K_BLOCKS >= 4 * NEAR + 4 else (c % 4 < K_BLOCKS % 4)
    at = a_ptr + (row * (QUADS * 32))[:, None] + (NEAR * 32 + c)[None, :]
    v = gl.load(at, mask=ok[:, None] & there[None, :], other=0)
    return v, _scale_word(a_scale_ptr, row, ok, NEAR, K_BLOCKS)


@gluon.jit
def _store_quad(
    smem,
    quad,
    top,
    q: gl.constexpr,
    K_BLOCKS: gl.constexpr,
    SHIFT: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    T: gl.constexpr,
    FIRST: gl.constexpr,
):
    if q < quads_of(K_BLOCKS):
        c = gl.arange(0, 32, layout=gl.SliceLayout(0, _word_layout(W)))
        scale = quad[1][:, None] >> (c % 4 * 8)[None, :] & 255
        down = gl.maximum(127 + SHIFT + scale - top[:, None], 0) << 23
        down = down.to(gl.float32, bitcast=True).to(gl.float16).to(gl.int16, bitcast=True)
        down = (down.to(gl.int32) & 0xFFFF) * 0x10001
        v = gl.inline_asm_elementwise(
            RESCALE, "=r,r,r", [quad[0], down], dtype=gl.int32, is_pure=True, pack=1
        )
        if 4 * q + 4 > K_BLOCKS:
            # Not left to words of 0: ptxas (CUDA 12.8) takes the upper half of what RESCALE makes of a constant 0
            # from a register that nothing wrote.
            v = gl.where((c % 4 < K_BLOCKS % 4)[None, :], v, 0)
        words_at(smem, q, N, T, FIRST).store(v)


@gluon.jit
def _rows(
    a_scale_ptr, pairs_ptr, start, end, K_BLOCKS: gl.constexpr, SHIFT: gl.constexpr, N: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Rows ``[N]`` of ``a``, which there are, and their largest scales, for ``_word_layout``; float32 ``[N]``: the
    scales that ``_gather`` gives them, for ``_store_layout``."""
    QUADS: gl.constexpr = quads_of(K_BLOCKS)
    WHOLE: gl.constexpr = K_BLOCKS // 4
    WIDTH: gl.constexpr = max(1 << (WHOLE - 1).bit_length(), 1) if WHOLE else 1
    S: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [W, 1], [1, 0])
    at, ok = column(start, end, N, gl.SliceLayout(1, S))
    row = gl.load(pairs_ptr + at, mask=ok, other=0).to(gl.int64)
    q = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, S))
    at = (a_scale_ptr + (row * (QUADS * 4))[:, None] + (q * 4)[None, :]).to(
        gl.pointer_type(gl.int32)
    )
    words = gl.load(at, mask=ok[:, None] & (q < WHOLE)[None, :], other=0)
    largest = gl.max(_largest(words), axis=1)
    if K_BLOCKS % 4 != 0:
        largest = gl.maximum(largest, _largest(_scale_word(a_scale_ptr, row, ok, WHOLE, K_BLOCKS)))
    L: gl.constexpr = gl.SliceLayout(1, _word_layout(W))
    at, ok = column(start, end, N, L)
    row = gl.load(pairs_ptr + at, mask=ok, other=0).to(gl.int64)
    bits = gl.where(largest == 255, NAN_BITS, gl.maximum(largest - SHIFT, 0) << 23)
    scale = gl.convert_layout(
        bits.to(gl.float32, bitcast=True), gl.SliceLayout(0, _store_layout(W))
    )
    return row, ok, gl.convert_layout(largest, L), scale


@gluon.jit
def _load_quads(
    a_ptr, a_scale_ptr, rows, g: gl.constexpr, K_BLOCKS: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    return (
        _load_quad(a_ptr, a_scale_ptr, rows[0], rows[1], g, K_BLOCKS, W),
        _load_quad(a_ptr, a_scale_ptr, rows[0], rows[1], g + 1, K_BLOCKS, W),
        _load_quad(a_ptr, a_scale_ptr, rows[0], rows[1], g + 2, K_BLOCKS, W),
        _load_quad(a_ptr, a_scale_ptr, rows[0], rows[1], g + 3, K_BLOCKS, W),
    )


@gluon.jit
def _store_quads(
    smem, quads, rows, g: gl.constexpr, K_BLOCKS: gl.constexpr, SHIFT: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
    T: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    _store_quad(smem, quads[0], rows[2], g, K_BLOCKS, SHIFT, N, W, T, FIRST)
    _store_quad(smem, quads[1], rows[2], g + 1, K_BLOCKS, SHIFT, N, W, T, FIRST)
    _store_quad(smem, quads[2], rows[2], g + 2, K_BLOCKS, SHIFT, N, W, T, FIRST)
    _store_quad(smem, quads[3], rows[2], g + 3, K_BLOCKS, SHIFT, N, W, T, FIRST)


@gluon.jit
def _gather(
    a_ptr, a_scale_ptr, pairs_ptr, start, end, smem, K_BLOCKS: gl.constexpr, SHIFT: gl.constexpr, N1: gl.constexpr,
    N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Brings rows of ``a`` to one scale each, in ``smem``: as ``mx_prefill_prepare.fold``, a row as a whole.

    Returns:
        float32 ``[N1]`` and ``[N2]``: the rows' scales, for ``_store_layout``.
    """
    QUADS: gl.constexpr = quads_of(K_BLOCKS)
    rows1 = _rows(a_scale_ptr, pairs_ptr, start, end, K_BLOCKS, SHIFT, N1, W)
    rows2 = rows1
    if N2 > 0:
        rows2 = _rows(a_scale_ptr, pairs_ptr, start + N1, end, K_BLOCKS, SHIFT, N2, W)
    for g in gl.static_range(0, QUADS, 4):  # in flight at once
        quads1 = _load_quads(a_ptr, a_scale_ptr, rows1, g, K_BLOCKS, W)
        if N2 > 0:
            quads2 = _load_quads(a_ptr, a_scale_ptr, rows2, g, K_BLOCKS, W)
        _store_quads(smem, quads1, rows1, g, K_BLOCKS, SHIFT, N1, W, N1 + N2, 0)
        if N2 > 0:
            _store_quads(smem, quads2, rows2, g, K_BLOCKS, SHIFT, N2, W, N1 + N2, N1)
    return rows1[3], rows2[3]


@gluon.jit
def _where(pairs_ptr, weights_ptr, start, end, N: gl.constexpr, W: gl.constexpr):
    """Pairs ``[N]``, which there are, and their routing weights."""
    at, ok = column(start, end, N, gl.SliceLayout(0, _store_layout(W)))
    pair = gl.load(pairs_ptr + at, mask=ok, other=0)
    return pair, ok, gl.load(weights_ptr + pair, mask=ok, other=0.0)


@gluon.jit
def _finish(
    acc,
    scale,
    bias,
    where,
    part_ptr,
    row,
    H: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
):
    L: gl.constexpr = _store_layout(W)
    pair, ok, weight = where
    y = gl.permute(gl.reshape(acc, (W // 2, 2, 2, 8, N)), (0, 2, 1, 3, 4))
    y = gl.convert_layout(gl.reshape(y, (16 * W, N)), L) * scale[None, :]
    if HAS_BIAS:
        y += bias[:, None]
    y = y * weight[None, :]
    out = part_ptr + pair.to(gl.int64)[None, :] * H + row[:, None]
    keep = ok[None, :] & (row < H)[:, None]
    # More than L2 holds: it had better keep tokens.
    gl.store(out, y.to(gl.bfloat16), mask=keep, eviction_policy="evict_first")


@gluon.jit
def _consume(
    words, scales, full, empty, lo, hi, a_ptr, a_scale_ptr, bias_ptr, weights_ptr, pairs_ptr, starts_ptr,
    counter_ptr, part_ptr, num_pairs, H: gl.constexpr, I: gl.constexpr,
    SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr,
    SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 16 * W
    TILES: gl.constexpr = (H + ROWS - 1) // ROWS
    QUADS: gl.constexpr = quads_of(I // 32)
    words, scales = views(words, scales, W, SLOTS, 1)
    x = shared_rows(QUADS, N1 + N2)
    slot = 0
    phase = 0
    s0, s1, s2, s3, reference, v = fetch(words, scales, full, 0, 0, 0, lo < hi, I // 32, W, 1)
    gdc_wait()  # for stage 1; the ring is already being filled
    for b in range(lo // TILES, (hi + TILES - 1) // TILES):
        e, start, end = block_of(starts_ptr, counter_ptr, b, num_pairs)
        barrier()  # everybody is done with the last block's pairs
        scale1, scale2 = _gather(
            a_ptr, a_scale_ptr, pairs_ptr, start, end, x, I // 32, SHIFT, N1, N2, W
        )
        where1 = _where(pairs_ptr, weights_ptr, start, end, N1, W)
        columns_ready()
        for tile in range(gl.maximum(lo - b * TILES, 0), gl.minimum(hi - b * TILES, TILES)):
            acc1, acc2, s0, s1, s2, s3, reference, v, slot, phase = wide_row(
                s0, s1, s2, s3, reference, v, words, scales, full, empty, slot, phase, x,
                b * TILES + tile < hi - 1, I // 32, SLOTS, N1, N2, W, 1, AHEAD,
            )  # fmt: skip
            row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _store_layout(W)))
            bias = row
            if HAS_BIAS:
                bias = gl.load(bias_ptr + e * H + row, mask=row < H, other=0.0)
            if N2 > 0:  # with two accumulators the registers do not hold them
                where1 = _where(pairs_ptr, weights_ptr, start, end, N1, W)
            _finish(acc1, scale1, bias, where1, part_ptr, row, H, HAS_BIAS, N1, W)
            if N2 > 0:
                where2 = _where(pairs_ptr, weights_ptr, start + N1, end, N2, W)
                _finish(acc2, scale2, bias, where2, part_ptr, row, H, HAS_BIAS, N2, W)


@read_once
def stage2_wide(
    desc_w,  # w2: see fp8_launch.descriptors
    desc_s,
    a_ptr,  # what stage1_wide leaves, as words
    a_scale_ptr,  # as it leaves them
    bias_ptr,  # [E, H] fp32
    weights_ptr,  # [pairs] fp32
    pairs_ptr,  # these three: prepare.list_pairs
    starts_ptr,
    counter_ptr,
    part_ptr,  # [pairs, H] bf16
    num_pairs,
    H: gl.constexpr,
    I: gl.constexpr,
    SHIFT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    W: gl.constexpr,
    SLOTS: gl.constexpr,
    AHEAD: gl.constexpr,  # decode a quad while the one before is multiplied
):
    ROWS: gl.constexpr = 16 * W
    TILES: gl.constexpr = (H + ROWS - 1) // ROWS
    STEPS: gl.constexpr = ring_steps(I // 32, SB)
    words, scales, full, empty = make_ring(desc_w, desc_s, W, SB, 1, SLOTS)
    # The list is complete: stage 1 lets this kernel start once it has itself waited for the list.
    lo, hi = share(gl.load(counter_ptr) * TILES)
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                words, scales, full, empty, lo, hi, a_ptr, a_scale_ptr, bias_ptr, weights_ptr, pairs_ptr,
                starts_ptr, counter_ptr, part_ptr, num_pairs, H, I, SHIFT, HAS_BIAS, N1, N2, W, SLOTS, AHEAD,
            )),
            (produce, (
                desc_w, desc_s, words, scales, full, empty, starts_ptr, num_pairs, lo, hi, TILES, W, STEPS, SLOTS,
                W, SB, 1,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
