"""The product of the fp8 prefill form (A8W4, A4W4): fp8 ``wgmma`` with both block scales inside the operands (Gluon).

**Weights** become e5m2. A row's scales are taken relative to the largest of them, its reference: with it at 2**13, a
number of E2M1 times a scale is exact in e5m2 for scales down to 26 binades below, and smaller ones count as 0. All 32
weights of a lane and step have one scale, so that two registers hold the eight magnitudes at that scale, and ``prmt``
looks four codes up at a time: 9 instructions for 8 weights, against 19 and a multiplication each for bf16. The
reference is applied to the result.

**Tokens** are e4m3, quantised as the mode asks and then brought to one scale in each group of columns
(``mx_prefill_prepare``). A group's products go to an accumulator of their own, which is added to the sum times the
token's scale: N / 2 multiply-adds a lane for 2 N cycles of matrix time, which also keeps the sum in full float32
(fp8 ``wgmma`` adds with fewer bits).

**Order.** Lane ``4 * g + t`` loads the 16 bytes of K block ``4 * step + t`` of its two rows, as in ``prefill``. Word i
feeds product i: nibbles 0 to 3 are the four bytes of one operand register, 4 to 7 of the other, so that column
``32 t + 8 i + 4 h + j`` of a step is stored as ``32 i + 16 h + 4 t + j``.

E8M0 0 counts as 0 where it is 26 binades below its row's reference, 255 makes its whole row NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    acc_layout,
    async_load,
    barrier,
    operand_layout,
)
from sglang_aiter_moe.portable.triton.hopper.prefill import eight_times, four_words, lane_layout

STAGES = gl.constexpr(4)
REFERENCE_EXPONENT = gl.constexpr(13)
SPAN = gl.constexpr(26)
"""Binades below its row's reference down to which a scale is exact."""

DECODE = gl.constexpr(
    "{ .reg .b32 m, s, p;"
    "and.b32 m, $2, 0x77777777; shl.b32 s, $2, 4;"
    "prmt.b32 p, $3, $4, m; shr.u32 m, m, 16; prmt.b32 m, $3, $4, m;"
    "prmt.b32 $0, s, $2, 0x5140; prmt.b32 $1, s, $2, 0x7362;"
    "lop3.b32 $0, $0, 0x80808080, p, 0xEA; lop3.b32 $1, $1, 0x80808080, m, 0xEA; }"
)


@gluon.constexpr_function
def chunk_layout(W):
    """Bytes ``[N, 128]`` of a copy: 16 a lane."""
    return gl.BlockedLayout([1, 16], [4, 8], [W, 1], [1, 0])


@gluon.constexpr_function
def column_layout(W):
    return gl.BlockedLayout([1], [32], [W], [0])


