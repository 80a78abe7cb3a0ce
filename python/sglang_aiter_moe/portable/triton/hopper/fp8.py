"""The pieces of the fp8 form: E2M1 words to e4m3 operands of ``wgmma``, and x in shared memory (Gluon).

**Weights.** Codes become e4m3 *by position*: sign to bit 7, magnitude to bits 4..2, which is the number times
2**-6, exactly. That is
7 instructions for 8 weights, against 15 and a multiplication each for bf16. A word's even nibbles are four
consecutive K of the
operand and its odd nibbles the four that follow 16 later, so a block of 32 columns is in the order
[16 even columns][16 odd columns], and x is stored so. Lane ``4 * g + t`` loads word ``t`` of the 16 bytes of its
two rows: the
operand's own layout, so codes never leave the lane that loaded them.

**Scales.** One ``wgmma`` has K = 32, one scale block. Its result is multiplied by the scale in float32 and added.
AITER keeps the scales
of two rows (16 apart, or gate and up) and of two blocks (4 apart) in one word; those two rows are given to one lane, so
that a word is loaded once and all of it is used.

**x.** bf16 has 8 significant bits, e4m3 has 4: x is two columns, ``hi`` and 16 times the rest, ``lo``, with a power
of two a row that puts
its largest magnitude in [128, 256). The pair holds every x above 2**-13 of the row's largest exactly, and all others to
2**-22 of it. (A8W4: one column, as AITER quantised it.) The tensor cores are idle in decode, so columns are free.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton import layout as _layout

weight_row = gluon.jit(_layout.weight_row.fn)
weight_offset = gluon.jit(_layout.weight_offset.fn)
scale_offset = gluon.jit(_layout.scale_offset.fn)
# Triton 3.9 renamed both.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

LO_SCALE = gl.constexpr(1.0 / 16)
CODE_SCALE = gl.constexpr(64.0)  # undoes the 2**-6 of the codes

DECODE = gl.constexpr(
    "{ .reg .b32 s, m;"
    "shl.b32 s, $2, 4; shl.b32 m, $2, 2; and.b32 m, m, 0x1C1C1C1C; lop3.b32 $0, s, 0x80808080, m, 0xEA;"
    "shr.u32 m, $2, 2; and.b32 m, m, 0x1C1C1C1C; lop3.b32 $1, $2, 0x80808080, m, 0xEA; }"
)


@gluon.constexpr_function
def word_layout(W):
    """[16 W rows, 16 bytes]: what ``operand_layout`` wants, one 32-bit word a lane and row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << b, 0] for b in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[16 * W, 16],
    )


@gluon.constexpr_function
def acc_layout(N, W):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, N, 32])


@gluon.constexpr_function
def operand_layout(N, W):
    return gl.DotOperandLayout(operand_index=0, parent=acc_layout(N, W), k_width=4)


@gluon.constexpr_function
def four_layout(N, W):
    """[N, 4]: the columns of ``acc_layout``, four contiguous values in each lane."""
    wide = [[1 << b, 0] for b in range(3, N.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], *wide],
        lane_bases=[[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0]] * (W.bit_length() - 1),
        block_bases=[],
        shape=[N, 4],
    )


