"""Stage 1 of the shared prefill form (Gluon): 64 gate and 64 up rows of one expert times a block of its tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sglang_aiter_moe.portable.triton.hopper.fp8 import acc_layout, barrier
from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import (
    columns,
    columns1,
    columns2,
    number_of_choices,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_stage1 import half_layout, quantize_blocks
from sglang_aiter_moe.portable.triton.hopper.shared_prefill import CONSUMERS, halves, multiply_tile
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_decode import decode_tile
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_facts import (
    block_facts,
    fact_layout,
    tile_facts,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_rings import (
    FACTS,
    ROWS,
    advance,
    copy_tokens,
    copy_weights,
    make_rings,
)


@gluon.constexpr_function
def block_layout(N):
    """``[2, 32, N]``: a scale block of a column in four lanes, eight values each."""
    return gl.BlockedLayout([1, 8, 1], [1, 4, 8], [2, 1, 4], [1, 2, 0])


@gluon.jit
def exp2(v):
    """Without the care that Triton's takes of results below 2**-126: three instructions less."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide(a, b):
    return a * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tanh_parts(v):
    """Numerator and denominator of the magnitude of tanh, as ``fp8_stage1.tanh_parts``."""
    a = gl.abs(v)
    e = exp2(a * -2.8853900817779268)
    s = a * a
    small = a * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315)))) * (1.0 + e)
    return gl.where(a < 0.1, small, 1.0 - e), 1.0 + e


@gluon.jit
def gate_up(
    g, u, limit, alpha, beta, linear_beta, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr
):
    """``fp8_stage1.gate_up``, with the instructions above: the epilogue is a fifth of a program."""
    if HAS_LIMIT:
        g = gl.where(g > limit, limit, g)
        u = gl.where(u > limit, limit, gl.where(u < -limit, -limit, u))
    if ACTIVATION == "situv2":
        gate, gate_below = tanh_parts(g * (1.0 / beta))
        up, up_below = tanh_parts(u * (1.0 / linear_beta))
        y = divide(
            (beta * linear_beta) * gate * up,
            gate_below * up_below * (1.0 + exp2(g * -1.4426950408889634)),
        )
        sign = (g.to(gl.int32, bitcast=True) ^ u.to(gl.int32, bitcast=True)) & -0x80000000
        return (y.to(gl.int32, bitcast=True) | sign).to(gl.float32, bitcast=True)
    elif ACTIVATION == "swiglu":
        return divide(g, 1.0 + exp2(g * (alpha * -1.4426950408889634))) * (u + 1.0)
    else:
        return divide(g, 1.0 + exp2(g * -1.4426950408889634)) * u


