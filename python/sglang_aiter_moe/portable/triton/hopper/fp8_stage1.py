"""Stage 1 on fp8 tensor cores: row tiles of 8 W gate and 8 W up rows (W warps) times the tokens of a block."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_aiter_moe.portable.triton.hopper.fp8 import (
    CODE_SCALE,
    INF_BITS,
    acc_layout,
    barrier,
    columns_ready,
    inf_to_nan,
    join_parts,
    row_scale,
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
def tanh_parts(v):
    """Numerator and denominator of tanh, by exp(-2|v|); the numerator by a polynomial where it would cancel."""
    a = gl.abs(v)
    e = gl.exp(-2.0 * a)
    s = a * a
    small = a * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315)))) * (1.0 + e)
    r = gl.where(a < 0.1, small, 1.0 - e)
    return gl.where(v < 0, -r, r), 1.0 + e


@gluon.jit
def gate_up(
    g, u, limit, alpha, beta, linear_beta, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr
):
    """As ``activation.gate_up``, with one division for SiTUv2's three: it is a tenth of a prefill program."""
    if HAS_LIMIT:
        g = gl.where(g > limit, limit, g)
        u = gl.where(u > limit, limit, gl.where(u < -limit, -limit, u))
    if ACTIVATION == "situv2":
        gate, gate_below = tanh_parts(g * (1.0 / beta))
        up, up_below = tanh_parts(u * (1.0 / linear_beta))
        return (beta * linear_beta) * gate * up / (gate_below * up_below * (1.0 + gl.exp(-g)))
    elif ACTIVATION == "swiglu":
        return g / (1.0 + gl.exp(-alpha * g)) * (u + 1.0)
    else:
        return g / (1.0 + gl.exp(-g)) * u


