"""Stage 1 for many tokens (Gluon): R rows of one expert, half gate and half up, times a block of up to T of its tokens.

How many of the T columns are computed follows from how many tokens the block holds (``column_choices``): a block
that is not full costs little more than its tokens. All choices are in one kernel, so that blocks of every size run in
one launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    INF_BITS,
    NAN_BITS,
    inf_to_nan,
    scale_offset,
    weight_offset,
    weight_row,
)
from sglang_aiter_moe.portable.triton.hopper.fp8_stage1 import gate_up
from sglang_aiter_moe.portable.triton.hopper.prefill import (
    copy_layout,
    lane_layout,
    multiply,
    row_bases,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import (
    columns,
    columns1,
    columns2,
    number_of_choices,
    row_starts,
    shared,
)


@gluon.constexpr_function
def half_layout(N, R, W):
    """``[R / 2, N]``: what is left of an accumulator's layout when its two rows have become one."""
    registers, warps = row_bases(R, W)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1]] + [[0, 8 << b] for b in range(N.bit_length() - 4)] + [[r // 2, 0] for r, _ in registers[1:]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[r // 2, 0] for r, _ in warps],
        block_bases=[],
        shape=[R // 2, N],
    )  # fmt: skip


@gluon.constexpr_function
def block_layout(W):
    """``[S, 32, N]``: a scale block of a column in four lanes, eight values each."""
    return gl.BlockedLayout([1, 8, 1], [1, 4, 8], [1, 1, W], [1, 2, 0])


@gluon.jit
def scale_blocks(y, FORMAT: gl.constexpr, RULE: gl.constexpr):
    """``y [S, 32, N]``, a scale block along axis 1, by ``codecs.mx_scale``'s rules: divided by the scales, and the
    scales' E8M0 bytes ``[S, N]``. Inf and NaN give 255, under which elements mean nothing."""
    EMAX: gl.constexpr = 8 if FORMAT == "e4m3" else 2
    MAX: gl.constexpr = 448.0 if FORMAT == "e4m3" else 6.0
    bits = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if RULE == "epilogue":
        exponent = gl.maximum(((bits + 0x400000) >> 23) - EMAX, 0)
    else:
        quotient = bits.to(gl.float32, bitcast=True) / MAX
        exponent = (quotient.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    exponent = gl.where(bits >= INF_BITS, 255, exponent)
    return y * gl.expand_dims(((254 - exponent) << 23).to(gl.float32, bitcast=True), 1), exponent


@gluon.jit
def quantize_blocks(y, FORMAT: gl.constexpr, RULE: gl.constexpr):
    """The same to MXFP8 or MXFP4: the elements as float32."""
    scaled, exponent = scale_blocks(y, FORMAT, RULE)
    if FORMAT == "e4m3":
        return scaled.to(gl.float8e4nv).to(gl.float32), exponent
    else:
        # E2M1's steps are 0.5 below 2, 1 below 4, then 2; adding 2**23 rounds a multiple of the step to nearest even.
        a = gl.abs(scaled)
        step = gl.where(a < 2.0, 0.5, gl.where(a < 4.0, 1.0, 2.0))
        rounded = gl.minimum((a / step + 8388608.0) - 8388608.0, 6.0 / step) * step
        return gl.where(scaled < 0, -rounded, rounded), exponent


@gluon.jit
def round_blocks(y, FORMAT: gl.constexpr, RULE: gl.constexpr):
    """``y [S, 32, N]`` rounded so; float32 values."""
    elements, exponent = quantize_blocks(y, FORMAT, RULE)
    scale = gl.where(exponent == 255, NAN_BITS, exponent << 23).to(gl.float32, bitcast=True)
    return elements * gl.expand_dims(scale, 1)


@gluon.jit
def gate_up_rows(
    acc, bias_ptr, i0, limit, alpha, beta, linear_beta, I: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, R: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
    ACTIVATE: gl.constexpr = gate_up,
):  # fmt: skip
    """Activation ``[R / 2, N]`` of gate and up rows, 8 of each in turn."""
    Y: gl.constexpr = half_layout(N, R, W)
    gate, up = gl.split(gl.permute(gl.reshape(acc, (R // 16, 2, 8, N)), (0, 2, 3, 1)))
    gate = gl.convert_layout(gl.reshape(gate, (R // 2, N)), Y, assert_trivial=True)
    up = gl.convert_layout(gl.reshape(up, (R // 2, N)), Y, assert_trivial=True)
    if HAS_BIAS:
        i = gl.minimum(i0 + gl.arange(0, R // 2, layout=gl.SliceLayout(1, Y)), I - 1)
        gate += gl.load(bias_ptr + i)[:, None]
        up += gl.load(bias_ptr + I + i)[:, None]
    return ACTIVATE(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)


@gluon.jit
def activate(
    acc,
    bias_ptr,  # of this expert
    pairs_ptr,  # of these columns
    a_ptr,
    num_pairs,
    i0,
    limit,
    alpha,
    beta,
    linear_beta,
    I: gl.constexpr,
    A_STRIDE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    FORMAT: gl.constexpr,
    RULE: gl.constexpr,
    VIA_BF16: gl.constexpr,
    R: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
):
    """From gate and up rows to ``a``."""
    y = gate_up_rows(
        inf_to_nan(acc), bias_ptr, i0, limit, alpha, beta, linear_beta, I, ACTIVATION, HAS_LIMIT, HAS_BIAS, R, N, W
    )  # fmt: skip
    if FORMAT != "bf16":
        if VIA_BF16:
            y = y.to(gl.bfloat16).to(gl.float32)
        y = gl.convert_layout(gl.reshape(y, (R // 64, 32, N)), block_layout(W))
        y = gl.reshape(round_blocks(y, FORMAT, RULE), (R // 2, N))
    y = y.to(gl.bfloat16)
    # Stored in the order of the operand, four (R = 128) or eight columns of a lane side by side.
    RUN: gl.constexpr = R // 32
    OUT: gl.constexpr = gl.BlockedLayout([RUN, 1], [16, 2], [1, W], [0, 1])
    y = gl.permute(gl.reshape(y, (RUN // 2, 4, 2, 2, 2, N)), (1, 3, 4, 0, 2, 5))
    y = gl.convert_layout(gl.reshape(y, (R // 2, N)), OUT)
    p = gl.arange(0, R // 2, layout=gl.SliceLayout(1, OUT))
    i = (
        i0
        + p // RUN // 4 * 8
        + p // RUN // 2 % 2 * 2
        + p // RUN % 2
        + p % 2 * 4
        + p % RUN // 2 * 32
    )
    place = i0 // 128 * 128 + p // RUN * 8 + i0 % 128 // (R // 2) * RUN + p % RUN
    pair = gl.load(pairs_ptr + gl.arange(0, N, layout=gl.SliceLayout(0, OUT)))
    out = a_ptr + pair.to(gl.int64)[None, :] * A_STRIDE
    # Past I up to A_STRIDE there are zeros: stage 2's weights are 0 there, but 0 times garbage may be NaN.
    y = gl.where((i < I)[:, None], y, 0.0)
    gl.store(out + place[:, None], y, mask=(pair < num_pairs)[None, :] & (i < A_STRIDE)[:, None])


@gluon.jit
def stage1_columns(
    x_ptr, words, scales, bias_ptr, pairs_ptr, a_ptr, num_pairs, topk, i0, limit, alpha, beta, linear_beta,
    H: gl.constexpr, I: gl.constexpr, X_STRIDE: gl.constexpr, A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr,
    VIA_BF16: gl.constexpr, WIDE: gl.constexpr, R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    smem1 = shared(4, N1)
    at1 = row_starts(pairs_ptr, 0, num_pairs, topk, X_STRIDE, WIDE, N1, copy_layout(W))
    smem2 = 0
    at2 = 0
    if N2 > 0:
        smem2 = shared(4, N2)
        at2 = row_starts(pairs_ptr, N1, num_pairs, topk, X_STRIDE, WIDE, N2, copy_layout(W))
    acc1, acc2 = multiply(words, scales, x_ptr, at1, at2, smem1, smem2, H // 32, R, N1, N2, W)
    activate(
        acc1, bias_ptr, pairs_ptr, a_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, I, A_STRIDE, ACTIVATION,
        HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, R, N1, W,
    )  # fmt: skip
    if N2 > 0:
        activate(
            acc2, bias_ptr, pairs_ptr + N1, a_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, I, A_STRIDE,
            ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, R, N2, W,
        )  # fmt: skip


@gluon.jit
def stage1_prefill(
    x_ptr,  # [M, X_STRIDE] bf16 in prefill order
    w_ptr,  # as int32
    scale_ptr,
    bias_ptr,
    pairs_ptr,  # [blocks, T]
    block_expert_ptr,
    block_rows_ptr,
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
    FORMAT: gl.constexpr,
    RULE: gl.constexpr,
    VIA_BF16: gl.constexpr,
    WIDE: gl.constexpr,
    R: gl.constexpr,
    T: gl.constexpr,
    W: gl.constexpr,
):
    K_BLOCKS: gl.constexpr = H // 32
    TILES: gl.constexpr = (A_STRIDE + R // 2 - 1) // (R // 2)
    b = gl.program_id(0) // TILES
    i0 = gl.program_id(0) % TILES * (R // 2)
    live = b < gl.load(num_blocks_ptr)
    e = gl.load(block_expert_ptr + b).to(gl.int64)  # past the last block: anything
    n = gl.load(block_rows_ptr + b)
    if live:
        # Row r = 16 * m + 8 * h + g of the tile: h picks gate or up, so that a lane holds both of a pair.
        r = gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 4)))
        c = gl.arange(0, 16, layout=gl.SliceLayout(0, lane_layout(R, W, 4)))
        i = gl.minimum(i0 + r // 16 * 8 + r % 8, I - 1)
        at = weight_offset(weight_row(r // 8 % 2, i, I, LAYOUT), 0, H // 2, LAYOUT) // 4
        words = w_ptr + e * (I * H // 4) + (at[:, None] + (c // 4 * 64 + c % 4)[None, :])
        r = gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 1)))
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))
        i = gl.minimum(i0 + r // 16 * 8 + r % 8, I - 1)
        at = scale_offset(r // 8 % 2, i, 0, I, K_BLOCKS, LAYOUT)
        scales = (
            scale_ptr + e * (2 * I * ((K_BLOCKS + 7) // 8 * 8)) + (at[:, None] + (t * 64)[None, :])
        )
        for j in gl.static_range(number_of_choices(T)):
            if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                stage1_columns(
                    x_ptr, words, scales, bias_ptr + e * (2 * I), pairs_ptr + b * T, a_ptr, num_pairs, topk, i0, limit,
                    alpha, beta, linear_beta, H, I, X_STRIDE, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE,
                    VIA_BF16, WIDE, R, columns1(T, j), columns2(T, j), W,
                )  # fmt: skip
