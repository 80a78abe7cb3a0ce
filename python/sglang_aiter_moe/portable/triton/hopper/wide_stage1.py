"""Stage 1 of the wide form (Gluon): row tiles of 8 W gate and 8 W up rows (W warps) times the tokens of a block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_aiter_moe.portable.triton.hopper.approximate import divide, exp2
from sglang_aiter_moe.portable.triton.hopper.fp8 import async_load, barrier, columns_ready
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_stage1 import byte_layout
from sglang_aiter_moe.portable.triton.hopper.prefill_stage1 import (
    block_layout,
    gate_up_rows,
    quantize_blocks,
)
from sglang_aiter_moe.portable.triton.hopper.read_once import read_once
from sglang_aiter_moe.portable.triton.hopper.ring import (
    block_of,
    make_ring,
    produce,
    ring_steps,
    share,
)
from sglang_aiter_moe.portable.triton.hopper.wide import (
    SB,
    acc_columns,
    column,
    fetch,
    quads_of,
    rows_at,
    shared_rows,
    views,
    wide_row,
)

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _stage(
    x_ptr, x_scale_ptr, pairs_ptr, start, end, topk, smem, QUADS: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
    T: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Starts the copy of N tokens; their scales ``[N]``."""
    at, ok = column(start, end, N, acc_columns(N, W))
    token = gl.load(pairs_ptr + at, mask=ok, other=0) // topk
    scale = gl.load(x_scale_ptr + token, mask=ok, other=0.0)
    L: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [W, 1], [1, 0])
    at, ok = column(start, end, N, gl.SliceLayout(1, L))
    token = gl.load(pairs_ptr + at, mask=ok, other=0) // topk
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    at = x_ptr + (token * (QUADS * 128))[:, None] + k[None, :]
    there = ok[:, None] & (k >= 0)[None, :]
    for q in gl.static_range(QUADS):
        async_load(rows_at(smem, q, N, T, FIRST), at + q * 128, mask=there)
    async_copy.commit_group()
    return scale


@gluon.jit
def _tanh_parts(v):
    """``fp8_stage1.tanh_parts``."""
    a = gl.abs(v)
    e = exp2(a * (-2 * LOG2_E))
    s = a * a
    small = a * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315)))) * (1.0 + e)
    r = gl.where(a < 0.1, small, 1.0 - e)
    return gl.where(v < 0, -r, r), 1.0 + e


@gluon.jit
def _gate_up(
    g, u, limit, alpha, beta, linear_beta, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr
):
    """``fp8_stage1.gate_up`` by ``approximate``: half its instructions."""
    if HAS_LIMIT:
        g = gl.where(g > limit, limit, g)
        u = gl.where(u > limit, limit, gl.where(u < -limit, -limit, u))
    if ACTIVATION == "situv2":
        gate, gate_below = _tanh_parts(g * (1.0 / beta))
        up, up_below = _tanh_parts(u * (1.0 / linear_beta))
        below = gate_below * up_below * (1.0 + exp2(g * -LOG2_E))
        return divide((beta * linear_beta) * gate * up, below)
    elif ACTIVATION == "swiglu":
        return divide(g, 1.0 + exp2(g * (-LOG2_E * alpha))) * (u + 1.0)
    else:
        return divide(g, 1.0 + exp2(g * -LOG2_E)) * u


@gluon.jit
def _pairs(pairs_ptr, start, end, N: gl.constexpr, L: gl.constexpr):
    """int64 ``[N]``: pairs, and which there are."""
    at, ok = column(start, end, N, L)
    return gl.load(pairs_ptr + at, mask=ok, other=0).to(gl.int64), ok


@gluon.jit
def _where(pairs_ptr, start, end, N: gl.constexpr, W: gl.constexpr):
    """Pairs as ``_finish`` stores elements, and as it stores scales."""
    return (
        _pairs(pairs_ptr, start, end, N, gl.SliceLayout(0, byte_layout(N, 16 * W, W))),
        _pairs(pairs_ptr, start, end, N, gl.SliceLayout(0, gl.SliceLayout(1, block_layout(W)))),
    )


