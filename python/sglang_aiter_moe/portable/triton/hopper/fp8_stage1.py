"""Stage 1 on fp8 tensor cores: 8 W gate and 8 W up rows of one expert (W warps) times the tokens of a block."""

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
    weight_row,
    word_layout,
)


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
    """E8M0 byte (int32 ``[S, T]``) of 32 values each, ``y [S, 32, T]``.

    RULE "pair" (A16W4): the largest magnitude lands in [128, 256). "epilogue" and "roundup": A8W4, as
    ``codecs.mx_scale``.
    """
    bits = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if RULE == "pair":
        return gl.maximum((bits >> 23) - 7, 1)
    elif RULE == "epilogue":
        return gl.maximum(((bits + 0x400000) >> 23) - 8, 0)
    else:
        q = bits.to(gl.float32, bitcast=True) / 448.0
        return (q.to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23


@gluon.jit
def stage1_fp8(
    x_ptr,  # [M, PARTS, QUADS * 128] e4m3
    x_scale_ptr,  # float32, PARTS == 2: [M]; else [M, QUADS * 4]
    w_ptr,  # w13 bytes
    scale_ptr,  # as int32
    bias_ptr,
    pairs_ptr,  # [blocks, N / PARTS]
    block_expert_ptr,
    num_blocks_ptr,
    a_ptr,  # [pairs, PARTS, QUADS2 * 128] e4m3
    a_scale_ptr,  # [pairs, QUADS2 * 4] float32
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
    N: gl.constexpr,
    W: gl.constexpr,
):
    K_BLOCKS: gl.constexpr = H // 32
    QUADS: gl.constexpr = quads(K_BLOCKS)
    QUADS2: gl.constexpr = quads(I // 32)
    T: gl.constexpr = N // PARTS
    ACC: gl.constexpr = acc_layout(N, W)
    ROWS: gl.constexpr = gl.SliceLayout(1, word_layout(W))
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    HALF: gl.constexpr = 8 * W  # gate rows of a program, and up rows
    TILES: gl.constexpr = (I + HALF - 1) // HALF
    b = gl.program_id(0) // TILES
    i0 = gl.program_id(0) % TILES * HALF
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if b < gl.load(num_blocks_ptr):
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        smem = gl.allocate_shared_memory(gl.float8e4nv, [QUADS, N, 128], SHARED)
        COL: gl.constexpr = gl.SliceLayout(0, ACC)
        c = gl.arange(0, N, layout=COL)
        pair = gl.load(pairs_ptr + b * T + c // PARTS)
        ok = pair < num_pairs
        token = gl.where(ok, pair // topk, 0)
        stage_columns(x_ptr, (token * PARTS + c % PARTS) * (QUADS * 128), ok, smem, QUADS, N, W)

        # Row r = 16 * warp + 8 * h + g of the tile: h picks one of the two rows whose scales share a word.
        r = gl.arange(0, 16 * W, layout=ROWS)
        kbyte = gl.arange(0, 16, layout=gl.SliceLayout(0, word_layout(W)))
        p = r // 16 * 8 + r % 8
        h = r // 8 % 2
        ps = gl.arange(0, HALF, layout=scale_word_layout(W))
        if LAYOUT == "separated":  # the first half of the warps gate, the second up
            half = p // (4 * W)
            p = p % (4 * W)
            i = i0 + p // 16 * 32 + p % 16 + h * 16
            pp = ps % (4 * W)
            s_at = scale_offset(
                ps // (4 * W),
                gl.minimum(i0 + pp // 16 * 32, I - 32) + pp % 16,
                0,
                I,
                K_BLOCKS,
                LAYOUT,
            )
        else:  # a lane has a gate row and its up row
            half, i = h, i0 + p
            s_at = scale_offset(0, gl.minimum(i0 + ps, I - 1), 0, I, K_BLOCKS, LAYOUT)
        i = gl.minimum(i, I - 1)
        at = weight_offset(weight_row(half, i, I, LAYOUT), 0, H // 2, LAYOUT)
        words = w_ptr + e * (I * H) + at[:, None] + kbyte[None, :]
        scales = scale_ptr + e * (2 * I * ((K_BLOCKS + 7) // 8 * 2)) + s_at // 4
        cols = x_scale_ptr + token * (QUADS * 4 if PARTS == 1 else 0)

        acc = gl.zeros([16 * W, N], gl.float32, layout=ACC)
        columns_ready()
        acc = multiply_row(acc, words, scales, smem, cols, K_BLOCKS, N, W, PARTS == 1)

        total = join_parts(acc, N, W, PARTS) * CODE_SCALE
        S: gl.constexpr = W // 4
        if LAYOUT == "separated":
            total = gl.permute(gl.reshape(total, (2, S, 2, 2, 8, T)), (1, 3, 2, 4, 5, 0))
        else:
            total = gl.permute(gl.reshape(total, (W, 2, 8, T)), (0, 2, 3, 1))
        SPLIT: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 2], [1, 32, 1, 1], [S, 1, 4, 1], [3, 2, 1, 0]
        )
        OUT: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 32, 1], [S, 1, 4], [2, 1, 0])
        gate, up = gl.split(gl.convert_layout(gl.reshape(total, (S, 32, T, 2)), SPLIT))
        gate = gl.convert_layout(gate, OUT)  # [S, 32, T]
        up = gl.convert_layout(up, OUT)
        t = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :]
        k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
        block = (
            gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None]
            + i0 // 32
        )
        pair = gl.load(pairs_ptr + b * T + t)
        ok = (pair < num_pairs) & (block < I // 32)
        if PARTS == 2:
            xs = gl.load(x_scale_ptr + pair // topk, mask=pair < num_pairs, other=0.0)
            gate = gate * xs
            up = up * xs
        if HAS_BIAS:
            bias = bias_ptr + e * (2 * I) + gl.minimum(block * 32, I - 32) + k
            gate += gl.load(bias)
            up += gl.load(bias + I)
        y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
        if VIA_BF16:
            y = y.to(gl.bfloat16).to(gl.float32)
        y = gl.where(ok, y, 0.0)
        exponent = gl.expand_dims(block_exponent(y, RULE), 1)  # [S, 1, T]
        scaled = y * ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        hi = scaled.to(gl.float8e4nv)
        # In a block even columns come first.
        base = pair.to(gl.int64) * (PARTS * QUADS2 * 128)
        where = k % 2 * 16 + k // 2
        out = a_ptr + base + block * 32 + where
        keep = ok & (k >= 0)
        gl.store(out, hi, mask=keep)
        if PARTS == 2:
            lo = ((scaled - hi.to(gl.float32)) * 16.0).to(gl.float8e4nv)
            gl.store(out + QUADS2 * 128, lo, mask=keep)
        out_scale = a_scale_ptr + pair * (QUADS2 * 4) + block
        gl.store(out_scale, (exponent << 23).to(gl.float32, bitcast=True), mask=ok)
        if (
            QUADS2 * 4 > I // 32
        ):  # stage 2 reads whole quads; its weights are 0 there, but 0 times garbage may be NaN
            if i0 + HALF >= I:
                mine = (pair < num_pairs) & (block == i0 // 32)
                for j in gl.static_range(I // 32, QUADS2 * 4):
                    zero = gl.zeros_like(scaled)
                    out = a_ptr + base + (j * 32 + k + block * 0)
                    gl.store(out, zero.to(gl.float8e4nv), mask=mine & (k >= 0))
                    if PARTS == 2:
                        gl.store(out + QUADS2 * 128, zero.to(gl.float8e4nv), mask=mine & (k >= 0))
                    out_scale = a_scale_ptr + pair * (QUADS2 * 4) + (j + block * 0)
                    gl.store(out_scale, gl.zeros_like(exponent).to(gl.float32), mask=mine)
