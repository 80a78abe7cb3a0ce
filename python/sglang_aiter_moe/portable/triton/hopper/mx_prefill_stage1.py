"""Stage 1 of the fp8 prefill form (Gluon): R rows of one expert, half gate and half up, times a block of up to T of
its tokens, and from them R / 2 columns of ``a`` in the mode's own blocks (``fold_kernel`` brings them together)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_aiter_moe.portable.triton.hopper.fp8 import scale_offset, weight_offset, weight_row
from sglang_aiter_moe.portable.triton.hopper.mx_prefill import (
    STAGES,
    chunk_layout,
    column_layout,
    line_layout,
    multiply,
)
from sglang_aiter_moe.portable.triton.hopper.prefill import lane_layout
from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import (
    columns,
    columns1,
    columns2,
    number_of_choices,
    row_starts,
    rows_of,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_stage1 import (
    block_layout,
    gate_up_rows,
    quantize_blocks,
)


@gluon.jit
def shared_columns(SLOTS: gl.constexpr, N: gl.constexpr):
    """Room for SLOTS chunks of 128 columns of N tokens, and a scale each."""
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return (
        gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, N, 128], L),
        gl.allocate_shared_memory(gl.float32, [SLOTS, N], S),
    )


@gluon.jit
def column_starts(
    pairs_ptr, num_pairs, topk, STRIDE: gl.constexpr, WIDE: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Where the tokens of a block begin: elements ``[N, 128]`` and scales ``[N]``."""
    scale = rows_of(pairs_ptr, num_pairs, topk, WIDE, N, column_layout(W)) * (STRIDE // 128)
    return row_starts(pairs_ptr, 0, num_pairs, topk, STRIDE, WIDE, N, chunk_layout(W)), scale


@gluon.constexpr_function
def byte_layout(N, R, W):
    """``[R / 2, N]``, a step's columns in the operand's order: what ``block_layout``'s lanes hold."""
    t = (R // 64).bit_length() - 1
    rows = (R // 2).bit_length() - 1
    lanes = [[0, 1 << b] for b in range(N.bit_length() - 1)]
    warps = W.bit_length() - 1
    across = lanes[3:] + [[0, 0]] * warps
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << b, 0] for b in range(t + 3)] + lanes[3 + warps :],
        lane_bases=[[1 << b, 0] for b in range(t + 3, rows)] + lanes[:3],
        warp_bases=across[:warps],
        block_bases=[],
        shape=[R // 2, N],
    )


@gluon.jit
def requantize(
    acc, bias_ptr, pairs_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, I: gl.constexpr,
    A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr,
    FORMAT: gl.constexpr, RULE: gl.constexpr, VIA_BF16: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """From gate and up rows to bytes and scales of ``a``. Past I there are zeros."""
    y = gate_up_rows(
        acc, bias_ptr, i0, limit, alpha, beta, linear_beta, I, ACTIVATION, HAS_LIMIT, HAS_BIAS, R, N, W
    )  # fmt: skip
    if VIA_BF16:
        y = y.to(gl.bfloat16).to(gl.float32)
    S: gl.constexpr = R // 64
    B: gl.constexpr = block_layout(W)
    y = gl.convert_layout(gl.reshape(y, (S, 32, N)), B)
    if A_STRIDE != I:
        s = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))
        k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))
        here = gl.expand_dims(s * 32, 1) + gl.expand_dims(k, 0) < I - i0
        y = gl.where(gl.expand_dims(here, 2), y, 0.0)
    y, exponent = quantize_blocks(y, FORMAT, RULE)
    OUT: gl.constexpr = byte_layout(N, R, W)
    y = gl.permute(gl.reshape(y, (S, 4, 2, 4, N)), (1, 2, 0, 3, 4))
    y = gl.convert_layout(gl.reshape(y.to(gl.float8e4nv), (R // 2, N)), OUT, assert_trivial=True)
    p = gl.arange(0, R // 2, layout=gl.SliceLayout(1, OUT))
    place = i0 // 128 * 128 + i0 % 128 // 32 * 4 + p // (4 * S) * 16 + p % (4 * S)
    pair = gl.load(pairs_ptr + gl.arange(0, N, layout=gl.SliceLayout(0, OUT)))
    out = a_ptr + pair.to(gl.int64)[None, :] * A_STRIDE + place[:, None]
    gl.store(out, y, mask=(pair < num_pairs)[None, :])
    E: gl.constexpr = exponent.type.layout
    pair = gl.load(pairs_ptr + gl.arange(0, N, layout=gl.SliceLayout(0, E)))
    block = i0 // 32 + gl.arange(0, S, layout=gl.SliceLayout(1, E))
    at = a_scale_ptr + pair.to(gl.int64)[None, :] * (A_STRIDE // 32) + block[:, None]
    gl.store(at, exponent.to(gl.uint8), mask=(pair < num_pairs)[None, :])


@gluon.jit
def stage1_columns(
    x_ptr, x_scale_ptr, lines, scale_ptr, scale_at, bias_ptr, pairs_ptr, a_ptr, a_scale_ptr, num_pairs, topk, i0,
    limit, alpha, beta, linear_beta, H: gl.constexpr, I: gl.constexpr, X_STRIDE: gl.constexpr,
    A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr,
    FORMAT: gl.constexpr, RULE: gl.constexpr, VIA_BF16: gl.constexpr, WIDE: gl.constexpr, R: gl.constexpr,
    N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    columns1 = shared_columns(STAGES, N1)
    at1 = column_starts(pairs_ptr, num_pairs, topk, X_STRIDE, WIDE, N1, W)
    columns2 = 0
    at2 = 0
    if N2 > 0:
        columns2 = shared_columns(STAGES, N2)
        at2 = column_starts(pairs_ptr + N1, num_pairs, topk, X_STRIDE, WIDE, N2, W)
    acc1, acc2 = multiply(
        lines, scale_ptr, scale_at, num_pairs >> 31, x_ptr, x_scale_ptr, at1, at2, columns1, columns2, False, H // 32,
        R, N1, N2, W,
    )  # fmt: skip
    requantize(
        acc1, bias_ptr, pairs_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, I, A_STRIDE,
        ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, R, N1, W,
    )  # fmt: skip
    if N2 > 0:
        requantize(
            acc2, bias_ptr, pairs_ptr + N1, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, I,
            A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, R, N2, W,
        )  # fmt: skip


@gluon.jit
def stage1_mx_prefill(
    x_ptr,  # [M, X_STRIDE] e4m3 in the operand's order
    x_scale_ptr,  # [M, X_STRIDE / 128] float32
    w_ptr,  # as int32
    scale_ptr,  # as int32
    bias_ptr,
    pairs_ptr,  # [blocks, T]
    block_expert_ptr,
    block_rows_ptr,
    num_blocks_ptr,
    a_ptr,  # [pairs, A_STRIDE] e4m3 in the operand's order
    a_scale_ptr,  # [pairs, A_STRIDE / 32] E8M0
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
    TILES: gl.constexpr = A_STRIDE // (R // 2)
    b = gl.program_id(0) // TILES
    i0 = gl.program_id(0) % TILES * (R // 2)
    live = b < gl.load(num_blocks_ptr)
    e = gl.load(block_expert_ptr + b).to(gl.int64)  # past the last block: anything
    n = gl.load(block_rows_ptr + b)
    if live:
        # Row r = 16 * m + 8 * h + g of the tile: h picks gate or up, so that a lane holds both of a pair.
        q = gl.arange(0, R // 2, layout=gl.SliceLayout(1, line_layout(R, W)))
        c = gl.arange(0, 32, layout=gl.SliceLayout(0, line_layout(R, W)))
        i = gl.minimum((i0 + q // 8 * 8)[:, None] + (c // 4)[None, :], I - 1)
        at = weight_offset(weight_row((q // 4 % 2)[:, None], i, I, LAYOUT), 0, H // 2, LAYOUT) // 4
        lines = w_ptr + e * (I * H // 4) + (at + (q % 4 * 64)[:, None] + (c % 4)[None, :])
        r = gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 1)))
        i = gl.minimum(i0 + r // 16 * 8 + r % 8, I - 1)
        at = scale_offset(r // 8 % 2, i, 0, I, K_BLOCKS, LAYOUT)
        scale_base = scale_ptr + e * (2 * I * ((K_BLOCKS + 7) // 8 * 2))
        for j in gl.static_range(number_of_choices(T)):
            if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                stage1_columns(
                    x_ptr, x_scale_ptr, lines, scale_base, (at // 4, at % 4), bias_ptr + e * (2 * I),
                    pairs_ptr + b * T, a_ptr, a_scale_ptr, num_pairs, topk, i0, limit, alpha, beta, linear_beta, H, I,
                    X_STRIDE, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, WIDE, R,
                    columns1(T, j), columns2(T, j), W,
                )  # fmt: skip
