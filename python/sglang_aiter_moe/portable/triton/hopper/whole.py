"""The whole layer for a few tokens in one launch (Gluon): stage 1, a meeting of all programs, stage 2.

One program an SM. One of its warps copies: the program's share of w13 of all experts, then its share of w2, through a
ring of bulk copies (``ring.py``); experts are known from the start, so w2 is on its way while stage 1 still computes
and waits in shared memory when the programs meet. Stage 1's share is a range of all tokens' and slots' tiles of 16
columns; stage 2's is 32 rows of y at a time for all slots of a token, so that its sum stays in one program, in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    CODE_SCALE,
    barrier,
    inf_to_nan,
    join_parts,
    split_rows,
)
from sglang_aiter_moe.portable.triton.hopper.fp8_stage1 import gate_up
from sglang_aiter_moe.portable.triton.hopper.ring import next_slot, ring_steps
from sglang_aiter_moe.portable.triton.hopper.whole_copy import (
    SCALES,
    UNITS,
    WORDS,
    produce,
    scale_rows,
    stage1_share,
    stage2_share,
    tokens_of,
    units_of,
)
from sglang_aiter_moe.portable.triton.hopper.whole_halves import (
    half_blocks,
    halves_head,
    halves_step,
    stage_halves,
)
from sglang_aiter_moe.portable.triton.hopper.whole_meeting import meet
from sglang_aiter_moe.portable.triton.hopper.whole_narrow import narrow_slots, warp_group
from sglang_aiter_moe.portable.triton.hopper.whole_parts import (
    ABSENT,
    ACC,
    COLUMNS,
    WARPS,
    clear,
    narrow_half,
    row_factors,
    slots_step,
    stage_slots,
    stage_token,
    token_step,
    view,
)

KEPT = gl.constexpr(32)
"""Of a token's slots times chunks of 512 columns: up to here ``a`` stays in registers while it is converted."""
TOKENS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))


@gluon.jit
def _activate(
    acc, x_scale, m, first, hi, ids_ptr, bias_ptr, a_ptr, num_experts, limit, alpha, beta, linear_beta,
    I: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, TOPK: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Four units' (HALVES: two) 16 columns each to ``a``."""
    TILES: gl.constexpr = I // 16
    PASS: gl.constexpr = UNITS // 2 if HALVES else UNITS
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[], lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [1, 0], [0, 0] if HALVES else [2, 0]], block_bases=[], shape=[PASS, 16],
    )  # fmt: skip
    if HALVES:  # a warp's own half of K
        row = gl.arange(0, 128, layout=gl.SliceLayout(1, ACC))
        col = gl.arange(0, 8, layout=gl.SliceLayout(0, ACC))
        acc = gl.where((col // 4)[None, :] == (row // 64)[:, None], acc, 0.0)
    total = gl.sum(join_parts(acc, COLUMNS, WARPS, 2), axis=1) * (x_scale * CODE_SCALE)
    if HALVES:
        barrier()  # the other warp group's products may still read where Triton puts this exchange
        total = gl.sum(gl.reshape(total, (2, 64)), axis=0)
    total = inf_to_nan(total)
    gate, up = gl.split(gl.permute(gl.reshape(total, (PASS, 2, 2, 8)), (0, 1, 3, 2)))
    gate = gl.convert_layout(gl.reshape(gate, (PASS, 16)), OUT)
    up = gl.convert_layout(gl.reshape(up, (PASS, 16)), OUT)
    unit = first + gl.arange(0, PASS, layout=gl.SliceLayout(1, OUT))[:, None]
    ok = unit < hi
    pair = m * TOPK + unit // TILES
    column = unit % TILES * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, OUT))[None, :]
    if HAS_BIAS:
        e = gl.load(ids_ptr + pair, mask=ok, other=-1)
        here = (e >= 0) & (e < num_experts)
        bias = bias_ptr + gl.where(here, e, 0).to(gl.int64) * (2 * I) + column
        mask = here & (column >= 0)
        gate += gl.load(bias, mask=mask, other=0.0)
        up += gl.load(bias + I, mask=mask, other=0.0)
    y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
    gl.store(a_ptr + pair * I + column, y.to(gl.bfloat16), mask=ok & (column >= 0))


