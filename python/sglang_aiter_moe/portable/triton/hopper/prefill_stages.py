"""Both stages for many tokens (Gluon): R rows of one expert times a block of up to T of its tokens.

How many of the T columns are computed follows from how many tokens the block holds (``column_choices``): a block
that is not full costs little more than its tokens. All choices are in one kernel, so that blocks of every size run in
one launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    barrier,
    scale_offset,
    weight_offset,
    weight_row,
)
from sglang_aiter_moe.portable.triton.hopper.fp8_stage1 import gate_up
from sglang_aiter_moe.portable.triton.hopper.prefill import (
    accumulators,
    copy_layout,
    finish,
    lane_layout,
    line_layout,
    load_step,
    multiply,
    multiply_chunk,
    prefetch_range,
    prefetch_steps,
    prefill_column,
    row_bases,
    start_copy,
)


@gluon.constexpr_function
def column_choices(T):
    """(N1, N2) in ascending order; a block runs the first whose sum holds its tokens."""
    return {
        8: ((8, 0),),
        16: ((8, 0), (16, 0)),
        32: ((16, 0), (32, 0)),
        64: ((32, 0), (64, 0)),
        96: ((32, 0), (64, 0), (64, 32)),
        128: ((64, 0), (64, 32), (128, 0)),
        160: ((64, 0), (64, 32), (128, 0), (128, 32)),
    }[T]


@gluon.constexpr_function
def number_of_choices(T):
    return len(column_choices(T))


@gluon.constexpr_function
def columns1(T, j):
    return column_choices(T)[j][0]


@gluon.constexpr_function
def columns2(T, j):
    return column_choices(T)[j][1]


@gluon.constexpr_function
def columns(T, j):
    """Most tokens of choice ``j``; 0 before the first."""
    return columns1(T, j) + columns2(T, j) if j >= 0 else 0


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


@gluon.jit
def round_blocks(y, FORMAT: gl.constexpr, RULE: gl.constexpr):
    """``y [S, 32, N]``, a scale block along axis 1, rounded to MXFP8 or MXFP4 by ``codecs.mx_scale``'s rules;
    float32 values."""
    EMAX: gl.constexpr = 8 if FORMAT == "e4m3" else 2
    MAX: gl.constexpr = 448.0 if FORMAT == "e4m3" else 6.0
    bits = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if RULE == "epilogue":
        exponent = gl.maximum(((bits + 0x400000) >> 23) - EMAX, 0)
    else:
        quotient = bits.to(gl.float32, bitcast=True) / MAX
        exponent = (quotient.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    exponent = gl.expand_dims(exponent, 1)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    scaled = y * ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    if FORMAT == "e4m3":
        return scaled.to(gl.float8e4nv).to(gl.float32) * scale
    else:
        # E2M1's steps are 0.5 below 2, 1 below 4, then 2; adding 2**23 rounds a multiple of the step to nearest even.
        a = gl.abs(scaled)
        step = gl.where(a < 2.0, 0.5, gl.where(a < 4.0, 1.0, 2.0))
        rounded = gl.minimum((a / step + 8388608.0) - 8388608.0, 6.0 / step) * step
        return gl.where(scaled < 0, -rounded, rounded) * scale


@gluon.jit
def row_starts(
    pairs_ptr,
    first,
    num_pairs,
    topk,
    STRIDE: gl.constexpr,
    WIDE: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
):
    """Element offsets ``[N, 128]`` of 128 columns of the rows of a block's pairs; unused ones read the last row."""
    CL: gl.constexpr = copy_layout(W)
    pair = gl.load(pairs_ptr + first + gl.arange(0, N, layout=gl.SliceLayout(1, CL)))
    row = gl.minimum(pair, num_pairs - 1) // topk
    if WIDE:
        row = row.to(gl.int64)
    return row[:, None] * STRIDE + gl.arange(0, 128, layout=gl.SliceLayout(0, CL))[None, :]


