"""Decoders of the shared prefill form: words of a slot become e5m2, in the layout that ``wgmma`` reads (Gluon).

**Rows.** Chunks of 16 bytes, one row and K block each, are numbered as they lie in memory: tile of 16 rows (4 x 2), K
block, half of the tile, row. The columns of a step stay in their natural order. Which row of the product a row becomes
is free (``product_rows``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sglang_aiter_moe.portable.triton.hopper.fp8 import barrier
from sglang_aiter_moe.portable.triton.hopper.mx_prefill import SPAN, decode
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_rings import FACTS, ROWS, advance
from sglang_aiter_moe.portable.triton.hopper.whole_parts import view


@gluon.constexpr_function
def chunk_bases(DW, BESIDE):
    """Registers, lanes and warps of a chunk's coordinates (tile / 2, tile % 2, K block, half, row)."""
    r0, r1, r2 = ([0, 0, 0, 0, b] for b in (1, 2, 4))
    hi, k0, k1, even = [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0]
    # Eight neighbouring lanes write rows that differ modulo 8: no two to the same banks.
    lanes = [r1, r2, hi, r0, k0] if BESIDE else [r0, r1, r2, hi, k0]
    tiles = [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]]
    if DW == 8:
        return [k1], lanes, [even, *tiles]
    return [k1, even], lanes, tiles


@gluon.constexpr_function
def chunks(DW, BESIDE):
    """``[4, 2, 4, 2, 8]``."""
    registers, lanes, warps = chunk_bases(DW, BESIDE)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, 2, 4, 2, 8])


@gluon.constexpr_function
def chunk_words(DW, BESIDE):
    """``[4, 2, 4, 2, 8, 4]``."""
    registers, lanes, warps = chunk_bases(DW, BESIDE)
    first = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2]]
    return gl.DistributedLinearLayout(
        first + [[*b, 0] for b in registers],
        [[*b, 0] for b in lanes],
        [[*b, 0] for b in warps],
        [],
        [4, 2, 4, 2, 8, 4],
    )


@gluon.constexpr_function
def word_layout(DW, BESIDE, BH):
    """The same of a slot's words ``[BH, 8 / BH, 8, 32]``: lines of 8 rows of a K block."""

    def place(b):
        tile = b[0] * 2 + b[1]
        half, tile = (tile // 4, tile % 4) if BH == 2 else (0, tile)
        return [half, tile, b[2] * 2 + b[3], b[4] * 4]

    registers, lanes, warps = chunk_bases(DW, BESIDE)
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]] + [place(b) for b in registers],
        [place(b) for b in lanes],
        [place(b) for b in warps],
        [],
        [BH, 8 // BH, 8, 32],
    )