@gluon.jit
def _finish(
    total, unit, m, ids_ptr, weights_ptr, bias_ptr, out_ptr, stride_out, num_experts,
    H: gl.constexpr, HAS_BIAS: gl.constexpr, TOPK: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """ROWS rows of y: each slot's own columns, summed over slots and, of 16 rows, over the halves of K."""
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, ACC))
    col = gl.arange(0, 8, layout=gl.SliceLayout(0, ACC))
    total = gl.where((col // 2)[None, :] == (row // ROWS % 4)[:, None], total, 0.0)
    y = gl.sum(join_parts(total, COLUMNS, WARPS, 2), axis=1)
    if ROWS == 16:
        barrier()  # the other warp group's products may still read where Triton puts this exchange
        y = gl.sum(gl.reshape(y, (WARPS, 16)), axis=0)
    else:
        y = gl.permute(gl.reshape(gl.sum(gl.reshape(y, (4, 32)), axis=0), (2, 2, 8)), (1, 0, 2))
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    y = gl.convert_layout(gl.reshape(y, (ROWS,)), OUT)
    n = unit * ROWS + gl.arange(0, ROWS, layout=OUT)
    if HAS_BIAS:
        for k in range(TOPK):
            e = gl.load(ids_ptr + m * TOPK + k)
            weight = gl.load(weights_ptr + m * TOPK + k)
            here = (e >= 0) & (e < num_experts)
            bias = bias_ptr + gl.where(here, e, 0).to(gl.int64) * H + n
            y += gl.where(here, weight * gl.load(bias), 0.0)
    gl.store(out_ptr + m.to(gl.int64) * stride_out + n, y.to(out_ptr.dtype.element_ty))


@gluon.jit
def _consume(
    words, scales, full, empty, x_ptr, ids_ptr, weights_ptr, bias13_ptr, bias2_ptr, a_ptr, state_ptr, out_ptr,
    stride_out, M, num_experts, limit, alpha, beta, linear_beta,
    H: gl.constexpr, I: gl.constexpr, LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_BIAS13: gl.constexpr, HAS_BIAS2: gl.constexpr, TOPK: gl.constexpr, SB: gl.constexpr, SLOTS: gl.constexpr,
    HALVES: gl.constexpr, NARROW: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    APART: gl.constexpr = 2 if LAYOUT == "separated" else 1
    TILES: gl.constexpr = I // 16
    GROUPS: gl.constexpr = (TOPK + 3) // 4
    T: gl.constexpr = 4 * (1 << (GROUPS - 1).bit_length())
    HALF: gl.constexpr = half_blocks(H // 32)
    PASS: gl.constexpr = UNITS // 2 if HALVES else UNITS
    STEPS1: gl.constexpr = ring_steps(HALF if HALVES else H // 32, SB)
    ROWS2: gl.constexpr = 16 if NARROW else 32
    STEPS2: gl.constexpr = ring_steps(narrow_half(I // 32, SB) if NARROW else I // 32, SB)
    CHUNKS: gl.constexpr = (I + 1023) // 1024 * 2 if NARROW else (I + 511) // 512
    SPREAD: gl.constexpr = scale_rows(APART, NARROW)
    words_of = view(words, words.dtype, [SLOTS, 1, 2 * UNITS, 2 * SB, 128], WORDS)
    scales1 = view(scales, scales.dtype, [SLOTS, 1, UNITS * SPREAD, SB // 2, 16], SCALES)
    scales2 = view(scales, scales.dtype, [SLOTS * APART, 1, UNITS, SB // 2, 16], SCALES)
    before = gl.load(state_ptr)
    slot = 0
    phase = 0
    QUADS1: gl.constexpr = STEPS1 * (SB // 4)
    SPACE: gl.constexpr = [1 << (QUADS1 - 1).bit_length(), 8, 128]
    columns = gl.allocate_shared_memory(gl.float8e4nv, SPACE, TOKENS)
    as_it_lies = view(columns, gl.uint8, SPACE, gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
    clear(as_it_lies)
    lo1, hi1 = stage1_share(M, TOPK * TILES)
    from1, to1 = tokens_of(lo1, hi1, TOPK * TILES, ONE)
    for m in range(from1, to1):
        barrier()  # everybody is done with the last token
        if HALVES:
            x_scale = stage_halves(x_ptr + m * H, as_it_lies, H, HALF)
        else:
            x_scale = stage_token(x_ptr + m * H, as_it_lies, H)
        lo, hi = units_of(lo1, hi1, m, TOPK * TILES, ONE)
        for first in range(lo, hi, PASS):
            acc = gl.zeros([128, 8], gl.float32, layout=ACC)
            if HALVES:
                v, s = halves_head(
                    words_of.index(slot), scales1.index(slot), full.index(slot), phase, LAYOUT, SB
                )
                for step in gl.static_range(STEPS1):
                    acc, v, s, slot, phase = halves_step(
                        acc, v, s, words_of, scales1, full, empty, slot, phase, columns, first, step, TILES, H // 32,
                        LAYOUT, SB, SLOTS,
                    )  # fmt: skip
            elif STEPS1 == 1:  # a loop of one step does not build in Triton 3.6
                acc = token_step(
                    acc, words_of.index(slot), scales1.index(slot), full.index(slot), empty.index(slot), phase,
                    columns, first, 0, TILES, H // 32, LAYOUT, SB,
                )  # fmt: skip
                slot, phase = next_slot(slot, phase, SLOTS)
            else:
                for step in range(STEPS1):
                    acc = token_step(
                        acc, words_of.index(slot), scales1.index(slot), full.index(slot), empty.index(slot), phase,
                        columns, first, step, TILES, H // 32, LAYOUT, SB,
                    )  # fmt: skip
                    slot, phase = next_slot(slot, phase, SLOTS)
            _activate(
                acc, x_scale, m, first, hi, ids_ptr, bias13_ptr, a_ptr, num_experts, limit, alpha, beta, linear_beta,
                I, ACTIVATION, HAS_LIMIT, HAS_BIAS13, TOPK, HALVES,
            )  # fmt: skip
    OF_TOKEN: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [1, 32], [4, 2], [1, 0]))
    t = gl.arange(0, T, layout=OF_TOKEN)
    lo2, hi2 = stage2_share(M, H // ROWS2)
    from2, to2 = tokens_of(lo2, hi2, H // ROWS2, ONE)
    # Of the first token: before the meeting, which takes time.
    at_first = gl.minimum(from2, M - 1) * TOPK + t
    e = gl.load(ids_ptr + at_first, mask=t < TOPK, other=-1)
    weight = gl.load(weights_ptr + at_first, mask=t < TOPK, other=0.0)
    meet(state_ptr, before)

    WIDE: gl.constexpr = 1 << (CHUNKS - 1).bit_length()
    QUADS: gl.constexpr = (WIDE if T * WIDE <= KEPT else CHUNKS) * 4
    pairs = gl.allocate_shared_memory(gl.float8e4nv, [QUADS, 2 * T, 128], TOKENS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    factors = gl.allocate_shared_memory(gl.int32, [T], FLAT)  # bits of float32, or ABSENT
    factors_of = view(factors, gl.int32, [T // 4, 4], FLAT)
    by_group = view(pairs, pairs.dtype, [QUADS * (T // 4), 8, 128], TOKENS)
    half = warp_group(lo2) if NARROW else 0
    left = (hi2 - lo2) * (GROUPS * STEPS2)  # slots of the ring still to come, this one included
    for m in range(from2, to2):
        here = (e >= 0) & (e < num_experts)
        barrier()  # everybody is done with the last token
        if T * WIDE <= KEPT:
            by_two = view(pairs, gl.int16, [QUADS * 2 * T, 64], gl.NVMMASharedLayout(128, 16, 2))
            scale = stage_slots(a_ptr + m * (TOPK * I), here, by_two, I, T, WIDE)
        else:
            scale = split_rows(a_ptr, m * TOPK + t, here, pairs, I, CHUNKS, T, WARPS)
        factor = scale * weight * CODE_SCALE
        bits = gl.where(factor == 0.0, 0, factor.to(gl.int32, bitcast=True))  # -0.0 would be ABSENT
        factors.store(gl.where(here, bits, ABSENT))
        fence_async_shared()
        barrier()
        following = gl.minimum(m + 1, M - 1) * TOPK + t
        e = gl.load(ids_ptr + following, mask=t < TOPK, other=-1)
        weight = gl.load(weights_ptr + following, mask=t < TOPK, other=0.0)
        first, end = units_of(lo2, hi2, m, H // ROWS2, ONE)
        for unit in range(first, end):
            if NARROW:
                total, slot, phase, left = narrow_slots(
                    words_of, scales1, full, empty, slot, phase, left, by_group, factors, half, unit % 2, I // 32, SB,
                    SLOTS,
                )  # fmt: skip
            elif GROUPS == 1:
                total = gl.zeros([128, 8], gl.float32, layout=ACC)
                total, slot, phase, left = _slots(
                    total, words_of, scales2, full, empty, slot, phase, left, by_group, factors_of, 0, APART, T // 4,
                    I // 32, SB, SLOTS,
                )  # fmt: skip
            else:
                total = gl.zeros([128, 8], gl.float32, layout=ACC)
                for group in range(GROUPS):
                    total, slot, phase, left = _slots(
                        total, words_of, scales2, full, empty, slot, phase, left, by_group, factors_of, group, APART,
                        T // 4, I // 32, SB, SLOTS,
                    )  # fmt: skip
            _finish(
                total, unit, m, ids_ptr, weights_ptr, bias2_ptr, out_ptr, stride_out, num_experts, H, HAS_BIAS2, TOPK,
                ROWS2,
            )  # fmt: skip


@gluon.jit
def _slots(
    total, words, scales, full, empty, slot, phase, left, by_group, factors, group,
    APART: gl.constexpr, GROUPS: gl.constexpr, K_BLOCKS: gl.constexpr, SB: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """``total`` plus what four slots of a token give."""
    STEPS: gl.constexpr = ring_steps(K_BLOCKS, SB)
    acc = gl.zeros([128, 8], gl.float32, layout=ACC)
    if STEPS == 1:
        acc = slots_step(
            acc, words.index(slot), scales.index(slot * APART), full.index(slot), empty.index(slot), phase, by_group,
            group, 0, left > SLOTS, GROUPS, K_BLOCKS, SB,
        )  # fmt: skip
        slot, phase = next_slot(slot, phase, SLOTS)
        left -= 1
    else:
        for step in range(STEPS):
            acc = slots_step(
                acc, words.index(slot), scales.index(slot * APART), full.index(slot), empty.index(slot), phase,
                by_group, group, step, left > SLOTS, GROUPS, K_BLOCKS, SB,
            )  # fmt: skip
            slot, phase = next_slot(slot, phase, SLOTS)
            left -= 1
    f = row_factors(factors.index(group))
    y = acc * f.to(gl.float32, bitcast=True)
    total += gl.where(f == ABSENT, 0.0, y)  # without an expert anything may have been read
    return total, slot, phase, left


@gluon.jit(do_not_specialize=["M"])
def whole_layer(
    desc_w1,  # see whole_launch._descriptors
    desc_s1,
    desc_w2,
    desc_s2,
    x_ptr,  # [M, H] bf16
    ids_ptr,  # [M, TOPK] int32
    weights_ptr,  # [M, TOPK] fp32
    bias13_ptr,  # [E, 2I] fp32
    bias2_ptr,  # [E, H] fp32
    a_ptr,  # [M * TOPK, I] bf16
    state_ptr,  # int32: see ``meet``
    out_ptr,  # [M, H]
    stride_out,
    M,
    num_experts,
    limit,
    alpha,
    beta,
    linear_beta,
    H: gl.constexpr,
    I: gl.constexpr,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS13: gl.constexpr,
    HAS_BIAS2: gl.constexpr,
    TOPK: gl.constexpr,
    SB: gl.constexpr,  # K blocks of a slot
    SLOTS: gl.constexpr,
    HALVES: gl.constexpr,  # see whole_halves
    NARROW: gl.constexpr,  # see whole_narrow
    ONE: gl.constexpr,  # whether M is 1
):
    APART: gl.constexpr = 2 if LAYOUT == "separated" else 1
    SPREAD: gl.constexpr = scale_rows(APART, NARROW)
    words = gl.allocate_shared_memory(gl.uint8, [SLOTS * UNITS, 1, 2, 2 * SB, 128], WORDS)
    scales = gl.allocate_shared_memory(
        gl.int32, [SLOTS * UNITS * SPREAD, 1, 1, SB // 2, 16], SCALES
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(known, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                words, scales, full, empty, x_ptr, ids_ptr, weights_ptr, bias13_ptr, bias2_ptr, a_ptr, state_ptr,
                out_ptr, stride_out, 1 if ONE else M, num_experts, limit, alpha, beta, linear_beta, H, I, LAYOUT,
                ACTIVATION, HAS_LIMIT, HAS_BIAS13, HAS_BIAS2, TOPK, SB, SLOTS, HALVES, NARROW, ONE,
            )),
            (produce, (
                desc_w1, desc_s1, desc_w2, desc_s2, words, scales, full, empty, known, ids_ptr, 1 if ONE else M,
                num_experts, H, I, LAYOUT, TOPK, SB, SLOTS, HALVES, NARROW, ONE,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