@gluon.jit
def activate(
    acc, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, FIRST: gl.constexpr,
    I: gl.constexpr, A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr, VIA_BF16: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """``activate_columns`` in pieces of up to 32 columns: intermediates find registers, and exchange little memory."""
    if N > 32:
        first, last = halves(acc, ROWS, N)
        activate(
            first, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, FIRST, I,
            A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N // 2,
        )  # fmt: skip
        activate(
            last, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta,
            FIRST + N // 2, I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N // 2,
        )  # fmt: skip
    else:
        activate_columns(
            acc, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, FIRST, I,
            A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N,
        )  # fmt: skip


@gluon.jit
def activate_columns(
    acc, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, FIRST: gl.constexpr,
    I: gl.constexpr, A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr, VIA_BF16: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + N - 1 of the block to bytes and scales of ``a``. Past I there are zeros."""
    A: gl.constexpr = acc_layout(N, CONSUMERS)
    factor = facts[1].index(here).load(gl.SliceLayout(1, A))
    token = facts[3].index(here).slice(FIRST, N).load(gl.SliceLayout(0, A))
    acc = acc * factor[:, None] * token[None, :]
    Y: gl.constexpr = half_layout(N, ROWS, CONSUMERS)
    gate, up = gl.split(gl.permute(gl.reshape(acc, (ROWS // 16, 2, 8, N)), (0, 2, 3, 1)))
    gate = gl.convert_layout(gl.reshape(gate, (ROWS // 2, N)), Y, assert_trivial=True)
    up = gl.convert_layout(gl.reshape(up, (ROWS // 2, N)), Y, assert_trivial=True)
    if HAS_BIAS:
        i = gl.minimum(i0 + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, Y)), I - 1)
        gate += gl.load(bias_ptr + i)[:, None]
        up += gl.load(bias_ptr + I + i)[:, None]
    y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
    if VIA_BF16:
        y = y.to(gl.bfloat16).to(gl.float32)
    B: gl.constexpr = block_layout(N)
    y = gl.convert_layout(gl.reshape(y, (2, 32, N)), B)
    if I % 64 != 0:
        s = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))
        k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))
        inside = gl.expand_dims(s * 32, 1) + gl.expand_dims(k, 0) < I - i0
        y = gl.where(gl.expand_dims(inside, 2), y, 0.0)
    elif A_STRIDE > I:
        y = gl.where(i0 < I, y, 0.0)
    y, exponent = quantize_blocks(y, FORMAT, RULE)
    y = gl.reshape(y.to(gl.float8e4nv), (64, N))
    OUT: gl.constexpr = y.type.layout
    k = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    pair = facts[2].index(here).slice(FIRST, N).load(gl.SliceLayout(0, OUT))
    out = a_ptr + pair.to(gl.int64)[None, :] * A_STRIDE + (i0 + k)[:, None]
    gl.store(out, y, mask=(pair < num_pairs)[None, :])
    E: gl.constexpr = exponent.type.layout
    pair = facts[2].index(here).slice(FIRST, N).load(gl.SliceLayout(0, E))
    block = i0 // 32 + gl.arange(0, 2, layout=gl.SliceLayout(1, E))
    at = a_scale_ptr + pair.to(gl.int64)[None, :] * (A_STRIDE // 32) + block[:, None]
    gl.store(at, exponent.to(gl.uint8), mask=(pair < num_pairs)[None, :])


@gluon.jit
def consume(
    rings, bias_ptr, block_expert_ptr, block_rows_ptr, tiles, a_ptr, a_scale_ptr, num_pairs, limit, alpha, beta,
    linear_beta, H: gl.constexpr, I: gl.constexpr, A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr,
    VIA_BF16: gl.constexpr, T: gl.constexpr, P: gl.constexpr, TS: gl.constexpr, AS: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = A_STRIDE // 64
    STEPS: gl.constexpr = (H + 127) // 128
    facts = rings[3]
    at = (0, 0, 0, 0)
    here = 0
    here_phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b = tile // TILES
        i0 = tile % TILES * 64
        n = gl.load(block_rows_ptr + b)
        bias = bias_ptr
        if HAS_BIAS:
            bias = bias_ptr + gl.load(block_expert_ptr + b).to(gl.int64) * (2 * I)
        for j in gl.static_range(number_of_choices(T)):
            if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                N1: gl.constexpr = columns1(T, j)
                N2: gl.constexpr = columns2(T, j)
                acc1, acc2, at = multiply_tile(
                    rings[1], rings[2], at, True, STEPS, P, N1, N2, T, TS, AS, TS == AS
                )
                mbarrier.wait(facts[4][0].index(here), here_phase)
                activate(
                    acc1, facts, here, bias, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, 0,
                    I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N1,
                )  # fmt: skip
                if N2 > 0:
                    activate(
                        acc2, facts, here, bias, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, N1,
                        I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N2,
                    )  # fmt: skip
        barrier()  # all have read them
        mbarrier.arrive(facts[4][1].index(here))
        here, here_phase = advance(here, here_phase, FACTS)


@gluon.jit
def decoder(
    rings, tiles, H: gl.constexpr, BH: gl.constexpr, PS: gl.constexpr, AS: gl.constexpr, DW: gl.constexpr,
):  # fmt: skip
    here = 0
    here_phase = 0
    slot = 0
    phase = 0
    out = 0
    out_phase = 0
    for _tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        here, here_phase, slot, phase, out, out_phase = decode_tile(
            rings[0], rings[2], rings[3], here, here_phase, slot, phase, out, out_phase, (H + 127) // 128, BH, False,
            PS, AS, DW,
        )  # fmt: skip


@gluon.jit
def token_loader(
    ring, x_ptr, pairs_ptr, block_rows_ptr, tiles, num_pairs, topk, H: gl.constexpr, X_STRIDE: gl.constexpr,
    A_STRIDE: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr, TS: gl.constexpr, LW: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = A_STRIDE // 64
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b = tile // TILES
        slot, phase = copy_tokens(
            ring, slot, phase, x_ptr, pairs_ptr + b * T, gl.load(block_rows_ptr + b), num_pairs, topk,
            (H + 127) // 128, X_STRIDE, WIDE, T, TS, LW,
        )  # fmt: skip


@gluon.jit
def weight_loader(
    desc_w, desc_s, ring, block_expert_ptr, tiles, H: gl.constexpr, A_STRIDE: gl.constexpr, BH: gl.constexpr,
    PS: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = A_STRIDE // 64
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e = gl.load(block_expert_ptr + tile // TILES)
        slot, phase = copy_weights(
            desc_w, desc_s, ring, slot, phase, e * BH, tile % TILES * (8 // BH), (H + 127) // 128, PS
        )  # fmt: skip


@gluon.jit
def fact_finder(
    facts, scale_ptr, x_scale_ptr, pairs_ptr, block_expert_ptr, tiles, num_pairs, topk, H: gl.constexpr,
    I: gl.constexpr, A_STRIDE: gl.constexpr, BH: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = A_STRIDE // 64
    GROUP: gl.constexpr = (H // 32 + 7) // 8 * 64
    here = 0
    phase = 0
    g = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, fact_layout())))
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b = tile // TILES
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        if BH == 2:
            group = gl.minimum(tile % TILES * 2 + g % 2, I // 32 - 1) + g // 2 * (I // 32)
        else:
            group = gl.minimum(tile % TILES * 4 + g, I // 16 - 1)
        pair, token_scale = block_facts(x_scale_ptr, pairs_ptr + b * T, num_pairs, topk, T)
        here, phase = tile_facts(
            facts, here, phase, scale_ptr + e * (I // 16 * GROUP), group * GROUP, pair, token_scale, H // 32, BH, False
        )  # fmt: skip


@gluon.jit
def stage1_shared(
    desc_w,  # shared_prefill_launch.descriptors
    desc_s,
    x_ptr,  # [M, X_STRIDE] e4m3
    x_scale_ptr,  # [M] float32
    scale_ptr,  # as int32
    bias_ptr,
    pairs_ptr,  # [blocks, T]
    block_expert_ptr,
    block_rows_ptr,
    num_blocks_ptr,
    a_ptr,  # [pairs, A_STRIDE] e4m3
    a_scale_ptr,  # [pairs, A_STRIDE / 32] E8M0
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
    T: gl.constexpr,
    P: gl.constexpr,
    TS: gl.constexpr,
    AS: gl.constexpr,
    PS: gl.constexpr,
    DW: gl.constexpr,
    LW: gl.constexpr,
    DREGS: gl.constexpr,
    LREGS: gl.constexpr,
):
    BH: gl.constexpr = 2 if LAYOUT == "separated" else 1
    rings = make_rings(desc_w, desc_s, BH, T, TS, AS, PS, LW)
    tiles = gl.load(num_blocks_ptr) * (A_STRIDE // 64)
    gl.warp_specialize(
        [
            (consume, (
                rings, bias_ptr, block_expert_ptr, block_rows_ptr, tiles, a_ptr, a_scale_ptr, num_pairs, limit, alpha,
                beta, linear_beta, H, I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, T, P, TS,
                AS,
            )),
            (decoder, (rings, tiles, H, BH, PS, AS, DW)),
            (token_loader, (
                rings[1], x_ptr, pairs_ptr, block_rows_ptr, tiles, num_pairs, topk, H, X_STRIDE, A_STRIDE, WIDE, T, TS,
                LW,
            )),
            (weight_loader, (desc_w, desc_s, rings[0], block_expert_ptr, tiles, H, A_STRIDE, BH, PS)),
            (fact_finder, (
                rings[3], scale_ptr, x_scale_ptr, pairs_ptr, block_expert_ptr, tiles, num_pairs, topk, H, I, A_STRIDE,
                BH, T,
            )),
        ],
        [DW, LW, 1, 1],
        [DREGS, LREGS, LREGS, LREGS],
    )  # fmt: skip
