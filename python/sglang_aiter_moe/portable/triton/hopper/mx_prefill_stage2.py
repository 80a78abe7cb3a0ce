"""Stage 2 of the fp8 prefill form (Gluon): R rows of w2 of one expert times a block of up to T of its tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sglang_aiter_moe.portable.triton.hopper.fp8 import barrier, scale_offset, weight_offset
from sglang_aiter_moe.portable.triton.hopper.mx_prefill import (
    STAGES,
    add_group,
    copy_tokens,
    copy_weights,
    decode_step,
    finish,
    largest_scale,
    line_layout,
    load_scales,
    multiply,
    no_sums,
    read_weights,
    scale_words,
    settled,
    start_group,
    weight_ring,
)
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_stage1 import column_starts, shared_columns
from sglang_aiter_moe.portable.triton.hopper.prefill import lane_layout
from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import (
    columns,
    columns1,
    columns2,
    number_of_choices,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_stage2 import side_by_side, store_part


@gluon.jit
def tile_offsets(H: gl.constexpr, I: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Within a tile of R rows: of the words ``[R / 2, 32]`` of the first step, line by line; of the rows' first scale
    words ``[R]``, and which of a word's bytes is a row's."""
    q = gl.arange(0, R // 2, layout=gl.SliceLayout(1, line_layout(R, W)))
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, line_layout(R, W)))
    row = gl.minimum((q // 4 * 8)[:, None] + (c // 4)[None, :], H - 1)
    at = weight_offset(row, 0, I // 2, "separated") // 4
    r = side_by_side(gl.arange(0, R, layout=gl.SliceLayout(1, lane_layout(R, W, 1))))
    scale = scale_offset(0, gl.minimum(r, H - 1), 0, H, I // 32, "separated")
    return at + (q % 4 * 64)[:, None] + (c % 4)[None, :], scale // 4, scale % 4


@gluon.jit
def last_tile(n0, H: gl.constexpr, R: gl.constexpr):
    """A tile that would reach past H begins earlier: its rows are computed twice, to the same bits."""
    return gl.minimum(n0, max(H - R, 0))


@gluon.jit
def store_parts(
    acc1, acc2, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H: gl.constexpr, HAS_BIAS: gl.constexpr,
    R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    store_part(acc1, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N1, W)
    if N2 > 0:
        store_part(acc2, bias_ptr, pairs_ptr + N1, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N2, W)


@gluon.jit
def copy_chunk(
    ring,
    slot,
    w_ptr,
    offsets,
    n0,
    step: gl.constexpr,
    I: gl.constexpr,
    R: gl.constexpr,
    W: gl.constexpr,
):
    """Starts the copy of a step's words of rows n0 .. n0 + R - 1."""
    copy_weights(ring, slot, w_ptr + n0 * (I // 8) + offsets[0], step, I // 32, R, W)
    async_copy.commit_group()


@gluon.jit
def chunk_scales(
    scale_ptr, offsets, n0, step: gl.constexpr, I: gl.constexpr, R: gl.constexpr, W: gl.constexpr
):
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, lane_layout(R, W, 1)))
    scales = scale_ptr + n0 * ((I // 32 + 7) // 8 * 2) + (offsets[1][:, None] + (t * 16)[None, :])
    return load_scales(scales, offsets[2] * 8, step, I // 32, R, W)


@gluon.jit
def stage2_tiles(
    a_ptr, a_scale_ptr, w_ptr, scale_ptr, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, at1, at2, H: gl.constexpr,
    I: gl.constexpr, HAS_BIAS: gl.constexpr, TILES: gl.constexpr, R: gl.constexpr, N1: gl.constexpr,
    N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """TILES tiles of R rows; all columns of the tokens stay in shared memory. Weights as in ``multiply``, from tile to
    tile."""
    K_BLOCKS: gl.constexpr = I // 32
    STEPS: gl.constexpr = (K_BLOCKS + 3) // 4
    ROW: gl.constexpr = (K_BLOCKS + 7) // 8 * 2
    columns1 = shared_columns(STEPS, N1)
    columns2 = 0
    if N2 > 0:
        columns2 = shared_columns(STEPS, N2)
    for step in gl.static_range(STEPS):
        copy_tokens(a_ptr, a_scale_ptr, at1, columns1, step, step)
        if N2 > 0:
            copy_tokens(a_ptr, a_scale_ptr, at2, columns2, step, step)
    ring = weight_ring(R)
    AHEAD: gl.constexpr = STAGES - 1
    offsets = tile_offsets(H, I, R, W)
    for c in gl.static_range(AHEAD):  # the tokens belong to the first group
        n = last_tile(n0 + c // STEPS * R, H, R)
        copy_chunk(ring, c, w_ptr, offsets, n, c % STEPS, I, R, W)
    here = last_tile(n0, H, R)
    words = scale_words(scale_ptr + here * ROW, offsets[1], 0, K_BLOCKS, R, W)
    scale = chunk_scales(scale_ptr, offsets, here, 0, I, R, W)
    n = last_tile(n0 + 1 // STEPS * R, H, R)
    soon = chunk_scales(scale_ptr, offsets, n, 1 % STEPS, I, R, W)
    reference = largest_scale(words, offsets[2], 0, K_BLOCKS, R, W)
    async_copy.wait_group(AHEAD - 1)
    barrier()
    ops = decode_step(read_weights(ring, 0, True, R, W), scale, reference, R, W)
    for tile in range(TILES):
        here = last_tile(n0 + tile * R, H, R)
        following = last_tile(here + R, H, R)
        words = scale_words(scale_ptr + following * ROW, offsets[1], 0, K_BLOCKS, R, W)
        its = reference
        acc1, acc2 = no_sums(R, N1, N2, W)
        for step in gl.static_range(STEPS):
            chunk = tile * STEPS + step
            async_copy.wait_group(AHEAD - 2)
            barrier()
            part = start_group(ops, columns1, step, R, N1, W)
            raw = read_weights(ring, (chunk + 1) % STAGES, True, R, W)
            n = last_tile(n0 + (tile + (step + AHEAD) // STEPS) * R, H, R)
            copy_chunk(
                ring, (chunk + AHEAD) % STAGES, w_ptr, offsets, n, (step + AHEAD) % STEPS, I, R, W
            )
            if step == STEPS - 1:
                reference = largest_scale(words, offsets[2], 0, K_BLOCKS, R, W)
            coming = decode_step(raw, soon, reference, R, W)
            n = last_tile(n0 + (tile + (step + 2) // STEPS) * R, H, R)
            soon = chunk_scales(scale_ptr, offsets, n, (step + 2) % STEPS, I, R, W)
            acc1 = add_group(acc1, part, columns1, step, N1, W)
            if N2 > 0:
                part = start_group(ops, columns2, step, R, N2, W)
                acc2 = add_group(acc2, part, columns2, step, N2, W)
            ops = settled(coming, num_pairs >> 31, R, W)
        acc1, acc2 = finish(acc1, acc2, its, N1, N2, W)
        store_parts(
            acc1, acc2, bias_ptr, pairs_ptr, part_ptr, num_pairs, here, H, HAS_BIAS, R, N1, N2, W
        )
    async_copy.wait_group(0)


@gluon.jit
def stage2_columns(
    a_ptr, a_scale_ptr, w_ptr, scale_ptr, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H: gl.constexpr,
    I: gl.constexpr, A_STRIDE: gl.constexpr, HAS_BIAS: gl.constexpr, WIDE: gl.constexpr, TILES: gl.constexpr,
    R: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """TILES == 0: one tile, tokens through the ring, too. Else TILES tiles with all columns of the tokens kept."""
    at1 = column_starts(pairs_ptr, num_pairs, 1, A_STRIDE, WIDE, N1, W)
    at2 = 0
    if N2 > 0:
        at2 = column_starts(pairs_ptr + N1, num_pairs, 1, A_STRIDE, WIDE, N2, W)
    if TILES == 0:
        columns1 = shared_columns(STAGES, N1)
        columns2 = 0
        if N2 > 0:
            columns2 = shared_columns(STAGES, N2)
        offsets = tile_offsets(H, I, R, W)
        n0 = last_tile(n0, H, R)
        acc1, acc2 = multiply(
            w_ptr + n0 * (I // 8) + offsets[0], scale_ptr + n0 * ((I // 32 + 7) // 8 * 2), (offsets[1], offsets[2]),
            num_pairs >> 31, a_ptr, a_scale_ptr, at1, at2, columns1, columns2, True, I // 32, R, N1, N2, W,
        )  # fmt: skip
        store_parts(
            acc1, acc2, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, H, HAS_BIAS, R, N1, N2, W
        )
    else:
        stage2_tiles(
            a_ptr, a_scale_ptr, w_ptr, scale_ptr, bias_ptr, pairs_ptr, part_ptr, num_pairs, n0, at1, at2, H, I,
            HAS_BIAS, TILES, R, N1, N2, W,
        )  # fmt: skip


@gluon.jit
def stage2_mx_prefill(
    a_ptr,  # [pairs, A_STRIDE] e4m3 in the operand's order
    a_scale_ptr,  # [pairs, A_STRIDE / 128] float32
    w_ptr,  # as int32
    scale_ptr,  # as int32
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
        s = scale_ptr + e * (H * ((I // 32 + 7) // 8 * 2))
        for j in gl.static_range(number_of_choices(T)):
            if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                stage2_columns(
                    a_ptr, a_scale_ptr, w, s, bias_ptr + e * H, pairs_ptr + b * T, part_ptr, num_pairs, n0, H, I,
                    A_STRIDE, HAS_BIAS, WIDE, TILES, R, columns1(T, j), columns2(T, j), W,
                )  # fmt: skip