@gluon.constexpr_function
def scale_word_layout(W):
    """[8 W]: the row pairs of ``operand_layout``, 8 a warp, the same in the four lanes of a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0], [0], [1], [2], [4]],
        warp_bases=[[8 << b] for b in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[8 * W],
    )


@gluon.jit
def operand(words, N: gl.constexpr, W: gl.constexpr):
    """uint8 ``[16 W, 16]`` in ``word_layout`` to e4m3 ``[16 W, 32]``, 2**-6 of the weights, without their scales."""
    even, odd = gl.inline_asm_elementwise(
        DECODE, "=r,=r,r", [words], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4
    )
    both = gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 1)), (16 * W, 32))
    return gl.convert_layout(both, operand_layout(N, W), assert_trivial=True)


@gluon.jit
def scale_f32(word, ODD: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """Scales ``[16 W, 1]`` of block j (of j + 4: ODD) from words of four E8M0 bytes: (row, partner) of j, then of j
    + 4.

    By shift and mask: byte 0 becomes 0 (and not 2**-127), 255 becomes Inf.
    """
    if ODD:
        lo = (word << 7) & 0x7F800000
        hi = (word >> 1) & 0x7F800000
    else:
        lo = (word << 23) & 0x7F800000
        hi = (word << 15) & 0x7F800000
    both = gl.join(lo.to(gl.float32, bitcast=True), hi.to(gl.float32, bitcast=True))
    rows = gl.reshape(gl.permute(gl.reshape(both, (W, 8, 2)), (0, 2, 1)), (16 * W,))
    return gl.convert_layout(rows, gl.SliceLayout(1, acc_layout(N, W)), assert_trivial=True)[
        :, None
    ]


@gluon.jit
def stage_columns(x_ptr, base, ok, smem, QUADS: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """Starts the copy of columns ``[N]`` (first bytes ``base``) to ``smem [QUADS, N, 128]``; masked ones are left
    as they are."""
    L: gl.constexpr = gl.BlockedLayout([1, 32 // W], [W // 2, 64 // W], [4, W // 4], [1, 0])
    c = gl.convert_layout(base, gl.SliceLayout(1, L))
    m = gl.convert_layout(ok, gl.SliceLayout(1, L))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    at = x_ptr + c[:, None] + k[None, :]
    mask = m[:, None] & (k >= 0)[None, :]
    for q in gl.static_range(QUADS):
        async_load(smem.index(q), at + q * 128, mask=mask)
    async_copy.commit_group()


@gluon.jit
def columns_ready():
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def load_words(word_ptr, q, K_BLOCKS: gl.constexpr, MASKED: gl.constexpr):
    """Words of K blocks 4q .. 4q+3. MASKED: past K_BLOCKS they are 0."""
    w = word_ptr + q * 1024
    if MASKED:
        n = K_BLOCKS - q * 4
        return (
            gl.load(w, mask=n > 0, other=0), gl.load(w + 256, mask=n > 1, other=0),
            gl.load(w + 512, mask=n > 2, other=0), gl.load(w + 768, mask=n > 3, other=0),
        )  # fmt: skip
    else:
        return gl.load(w), gl.load(w + 256), gl.load(w + 512), gl.load(w + 768)


@gluon.jit
def load_scales(scale_ptr, pair):
    """Scale words of K blocks 8 * pair .. 8 * pair + 7; AITER pads scale columns to 8, so they exist."""
    s = scale_ptr + pair * 64
    return gl.load(s), gl.load(s + 16), gl.load(s + 32), gl.load(s + 48)


@gluon.jit
def product(words, smem_q, u: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """Starts one block's ``[16 W, 32] @ [32, N]``."""
    zero = gl.zeros([16 * W, N], gl.float32, layout=acc_layout(N, W))
    x = smem_q.slice(u * 32, 32, dim=1).permute((1, 0))
    return warpgroup_mma(operand(words, N, W), x, zero, use_acc=False, is_async=True)


@gluon.jit
def column_scales(ptr, N: gl.constexpr, W: gl.constexpr):
    """Four float32 scales of each column, ``ptr [N]`` pointing at the first."""
    L: gl.constexpr = four_layout(N, W)
    at = gl.convert_layout(ptr, gl.SliceLayout(1, L), assert_trivial=True)
    v = gl.load(at[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :])
    even, odd = gl.split(gl.reshape(v, (N, 2, 2)))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    COL: gl.constexpr = gl.SliceLayout(0, acc_layout(N, W))
    return (
        gl.convert_layout(c0, COL, assert_trivial=True)[None, :],
        gl.convert_layout(c1, COL, assert_trivial=True)[None, :],
        gl.convert_layout(c2, COL, assert_trivial=True)[None, :],
        gl.convert_layout(c3, COL, assert_trivial=True)[None, :],
    )


