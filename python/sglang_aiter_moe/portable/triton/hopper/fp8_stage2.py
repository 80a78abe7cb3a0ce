"""Stage 2 on fp8 tensor cores: row tiles of 16 W rows of w2 of one expert (W warps) times the pairs of a block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer, smid

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    CODE_SCALE,
    acc_layout,
    barrier,
    columns_ready,
    join_parts,
    split_rows,
    stage_columns,
)
from sglang_aiter_moe.portable.triton.hopper.ring import (
    block_of,
    evict_first_marker,
    make_ring,
    produce,
    ring_quads,
    ring_row,
    fixed,
    make_mail,
    next_run,
    ring_steps,
    share,
)


@gluon.jit
def _consume(
    words,
    scales,
    full,
    empty,
    mail,
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
    LAST: gl.constexpr,
    STAMP: gl.constexpr,
    stamp_ptr,
    TAIL: gl.constexpr = 0,
    UNIT: gl.constexpr = 1,
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
    if STAMP:
        gl.store(stamp_ptr + gl.program_id(0) * 8 + 2, globaltimer())
    begin = lo
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
            if STAMP:
                if (b == lo // TILES) & (lo == begin):
                    gl.store(stamp_ptr + gl.program_id(0) * 8 + 3, globaltimer())
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
                if LAST:
                    gl.store(out[None, :] + row[:, None], y.to(gl.bfloat16), mask=keep, eviction_policy="evict_last")
                else:
                    gl.store(out[None, :] + row[:, None], y.to(gl.bfloat16), mask=keep)
        if TAIL:
            lo, hi = next_run(mail, full, slot, phase, total, UNIT, W)
        else:
            lo = total
    if STAMP:
        gl.store(stamp_ptr + gl.program_id(0) * 8 + 4, globaltimer())


@gluon.jit
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
    LAST: gl.constexpr = False,
    QUEUE: gl.constexpr = 0,
    TAIL: gl.constexpr = 0,
    UNIT: gl.constexpr = 1,
    FIRST: gl.constexpr = False,
    STAMP: gl.constexpr = False,
    stamp_ptr=None,
):
    if FIRST:
        evict_first_marker()
    if STAMP:
        gl.store(stamp_ptr + gl.program_id(0) * 8 + 0, globaltimer())
        gl.store(stamp_ptr + gl.program_id(0) * 8 + 7, smid().to(gl.int64) + 1)
    ROWS: gl.constexpr = 16 * W
    TILES: gl.constexpr = (H + ROWS - 1) // ROWS
    STEPS: gl.constexpr = ring_steps(I // 32, SB)
    words, scales, full, empty = make_ring(desc_w, desc_s, W, SB, 1, SLOTS)
    # The list is complete: stage 1 lets this kernel start once it has itself waited for the list.
    mail = make_mail(SLOTS)
    total = gl.load(counter_ptr) * TILES
    lo, hi = share(fixed(total, TAIL))
    if PDL:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                words, scales, full, empty, mail, lo, hi, total, a_ptr, a_scale_ptr, bias_ptr, weights_ptr, pairs_ptr,
                starts_ptr, counter_ptr, part_ptr, num_pairs, H, I, HAS_BIAS, PARTS, PDL, N, W, SB, SLOTS,
                BY_ROW, LAST, STAMP, stamp_ptr, TAIL, UNIT,
            )),
            (produce, (
                desc_w, desc_s, words, scales, full, empty, mail, starts_ptr,
                counter_ptr + QUEUE, num_pairs, lo, hi, total, TILES, W, STEPS, SLOTS,
                W, SB, 1, TAIL, UNIT, STAMP, stamp_ptr,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