@gluon.jit
def shared(STAGES: gl.constexpr, N: gl.constexpr):
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], L)


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
    """From gate and up rows, 8 of each in turn, to ``a``."""
    Y: gl.constexpr = half_layout(N, R, W)
    gate, up = gl.split(gl.permute(gl.reshape(acc, (R // 16, 2, 8, N)), (0, 2, 3, 1)))
    gate = gl.convert_layout(gl.reshape(gate, (R // 2, N)), Y, assert_trivial=True)
    up = gl.convert_layout(gl.reshape(up, (R // 2, N)), Y, assert_trivial=True)
    if HAS_BIAS:
        i = gl.minimum(i0 + gl.arange(0, R // 2, layout=gl.SliceLayout(1, Y)), I - 1)
        gate += gl.load(bias_ptr + i)[:, None]
        up += gl.load(bias_ptr + I + i)[:, None]
    y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
    if FORMAT != "bf16":
        B: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 4, 8], [1, 1, W], [1, 2, 0])
        if VIA_BF16:
            y = y.to(gl.bfloat16).to(gl.float32)
        y = gl.convert_layout(gl.reshape(y, (R // 64, 32, N)), B)
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
    x_ptr, words, scales, word_tiles, scale_tiles, bias_ptr, pairs_ptr, a_ptr, num_pairs, topk, i0, limit, alpha,
    beta, linear_beta, H: gl.constexpr, I: gl.constexpr, X_STRIDE: gl.constexpr, A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr,
    VIA_BF16: gl.constexpr, WIDE: gl.constexpr, R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
    W: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    smem1 = shared(4, N1)
    at1 = row_starts(pairs_ptr, 0, num_pairs, topk, X_STRIDE, WIDE, N1, W)
    smem2 = 0
    at2 = 0
    if N2 > 0:
        smem2 = shared(4, N2)
        at2 = row_starts(pairs_ptr, N1, num_pairs, topk, X_STRIDE, WIDE, N2, W)
    acc1, acc2 = multiply(
        words, scales, word_tiles, scale_tiles, x_ptr, at1, at2, smem1, smem2, H // 32, R, N1, N2, W, PREFETCH
    )
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
    PREFETCH: gl.constexpr,
):
    K_BLOCKS: gl.constexpr = H // 32
    TILES: gl.constexpr = (A_STRIDE + R // 2 - 1) // (R // 2)
    b = gl.program_id(0) // TILES
    i0 = gl.program_id(0) % TILES * (R // 2)
    live = b < gl.load(num_blocks_ptr)
    e = gl.load(block_expert_ptr + b).to(gl.int64)  # past the last block: anything
    n = gl.load(block_rows_ptr + b)
    if live:
        word_base = w_ptr + e * (I * H // 4)
        scale_base = scale_ptr + e * (2 * I * ((K_BLOCKS + 7) // 8 * 8))
        tile = gl.arange(0, R * 2, layout=line_layout(W)) // 32  # of 16 rows, the gate ones first
        i = gl.minimum(i0 + tile % (R // 32) * 16, I - 16)
        at = weight_offset(weight_row(tile // (R // 32), i, I, LAYOUT), 0, H // 2, LAYOUT) // 4
        word_tiles = word_base + at
        tile = gl.arange(0, R // 8, layout=line_layout(W)) // 4  # of 32 rows
        if LAYOUT == "separated":
            i = gl.minimum(i0 + tile % (R // 64) * 32, I - 32)
            scale_tiles = scale_base + scale_offset(tile // (R // 64), i, 0, I, K_BLOCKS, LAYOUT)
        else:
            i = gl.minimum(i0 + tile * 16, I - 16)
            scale_tiles = scale_base + scale_offset(0, i, 0, I, K_BLOCKS, LAYOUT)
        if PREFETCH:
            prefetch_steps(word_tiles, scale_tiles, 0, K_BLOCKS, R, W)
        # Row r = 16 * m + 8 * h + g of the tile: h picks gate or up, so that a lane holds both of a pair.
        r = gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 4)))
        c = gl.arange(0, 16, layout=gl.SliceLayout(0, lane_layout(R, W, 4)))
        i = gl.minimum(i0 + r // 16 * 8 + r % 8, I - 1)
        at = weight_offset(weight_row(r // 8 % 2, i, I, LAYOUT), 0, H // 2, LAYOUT) // 4
        words = word_base + (at[:, None] + (c // 4 * 64 + c % 4)[None, :])
        r = gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 1)))
        t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))
        i = gl.minimum(i0 + r // 16 * 8 + r % 8, I - 1)
        at = scale_offset(r // 8 % 2, i, 0, I, K_BLOCKS, LAYOUT)
        scales = scale_base + (at[:, None] + (t * 64)[None, :])
        for j in gl.static_range(number_of_choices(T)):
            if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                stage1_columns(
                    x_ptr, words, scales, word_tiles, scale_tiles, bias_ptr + e * (2 * I), pairs_ptr + b * T, a_ptr, num_pairs,
                    topk, i0, limit, alpha, beta, linear_beta, H, I, X_STRIDE, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE,
                    VIA_BF16, WIDE, R, columns1(T, j), columns2(T, j), W, PREFETCH,
                )  # fmt: skip


@gluon.constexpr_function
def part_layout(N, R, W):
    """``[R, N]``: an accumulator's layout with its two rows side by side (``stage2_rows``)."""
    registers, warps = row_bases(R, W)
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [0, 1]] + [[0, 8 << b] for b in range(N.bit_length() - 4)] + registers[1:],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[R, N],
    )  # fmt: skip


@gluon.jit
def store_part(
    acc,
    bias_ptr,  # of this expert
    pairs_ptr,  # of these columns
    part_ptr,
    num_pairs,
    n0,
    H: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    R: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
):
    """Straight from the accumulator: two rows a lane, 16 rows (32 bytes) a warp and pair.

    The pairs are read again for each tile: kept, their addresses would take 40 registers."""
    L: gl.constexpr = part_layout(N, R, W)
    pair = gl.load(pairs_ptr + gl.arange(0, N, layout=gl.SliceLayout(0, L)))
    y = gl.permute(gl.reshape(acc, (R // 16, 2, 8, N)), (0, 2, 1, 3))
    y = gl.convert_layout(gl.reshape(y, (R, N)), L, assert_trivial=True)
    n = n0 + gl.arange(0, R, layout=gl.SliceLayout(1, L))
    if HAS_BIAS:
        y += gl.load(bias_ptr + n, mask=n < H, other=0.0)[:, None]
    out = part_ptr + pair.to(gl.int64)[None, :] * H + n[:, None]
    gl.store(out, y.to(gl.bfloat16), mask=(pair < num_pairs)[None, :] & (n < H)[:, None])


@gluon.jit
def side_by_side(r):
    """Row 16 m + 8 h + g of an operand is row 16 m + 2 g + h of the tile."""
    return r // 16 * 16 + r % 8 * 2 + r // 8 % 2


@gluon.jit
def stage2_rows(
    n0, w_ptr, scale_ptr, H: gl.constexpr, I: gl.constexpr, R: gl.constexpr, W: gl.constexpr
):
    """Pointers to the words ``[R, 16]`` and scale bytes ``[R, 4]`` of the first step of rows n0 .. n0 + R - 1."""
    K_BLOCKS: gl.constexpr = I // 32
    r = gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 4)))
    n = gl.minimum(n0 + side_by_side(r), H - 1)
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, lane_layout(R, W, 4)))
    at = weight_offset(n, 0, I // 2, "separated") // 4
    words = w_ptr + (at[:, None] + (c // 4 * 64 + c % 4)[None, :])
    r = gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 1)))
    n = gl.minimum(n0 + side_by_side(r), H - 1)
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))
    at = scale_offset(0, n, 0, H, K_BLOCKS, "separated")
    return words, scale_ptr + (at[:, None] + (t * 64)[None, :])


@gluon.jit
def stage2_columns(
    a_ptr, w_ptr, scale_ptr, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H: gl.constexpr,
    I: gl.constexpr, A_STRIDE: gl.constexpr, HAS_BIAS: gl.constexpr, WIDE: gl.constexpr, TILES: gl.constexpr,
    R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """TILES == 0: one tile, tokens through the ring. Else TILES tiles with all columns of the tokens kept."""
    K_BLOCKS: gl.constexpr = I // 32
    STEPS: gl.constexpr = (K_BLOCKS + 3) // 4
    KEPT: gl.constexpr = STEPS if TILES > 0 else 4
    smem1 = shared(KEPT, N1)
    at1 = row_starts(pairs_ptr, 0, num_pairs, 1, A_STRIDE, WIDE, N1, W)
    smem2 = 0
    at2 = 0
    if N2 > 0:
        smem2 = shared(KEPT, N2)
        at2 = row_starts(pairs_ptr, N1, num_pairs, 1, A_STRIDE, WIDE, N2, W)
    if TILES == 0:
        tile = gl.arange(0, R * 2, layout=line_layout(W)) // 32  # of 16 rows
        n = gl.minimum(n0 + tile * 16, H - 16)
        word_tiles = w_ptr + weight_offset(n, 0, I // 2, "separated") // 4
        tile = gl.arange(0, R // 8, layout=line_layout(W)) // 4  # of 32 rows
        n = gl.minimum(n0 + tile * 32, H - 32)
        scale_tiles = scale_ptr + scale_offset(0, n, 0, H, K_BLOCKS, "separated")
        if PREFETCH:
            prefetch_steps(word_tiles, scale_tiles, 0, K_BLOCKS, R, W)
        words, scales = stage2_rows(n0, w_ptr, scale_ptr, H, I, R, W)
        acc1, acc2 = multiply(
            words, scales, word_tiles, scale_tiles, a_ptr, at1, at2, smem1, smem2, K_BLOCKS, R, N1, N2, W, PREFETCH
        )
        store_part(acc1, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N1, W)
        if N2 > 0:
            store_part(
                acc2, bias_ptr, pairs_ptr + N1, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N2, W
            )
    else:
        COLS: gl.constexpr = (K_BLOCKS + 7) // 8 * 8
        if PREFETCH:
            prefetch_range(w_ptr, n0 * (I // 8), R * I // 8, H * I // 8, 32, W)
            prefetch_range(scale_ptr, n0 * COLS, R * COLS, H * COLS, 128, W)
        for step in gl.static_range(STEPS):
            start_copy(a_ptr, at1, at2, smem1, smem2, step, step, N2)
        async_copy.commit_group()
        words, scales = stage2_rows(n0, w_ptr, scale_ptr, H, I, R, W)
        now = load_step(words, scales, 0, K_BLOCKS, R, W)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        for _tile in range(TILES):
            acc1, acc2 = accumulators(R, N1, N2, W)
            if PREFETCH:
                prefetch_range(w_ptr, (n0 + R) * (I // 8), R * I // 8, H * I // 8, 32, W)
                prefetch_range(scale_ptr, (n0 + R) * COLS, R * COLS, H * COLS, 128, W)
            for step in gl.static_range(STEPS):
                if step + 1 < STEPS:
                    soon = load_step(words, scales, step + 1, K_BLOCKS, R, W)
                else:
                    words, scales = stage2_rows(n0 + R, w_ptr, scale_ptr, H, I, R, W)
                    soon = load_step(words, scales, 0, K_BLOCKS, R, W)
                chunk2 = 0
                if N2 > 0:
                    chunk2 = smem2.index(step)
                acc1, acc2 = multiply_chunk(acc1, acc2, now, smem1.index(step), chunk2, R, N1, N2, W)
                now = soon
            y1, y2 = finish(acc1, acc2, N2)
            store_part(y1, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N1, W)
            if N2 > 0:
                store_part(
                    y2, bias_ptr, pairs_ptr + N1, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N2, W
                )
            n0 += R


@gluon.jit
def stage2_prefill(
    a_ptr,  # [pairs, A_STRIDE] bf16 in prefill order
    w_ptr,  # as int32
    scale_ptr,
    bias_ptr,
    pairs_ptr,
    block_expert_ptr,
    block_rows_ptr,
    num_blocks_ptr,
    part_ptr,  # [pairs, H] bf16, without the routing weights
    num_pairs,
    H: gl.constexpr,
    I: gl.constexpr,
    A_STRIDE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WIDE: gl.constexpr,
    TILES: gl.constexpr,
    R: gl.constexpr,
    T: gl.constexpr,
    W: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    ROWS: gl.constexpr = R * (TILES if TILES > 0 else 1)
    GROUPS: gl.constexpr = (H + ROWS - 1) // ROWS
    b = gl.program_id(0) // GROUPS
    n0 = gl.program_id(0) % GROUPS * ROWS
    live = b < gl.load(num_blocks_ptr)
    e = gl.load(block_expert_ptr + b).to(gl.int64)  # past the last block: anything
    n = gl.load(block_rows_ptr + b)
    if live:
        w = w_ptr + e * (H * I // 8)
        s = scale_ptr + e * (H * ((I // 32 + 7) // 8 * 8))
        for j in gl.static_range(number_of_choices(T)):
            if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                stage2_columns(
                    a_ptr, w, s, bias_ptr + e * H, pairs_ptr + b * T, part_ptr, num_pairs, n0, H, I,
                    A_STRIDE, HAS_BIAS, WIDE, TILES, R, columns1(T, j), columns2(T, j), W, PREFETCH,
                )  # fmt: skip