@gluon.jit
def block_exponent(y, RULE: gl.constexpr):
    """E8M0 byte (int32 ``[S, T]``) of 32 values each, ``y [S, 32, T]``, and the bits of their largest magnitude.

    RULE "epilogue" or "roundup", as ``codecs.mx_scale``; Inf and NaN give 254, with which ``row_scale`` gives NaN.
    """
    bits = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if RULE == "epilogue":
        exponent = gl.maximum(((bits + 0x400000) >> 23) - 8, 0)
    else:
        q = bits.to(gl.float32, bitcast=True) / 448.0
        exponent = (q.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return gl.where(bits >= INF_BITS, 254, exponent), bits


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
    x_ptr,
    x_scale_ptr,
    bias_ptr,
    pairs_ptr,
    starts_ptr,
    counter_ptr,
    a_ptr,
    a_scale_ptr,
    num_pairs,
    topk,
    limit,
    alpha,
    beta,
    linear_beta,
    H: gl.constexpr,
    I: gl.constexpr,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RULE: gl.constexpr,
    VIA_BF16: gl.constexpr,
    PARTS: gl.constexpr,
    QUADS2: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    SB: gl.constexpr,
    SLOTS: gl.constexpr,
    BY_ROW: gl.constexpr,
    TAIL: gl.constexpr,
    UNIT: gl.constexpr,
):
    QUADS: gl.constexpr = ring_quads(H // 32, SB)
    BH: gl.constexpr = 2 if LAYOUT == "separated" else 1
    HALF: gl.constexpr = 8 * W
    TILES: gl.constexpr = (I + HALF - 1) // HALF
    ACC: gl.constexpr = acc_layout(N, W)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    smem = gl.allocate_shared_memory(gl.float8e4nv, [QUADS, N, 128], SHARED)
    c = gl.arange(0, N, layout=gl.SliceLayout(0, ACC))
    slot = 0
    phase = 0
    while lo < total:
        for b in range(lo // TILES, (hi + TILES - 1) // TILES):
            e, start, end = block_of(starts_ptr, counter_ptr, b, num_pairs)
            ok_c = start + c // PARTS < end
            pair_c = gl.load(pairs_ptr + start + c // PARTS, mask=ok_c, other=0)
            token = pair_c // topk
            barrier()  # everybody is done with the last block's tokens
            stage_columns(x_ptr, token * PARTS + c % PARTS, ok_c, smem, QUADS, N, W)
            cols = x_scale_ptr + token * (QUADS * 4 if not BY_ROW else 0)
            columns_ready()
            for tile in range(gl.maximum(lo - b * TILES, 0), gl.minimum(hi - b * TILES, TILES)):
                i0 = tile * HALF
                acc, slot, phase = ring_row(
                    words, scales, full, empty, slot, phase, smem, cols, H // 32, SLOTS, N, W, SB, BH, not BY_ROW
                )  # fmt: skip
                _finish(
                    acc, e, start, end, i0, bias_ptr, pairs_ptr, x_scale_ptr, a_ptr, a_scale_ptr, topk, limit, alpha,
                    beta, linear_beta, I, LAYOUT, ACTIVATION, HAS_LIMIT, HAS_BIAS, RULE, VIA_BF16, PARTS, QUADS2, N, W,
                    BY_ROW,
                )  # fmt: skip
        if TAIL:
            lo, hi = next_run(begins, full, slot, phase, total, UNIT, W)
        else:
            lo = total


@gluon.jit
def _finish(
    acc,
    e,
    start,
    end,
    i0,
    bias_ptr,
    pairs_ptr,
    x_scale_ptr,
    a_ptr,
    a_scale_ptr,
    topk,
    limit,
    alpha,
    beta,
    linear_beta,
    I: gl.constexpr,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RULE: gl.constexpr,
    VIA_BF16: gl.constexpr,
    PARTS: gl.constexpr,
    QUADS2: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    BY_ROW: gl.constexpr,
):
    """Activation and rounding of one row tile."""
    T: gl.constexpr = N // PARTS
    HALF: gl.constexpr = 8 * W
    total = inf_to_nan(join_parts(acc, N, W, PARTS) * CODE_SCALE)
    S: gl.constexpr = W // 4
    if LAYOUT == "separated":
        total = gl.permute(gl.reshape(total, (2, S, 2, 2, 8, T)), (1, 3, 2, 4, 5, 0))
    else:
        total = gl.permute(gl.reshape(total, (W, 2, 8, T)), (0, 2, 3, 1))
    SPLIT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [1, 32, 1, 1], [S, 1, 4, 1], [3, 2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 32, 1], [S, 1, 4], [2, 1, 0])
    gate, up = gl.split(gl.convert_layout(gl.reshape(total, (S, 32, T, 2)), SPLIT))
    gate = gl.convert_layout(gate, OUT)  # [S, 32, T]
    up = gl.convert_layout(up, OUT)
    t = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :]
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
    block = (
        gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None] + i0 // 32
    )
    here = start + t < end
    pair = gl.load(pairs_ptr + start + t, mask=here, other=0)
    ok = here & (block < I // 32)
    if BY_ROW:
        xs = gl.load(x_scale_ptr + pair // topk, mask=here, other=0.0)
        gate = gate * xs
        up = up * xs
    if HAS_BIAS:
        bias = bias_ptr + e * (2 * I) + gl.minimum(block * 32, I - 32) + k
        gate += gl.load(bias)
        up += gl.load(bias + I)
    y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
    keep = ok & (k >= 0)
    if PARTS == 2:
        gl.store(a_ptr + pair.to(gl.int64) * I + block * 32 + k, y.to(gl.bfloat16), mask=keep)
    else:
        if VIA_BF16:
            y = y.to(gl.bfloat16).to(gl.float32)
        y = gl.where(ok, y, 0.0)
        exponent, bits = block_exponent(y, RULE)
        factor = gl.expand_dims(row_scale(bits, exponent), 1)
        exponent = gl.expand_dims(exponent, 1)  # [S, 1, T]
        scaled = y * ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        if BY_ROW:  # the rounded value: bf16 holds it, and stage 2 scales a row as a whole
            y = scaled.to(gl.float8e4nv).to(gl.float32) * factor
            gl.store(a_ptr + pair.to(gl.int64) * I + block * 32 + k, y.to(gl.bfloat16), mask=keep)
        else:
            # In a block even columns come first.
            out = a_ptr + pair.to(gl.int64) * (QUADS2 * 128) + block * 32 + (k % 2 * 16 + k // 2)
            gl.store(out, scaled.to(gl.float8e4nv), mask=keep)
            out_scale = a_scale_ptr + pair * (QUADS2 * 4) + block
            gl.store(out_scale, factor, mask=ok)
            # Stage 2 reads whole steps; its weights are 0 there, but 0 times garbage may be NaN.
            if QUADS2 * 4 > I // 32:
                if i0 + HALF >= I:
                    mine = here & (block == i0 // 32)
                    zero = gl.zeros_like(scaled).to(gl.float8e4nv)
                    for j in gl.static_range(I // 32, QUADS2 * 4):
                        at = pair.to(gl.int64) * (QUADS2 * 128) + (j * 32 + k + block * 0)
                        gl.store(a_ptr + at, zero, mask=mine & (k >= 0))
                        out_scale = a_scale_ptr + pair * (QUADS2 * 4) + (j + block * 0)
                        gl.store(out_scale, gl.zeros_like(exponent).to(gl.float32), mask=mine)


@read_once
def stage1_fp8(
    desc_w,  # w13: see fp8_launch.descriptors
    desc_s,
    x_ptr,  # [M, PARTS, QUADS * 128] e4m3
    x_scale_ptr,  # float32, BY_ROW: [M]; else [M, QUADS * 4]
    bias_ptr,
    pairs_ptr,  # these three: prepare.list_pairs
    starts_ptr,
    counter_ptr,
    a_ptr,  # BY_ROW: [pairs, I] bf16; else [pairs, QUADS2 * 128] e4m3
    a_scale_ptr,  # [pairs, QUADS2 * 4] float32, without BY_ROW
    num_pairs,
    topk,
    limit,
    alpha,
    beta,
    linear_beta,
    H: gl.constexpr,
    I: gl.constexpr,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    RULE: gl.constexpr,
    VIA_BF16: gl.constexpr,
    PARTS: gl.constexpr,
    PDL: gl.constexpr,
    QUADS2: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
    SB: gl.constexpr,  # K blocks of a slot
    SLOTS: gl.constexpr,
    BY_ROW: gl.constexpr,  # one scale a row of x and of ``a``: of both parts, or of MXFP8 values coded again
    TAIL: gl.constexpr,  # row tiles a program that are taken from a queue, UNIT at a time: see ``tail``
    UNIT: gl.constexpr,
    QUEUE: gl.constexpr,  # where in ``counter_ptr`` the queue is
):
    BH: gl.constexpr = 2 if LAYOUT == "separated" else 1
    HALF: gl.constexpr = 8 * W
    TILES: gl.constexpr = (I + HALF - 1) // HALF
    STEPS: gl.constexpr = ring_steps(H // 32, SB)
    words, scales, full, empty = make_ring(desc_w, desc_s, W, SB, BH, SLOTS)
    begins = make_words(SLOTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = gl.load(counter_ptr) * TILES
    lo, hi = share(shared_out(total, TAIL))
    gl.warp_specialize(
        [
            (_consume, (
                words, scales, full, empty, begins, lo, hi, total, x_ptr, x_scale_ptr, bias_ptr, pairs_ptr, starts_ptr,
                counter_ptr, a_ptr, a_scale_ptr, num_pairs, topk, limit, alpha, beta, linear_beta, H, I, LAYOUT,
                ACTIVATION, HAS_LIMIT, HAS_BIAS, RULE, VIA_BF16, PARTS, QUADS2, N, W, SB, SLOTS, BY_ROW, TAIL, UNIT,
            )),
            (produce, (
                desc_w, desc_s, words, scales, full, empty, starts_ptr, num_pairs, lo, hi, TILES, W // BH, STEPS,
                SLOTS, W, SB, BH, TAIL, UNIT, begins, counter_ptr + QUEUE, total,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
