"""Stage 2 for many tokens (Gluon): R rows of w2 of one expert times a block of up to T of its tokens, as in stage 1."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from sglang_aiter_moe.portable.triton.hopper.fp8 import barrier, scale_offset, weight_offset
from sglang_aiter_moe.portable.triton.hopper.prefill import (
    accumulators,
    copy_layout,
    finish,
    lane_layout,
    load_step,
    multiply,
    multiply_chunk,
    row_bases,
    start_copy,
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
    R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """TILES == 0: one tile, tokens through the ring. Else TILES tiles with all columns of the tokens kept."""
    K_BLOCKS: gl.constexpr = I // 32
    STEPS: gl.constexpr = (K_BLOCKS + 3) // 4
    KEPT: gl.constexpr = STEPS if TILES > 0 else 4
    smem1 = shared(KEPT, N1)
    at1 = row_starts(pairs_ptr, 0, num_pairs, 1, A_STRIDE, WIDE, N1, copy_layout(W))
    smem2 = 0
    at2 = 0
    if N2 > 0:
        smem2 = shared(KEPT, N2)
        at2 = row_starts(pairs_ptr, N1, num_pairs, 1, A_STRIDE, WIDE, N2, copy_layout(W))
    if TILES == 0:
        words, scales = stage2_rows(n0, w_ptr, scale_ptr, H, I, R, W)
        acc1, acc2 = multiply(words, scales, a_ptr, at1, at2, smem1, smem2, K_BLOCKS, R, N1, N2, W)
        store_part(acc1, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N1, W)
        if N2 > 0:
            store_part(
                acc2, bias_ptr, pairs_ptr + N1, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N2, W
            )
    else:
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
            for step in gl.static_range(STEPS):
                if step + 1 < STEPS:
                    soon = load_step(words, scales, step + 1, K_BLOCKS, R, W)
                else:
                    words, scales = stage2_rows(n0 + R, w_ptr, scale_ptr, H, I, R, W)
                    soon = load_step(words, scales, 0, K_BLOCKS, R, W)
                chunk2 = 0
                if N2 > 0:
                    chunk2 = smem2.index(step)
                acc1, acc2 = multiply_chunk(
                    acc1, acc2, now, smem1.index(step), chunk2, R, N1, N2, W
                )
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
                    A_STRIDE, HAS_BIAS, WIDE, TILES, R, columns1(T, j), columns2(T, j), W,
                )  # fmt: skip