@gluon.constexpr_function
def words_together(k_blocks):
    """Scale words of a lane and row that ``scale_words`` loads at once: a power of two."""
    return min(16, 1 << ((k_blocks + 7) // 8 - 1).bit_length())


@gluon.jit
def scale_words(scale_ptr, at, begin, K_BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Words int32 ``[R, 4 P]`` of K blocks 8 * begin and on, of the rows whose first word is at ``at [R]``.

    A word holds four scales: this row and its partner of block j, then both of block j + 4."""
    P: gl.constexpr = words_together(K_BLOCKS)
    L: gl.constexpr = lane_layout(R, W, P)
    first = gl.convert_layout(at, gl.SliceLayout(1, L), assert_trivial=True)
    c = gl.arange(0, 4 * P, layout=gl.SliceLayout(0, L))
    block = (begin + c % P) * 8 + c // P
    at = first[:, None] + ((begin + c % P) * 64 + c // P * 16)[None, :]
    return gl.load(scale_ptr + at, mask=(block < K_BLOCKS)[None, :], other=0)


@gluon.jit
def largest_scale(word, byte, begin, K_BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """int32 ``[R]``: the largest of a row's scales in its words; ``byte [R]``: which of a word's is the row's."""
    P: gl.constexpr = words_together(K_BLOCKS)
    L: gl.constexpr = lane_layout(R, W, P)
    shift = gl.convert_layout(byte * 8, gl.SliceLayout(1, L), assert_trivial=True)[:, None]
    c = gl.arange(0, 4 * P, layout=gl.SliceLayout(0, L))
    later = (begin + c % P) * 8 + c // P + 4
    word = word >> shift
    second = gl.where((later < K_BLOCKS)[None, :], word >> 16 & 255, 0)
    return gl.max(gl.maximum(word & 255, second), axis=1)


@gluon.jit
def row_reference(scale_ptr, at, byte, K_BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """The largest scale byte of each row, int32 ``[R]``."""
    P: gl.constexpr = words_together(K_BLOCKS)
    word = scale_words(scale_ptr, at, 0, K_BLOCKS, R, W)
    largest = largest_scale(word, byte, 0, K_BLOCKS, R, W)
    for begin in gl.static_range(P, (K_BLOCKS + 7) // 8, P):
        word = scale_words(scale_ptr, at, begin, K_BLOCKS, R, W)
        largest = gl.maximum(largest, largest_scale(word, byte, begin, K_BLOCKS, R, W))
    return largest


@gluon.jit
def reference_factor(reference, N: gl.constexpr, W: gl.constexpr):
    """float32 ``[R, 1]``: what the sum of a row is short of, for an accumulator of N columns. A row whose reference is
    below 2**-114 counts as 0."""
    bits = gl.where(reference == 255, 255, gl.maximum(reference - REFERENCE_EXPONENT, 0)) << 23
    factor = gl.where(reference == 255, bits | 0x400000, bits).to(gl.float32, bitcast=True)
    return gl.convert_layout(factor, gl.SliceLayout(1, acc_layout(N, W)), assert_trivial=True)[
        :, None
    ]


@gluon.jit
def tables(scale, reference, R: gl.constexpr, W: gl.constexpr):
    """The magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times scale bytes ``[R, 4]``, as four e5m2 bytes each."""
    L: gl.constexpr = gl.SliceLayout(1, lane_layout(R, W, 1))
    below = gl.convert_layout(reference, L, assert_trivial=True)[:, None] - scale
    b = 116 - below * 4  # twice the scale: exponent field 29 and downwards
    low = gl.where(below <= SPAN, b * 0x01010100 - 0x02040800, 0)
    high = gl.where(below <= SPAN, b * 0x01010101 + 0x06040200, 0)
    return low, high


@gluon.jit
def decode(word, table):
    """Words int32 ``[R, 4]`` and their tables to e5m2 bytes of nibbles 0 to 3 and 4 to 7, int32 ``[R, 4]`` each."""
    return gl.inline_asm_elementwise(
        DECODE,
        "=r,=r,r,r,r",
        [word, table[0], table[1]],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def operand(pair, N: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """What ``decode`` gave as an e5m2 operand ``[R, 32]``: the same registers.

    Bytes that are carried through a loop would be taken apart and put together again, so words are."""
    a = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $10;",
        "=r,=r" + ",r" * 16,
        [eight_times(pair[0], R, W), eight_times(pair[1], R, W)],
        dtype=gl.float8e5,
        is_pure=True,
        pack=8,
    )
    a = gl.permute(gl.reshape(a, (R, 4, 2, 4)), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(a, (R, 32)), operand_layout(N, W), assert_trivial=True)


@gluon.constexpr_function
def line_layout(R, W):
    """``[R / 2, 32]`` words of a step, 8 rows of a K block (a line of 128 bytes) side by side: 16 bytes a lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]] + [[4 * W << b, 0] for b in range((R // (8 * W)).bit_length() - 1)],
        lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[4 << b, 0] for b in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[R // 2, 32],
    )  # fmt: skip


@gluon.constexpr_function
def read_layout(R, W, BESIDE):
    """The same as an operand's lanes read it, R = 16 W: K block t and rows g and g + 8 of 16, or (BESIDE) 2 g and
    2 g + 1."""
    rows = [[0, 8], [0, 16], [4, 0]] if BESIDE else [[0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4] if BESIDE else [4, 0]],
        lane_bases=[[1, 0], [2, 0], *rows],
        warp_bases=[[8 << b, 0] for b in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[R // 2, 32],
    )


@gluon.jit
def weight_ring(R: gl.constexpr):
    """Shared memory for the words of STAGES steps."""
    L: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])
    return gl.allocate_shared_memory(gl.int32, [STAGES, R // 2, 32], L)


@gluon.jit
def copy_weights(ring, slot, lines, step, K_BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Starts the copy of K blocks 4 * step .. + 3 from ``lines [R / 2, 32]``, which point at the first step; past the
    last block it is copied again. A line of 128 bytes belongs to 8 neighbouring lanes: cp.async takes each other
    16 bytes for a sector of its own."""
    at = lines + step * 256
    if K_BLOCKS % 4 != 0:
        q = gl.arange(0, R // 2, layout=gl.SliceLayout(1, line_layout(R, W)))
        at -= (gl.maximum(step * 4 + q % 4 - (K_BLOCKS - 1), 0) * 64)[:, None]
    async_load(ring.index(slot), at)


@gluon.jit
def read_weights(ring, slot, BESIDE: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Words ``[R, 16]`` of a step."""
    v = ring.index(slot).load(read_layout(R, W, BESIDE))
    if BESIDE:
        v = gl.permute(gl.reshape(v, (R // 16, 2, 4, 4, 2, 4)), (0, 4, 1, 3, 2, 5))
    else:
        v = gl.permute(gl.reshape(v, (R // 16, 2, 4, 8, 4)), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(v, (R, 16)), lane_layout(R, W, 4), assert_trivial=True)


@gluon.jit
def load_scales(scales, shift, step, K_BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Scale bytes ``[R, 4]`` of a step; past the last block they are 0."""
    s = scales + step // 2 * 64
    if K_BLOCKS % 4 == 0:
        b = gl.load(s)
    else:
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))
        b = gl.load(s, mask=(step * 4 + t < K_BLOCKS)[None, :], other=0)
    return b >> (shift + step % 2 * 16)[:, None] & 255


@gluon.jit
def decode_step(words, scale, reference, R: gl.constexpr, W: gl.constexpr):
    """The four products' bytes of a step."""
    w0, w1, w2, w3 = four_words(words, R, W)
    table = tables(scale, reference, R, W)
    return decode(w0, table), decode(w1, table), decode(w2, table), decode(w3, table)


@gluon.jit
def settled(ops, zero, R: gl.constexpr, W: gl.constexpr):
    """``settled_pair`` of a step."""
    return (
        settled_pair(ops[0], zero, R, W),
        settled_pair(ops[1], zero, R, W),
        settled_pair(ops[2], zero, R, W),
        settled_pair(ops[3], zero, R, W),
    )


@gluon.jit
def settled_pair(pair, zero, R: gl.constexpr, W: gl.constexpr):
    """Bytes that were decoded while products ran, defined again where none is in flight: else ptxas (C7513) sees
    registers that a product reads defined while products run, and waits for each. ``zero`` is 0, but must not look so.
    """
    z = gl.full([R, 4], zero, gl.int32, layout=lane_layout(R, W, 1))
    return gl.inline_asm_elementwise(
        "xor.b32 $0, $2, $4; xor.b32 $1, $3, $4;",
        "=r,=r,r,r,r",
        [pair[0], pair[1], z],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def start_group(ops, columns, slot, R: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """Starts a step's four products, in an accumulator of their own."""
    part = warpgroup_mma_init(gl.zeros([R, N], gl.float32, layout=acc_layout(N, W)))
    for u in gl.static_range(4):
        a = operand(ops[u], N, R, W)
        x = columns[0].index(slot).slice(u * 32, 32, dim=1).permute((1, 0))
        part = warpgroup_mma(a, x, part, use_acc=u > 0, is_async=True)
    return part


@gluon.jit
def add_group(acc, part, columns, slot, N: gl.constexpr, W: gl.constexpr):
    """Adds the products times the tokens' scales.

    No product is left in flight: with one that crosses a loop's end ptxas (CUDA 12.8, C7514) waits for each."""
    scale = columns[1].index(slot).load(gl.SliceLayout(0, acc_layout(N, W)))
    part = warpgroup_mma_wait(0, deps=[part])
    acc += part * scale[None, :]
    return warpgroup_mma_wait(
        0, deps=[acc]
    )  # additions that come after the next product's start would serialise all


@gluon.jit
def no_sums(R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr):
    """Zeros; without N2 the second one is a stand-in that nothing reads."""
    acc1 = gl.zeros([R, N1], gl.float32, layout=acc_layout(N1, W))
    if N2 > 0:
        return acc1, gl.zeros([R, N2], gl.float32, layout=acc_layout(N2, W))
    else:
        return acc1, 0


@gluon.jit
def finish(acc1, acc2, reference, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr):
    acc1 = acc1 * reference_factor(reference, N1, W)
    if N2 > 0:
        acc2 = acc2 * reference_factor(reference, N2, W)
    return acc1, acc2


@gluon.jit
def copy_tokens(x_ptr, x_scale_ptr, at, columns, slot, step):
    """Starts the copy of columns 128 * step .. + 127 and of their scales, of the rows that start at ``at``: elements
    ``[N, 128]``, scales ``[N]``."""
    async_load(columns[0].index(slot), x_ptr + (at[0] + step * 128))
    async_load(columns[1].index(slot), x_scale_ptr + (at[1] + step))


@gluon.jit
def copy_step(
    ring, columns1, columns2, lines, x_ptr, x_scale_ptr, at1, at2, step, K_BLOCKS: gl.constexpr, R: gl.constexpr,
    N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    slot = step % STAGES
    copy_weights(ring, slot, lines, step, K_BLOCKS, R, W)
    copy_tokens(x_ptr, x_scale_ptr, at1, columns1, slot, step)
    if N2 > 0:
        copy_tokens(x_ptr, x_scale_ptr, at2, columns2, slot, step)


@gluon.jit
def multiply(
    lines, scale_ptr, scale_at, zero, x_ptr, x_scale_ptr, at1, at2, columns1, columns2, BESIDE: gl.constexpr,
    K_BLOCKS: gl.constexpr, R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """``[R, N1]`` and ``[R, N2]`` float32: all K blocks of R rows times the tokens at ``at1`` and ``at2``.

    A step's weights are decoded while the products of the one before run, and copied two steps before that.

    Args:
        lines: pointers ``[R / 2, 32]`` to the first step's words.
        scale_at: each row's first scale word, and which of a word's bytes is the row's.
        zero: 0 (``settled_pair``).
    """
    STEPS: gl.constexpr = (K_BLOCKS + 3) // 4
    ring = weight_ring(R)
    shift = scale_at[1] * 8
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))
    scales = scale_ptr + (scale_at[0][:, None] + (t * 16)[None, :])
    for step in gl.static_range(STAGES - 1):
        if step < STEPS:
            copy_step(
                ring, columns1, columns2, lines, x_ptr, x_scale_ptr, at1, at2, step, K_BLOCKS, R, N2, W
            )  # fmt: skip
        async_copy.commit_group()
    scale = load_scales(scales, shift, 0, K_BLOCKS, R, W)
    soon = load_scales(scales, shift, 1, K_BLOCKS, R, W)
    reference = row_reference(scale_ptr, scale_at[0], scale_at[1], K_BLOCKS, R, W)
    async_copy.wait_group(STAGES - 2)
    barrier()
    ops = decode_step(read_weights(ring, 0, BESIDE, R, W), scale, reference, R, W)
    acc1, acc2 = no_sums(R, N1, N2, W)
    for step in range(STEPS):
        # No proxy fence: it compiles to MEMBAR, which waits for the copies of the steps to come. Triton's own
        # pipelined products read what cp.async wrote after a wait and a barrier, too.
        async_copy.wait_group(STAGES - 3)
        barrier()  # this step and the next are there for all, and nobody reads the one before any more
        slot = step % STAGES
        part = start_group(ops, columns1, slot, R, N1, W)
        words = read_weights(ring, (step + 1) % STAGES, BESIDE, R, W)
        if step + STAGES - 1 < STEPS:
            copy_step(
                ring, columns1, columns2, lines, x_ptr, x_scale_ptr, at1, at2, step + STAGES - 1, K_BLOCKS, R, N2, W
            )  # fmt: skip
        async_copy.commit_group()
        following = decode_step(words, soon, reference, R, W)
        soon = load_scales(scales, shift, gl.minimum(step + 2, STEPS - 1), K_BLOCKS, R, W)
        acc1 = add_group(acc1, part, columns1, slot, N1, W)
        if N2 > 0:
            part = start_group(ops, columns2, slot, R, N2, W)
            acc2 = add_group(acc2, part, columns2, slot, N2, W)
        ops = settled(following, zero, R, W)
    async_copy.wait_group(0)
    return finish(acc1, acc2, reference, N1, N2, W)
