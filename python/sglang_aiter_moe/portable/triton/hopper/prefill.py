"""Both stages for many tokens: bf16 ``wgmma`` with the weights from registers and the tokens from shared memory
(Gluon).

A warpgroup owns 64 rows of one expert and up to N of its tokens. A lane decodes the words that it loads, and they are
already its part of the operand: of a word's planes (``decode.py``), 0 4 1 5 feed one K = 16 product and 2 6 3 7 the
next. The
tokens' columns are stored in that order (``prefill_column``) and stream through a ring of three 128-column chunks.
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

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    async_load,
    barrier,
    scale_offset,
    weight_offset,
    weight_row,
    word_layout,
)
from sglang_aiter_moe.portable.triton.hopper.fp8_stage1 import gate_up

ACCUMULATOR_SCALE = gl.constexpr(2.0**64)
STAGES = gl.constexpr(3)


def _pair_of_planes(out: int, sign: int, magnitude: int) -> str:
    def shift(by: int) -> str:
        return f"{'shl' if by >= 0 else 'shr'}.b32"

    return (
        f"{shift(sign)} s, $4, {abs(sign)}; {shift(magnitude)} m, $4, {abs(magnitude)};"
        f"and.b32 m, m, 0x01C001C0; lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 ${out}, m, $8;"
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
def tile_layout(N):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])


@gluon.constexpr_function
def copy_layout():
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def word32_layout():
    """[64, 4]: the same words as ``word_layout``, as int32."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.jit
def operands(words, scale, N: gl.constexpr):
    """Words int32 ``[64, 4]`` and scale bytes ``[64]`` to two bf16 operands ``[64, 16]``, 2**-64 of the weights."""
    exponent = gl.minimum(scale.to(gl.int32), 193) + 62
    pair = (exponent * 0x00800080)[:, None] + gl.zeros([64, 4], gl.int32, layout=word32_layout())
    a, b = gl.inline_asm_elementwise(
        DECODE,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [_four_times(words), _four_times(pair)],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return _operand(a, N), _operand(b, N)


@gluon.jit
def _four_times(v):
    """``[64, 4]`` to ``[64, 16]``: an element for each that a word gives, all in the word's register."""
    v = gl.join(v, v)  # [64, 4, 2]
    v = gl.join(v, v)  # [64, 4, 2, 2]
    return gl.convert_layout(gl.reshape(v, (64, 16)), word_layout(4), assert_trivial=True)


@gluon.jit
def _operand(v, N: gl.constexpr):
    v = gl.reshape(gl.permute(gl.reshape(v, (64, 4, 2, 2)), (0, 2, 1, 3)), (64, 16))
    L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=tile_layout(N), k_width=2)
    return gl.convert_layout(v, L, assert_trivial=True)


@gluon.jit
def copy_chunk(at, ok, smem, step, COLUMNS: gl.constexpr):
    """Starts the copy of columns 128 * step .. + 127 of the rows ``at [N, 128]``; past COLUMNS nothing is copied."""
    async_load(smem.index(step % STAGES), at + step * 128, mask=ok & (step * 128 < COLUMNS))
    async_copy.commit_group()


@gluon.jit
def load_step(words, scales, step, K_BLOCKS: gl.constexpr):
    """Words and scale bytes of four K blocks; past the last one they are 0."""
    w = words + step * 256
    s = scales + step // 2 * 256 + step % 2 * 2
    n = K_BLOCKS - step * 4
    return (
        gl.load(w, mask=n > 0, other=0), gl.load(w + 64, mask=n > 1, other=0),
        gl.load(w + 128, mask=n > 2, other=0), gl.load(w + 192, mask=n > 3, other=0),
        gl.load(s, mask=n > 0, other=0), gl.load(s + 64, mask=n > 1, other=0),
        gl.load(s + 128, mask=n > 2, other=0), gl.load(s + 192, mask=n > 3, other=0),
    )  # fmt: skip


