"""The product of the wide form (A8W4, A4W4): 16 to 48 tokens of an expert in shared memory, weights through a ring
(Gluon).

**Weights** come through the ring of ``ring`` and become e5m2 as in ``mx_prefill``: lane ``4 * g + t`` reads the 16
bytes of K block ``4 * q + t`` of its two rows, which have one scale each, so that two registers hold the eight
magnitudes at that scale and ``prmt`` looks four codes up at a time. A slot's scales are taken relative to a row's
largest in the slot, 26 binades down; that one is applied to what the slot's products add up to, four K blocks in an
accumulator of their own (fp8 products are added with fewer bits than float32 has).

**Tokens** are e4m3 with one scale a row (``wide_prepare``), so that the loop has none of theirs, in ``mx_prefill``'s
order of columns. 40 or 48 tokens are multiplied as 64: the others are the next quad's, and their sums are dropped.

**Order.** A quad of K blocks is decoded while the products of the one before run. A slot is released behind the start
of its last products, which read registers, and what the next slot holds is looked at before those are waited for.

E8M0 0 counts as 0 where it is 26 binades below its row's largest in the slot, 255 makes its whole row NaN.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton.hopper.fp8 import REINTERPRET_IS_PUBLIC, acc_layout
from sglang_aiter_moe.portable.triton.hopper.mx_prefill import (
    decode_step,
    operand,
    reference_factor,
)
from sglang_aiter_moe.portable.triton.hopper.prefill import lane_layout
from sglang_aiter_moe.portable.triton.hopper.ring import next_slot, ring_steps


@gluon.constexpr_function
def _bits(n):
    return [1 << b for b in range(n.bit_length() - 1)]


SB = gl.constexpr(16)
"""K blocks of a slot."""


OVERLAPS = gl.constexpr(not REINTERPRET_IS_PUBLIC)
"""Whether a product may read columns past its tokens, the next quad's: Triton 3.9 refuses a view that reaches past
what it views, and the quads have room for all columns there."""


@triton.constexpr_function
def product_columns(tokens):
    """Columns of the product: a power of two; those past the tokens nobody reads."""
    return max(8, 1 << (tokens - 1).bit_length())


@triton.constexpr_function
def quads_of(blocks):
    """Groups of 128 columns."""
    return (blocks + 3) // 4


@gluon.constexpr_function
def words_layout(W, BH):
    """``[BH, W / BH, 8, 32]`` words: four K blocks of W tiles of 16 rows. A lane's two rows are of two halves (gate and
    up) or of two neighbouring tiles."""
    rows = [1, 0, 0, 0] if BH == 2 else [0, 1, 0, 0]
    tiles = _bits(W // 2) if BH == 2 else _bits(W)[1:]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], rows],
        lane_bases=[[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16]],
        warp_bases=[[0, 0, 1, 0], *[[0, b, 0, 0] for b in tiles]],
        block_bases=[],
        shape=[BH, W // BH, 8, 32],
    )


@gluon.constexpr_function
def scales_layout(W, BH):
    """``[BH, W / 2 / BH, 4, 128]`` scale bytes of a slot, as the lanes of ``words_layout`` need them."""
    rows = [1, 0, 0, 0] if BH == 2 else [0, 0, 0, 1]
    groups = [[0, b, 0, 0] for b in _bits(W // 2 // BH)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 2], [0, 0, 2, 0], rows],
        lane_bases=[[0, 0, 0, 64], [0, 0, 1, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16]],
        warp_bases=[[0, 0, 0, 32], *([[0, 0, 0, 1]] if BH == 2 else []), *groups],
        block_bases=[],
        shape=[BH, W // 2 // BH, 4, 128],
    )


@gluon.jit
def views(words, scales, W: gl.constexpr, SLOTS: gl.constexpr, BH: gl.constexpr):
    """The ring's words as words and its scales as bytes."""
    I32: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
    U8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
    if REINTERPRET_IS_PUBLIC:
        w = words.reinterpret(gl.int32, [SLOTS, BH, W // BH, 2 * SB, 32], I32)
        s = scales.reinterpret(gl.uint8, [SLOTS, BH, W // 2 // BH, SB // 4, 128], U8)
    else:
        w = words._reinterpret(gl.int32, [SLOTS, BH, W // BH, 2 * SB, 32], I32)
        s = scales._reinterpret(gl.uint8, [SLOTS, BH, W // 2 // BH, SB // 4, 128], U8)
    return w, s


@gluon.jit
def load_words(words, q: gl.constexpr, W: gl.constexpr, BH: gl.constexpr):
    """Words ``[16 W, 16]`` of a slot's quad of blocks."""
    v = words.slice(8 * q, 8, dim=2).load(words_layout(W, BH))
    if BH == 2:
        v = gl.permute(gl.reshape(v, (2, W // 2, 4, 2, 8, 4)), (1, 3, 0, 4, 2, 5))
    else:
        v = gl.permute(gl.reshape(v, (W // 2, 2, 4, 2, 8, 4)), (0, 3, 1, 4, 2, 5))
    return gl.convert_layout(
        gl.reshape(v, (16 * W, 16)), lane_layout(16 * W, W, 4), assert_trivial=True
    )


@gluon.jit
def load_scales(scales, W: gl.constexpr, BH: gl.constexpr):
    """A slot's scale bytes, int32 ``[16 W, 4]`` for each quad of blocks."""
    s = scales.load(scales_layout(W, BH))
    # Bytes of a word: a row and its partner of block j, then of block j + 4.
    if BH == 2:
        s = gl.reshape(s, (2, W // 4, 2, 2, 2, 2, 8, 2, 2))
        s = gl.permute(s, (1, 8, 5, 0, 6, 3, 4, 2, 7))
    else:
        s = gl.reshape(s, (W // 2, 2, 2, 2, 2, 8, 2, 2))
        s = gl.permute(s, (0, 4, 7, 5, 2, 3, 1, 6))
    R: gl.constexpr = 16 * W
    even, odd = gl.split(gl.reshape(s, (R, 4, 2, 2)))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return _scale(a, R, W), _scale(b, R, W), _scale(c, R, W), _scale(d, R, W)


@gluon.jit
def _scale(s, R: gl.constexpr, W: gl.constexpr):
    return gl.convert_layout(s.to(gl.int32), lane_layout(R, W, 1), assert_trivial=True)


@gluon.jit
def _start(words, scale, reference, x, q, T: gl.constexpr, W: gl.constexpr):
    """Decodes a quad of blocks and starts its products, in an accumulator of their own."""
    R: gl.constexpr = 16 * W
    N: gl.constexpr = product_columns(T)
    ops = decode_step(words, scale, reference, R, W)
    columns = rows_at(x, q, N, T, 0)
    part = warpgroup_mma_init(gl.zeros([R, N], gl.float32, layout=acc_layout(N, W)))
    for u in gl.static_range(4):
        at = columns.slice(u * 32, 32, dim=1).permute((1, 0))
        part = warpgroup_mma(operand(ops[u], N, R, W), at, part, use_acc=u > 0, is_async=True)
    return part


@gluon.jit
def _add(acc, part, factor, LEFT: gl.constexpr):
    """The sum plus a quad's products, of which LEFT quads are still on their way."""
    return acc + warpgroup_mma_wait(4 * LEFT, deps=[part]) * factor


@gluon.jit
def fetch(
    words,
    scales,
    full,
    slot,
    phase,
    step,
    more,
    K_BLOCKS: gl.constexpr,
    W: gl.constexpr,
    BH: gl.constexpr,
):
    """Waits for a slot unless there are no more: its scales, a row's largest, and the words of its first quad."""
    R: gl.constexpr = 16 * W
    mbarrier.wait(full.index(slot), phase, pred=more)
    s0, s1, s2, s3 = load_scales(scales.index(slot), W, BH)
    if K_BLOCKS % SB != 0:  # scale rows end in padding, which may be anything
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))[None, :]
        left = K_BLOCKS - step * SB - t
        s0 = gl.where(left > 0, s0, 0)
        s1 = gl.where(left > 4, s1, 0)
        s2 = gl.where(left > 8, s2, 0)
        s3 = gl.where(left > 12, s3, 0)
    reference = gl.max(gl.maximum(gl.maximum(s0, s1), gl.maximum(s2, s3)), axis=1)
    return s0, s1, s2, s3, reference, load_words(words.index(slot), 0, W, BH)


@gluon.jit
def _step(
    acc, s0, s1, s2, s3, reference, v, words, scales, full, empty, slot, phase, x, step, more,
    QUADS: gl.constexpr, K_BLOCKS: gl.constexpr, SLOTS: gl.constexpr, T: gl.constexpr, W: gl.constexpr,
    BH: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """The sum plus QUADS quads of a slot, and what ``fetch`` finds in the next."""
    STEPS: gl.constexpr = ring_steps(K_BLOCKS, SB)
    factor = reference_factor(reference, product_columns(T), W)
    s = (s0, s1, s2, s3)
    first = step * (SB // 4)
    part = 0
    for q in gl.static_range(QUADS):
        coming = load_words(words.index(slot), min(q + 1, QUADS - 1), W, BH)
        quad = first + q
        if AHEAD and q > 0:  # a quad is decoded while the products of the one before run
            following = _start(v, s[q], reference, x, quad, T, W)
            acc = _add(acc, part, factor, 1)
            part = following
        else:
            part = _start(v, s[q], reference, x, quad, T, W)
        if not AHEAD and q < QUADS - 1:
            acc = _add(acc, part, factor, 0)
        v = coming
    # What was read must have arrived before the next copy may overwrite it; the last products read registers.
    fence_async_shared()
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, SLOTS)
    s0, s1, s2, s3, reference, v = fetch(
        words, scales, full, slot, phase, (step + 1) % STEPS, more | (step < STEPS - 1), K_BLOCKS, W, BH
    )  # fmt: skip
    acc = _add(acc, part, factor, 0)
    return acc, s0, s1, s2, s3, reference, v, slot, phase


@gluon.jit
def wide_row(
    s0, s1, s2, s3, reference, v, words, scales, full, empty, slot, phase, x, more, K_BLOCKS: gl.constexpr,
    SLOTS: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr, BH: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One row tile ``[16 W, N1]`` and ``[16 W, N2]``, what ``fetch`` finds in the next (``more``) tile's first slot,
    and which that is.

    Rows: 8 of each of two in turn, gate and up or tiles of 16 rows."""
    STEPS: gl.constexpr = ring_steps(K_BLOCKS, SB)
    LAST: gl.constexpr = quads_of(K_BLOCKS) - (STEPS - 1) * (SB // 4)
    # Those that are not in the loop: the last one where it holds fewer quads, and what would leave a loop of one step,
    # which does not build in Triton 3.6.
    APART: gl.constexpr = STEPS if STEPS <= 2 else int(LAST < SB // 4)
    R: gl.constexpr = 16 * W
    N: gl.constexpr = product_columns(N1 + N2)
    acc = gl.zeros([R, N], gl.float32, layout=acc_layout(N, W))
    for step in range(STEPS - APART):
        acc, s0, s1, s2, s3, reference, v, slot, phase = _step(
            acc, s0, s1, s2, s3, reference, v, words, scales, full, empty, slot, phase, x, step, more, SB // 4,
            K_BLOCKS, SLOTS, N1 + N2, W, BH, AHEAD,
        )  # fmt: skip
    for step in gl.static_range(STEPS - APART, STEPS):
        acc, s0, s1, s2, s3, reference, v, slot, phase = _step(
            acc, s0, s1, s2, s3, reference, v, words, scales, full, empty, slot, phase, x, step, more,
            LAST if step == STEPS - 1 else SB // 4, K_BLOCKS, SLOTS, N1 + N2, W, BH, AHEAD,
        )  # fmt: skip
    acc1 = acc
    acc2 = acc
    if N2 > 0:
        acc1, acc2 = _halves(acc, N // 2, W)
        if N2 < N // 2:
            acc2 = _halves(acc2, N // 4, W)[0]
            if N2 < N // 4:
                acc2 = _halves(acc2, N // 8, W)[0]
    return acc1, acc2, s0, s1, s2, s3, reference, v, slot, phase


@gluon.jit
def _halves(acc, N: gl.constexpr, W: gl.constexpr):
    """``[16 W, 2 N]`` to the first and the last N columns."""
    a, b = gl.split(gl.permute(gl.reshape(acc, (16 * W, 2, N)), (0, 2, 1)))
    L: gl.constexpr = acc_layout(N, W)
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(
        b, L, assert_trivial=True
    )


@gluon.jit
def shared_rows(QUADS: gl.constexpr, T: gl.constexpr):
    """Room for T tokens of QUADS quads of columns, quad after quad."""
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    N: gl.constexpr = product_columns(T)
    if OVERLAPS:
        return gl.allocate_shared_memory(
            gl.float8e4nv, [(QUADS * T + N - T) // 8, 8, 128], L
        )  # eight rows at a time
    else:
        return gl.allocate_shared_memory(gl.float8e4nv, [QUADS, N, 128], L)


@gluon.jit
def rows_at(smem, q, N: gl.constexpr, T: gl.constexpr, FIRST: gl.constexpr):
    """``[N, 128]`` of ``shared_rows``: quad q from token FIRST on; with more than T tokens the next quad's as well."""
    if OVERLAPS:
        eight = smem.index(q * (T // 8) + FIRST // 8)
        return eight._reinterpret(eight.dtype, [N, 128], eight.layout)
    elif product_columns(T) == N:
        return smem.index(q)
    else:
        return smem.index(q).slice(FIRST, N, dim=0)


@gluon.jit
def words_at(smem, q, N: gl.constexpr, T: gl.constexpr, FIRST: gl.constexpr):
    """The same as words ``[N, 32]``."""
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    if OVERLAPS:
        return smem.index(q * (T // 8) + FIRST // 8)._reinterpret(gl.int32, [N, 32], L)
    else:
        return rows_at(smem, q, N, T, FIRST).reinterpret(gl.int32, [N, 32], L)


@gluon.jit
def column(start, end, N: gl.constexpr, L: gl.constexpr):
    """Of N columns of a block: where the pair is listed, and whether there is one."""
    at = start + gl.arange(0, N, layout=L)
    return at, at < end


@gluon.constexpr_function
def acc_columns(N, W):
    return gl.SliceLayout(0, acc_layout(N, W))
