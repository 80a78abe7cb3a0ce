"""Stage 2 on fp8 tensor cores: TILES times 16 W rows of w2 of one expert times the pairs of a block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    CODE_SCALE,
    acc_layout,
    columns_ready,
    join_parts,
    multiply_row,
    quads,
    scale_offset,
    scale_word_layout,
    stage_columns,
    weight_offset,
    word_layout,
)


@gluon.jit
def stage2_fp8(
    a_ptr,  # [pairs, PARTS, QUADS * 128] e4m3
    a_scale_ptr,  # [pairs, QUADS * 4] float32
    w_ptr,  # w2 bytes
    scale_ptr,  # as int32
    bias_ptr,  # [E, H] fp32
    weights_ptr,  # [pairs] fp32
    pairs_ptr,  # [blocks, N / PARTS]
    block_expert_ptr,
    num_blocks_ptr,
    part_ptr,  # [pairs, H] bf16
    num_pairs,
    H: gl.constexpr,
    I: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
    N: gl.constexpr,
    TILES: gl.constexpr,
    W: gl.constexpr,
):
    K_BLOCKS: gl.constexpr = I // 32
    QUADS: gl.constexpr = quads(K_BLOCKS)
    T: gl.constexpr = N // PARTS
    ACC: gl.constexpr = acc_layout(N, W)
    ROWS: gl.constexpr = gl.SliceLayout(1, word_layout(W))
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    ROWS_TILE: gl.constexpr = 16 * W
    GROUPS: gl.constexpr = (H + ROWS_TILE * TILES - 1) // (ROWS_TILE * TILES)
    b = gl.program_id(0) // GROUPS
    first = gl.program_id(0) % GROUPS * TILES
    # The list is complete: stage 1 lets this kernel start once it has itself waited for the list.
    live = b < gl.load(num_blocks_ptr)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if live:
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        smem = gl.allocate_shared_memory(gl.float8e4nv, [QUADS, N, 128], SHARED)
        c = gl.arange(0, N, layout=gl.SliceLayout(0, ACC))
        pair = gl.load(pairs_ptr + b * T + c // PARTS)
        ok = pair < num_pairs
        pair = gl.where(ok, pair, 0)
        stage_columns(a_ptr, (pair * PARTS + c % PARTS) * (QUADS * 128), ok, smem, QUADS, N, W)
        cols = a_scale_ptr + pair * (QUADS * 4)

        # Row r = 16 * warp + 8 * h + g of the tile: h picks one of the two rows, 16 apart, whose scales share a word.
        r = gl.arange(0, ROWS_TILE, layout=ROWS)
        r = r // 32 * 32 + r // 16 % 2 * 8 + r // 8 % 2 * 16 + r % 8
        kbyte = gl.arange(0, 16, layout=gl.SliceLayout(0, word_layout(W)))
        w = w_ptr + e * (H * I // 2)
        rs = gl.arange(0, ROWS_TILE // 2, layout=scale_word_layout(W))
        rs = rs // 16 * 32 + rs % 16
        s = scale_ptr + e * (H * ((K_BLOCKS + 7) // 8 * 2))
        ACC_T: gl.constexpr = gl.BlockedLayout([1, T], [32, 1], [W, 1], [0, 1])
        t = gl.arange(0, T, layout=gl.SliceLayout(0, ACC_T))
        pair_t = gl.load(pairs_ptr + b * T + t)
        ok_t = pair_t < num_pairs
        weight = gl.load(weights_ptr + pair_t, mask=ok_t, other=0.0)
        out = part_ptr + pair_t.to(gl.int64) * H

        columns_ready()
        for tile in range(TILES):
            acc = gl.zeros([ROWS_TILE, N], gl.float32, layout=ACC)
            n = gl.minimum((first + tile) * ROWS_TILE + r, H - 1)
            words = w + weight_offset(n, 0, I // 2, "separated")[:, None] + kbyte[None, :]
            ns = gl.minimum((first + tile) * ROWS_TILE + rs, H - 32 + rs % 16)
            scales = s + scale_offset(0, ns, 0, H, K_BLOCKS, "separated") // 4
            acc = multiply_row(acc, words, scales, smem, cols, K_BLOCKS, N, W, True)

            y = join_parts(acc, N, W, PARTS) * CODE_SCALE
            y = gl.permute(gl.reshape(y, (W // 2, 2, 2, 8, T)), (0, 2, 1, 3, 4))
            y = gl.convert_layout(gl.reshape(y, (ROWS_TILE, T)), ACC_T)
            row = (first + tile) * ROWS_TILE + gl.arange(
                0, ROWS_TILE, layout=gl.SliceLayout(1, ACC_T)
            )
            if HAS_BIAS:
                y += gl.load(bias_ptr + e * H + row, mask=row < H, other=0.0)[:, None]
            y = y * weight[None, :]
            keep = ok_t[None, :] & (row < H)[:, None]
            gl.store(out[None, :] + row[:, None], y.to(gl.bfloat16), mask=keep)