@gluon.constexpr_function
def scale_layout(DW, BESIDE, BH):
    """A slot's scale words ``[BH, 4 / BH, 2, 32]`` of the same chunks: one for two tiles."""

    def place(b):
        half, group = (b[0] // 2, b[0] % 2) if BH == 2 else (0, b[0])
        return [half, group, b[2] // 2, b[2] % 2 * 16 + b[3] * 8 + b[4]]

    registers, lanes, warps = chunk_bases(DW, BESIDE)
    return gl.DistributedLinearLayout(
        [place(b) for b in registers if not b[1]],
        [place(b) for b in lanes],
        [place(b) for b in warps],
        [],
        [BH, 4 // BH, 2, 32],
    )


@gluon.jit
def product_rows(v, K: gl.constexpr, BH: gl.constexpr, BESIDE: gl.constexpr):
    """``[4, 2, 2, 8, K]``, tiles, halves and rows in memory's order, to rows of the product ``[128, K]``.

    Stage 1: a lane's two rows are gate and up of the same i. Stage 2 (BESIDE): neighbours."""
    if BESIDE:
        v = gl.permute(gl.reshape(v, (4, 2, 2, 4, 2, K)), (0, 1, 4, 2, 3, 5))
    elif BH == 2:
        v = gl.permute(gl.reshape(v, (2, 2, 2, 2, 8, K)), (1, 2, 3, 0, 4, 5))
    else:
        v = gl.permute(v, (0, 2, 1, 3, 4))
    return gl.reshape(v, (128, K))


@gluon.jit
def one_word(v, DW: gl.constexpr, BESIDE: gl.constexpr):
    return gl.convert_layout(v, chunks(DW, BESIDE), assert_trivial=True)


@gluon.jit
def decode_slot(
    words, scales, reference, step, BH: gl.constexpr, BESIDE: gl.constexpr, DW: gl.constexpr
):
    """e5m2 bytes of a step as words ``[128, 32]``, rows of the product."""
    L: gl.constexpr = chunks(DW, BESIDE)
    v = gl.reshape(words.load(word_layout(DW, BESIDE, BH)), (4, 2, 4, 2, 8, 4))
    v = gl.convert_layout(v, chunk_words(DW, BESIDE), assert_trivial=True)
    s = gl.reshape(scales.load(scale_layout(DW, BESIDE, BH)), (4, 4, 2, 8))
    s = gl.expand_dims(gl.convert_layout(s, gl.SliceLayout(1, L), assert_trivial=True), 1)
    even = gl.arange(
        0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L))))
    )
    shift = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(even, 0), 2), 3), 4) * 8
    byte = (s >> (shift + step % 2 * 16)) & 255
    below = gl.expand_dims(reference, 2) - byte
    b = 116 - below * 4  # mx_prefill.tables
    low = gl.where(below <= SPAN, b * 0x01010100 - 0x02040800, 0)
    high = gl.where(below <= SPAN, b * 0x01010101 + 0x06040200, 0)
    table = (low, high)
    a, c = gl.split(gl.reshape(v, (4, 2, 4, 2, 8, 2, 2)))
    w0, w2 = gl.split(a)
    w1, w3 = gl.split(c)
    p0 = decode(one_word(w0, DW, BESIDE), table)
    p1 = decode(one_word(w1, DW, BESIDE), table)
    p2 = decode(one_word(w2, DW, BESIDE), table)
    p3 = decode(one_word(w3, DW, BESIDE), table)
    lo = gl.join(gl.join(p0[0], p0[1]), gl.join(p1[0], p1[1]))  # [.., h, w0]
    hi = gl.join(gl.join(p2[0], p2[1]), gl.join(p3[0], p3[1]))
    v = gl.permute(gl.join(lo, hi), (0, 1, 3, 4, 2, 7, 6, 5))  # [.., hi, row, K block, w1, w0, h]
    return product_rows(gl.reshape(v, (4, 2, 2, 8, 32)), 32, BH, BESIDE)


@gluon.jit
def decode_tile(
    words_ring, operand_ring, facts, here, here_phase, slot, phase, out, out_phase, STEPS: gl.constexpr,
    BH: gl.constexpr, BESIDE: gl.constexpr, PS: gl.constexpr, AS: gl.constexpr, DW: gl.constexpr,
):  # fmt: skip
    """All steps of a row tile, and where the rings stand then."""
    words, scales, bars = words_ring
    full, empty = bars
    operands, out_bars = operand_ring
    out_full, out_empty = out_bars
    W32: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    as_words = view(operands, gl.int32, [AS, ROWS, 32], W32)
    fact_full, fact_empty = facts[4]
    mbarrier.wait(fact_full.index(here), here_phase)
    reference = facts[0].index(here).load(gl.SliceLayout(2, chunks(DW, BESIDE)))
    for step in range(STEPS):
        mbarrier.wait(full.index(slot), phase)
        v = decode_slot(words.index(slot), scales.index(slot), reference, step, BH, BESIDE, DW)
        mbarrier.wait(out_empty.index(out), out_phase ^ 1)
        as_words.index(out).store(v)
        # Words have arrived before they may be overwritten, and what was written is there for the tensor cores.
        fence_async_shared()
        barrier()
        mbarrier.arrive(out_full.index(out))
        mbarrier.arrive(empty.index(slot))
        slot, phase = advance(slot, phase, PS)
        out, out_phase = advance(out, out_phase, AS)
    mbarrier.arrive(fact_empty.index(here))
    here, here_phase = advance(here, here_phase, FACTS)
    return here, here_phase, slot, phase, out, out_phase
