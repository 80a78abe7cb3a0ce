"""The pieces of the fp8 form: E2M1 words to e4m3 operands of ``wgmma``, and x in shared memory (Gluon).

**Weights.** Codes become e4m3 *by position*: sign to bit 7, magnitude to bits 4..2, which is the number times
2**-6, exactly. That is
7 instructions for 8 weights, against 15 and a multiplication each for bf16. A word's even nibbles are four
consecutive K of the
operand and its odd nibbles the four that follow 16 later, so a block of 32 columns is in the order
[16 even columns][16 odd columns], and x is stored so. Lane ``4 * g + t`` takes word ``t`` of the 16 bytes of its
two rows, which ``ldmatrix`` delivers: the operand's own layout, so codes never leave the lane that read them.

**Scales.** One ``wgmma`` has K = 32, one scale block. Its result is multiplied by the scale in float32 and added.
AITER keeps the scales
of two rows (16 apart, or gate and up) and of two blocks (4 apart) in one word; those two rows are given to one lane, so
that a word is loaded once and all of it is used.

**x, and stage 1's output.** bf16 has 8 significant bits, e4m3 has 4: a row is two
columns, ``hi`` and 16 times the rest, ``lo``, with a power
of two a row that puts
its largest magnitude in [128, 256). The pair holds every x above 2**-13 of the row's largest exactly, and all others to
2**-22 of it. A8W4: one column, as AITER quantised it, or (BY_ROW) its values coded again with one scale a row: exact
above 2**-13 of the row's largest, others to 2**-17 of it; the loop then has no scales of columns. The tensor cores are
idle in decode, so columns are free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from sglang_aiter_moe.portable.triton import codecs as _codecs
from sglang_aiter_moe.portable.triton import layout as _layout

weight_row = gluon.jit(_layout.weight_row.fn)
weight_offset = gluon.jit(_layout.weight_offset.fn)
scale_offset = gluon.jit(_layout.scale_offset.fn)
inf_to_nan = gluon.jit(_codecs.inf_to_nan.fn)
# Triton 3.9 renamed these.
REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

LO_SCALE = gl.constexpr(1.0 / 16)
CODE_SCALE = gl.constexpr(64.0)  # undoes the 2**-6 of the codes
SCALE_BITS = gl.constexpr(0x7F800000)  # where a float32 keeps an E8M0 byte
INF_BITS = gl.constexpr(0x7F800000)
NAN_BITS = gl.constexpr(0x7FC00000)

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
def row_scale(largest, exponent):
    """float32: the power of two of an exponent field; NaN where a row's largest magnitude (its bits) is Inf or NaN:
    e4m3 has no Inf."""
    return gl.where(largest >= INF_BITS, NAN_BITS, exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scale_f32(word, mask, ODD: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """Scales ``[16 W, 1]`` of block j (of j + 4: ODD) from words of four E8M0 bytes: (row, partner) of j, then of j
    + 4.

    By shift and ``mask``, SCALE_BITS: byte 0 becomes 0 (and not 2**-127), 255 becomes Inf (``inf_to_nan``). With a mask
    of 0, which takes no further instruction, 0: padding, whose bytes may be anything.
    """
    if ODD:
        lo = (word << 7) & mask
        hi = (word >> 1) & mask
    else:
        lo = (word << 23) & mask
        hi = (word << 15) & mask
    both = gl.join(lo.to(gl.float32, bitcast=True), hi.to(gl.float32, bitcast=True))
    rows = gl.reshape(gl.permute(gl.reshape(both, (W, 8, 2)), (0, 2, 1)), (16 * W,))
    return gl.convert_layout(rows, gl.SliceLayout(1, acc_layout(N, W)), assert_trivial=True)[
        :, None
    ]


@gluon.jit
def stage_columns(x_ptr, row, ok, smem, QUADS: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """Starts the copy of columns ``[N]`` (rows ``row`` of ``x_ptr [.., QUADS * 128]``) to ``smem [QUADS, N, 128]``.

    Masked ones are left as they are. Four quads a copy where they divide: Triton puts a barrier between two copies.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [W, 1], [1, 0])
    C: gl.constexpr = 4 if QUADS % 4 == 0 else 1
    if REINTERPRET_IS_PUBLIC:
        chunks = smem.reinterpret(smem.dtype, [QUADS // C, C * N, 128], smem.layout)
    else:
        chunks = smem._reinterpret(smem.dtype, [QUADS // C, C * N, 128], smem.layout)
    COLS: gl.constexpr = gl.SliceLayout(1, L)
    c = gl.convert_layout(_repeated(row, C, N, W), COLS)
    m = gl.convert_layout(_repeated(ok.to(gl.int32), C, N, W), COLS) != 0
    quad = gl.arange(0, C * N, layout=COLS) // N
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    at = x_ptr + (c * (QUADS * 128) + quad * 128)[:, None] + k[None, :]
    mask = m[:, None] & (k >= 0)[None, :]
    for q in gl.static_range(QUADS // C):
        async_load(chunks.index(q), at + q * (C * 128), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _repeated(v, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr):
    """``[N]`` C times over."""
    if C == 1:
        return v
    else:
        ONES: gl.constexpr = gl.BlockedLayout([C, 1], [1, 32], [1, W], [1, 0])
        flat = gl.convert_layout(v, gl.SliceLayout(0, ONES))
        return gl.reshape(
            gl.expand_dims(flat, 0) + gl.zeros([C, N], v.dtype, layout=ONES), (C * N,)
        )


@gluon.jit
def split_rows(
    x_ptr, row, ok, smem, K: gl.constexpr, CHUNKS: gl.constexpr, T: gl.constexpr, W: gl.constexpr,
    PARTS: gl.constexpr = 2,
):  # fmt: skip
    """bf16 rows ``[T]`` of ``x_ptr [.., K]`` to pairs of columns, or single ones, in ``smem [4 CHUNKS, PARTS T, 128]``.

    Returns:
        float32 ``[T]``: the rows' scales, in a layout of the caller's ``row``.
    """
    ROWS: gl.constexpr = min(T, W)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [ROWS, W // ROWS], [1, 0])
    if REINTERPRET_IS_PUBLIC:
        chunks = smem.reinterpret(smem.dtype, [CHUNKS, 4 * PARTS * T, 128], smem.layout)
    else:
        chunks = smem._reinterpret(smem.dtype, [CHUNKS, 4 * PARTS * T, 128], smem.layout)
    r = gl.convert_layout(row, gl.SliceLayout(1, L)).to(gl.int64)
    mask = (gl.convert_layout(ok.to(gl.int32), gl.SliceLayout(1, L)) != 0)[:, None]
    k = gl.arange(0, 512, layout=gl.SliceLayout(0, L))
    at = x_ptr + (r * K)[:, None] + k[None, :]
    largest = gl.zeros([T], gl.int32, layout=gl.SliceLayout(1, L))
    for c in gl.static_range(CHUNKS):
        v = gl.load(at + c * 512, mask=mask & (k < K - c * 512)[None, :], other=0.0).to(gl.float32)
        largest = gl.maximum(largest, gl.max(v.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    exponent = gl.minimum(gl.maximum((largest >> 23) - 7, 1), 253)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    for c in gl.static_range(CHUNKS):
        v = gl.load(at + c * 512, mask=mask & (k < K - c * 512)[None, :], other=0.0).to(gl.float32)
        v = v * inverse
        hi = v.to(gl.float8e4nv)
        # A block of 32 columns is stored as [16 even][16 odd].
        if PARTS == 2:
            lo = ((v - hi.to(gl.float32)) * 16.0).to(gl.float8e4nv)
            both = gl.reshape(gl.join(hi, lo), (T, 4, 4, 16, 2, 2))
            both = gl.reshape(gl.permute(both, (1, 0, 5, 2, 4, 3)), (8 * T, 128))
            chunks.index(c).store(both)
        else:
            one = gl.permute(gl.reshape(hi, (T, 4, 4, 16, 2)), (1, 0, 2, 4, 3))
            chunks.index(c).store(gl.reshape(one, (4 * T, 128)))
    return gl.convert_layout(row_scale(largest, exponent), row.type.layout)


@gluon.jit
def columns_ready():
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


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


@gluon.constexpr_function
def padding_of(blocks, per_step, group):
    """Bit j: block ``8 * group + j`` of the last step lies past the ``blocks`` of K, in the padding of its scale row.

    Scale rows are padded to groups of eight blocks; whole groups past them are outside of what bulk copies see, and 0.
    """
    left = blocks - (blocks - 1) // per_step * per_step - 8 * group
    return 0xFF & -(1 << left) if 0 < left < 8 else 0


@gluon.jit
def last_mask(step, STEPS: gl.constexpr):
    """The mask of a scale that is padding in the last step."""
    if STEPS == 1:
        return 0
    else:
        return gl.where(step == STEPS - 1, 0, SCALE_BITS)


@gluon.jit
def quad_scales(
    scales,
    col_scale_ptr,
    mask,  # last_mask
    PADDING: gl.constexpr,  # padding_of these eight blocks
    ODD: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    COL_SCALES: gl.constexpr,
):
    FIRST: gl.constexpr = PADDING >> (4 if ODD else 0)
    s0 = scale_f32(scales[0], mask if FIRST & 1 else SCALE_BITS, ODD, N, W)
    s1 = scale_f32(scales[1], mask if FIRST & 2 else SCALE_BITS, ODD, N, W)
    s2 = scale_f32(scales[2], mask if FIRST & 4 else SCALE_BITS, ODD, N, W)
    s3 = scale_f32(scales[3], mask if FIRST & 8 else SCALE_BITS, ODD, N, W)
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
def join_parts(acc, N: gl.constexpr, W: gl.constexpr, PARTS: gl.constexpr):
    """``[16 W, N]`` to ``[16 W, N / PARTS]``: hi and lo columns of a token added up."""
    if PARTS == 2:
        hi, lo = gl.split(gl.reshape(acc, (16 * W, N // 2, 2)))
        return hi + lo * LO_SCALE
    else:
        return acc