@gluon.jit
def two_products(acc, w, s, chunk, u: gl.constexpr, N: gl.constexpr):
    a, b = operands(w, s, N)
    acc = warpgroup_mma(a, chunk.slice(u * 32, 16, dim=1).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(b, chunk.slice(u * 32 + 16, 16, dim=1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def multiply(
    words, scales, at, ok, smem, K_BLOCKS: gl.constexpr, COLUMNS: gl.constexpr, N: gl.constexpr
):
    """``[64, N]`` float32: all K blocks of 64 rows times the rows of x that ``at [N, 128]`` points at.

    Weights are loaded a step ahead, x two chunks ahead.
    """
    STEPS: gl.constexpr = (K_BLOCKS + 3) // 4
    copy_chunk(at, ok, smem, 0, COLUMNS)
    copy_chunk(at, ok, smem, 1, COLUMNS)
    acc = warpgroup_mma_init(gl.zeros([64, N], gl.float32, layout=tile_layout(N)))
    now = load_step(words, scales, 0, K_BLOCKS)
    for step in range(STEPS):
        soon = load_step(words, scales, step + 1, K_BLOCKS)
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()  # the chunk is there for all, and all have left the one that is overwritten next
        copy_chunk(at, ok, smem, step + 2, COLUMNS)
        chunk = smem.index(step % STAGES)
        acc = two_products(acc, now[0], now[4], chunk, 0, N)
        acc = two_products(acc, now[1], now[5], chunk, 1, N)
        acc = two_products(acc, now[2], now[6], chunk, 2, N)
        acc = two_products(acc, now[3], now[7], chunk, 3, N)
        acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
        now = soon
    async_copy.wait_group(0)
    return warpgroup_mma_wait(0, deps=[acc]) * ACCUMULATOR_SCALE


@gluon.jit
def prefill_column(i):
    """Where column ``i`` is stored: of a block of 32, element 8 t + 2 m + h + 4 l at 16 m + 8 h + 2 t + l."""
    return i // 32 * 32 + i // 2 % 2 * 16 + i % 2 * 8 + i // 8 % 4 * 2 + i // 4 % 2


@gluon.jit
def round_blocks(y, FORMAT: gl.constexpr, RULE: gl.constexpr):
    """``y [32, N]``, a scale block a column, rounded to MXFP8 or MXFP4 by ``codecs.mx_scale``'s rules; float32
    values."""
    EMAX: gl.constexpr = 8 if FORMAT == "e4m3" else 2
    MAX: gl.constexpr = 448.0 if FORMAT == "e4m3" else 6.0
    bits = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    if RULE == "epilogue":
        exponent = gl.maximum(((bits + 0x400000) >> 23) - EMAX, 0)
    else:
        quotient = bits.to(gl.float32, bitcast=True) / MAX
        exponent = (quotient.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    scale = (exponent << 23).to(gl.float32, bitcast=True)[None, :]
    scaled = y * ((254 - exponent) << 23).to(gl.float32, bitcast=True)[None, :]
    if FORMAT == "e4m3":
        return scaled.to(gl.float8e4nv).to(gl.float32) * scale
    else:
        # E2M1's steps are 0.5 below 2, 1 below 4, then 2; adding 2**23 rounds a multiple of the step to nearest even.
        a = gl.abs(scaled)
        step = gl.where(a < 2.0, 0.5, gl.where(a < 4.0, 1.0, 2.0))
        rounded = gl.minimum((a / step + 8388608.0) - 8388608.0, 6.0 / step) * step
        return gl.where(scaled < 0, -rounded, rounded) * scale


@gluon.jit
def stage1_prefill(
    x_ptr,  # [M, X_STRIDE] bf16 in prefill order
    w_ptr,  # as int32
    scale_ptr,
    bias_ptr,
    pairs_ptr,  # [blocks, N]
    block_expert_ptr,
    num_blocks_ptr,
    a_ptr,  # [pairs, A_STRIDE] bf16 in prefill order
    num_pairs,
    topk,
    limit,
    alpha,
    beta,
    linear_beta,
    H: gl.constexpr,
    I: gl.constexpr,
    X_STRIDE: gl.constexpr,
    A_STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    N: gl.constexpr,
    FORMAT: gl.constexpr,
    RULE: gl.constexpr,
    VIA_BF16: gl.constexpr,
):
    K_BLOCKS: gl.constexpr = H // 32
    TILES: gl.constexpr = I // 32
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CL: gl.constexpr = copy_layout()
    b = gl.program_id(0) // TILES
    i0 = gl.program_id(0) % TILES * 32
    if b < gl.load(num_blocks_ptr):
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], SHARED)
        pair = gl.load(pairs_ptr + b * N + gl.arange(0, N, layout=gl.SliceLayout(1, CL)))
        k = gl.arange(0, 128, layout=gl.SliceLayout(0, CL))
        ok = (pair < num_pairs)[:, None] & (k >= 0)[None, :]
        at = x_ptr + (pair // topk).to(gl.int64)[:, None] * X_STRIDE + k[None, :]

        # Row r = 16 * warp + 8 * h + g: h picks gate or up, so that a lane holds both of a pair.
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, word32_layout()))
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, word32_layout()))
        half = r // 8 % 2
        i = i0 + r // 16 * 8 + r % 8
        words = w_ptr + e * (I * H // 4)
        words = (
            words
            + weight_offset(weight_row(half, i, I, LAYOUT), 0, H // 2, LAYOUT)[:, None] // 4
            + word[None, :]
        )
        scales = (
            scale_ptr
            + e * (2 * I * ((K_BLOCKS + 7) // 8 * 8))
            + scale_offset(half, i, 0, I, K_BLOCKS, LAYOUT)
        )
        total = multiply(words, scales, at, ok, smem, K_BLOCKS, X_STRIDE, N)

        gate, up = gl.split(gl.permute(gl.reshape(total, (4, 2, 8, N)), (0, 2, 3, 1)))
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
        gate = gl.convert_layout(gl.reshape(gate, (32, N)), OUT)
        up = gl.convert_layout(gl.reshape(up, (32, N)), OUT)
        i = i0 + gl.arange(0, 32, layout=gl.SliceLayout(1, OUT))
        pair = gl.load(pairs_ptr + b * N + gl.arange(0, N, layout=gl.SliceLayout(0, OUT)))
        if HAS_BIAS:
            bias = bias_ptr + e * (2 * I) + i
            gate += gl.load(bias)[:, None]
            up += gl.load(bias + I)[:, None]
        y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
        if FORMAT != "bf16":
            if VIA_BF16:
                y = y.to(gl.bfloat16).to(gl.float32)
            y = round_blocks(y, FORMAT, RULE)
        keep = (pair < num_pairs)[None, :] & (i >= 0)[:, None]
        out = a_ptr + pair.to(gl.int64)[None, :] * A_STRIDE
        gl.store(out + prefill_column(i)[:, None], y.to(gl.bfloat16), mask=keep)
        if (
            A_STRIDE > I
        ):  # stage 2 reads whole steps; its weights are 0 there, but 0 times garbage may be NaN
            if i0 + 32 >= I:
                for j in gl.static_range((A_STRIDE - I) // 32):
                    gl.store(
                        out + (i + (32 + j * 32))[:, None],
                        gl.zeros_like(y).to(gl.bfloat16),
                        mask=keep,
                    )


@gluon.jit
def stage2_prefill(
    a_ptr,  # [pairs, A_STRIDE] bf16 in prefill order
    w_ptr,  # as int32
    scale_ptr,
    bias_ptr,
    weights_ptr,
    pairs_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    part_ptr,  # [pairs, H] bf16
    num_pairs,
    H: gl.constexpr,
    I: gl.constexpr,
    A_STRIDE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    N: gl.constexpr,
):
    K_BLOCKS: gl.constexpr = I // 32
    TILES: gl.constexpr = (H + 63) // 64
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CL: gl.constexpr = copy_layout()
    b = gl.program_id(0) // TILES
    n0 = gl.program_id(0) % TILES * 64
    if b < gl.load(num_blocks_ptr):
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], SHARED)
        pair = gl.load(pairs_ptr + b * N + gl.arange(0, N, layout=gl.SliceLayout(1, CL)))
        k = gl.arange(0, 128, layout=gl.SliceLayout(0, CL))
        ok = (pair < num_pairs)[:, None] & (k >= 0)[None, :]
        at = a_ptr + pair.to(gl.int64)[:, None] * A_STRIDE + k[None, :]
        n = gl.minimum(n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, word32_layout())), H - 1)
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, word32_layout()))
        words = (
            w_ptr
            + e * (H * I // 8)
            + weight_offset(n, 0, I // 2, "separated")[:, None] // 4
            + word[None, :]
        )
        scales = (
            scale_ptr
            + e * (H * ((K_BLOCKS + 7) // 8 * 8))
            + scale_offset(0, n, 0, H, K_BLOCKS, "separated")
        )
        total = multiply(words, scales, at, ok, smem, K_BLOCKS, A_STRIDE, N)

        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        y = gl.convert_layout(total, OUT)
        n = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
        pair = gl.load(pairs_ptr + b * N + gl.arange(0, N, layout=gl.SliceLayout(0, OUT)))
        ok = pair < num_pairs
        if HAS_BIAS:
            y += gl.load(bias_ptr + e * H + n, mask=n < H, other=0.0)[:, None]
        y = y * gl.load(weights_ptr + pair, mask=ok, other=0.0)[None, :]
        out = part_ptr + pair.to(gl.int64)[None, :] * H + n[:, None]
        gl.store(out, y.to(gl.bfloat16), mask=ok[None, :] & (n < H)[:, None])