@gluon.jit
def _finish(
    acc, bias_ptr, where, a_ptr, a_scale_ptr, i0, limit, alpha, beta, linear_beta, I: gl.constexpr,
    A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr,
    FORMAT: gl.constexpr, RULE: gl.constexpr, VIA_BF16: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """From gate and up rows to bytes of ``a`` in the operand's order, and their blocks' scales."""
    R: gl.constexpr = 16 * W
    y = gate_up_rows(
        acc, bias_ptr, i0, limit, alpha, beta, linear_beta, I, ACTIVATION, HAS_LIMIT, HAS_BIAS, R, N, W, _gate_up
    )  # fmt: skip
    if VIA_BF16:
        y = y.to(gl.bfloat16).to(gl.float32)
    S: gl.constexpr = W // 4
    y = gl.convert_layout(gl.reshape(y, (S, 32, N)), block_layout(W))
    y, exponent = quantize_blocks(y, FORMAT, RULE)
    OUT: gl.constexpr = byte_layout(N, R, W)
    y = gl.permute(gl.reshape(y, (S, 4, 2, 4, N)), (1, 2, 0, 3, 4))
    y = gl.convert_layout(gl.reshape(y.to(gl.float8e4nv), (R // 2, N)), OUT, assert_trivial=True)
    p = gl.arange(0, R // 2, layout=gl.SliceLayout(1, OUT))
    place = i0 // 128 * 128 + i0 % 128 // 32 * 4 + p // (4 * S) * 16 + p % (4 * S)
    pair, ok = where[0]
    here = i0 // 32 + p // 4 % S < I // 32
    gl.store(a_ptr + pair[None, :] * A_STRIDE + place[:, None], y, mask=ok[None, :] & here[:, None])
    E: gl.constexpr = exponent.type.layout
    pair, ok = where[1]
    block = i0 // 32 + gl.arange(0, S, layout=gl.SliceLayout(1, E))
    at = a_scale_ptr + pair[None, :] * (A_STRIDE // 32) + block[:, None]
    gl.store(at, exponent.to(gl.uint8), mask=ok[None, :] & (block < I // 32)[:, None])


@gluon.jit
def _consume(
    words, scales, full, empty, lo, hi, x_ptr, x_scale_ptr, bias_ptr, pairs_ptr, starts_ptr, counter_ptr, a_ptr,
    a_scale_ptr, num_pairs, topk, limit, alpha, beta, linear_beta, H: gl.constexpr, I: gl.constexpr,
    A_STRIDE: gl.constexpr, LAYOUT: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr, VIA_BF16: gl.constexpr, N1: gl.constexpr,
    N2: gl.constexpr, W: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    QUADS: gl.constexpr = quads_of(H // 32)
    BH: gl.constexpr = 2 if LAYOUT == "separated" else 1
    HALF: gl.constexpr = 8 * W
    TILES: gl.constexpr = (I + HALF - 1) // HALF
    words, scales = views(words, scales, W, SLOTS, BH)
    x = shared_rows(QUADS, N1 + N2)
    slot = 0
    phase = 0
    s0, s1, s2, s3, reference, v = fetch(words, scales, full, 0, 0, 0, lo < hi, H // 32, W, BH)
    for b in range(lo // TILES, (hi + TILES - 1) // TILES):
        e, start, end = block_of(starts_ptr, counter_ptr, b, num_pairs)
        barrier()  # everybody is done with the last block's tokens
        scale1 = _stage(
            x_ptr, x_scale_ptr, pairs_ptr, start, end, topk, x, QUADS, N1, W, N1 + N2, 0
        )
        where1 = _where(pairs_ptr, start, end, N1, W)
        scale2 = scale1
        if N2 > 0:
            scale2 = _stage(
                x_ptr, x_scale_ptr, pairs_ptr, start + N1, end, topk, x, QUADS, N2, W, N1 + N2, N1
            )
        columns_ready()
        for tile in range(gl.maximum(lo - b * TILES, 0), gl.minimum(hi - b * TILES, TILES)):
            acc1, acc2, s0, s1, s2, s3, reference, v, slot, phase = wide_row(
                s0, s1, s2, s3, reference, v, words, scales, full, empty, slot, phase, x,
                b * TILES + tile < hi - 1, H // 32, SLOTS, N1, N2, W, BH, AHEAD,
            )  # fmt: skip
            if N2 > 0:  # with two accumulators the registers do not hold them
                where1 = _where(pairs_ptr, start, end, N1, W)
            _finish(
                acc1 * scale1[None, :], bias_ptr + e * (2 * I), where1, a_ptr, a_scale_ptr, tile * HALF, limit, alpha,
                beta, linear_beta, I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N1, W,
            )  # fmt: skip
            if N2 > 0:
                where2 = _where(pairs_ptr, start + N1, end, N2, W)
                _finish(
                    acc2 * scale2[None, :], bias_ptr + e * (2 * I), where2, a_ptr, a_scale_ptr, tile * HALF, limit,
                    alpha, beta, linear_beta, I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16,
                    N2, W,
                )  # fmt: skip


@read_once
def stage1_wide(
    desc_w,  # w13: see fp8_launch.descriptors
    desc_s,
    x_ptr,  # [M, QUADS * 128] e4m3 in the operand's order
    x_scale_ptr,  # [M] float32
    bias_ptr,
    pairs_ptr,  # these three: prepare.list_pairs
    starts_ptr,
    counter_ptr,
    a_ptr,  # [pairs, A_STRIDE] e4m3 in the operand's order, in the mode's own blocks
    a_scale_ptr,  # [pairs, A_STRIDE / 32] E8M0
    num_pairs,
    topk,
    limit,
    alpha,
    beta,
    linear_beta,
    H: gl.constexpr,
    I: gl.constexpr,
    A_STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    FORMAT: gl.constexpr,
    RULE: gl.constexpr,
    VIA_BF16: gl.constexpr,
    N1: gl.constexpr,
    N2: gl.constexpr,
    W: gl.constexpr,
    SLOTS: gl.constexpr,
    AHEAD: gl.constexpr,  # decode a quad while the one before is multiplied
):
    BH: gl.constexpr = 2 if LAYOUT == "separated" else 1
    HALF: gl.constexpr = 8 * W
    TILES: gl.constexpr = (I + HALF - 1) // HALF
    STEPS: gl.constexpr = ring_steps(H // 32, SB)
    words, scales, full, empty = make_ring(desc_w, desc_s, W, SB, BH, SLOTS)
    gdc_wait()
    gdc_launch_dependents()
    lo, hi = share(gl.load(counter_ptr) * TILES)
    gl.warp_specialize(
        [
            (_consume, (
                words, scales, full, empty, lo, hi, x_ptr, x_scale_ptr, bias_ptr, pairs_ptr, starts_ptr, counter_ptr,
                a_ptr, a_scale_ptr, num_pairs, topk, limit, alpha, beta, linear_beta, H, I, A_STRIDE, LAYOUT,
                ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N1, N2, W, SLOTS, AHEAD,
            )),
            (produce, (
                desc_w, desc_s, words, scales, full, empty, starts_ptr, num_pairs, lo, hi, TILES, W // BH, STEPS,
                SLOTS, W, SB, BH,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
