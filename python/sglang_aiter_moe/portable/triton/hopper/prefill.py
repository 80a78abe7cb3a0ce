"""The product of the prefill form: bf16 ``wgmma`` with the weights from registers and the tokens from shared memory
(Gluon).

**Weights.** Lane ``4 * g + t`` of a warp loads 16 bytes of its two rows: all of K block ``4 * step + t``, so that it
needs one scale a row and step. Word ``w`` of the 16 bytes feeds two K = 16 products: nibbles q and q + 4 are one bf16
pair, pairs 0 and 1 belong to the first product, 2 and 3 to the second. No code leaves the lane that loaded it. The
tokens' columns are stored in that order (``prefill_column``).

**Tokens.** 128 columns a step, in a ring of four chunks: two on their way, one being read, and one that the products
still in flight may read. A program with R rows reads its tokens once for all of them: L2 serves ``1 / R`` bytes an
operation, which is what limits 64 rows.

**Sizes.** A block of tokens is N1 + N2 columns, two accumulators that share every decoded weight, so that 96 and 160
columns exist beside the powers of two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton.hopper.fp8 import async_load, barrier

ACCUMULATOR_SCALE = gl.constexpr(2.0**64)
STAGES = gl.constexpr(4)


def _pair_of_planes(out: int, sign: int, magnitude: int) -> str:
    def shift(by: int) -> str:
        return f"{'shl' if by >= 0 else 'shr'}.b32"

    signs = f"{shift(sign)} s, $4, {abs(sign)};" if sign else "mov.b32 s, $4;"
    return (
        f"{signs} {shift(magnitude)} m, $4, {abs(magnitude)};"
        f"and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 ${out}, m, $12;"
    )


DECODE = gl.constexpr(
    "{ .reg .b32 s, m;"
    + _pair_of_planes(0, 12, 6)
    + _pair_of_planes(1, 8, 2)
    + _pair_of_planes(2, 4, -2)
    + _pair_of_planes(3, 0, -6)
    + "}"
)


@gluon.constexpr_function
def row_bases(R, W):
    """Registers and warps along the rows of an operand: 8 apart in a lane, 16 a warp, then repeated."""
    registers = [[16 * W << b, 0] for b in range((R // (16 * W)).bit_length() - 1)]
    return [[8, 0], *registers], [[16 << b, 0] for b in range(W.bit_length() - 1)]


@gluon.constexpr_function
def tile_layout(N, W):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, N, 16])


@gluon.constexpr_function
def copy_layout(W):
    return gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])


@gluon.constexpr_function
def lane_layout(R, W, each):
    """``[R, 4 * each]``: ``each`` values a K block, all in the lane of that K block."""
    registers, warps = row_bases(R, W)
    bits = each.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << b] for b in range(bits)] + registers,
        lane_bases=[[0, each], [0, 2 * each], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[R, 4 * each],
    )


@gluon.jit
def eight_times(v, R: gl.constexpr, W: gl.constexpr):
    """``[R, 4]`` to ``[R, 32]``: an element for each that a word gives, all in the word's register."""
    v = gl.join(v, v)
    v = gl.join(v, v)
    v = gl.join(v, v)
    return gl.convert_layout(gl.reshape(v, (R, 32)), lane_layout(R, W, 8), assert_trivial=True)


