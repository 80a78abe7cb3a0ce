"""Stage 2 on fp8 tensor cores: row tiles of 16 W rows of w2 of one expert (W warps) times the pairs of a block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    CODE_SCALE,
    acc_layout,
    barrier,
    columns_ready,
    join_parts,
    split_rows,
    stage_columns,
)
from sglang_aiter_moe.portable.triton.hopper.read_once import read_once
from sglang_aiter_moe.portable.triton.hopper.ring import (
    block_of,
    make_ring,
    produce,
    ring_quads,
    ring_row,
    ring_steps,
    share,
)
from sglang_aiter_moe.portable.triton.hopper.tail import make_words, next_run, shared_out


@gluon.jit
def _consume(
    words,
    scales,
    full,
    empty,
    begins,
    lo,
    hi,
    total,
    a_ptr,
    a_scale_ptr,
    bias_ptr,
    weights_ptr,
    pairs_ptr,
    starts_ptr,
    counter_ptr,
    part_ptr,
    num_pairs,
    H: gl.constexpr,
    I: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    SB: gl.constexpr,
    SLOTS: gl.constexpr,
    BY_ROW: gl.constexpr,
    TAIL: gl.constexpr,
    UNIT: gl.constexpr,
    DISCARDED: gl.constexpr,
):
    QUADS: gl.constexpr = ring_quads(I // 32, SB)
    T: gl.constexpr = N // PARTS
    ROWS: gl.constexpr = 16 * W
    TILES: gl.constexpr = (H + ROWS - 1) // ROWS
    ACC: gl.constexpr = acc_layout(N, W)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    ACC_T: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, W], [0, 1])
    CHUNKS: gl.constexpr = (QUADS + 3) // 4
    smem = gl.allocate_shared_memory(
        gl.float8e4nv, [CHUNKS * 4 if BY_ROW else QUADS, N, 128], SHARED
    )
    c = gl.arange(0, N, layout=gl.SliceLayout(0, ACC))
    t = gl.arange(0, T, layout=gl.SliceLayout(0, ACC_T))
    slot = 0
    phase = 0
    if PDL:
        gdc_wait()  # for stage 1; the ring is already being filled
    while lo < total:
        for b in range(lo // TILES, (hi + TILES - 1) // TILES):
            e, start, end = block_of(starts_ptr, counter_ptr, b, num_pairs)
            ok_c = start + c // PARTS < end
            pair_c = gl.load(pairs_ptr + start + c // PARTS, mask=ok_c, other=0)
            ok = start + t < end
            pair = gl.load(pairs_ptr + start + t, mask=ok, other=0)
            weight = gl.load(weights_ptr + pair, mask=ok, other=0.0)
            out = part_ptr + pair.to(gl.int64) * H
            cols = a_scale_ptr + pair_c * (QUADS * 4)
            barrier()  # everybody is done with the last block's pairs
            if BY_ROW:
                pair_scale = split_rows(a_ptr, pair, ok, smem, I, CHUNKS, T, W, PARTS)
            else:
                stage_columns(a_ptr, pair_c, ok_c, smem, QUADS, N, W)
            columns_ready()
            for tile in range(gl.maximum(lo - b * TILES, 0), gl.minimum(hi - b * TILES, TILES)):
                acc, slot, phase = ring_row(
                    words, scales, full, empty, slot, phase, smem, cols, I // 32, SLOTS, N, W, SB, 1, not BY_ROW
                )  # fmt: skip
                y = join_parts(acc, N, W, PARTS) * CODE_SCALE
                y = gl.permute(gl.reshape(y, (W // 2, 2, 2, 8, T)), (0, 2, 1, 3, 4))
                y = gl.convert_layout(gl.reshape(y, (ROWS, T)), ACC_T)
                if BY_ROW:
                    y = y * pair_scale[None, :]
                row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC_T))
                if HAS_BIAS:
                    y += gl.load(bias_ptr + e * H + row, mask=row < H, other=0.0)[:, None]
                y = y * weight[None, :]
                keep = ok[None, :] & (row < H)[:, None]
                y = y.to(gl.bfloat16)
                if DISCARDED:
                    gl.store(
                        out[None, :] + row[:, None], y, mask=keep, eviction_policy="evict_last"
                    )
                else:
                    gl.store(out[None, :] + row[:, None], y, mask=keep)
        if TAIL:
            lo, hi = next_run(begins, full, slot, phase, total, UNIT, W)
        else:
            lo = total


@read_once
def stage2_fp8(
    desc_w,  # w2: see fp8_launch.descriptors
    desc_s,
    a_ptr,  # BY_ROW: [pairs, I] bf16; else [pairs, QUADS * 128] e4m3
    a_scale_ptr,  # [pairs, QUADS * 4] float32, without BY_ROW
    bias_ptr,  # [E, H] fp32
    weights_ptr,  # [pairs] fp32
    pairs_ptr,  # these three: prepare.list_pairs
    starts_ptr,
    counter_ptr,
    part_ptr,  # [pairs, H] bf16
    num_pairs,
    H: gl.constexpr,
    I: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    SB: gl.constexpr,  # K blocks of a slot
    SLOTS: gl.constexpr,
    BY_ROW: gl.constexpr,  # as in stage 1
    TAIL: gl.constexpr,  # row tiles a program that are taken from a queue, UNIT at a time: see ``tail``
    UNIT: gl.constexpr,
    QUEUE: gl.constexpr,  # where in ``counter_ptr`` the queue is
    DISCARDED: gl.constexpr,  # the sum drops the parts, so L2 may hold on to them until then
):
    ROWS: gl.constexpr = 16 * W
    TILES: gl.constexpr = (H + ROWS - 1) // ROWS
    STEPS: gl.constexpr = ring_steps(I // 32, SB)
    words, scales, full, empty = make_ring(desc_w, desc_s, W, SB, 1, SLOTS)
    begins = make_words(SLOTS)
    # The list is complete: stage 1 lets this kernel start once it has itself waited for the list.
    total = gl.load(counter_ptr) * TILES
    lo, hi = share(shared_out(total, TAIL))
    if PDL:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                words, scales, full, empty, begins, lo, hi, total, a_ptr, a_scale_ptr, bias_ptr, weights_ptr, pairs_ptr,
                starts_ptr, counter_ptr, part_ptr, num_pairs, H, I, HAS_BIAS, PARTS, PDL, N, W, SB, SLOTS,
                BY_ROW, TAIL, UNIT, DISCARDED,
            )),
            (produce, (
                desc_w, desc_s, words, scales, full, empty, starts_ptr, num_pairs, lo, hi, TILES, W, STEPS, SLOTS,
                W, SB, 1, TAIL, UNIT, begins, counter_ptr + QUEUE, total,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
