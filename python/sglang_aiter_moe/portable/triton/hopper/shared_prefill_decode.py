"""Weights of the shared prefill form: words of a slot as the lanes want them that multiply (Gluon).

**Rows.** Chunks of 16 bytes, one row and K block each, are numbered as they lie in memory: tile of 16 rows (2 x 2 of a
group of consumers, in stage 1 half of the rows gate and half up), K block, half of the tile, row. Lane ``4 * t + k``
takes K block k of the product's rows t and t + 8 of its warp's 16, so columns have ``mx_prefill``'s order. Which row of
the product a row becomes is free (``product_rows``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_aiter_moe.portable.triton.hopper.prefill import lane_layout

HALF = gl.constexpr(64)
"""Rows of a tile that a group of consumers has."""
WARPS = gl.constexpr(4)
"""Of a group of consumers."""


@gluon.constexpr_function
def chunk_bases(BH, BESIDE):
    """Registers, lanes and warps of a chunk's coordinates (tile / 2, tile % 2, K block, half, row)."""
    r0, r1, r2 = ([0, 0, 0, 0, b] for b in (1, 2, 4))
    pair, tile, half = [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 0]
    blocks = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0]]
    if BESIDE:
        return [r0], [*blocks, r1, r2, half], [tile, pair]
    if BH == 2:
        return [pair], [*blocks, r0, r1, r2], [half, tile]
    return [tile], [*blocks, r0, r1, r2], [half, pair]


@gluon.constexpr_function
def chunks(BH, BESIDE):
    """``[2, 2, 4, 2, 8]``."""
    registers, lanes, warps = chunk_bases(BH, BESIDE)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [2, 2, 4, 2, 8])


@gluon.constexpr_function
def word_layout(BH, BESIDE):
    """The same of a group's words ``[BH, 4 / BH, 8, 32]``: lines of 8 rows of a K block."""

    def place(b):
        tile = [b[0], b[1]] if BH == 2 else [0, b[0] * 2 + b[1]]
        return [*tile, b[2] * 2 + b[3], b[4] * 4]

    registers, lanes, warps = chunk_bases(BH, BESIDE)
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]] + [place(b) for b in registers],
        [place(b) for b in lanes],
        [place(b) for b in warps],
        [],
        [BH, 4 // BH, 8, 32],
    )


@gluon.constexpr_function
def scale_layout(BH, BESIDE):
    """A group's scale words ``[BH, 2 / BH, 4, 16]`` of the same chunks: one for two tiles."""

    def place(b):
        pair = [b[0], 0] if BH == 2 else [0, b[0]]
        return [*pair, b[2], b[3] * 8 + b[4]]

    registers, lanes, warps = chunk_bases(BH, BESIDE)
    return gl.DistributedLinearLayout(
        [place(b) for b in registers if not b[1]],
        [place(b) for b in lanes],
        [place(b) for b in warps],
        [],
        [BH, 2 // BH, 4, 16],
    )


@gluon.jit
def product_rows(v, BH: gl.constexpr, BESIDE: gl.constexpr):
    """``[4, 2, 2, 8]``, tiles, halves and rows in memory's order, to rows of the product ``[128]``.

    Stage 1: a lane's two rows are gate and up of the same i. Stage 2 (BESIDE): neighbours."""
    if BESIDE:
        v = gl.permute(gl.reshape(v, (4, 2, 2, 4, 2)), (0, 1, 4, 2, 3))
    elif BH == 2:
        v = gl.permute(gl.reshape(v, (2, 2, 2, 2, 8)), (1, 2, 3, 0, 4))
    else:
        v = gl.permute(v, (0, 2, 1, 3))
    return gl.reshape(v, (128,))


@gluon.jit
def lane_rows(v, K: gl.constexpr, BH: gl.constexpr, BESIDE: gl.constexpr):
    """``[2, 2, 4, 2, 8, K]``, a group's chunks, to ``[64, 4 * K]`` by rows of the product."""
    if BESIDE:
        v = gl.permute(gl.reshape(v, (2, 2, 4, 2, 4, 2, K)), (0, 1, 5, 3, 4, 2, 6))
    elif BH == 2:
        v = gl.permute(v, (1, 3, 0, 4, 2, 5))
    else:
        v = gl.permute(v, (0, 3, 1, 4, 2, 5))
    return gl.convert_layout(
        gl.reshape(v, (HALF, 4 * K)), lane_layout(HALF, WARPS, K), assert_trivial=True
    )


@gluon.jit
def load_slot(ring, slot, BH: gl.constexpr, BESIDE: gl.constexpr, G: gl.constexpr, g: gl.constexpr):
    """Words and scale words of group ``g``."""
    words = ring[0].index(slot * G + g)
    scales = ring[1].index(slot * G + g)
    return words.load(word_layout(BH, BESIDE)), scales.load(scale_layout(BH, BESIDE))


@gluon.jit
def lane_words(words, BH: gl.constexpr, BESIDE: gl.constexpr):
    """``[64, 16]``."""
    return lane_rows(gl.reshape(words, (2, 2, 4, 2, 8, 4)), 4, BH, BESIDE)


@gluon.jit
def lane_scales(scales, step, BH: gl.constexpr, BESIDE: gl.constexpr):
    """Scale bytes ``[64, 4]`` of a step: a word has those of two tiles and two steps."""
    L: gl.constexpr = chunks(BH, BESIDE)
    s = gl.convert_layout(
        gl.reshape(scales, (2, 4, 2, 8)), gl.SliceLayout(1, L), assert_trivial=True
    )
    tile = gl.arange(
        0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L))))
    )
    shift = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(tile, 0), 2), 3), 4) * 8
    byte = (gl.expand_dims(s, 1) >> (shift + step % 2 * 16)) & 255
    return lane_rows(gl.reshape(byte, (2, 2, 4, 2, 8, 1)), 1, BH, BESIDE)