@gluon.jit
def operand(word, pair, N: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Words int32 ``[R, 4]`` and scale pairs ``[R, 4]`` to a bf16 operand ``[R, 32]``, 2**-64 of the weights."""
    a = gl.inline_asm_elementwise(
        DECODE,
        "=r,=r,=r,=r" + ",r" * 16,
        [eight_times(word, R, W), eight_times(pair, R, W)],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=8,
    )
    a = gl.permute(gl.reshape(a, (R, 4, 2, 2, 2)), (0, 2, 3, 1, 4))
    L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=tile_layout(N, W), k_width=2)
    return gl.convert_layout(gl.reshape(a, (R, 32)), L, assert_trivial=True)


@gluon.jit
def load_step(words, scales, step, K_BLOCKS: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Words ``[R, 16]`` and scale bytes ``[R, 4]`` of K blocks 4 * step .. 4 * step + 3; past the last one they are 0.

    Scales as pairs of bf16 with the exponent field byte + 62; above 2**65 (byte 192), and for NaN, Inf
    (``codecs.inf_to_nan``).
    """
    w = words + step * 256
    s = scales + (step // 2 * 256 + step % 2 * 2)
    if K_BLOCKS % 4 == 0:
        v = gl.load(w)
        b = gl.load(s)
    else:
        n = K_BLOCKS - step * 4
        c = gl.arange(0, 16, layout=gl.SliceLayout(0, lane_layout(R, W, 4)))
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))
        v = gl.load(w, mask=(c // 4 < n)[None, :], other=0)
        b = gl.load(s, mask=(t < n)[None, :], other=0)
    return v, (gl.minimum(b.to(gl.int32), 193) + 62) * 0x00800080


@gluon.jit
def one_word(v, R: gl.constexpr, W: gl.constexpr):
    return gl.convert_layout(v, lane_layout(R, W, 1), assert_trivial=True)


@gluon.jit
def four_words(v, R: gl.constexpr, W: gl.constexpr):
    even, odd = gl.split(gl.reshape(v, (R, 4, 2, 2)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return one_word(w0, R, W), one_word(w1, R, W), one_word(w2, R, W), one_word(w3, R, W)


@gluon.jit
def one_product(
    acc1,
    acc2,
    word,
    pair,
    chunk1,
    chunk2,
    u: gl.constexpr,
    R: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    W: gl.constexpr,
):
    """32 columns, left in flight; those before it have ended, so that their registers are free again."""
    x1 = chunk1.slice(u * 32, 32, dim=1).permute((1, 0))
    acc1 = warpgroup_mma(operand(word, pair, N1, R, W), x1, acc1, is_async=True)
    if N2 > 0:
        x2 = chunk2.slice(u * 32, 32, dim=1).permute((1, 0))
        acc2 = warpgroup_mma(operand(word, pair, N2, R, W), x2, acc2, is_async=True)
        acc1, acc2 = warpgroup_mma_wait(2, deps=[acc1, acc2])
        return warpgroup_mma_init(acc1), warpgroup_mma_init(acc2)
    else:
        acc1 = warpgroup_mma_wait(1, deps=[acc1])
        return warpgroup_mma_init(acc1), acc2


@gluon.jit
def multiply_chunk(
    acc1,
    acc2,
    now,
    chunk1,
    chunk2,
    R: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    W: gl.constexpr,
):
    w0, w1, w2, w3 = four_words(now[0], R, W)
    acc1, acc2 = one_product(acc1, acc2, w0, now[1], chunk1, chunk2, 0, R, N1, N2, W)
    acc1, acc2 = one_product(acc1, acc2, w1, now[1], chunk1, chunk2, 1, R, N1, N2, W)
    acc1, acc2 = one_product(acc1, acc2, w2, now[1], chunk1, chunk2, 2, R, N1, N2, W)
    return one_product(acc1, acc2, w3, now[1], chunk1, chunk2, 3, R, N1, N2, W)


@gluon.jit
def start_copy(x_ptr, at1, at2, smem1, smem2, slot, step, N2: gl.constexpr):
    """Starts the copy of columns 128 * step .. + 127 of the rows that start at ``at [N, 128]`` (elements)."""
    async_load(smem1.index(slot), x_ptr + (at1 + step * 128))
    if N2 > 0:
        async_load(smem2.index(slot), x_ptr + (at2 + step * 128))


@gluon.jit
def accumulators(R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr):
    """Zeros; without N2 the second one is a stand-in that nothing reads."""
    acc1 = warpgroup_mma_init(gl.zeros([R, N1], gl.float32, layout=tile_layout(N1, W)))
    if N2 > 0:
        return acc1, warpgroup_mma_init(gl.zeros([R, N2], gl.float32, layout=tile_layout(N2, W)))
    else:
        return acc1, 0


@gluon.jit
def finish(acc1, acc2, N2: gl.constexpr):
    if N2 > 0:
        acc1, acc2 = warpgroup_mma_wait(0, deps=[acc1, acc2])
        return acc1 * ACCUMULATOR_SCALE, acc2 * ACCUMULATOR_SCALE
    else:
        return warpgroup_mma_wait(0, deps=[acc1]) * ACCUMULATOR_SCALE, 0


@gluon.jit
def multiply(
    words,
    scales,
    x_ptr,
    at1,
    at2,
    smem1,
    smem2,
    K_BLOCKS: gl.constexpr,
    R: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    W: gl.constexpr,
):
    """``[R, N1]`` and ``[R, N2]`` float32: all K blocks of R rows times the rows of x at ``at1`` and ``at2``.

    Weights are loaded a step before they are needed."""
    STEPS: gl.constexpr = (K_BLOCKS + 3) // 4
    start_copy(x_ptr, at1, at2, smem1, smem2, 0, 0, N2)
    async_copy.commit_group()
    if STEPS > 1:
        start_copy(x_ptr, at1, at2, smem1, smem2, 1, 1, N2)
    async_copy.commit_group()
    acc1, acc2 = accumulators(R, N1, N2, W)
    now = load_step(words, scales, 0, K_BLOCKS, R, W)
    for step in range(STEPS):
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()  # the chunk is there for all, and nobody reads the one before last any more
        soon = load_step(words, scales, gl.minimum(step + 1, STEPS - 1), K_BLOCKS, R, W)
        if step + 2 < STEPS:
            start_copy(x_ptr, at1, at2, smem1, smem2, (step + 2) % STAGES, step + 2, N2)
        async_copy.commit_group()
        slot = step % STAGES
        chunk2 = 0
        if N2 > 0:
            chunk2 = smem2.index(slot)
        acc1, acc2 = multiply_chunk(acc1, acc2, now, smem1.index(slot), chunk2, R, N1, N2, W)
        now = soon
    acc1, acc2 = finish(acc1, acc2, N2)
    # Behind the products' end: the barrier that comes with it lets an epilogue of one warp group store where the
    # products of another read.
    async_copy.wait_group(0)
    return acc1, acc2


@gluon.jit
def prefill_column(i):
    """Where column ``i`` is stored: from bits [step][2 t][2 w][l][v][h] to [step][2 w][v][h][2 t][l]."""
    return (
        i // 128 * 128
        + i // 8 % 4 * 32
        + i // 2 % 2 * 16
        + i % 2 * 8
        + i // 32 % 4 * 2
        + i // 4 % 2
    )