@gluon.jit
def start_quad(words, smem_q, N: gl.constexpr, W: gl.constexpr):
    p0 = product(words[0], smem_q, 0, N, W)
    p1 = product(words[1], smem_q, 1, N, W)
    p2 = product(words[2], smem_q, 2, N, W)
    p3 = product(words[3], smem_q, 3, N, W)
    return p0, p1, p2, p3


@gluon.jit
def quad_scales(
    scales,
    col_scale_ptr,
    ODD: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    COL_SCALES: gl.constexpr,
):
    s0 = scale_f32(scales[0], ODD, N, W)
    s1 = scale_f32(scales[1], ODD, N, W)
    s2 = scale_f32(scales[2], ODD, N, W)
    s3 = scale_f32(scales[3], ODD, N, W)
    if COL_SCALES:
        c0, c1, c2, c3 = column_scales(col_scale_ptr, N, W)
        s0 = s0 * c0
        s1 = s1 * c1
        s2 = s2 * c2
        s3 = s3 * c3
    return s0, s1, s2, s3


@gluon.jit
def add_quad(acc, p, s):
    acc += p[0] * s[0]
    acc += p[1] * s[1]
    acc += p[2] * s[2]
    acc += p[3] * s[3]
    return acc


@gluon.jit
def multiply_row(
    acc,
    words,
    scales,
    smem,
    cols,
    K_BLOCKS: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    COL_SCALES: gl.constexpr,
):
    """``acc [16 W, N]`` plus all K blocks of a tile, 8 a step."""
    QUADS: gl.constexpr = quads(K_BLOCKS)
    MASKED: gl.constexpr = K_BLOCKS % 4 != 0
    for pair in range(QUADS // 2):
        q = pair * 2
        s = load_scales(scales, pair)
        a = load_words(words, q, K_BLOCKS, MASKED and QUADS % 2 == 0)
        b = load_words(words, q + 1, K_BLOCKS, MASKED and QUADS % 2 == 0)
        pa = start_quad(a, smem.index(q), N, W)
        pb = start_quad(b, smem.index(q + 1), N, W)
        sa = quad_scales(s, cols + q * 4, False, N, W, COL_SCALES)
        pa = warpgroup_mma_wait(4, deps=[pa[0], pa[1], pa[2], pa[3]])
        acc = add_quad(acc, pa, sa)
        sb = quad_scales(s, cols + q * 4 + 4, True, N, W, COL_SCALES)
        pb = warpgroup_mma_wait(0, deps=[pb[0], pb[1], pb[2], pb[3]])
        acc = add_quad(acc, pb, sb)
    if QUADS % 2 == 1:
        s = load_scales(scales, QUADS // 2)
        a = load_words(words, QUADS - 1, K_BLOCKS, MASKED)
        pa = start_quad(a, smem.index(QUADS - 1), N, W)
        sa = quad_scales(s, cols + (QUADS - 1) * 4, False, N, W, COL_SCALES)
        pa = warpgroup_mma_wait(0, deps=[pa[0], pa[1], pa[2], pa[3]])
        acc = add_quad(acc, pa, sa)
    return acc


@gluon.jit
def join_parts(acc, N: gl.constexpr, W: gl.constexpr, PARTS: gl.constexpr):
    """``[16 W, N]`` to ``[16 W, N / PARTS]``: hi and lo columns of a token added up."""
    if PARTS == 2:
        hi, lo = gl.split(gl.reshape(acc, (16 * W, N // 2, 2)))
        return hi + lo * LO_SCALE
    else:
        return acc


@triton.constexpr_function
def quads(blocks):
    """Groups of four K blocks."""
    return (blocks + 3) // 4
