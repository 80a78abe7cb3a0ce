"""Stage 1 of the shared prefill form (Gluon): 32 gate and 32 up rows of one expert a group of consumers, times a block
of its tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sglang_aiter_moe.portable.triton.hopper.approximate import divide, exp2
from sglang_aiter_moe.portable.triton.hopper.fp8 import acc_layout, barrier
from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import (
    columns,
    columns1,
    columns2,
    number_of_choices,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_stage1 import (
    half_layout,
    quantize_blocks,
    scale_blocks,
)
from sglang_aiter_moe.portable.triton.hopper.read_once import read_once
from sglang_aiter_moe.portable.triton.hopper.shared_prefill import (
    first_words,
    group_rows,
    halves,
    multiply_tile,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_decode import HALF, WARPS
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_facts import (
    block_facts,
    fact_layout,
    tile_facts,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_rings import (
    FACTS,
    advance,
    copy_tokens,
    copy_weights,
    make_rings,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_roles import start_roles


@gluon.constexpr_function
def tiles_of(I, G):
    """Row tiles of an expert, 32 columns of ``a`` a group. ``fold_rows_kernel`` writes the zeros past I."""
    return (I + 32 * G - 1) // (32 * G)


@gluon.constexpr_function
def block_layout():
    """``[1, 32, N]``: a scale block of a column in four lanes, eight values each."""
    return gl.BlockedLayout([1, 8, 1], [1, 4, 8], [1, 1, 4], [1, 2, 0])


@gluon.jit
def tanh_parts(v, scale):
    """Numerator and denominator of the magnitude of tanh of ``v * scale``, scale positive. Below 2**-7 it is its
    argument: a relative error of up to 2**-15.6 there and above, where ``1 - e`` cancels; E4M3 has 2**-4."""
    a = gl.abs(v) * scale
    e = exp2(gl.abs(v) * (scale * -2.8853900817779268))
    return gl.where(a < 0.0078125, a * (1.0 + e), 1.0 - e), 1.0 + e


@gluon.jit
def gate_up(
    g, u, limit, alpha, beta, linear_beta, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr
):
    """``fp8_stage1.gate_up`` by ``approximate``: the epilogue is a fifth of a program."""
    if HAS_LIMIT:
        g = gl.where(g > limit, limit, g)
        u = gl.where(u > limit, limit, gl.where(u < -limit, -limit, u))
    if ACTIVATION == "situv2":
        gate, gate_below = tanh_parts(g, 1.0 / beta)
        up, up_below = tanh_parts(u, 1.0 / linear_beta)
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
    G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """``activate_columns`` in pieces of up to 32 columns: intermediates find registers, and exchange little memory."""
    if N > 32:
        first, last = halves(acc, N)
        activate(
            first, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, FIRST, I,
            A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N // 2, G, g,
        )  # fmt: skip
        activate(
            last, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta,
            FIRST + N // 2, I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N // 2, G, g,
        )  # fmt: skip
    else:
        activate_columns(
            acc, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, FIRST, I,
            A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N, G, g,
        )  # fmt: skip


@gluon.jit
def activate_columns(
    acc, facts, here, bias_ptr, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, FIRST: gl.constexpr,
    I: gl.constexpr, A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr, VIA_BF16: gl.constexpr, N: gl.constexpr,
    G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + N - 1 of the block to bytes and scales of ``a``."""
    A: gl.constexpr = acc_layout(N, WARPS)
    factor = group_rows(facts[1], here, G, g).load(gl.SliceLayout(1, A))
    token = facts[3].index(here).slice(FIRST, N).load(gl.SliceLayout(0, A))
    acc = acc * factor[:, None] * token[None, :]
    Y: gl.constexpr = half_layout(N, HALF, WARPS)
    gate, up = gl.split(gl.permute(gl.reshape(acc, (HALF // 16, 2, 8, N)), (0, 2, 3, 1)))
    gate = gl.convert_layout(gl.reshape(gate, (HALF // 2, N)), Y, assert_trivial=True)
    up = gl.convert_layout(gl.reshape(up, (HALF // 2, N)), Y, assert_trivial=True)
    if HAS_BIAS:
        i = gl.minimum(i0 + gl.arange(0, HALF // 2, layout=gl.SliceLayout(1, Y)), I - 1)
        gate += gl.load(bias_ptr + i)[:, None]
        up += gl.load(bias_ptr + I + i)[:, None]
    y = gate_up(gate, up, limit, alpha, beta, linear_beta, ACTIVATION, HAS_LIMIT)
    if VIA_BF16:
        y = y.to(gl.bfloat16).to(gl.float32)
    B: gl.constexpr = block_layout()
    y = gl.convert_layout(gl.reshape(y, (1, 32, N)), B)
    if FORMAT == "e4m3":
        y, exponent = scale_blocks(y, FORMAT, RULE)
    else:
        y, exponent = quantize_blocks(y, FORMAT, RULE)
    y = gl.reshape(y.to(gl.float8e4nv), (32, N))
    OUT: gl.constexpr = y.type.layout
    k = gl.arange(0, 32, layout=gl.SliceLayout(1, OUT))
    pair = facts[2].index(here).slice(FIRST, N).load(gl.SliceLayout(0, OUT))
    out = a_ptr + pair.to(gl.int64)[None, :] * A_STRIDE + (i0 + k)[:, None]
    there = (pair < num_pairs) & (i0 < I)
    gl.store(out, y, mask=there[None, :])
    E: gl.constexpr = exponent.type.layout
    pair = facts[2].index(here).slice(FIRST, N).load(gl.SliceLayout(0, E))
    block = i0 // 32 + gl.arange(0, 1, layout=gl.SliceLayout(1, E))
    at = a_scale_ptr + pair.to(gl.int64)[None, :] * (A_STRIDE // 32) + block[:, None]
    there = (pair < num_pairs) & (i0 < I)
    gl.store(at, exponent.to(gl.uint8), mask=there[None, :])


@gluon.jit
def consume(
    rings, bias_ptr, block_expert_ptr, block_rows_ptr, tiles, a_ptr, a_scale_ptr, num_pairs, limit, alpha, beta,
    linear_beta, H: gl.constexpr, I: gl.constexpr, A_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr, HAS_BIAS: gl.constexpr, FORMAT: gl.constexpr, RULE: gl.constexpr,
    VIA_BF16: gl.constexpr, T: gl.constexpr, P: gl.constexpr, LOOPED: gl.constexpr, TS: gl.constexpr,
    PS: gl.constexpr, BH: gl.constexpr, G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = tiles_of(I, G)
    facts = rings[2]
    here = 0
    here_phase = 0
    if gl.program_id(0) < tiles:
        at = first_words(rings[0], BH, False, G, g)
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            b = tile // TILES
            i0 = (tile % TILES * G + g) * 32
            n = gl.load(block_rows_ptr + b)
            last = tile + gl.num_programs(0) >= tiles
            bias = bias_ptr
            if HAS_BIAS:
                bias = bias_ptr + gl.load(block_expert_ptr + b).to(gl.int64) * (2 * I)
            mbarrier.wait(facts[4][0].index(here), here_phase)
            for j in gl.static_range(number_of_choices(T)):
                if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                    N1: gl.constexpr = columns1(T, j)
                    N2: gl.constexpr = columns2(T, j)
                    acc1, acc2, at = multiply_tile(
                        rings[1], rings[0], at, facts, here, last, True, (H + 127) // 128, P, LOOPED, N1, N2, T, TS,
                        PS, BH, False, G, g,
                    )  # fmt: skip
                    activate(
                        acc1, facts, here, bias, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta, 0,
                        I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N1, G, g,
                    )  # fmt: skip
                    if N2 > 0:
                        activate(
                            acc2, facts, here, bias, a_ptr, a_scale_ptr, num_pairs, i0, limit, alpha, beta, linear_beta,
                            N1, I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, N2, G, g,
                        )  # fmt: skip
            barrier()  # all have read them
            mbarrier.arrive(facts[4][1].index(here))
            here, here_phase = advance(here, here_phase, FACTS)


@gluon.jit
def token_loader(
    ring, x_ptr, pairs_ptr, block_rows_ptr, tiles, num_pairs, topk, H: gl.constexpr, I: gl.constexpr,
    X_STRIDE: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr, TS: gl.constexpr, LW: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = tiles_of(I, G)
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
    desc_w, desc_s, ring, block_expert_ptr, tiles, H: gl.constexpr, I: gl.constexpr, BH: gl.constexpr,
    PS: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = tiles_of(I, G)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e = gl.load(block_expert_ptr + tile // TILES)
        slot, phase = copy_weights(
            desc_w, desc_s, ring, slot, phase, e * BH, tile % TILES * (G * (4 // BH)), (H + 127) // 128, PS, BH, G
        )  # fmt: skip


@gluon.jit
def fact_finder(
    facts, scale_ptr, x_scale_ptr, pairs_ptr, block_expert_ptr, tiles, num_pairs, topk, H: gl.constexpr,
    I: gl.constexpr, BH: gl.constexpr, T: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = tiles_of(I, G)
    GROUP: gl.constexpr = (H // 32 + 7) // 8 * 64
    here = 0
    phase = 0
    g = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, fact_layout())))
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b = tile // TILES
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        pair, token_scale = block_facts(x_scale_ptr, pairs_ptr + b * T, num_pairs, topk, T)
        if BH == 2:
            first = tile % TILES * G + g % 2
            further = g // 2 * (I // 32)
        else:
            first = tile % TILES * (2 * G) + g
            further = first * 0
        here, phase = tile_facts(
            facts, here, phase, scale_ptr + e * (I // 16 * GROUP), first, further, 2 // BH * (I // 32) - 1, GROUP,
            4 // BH, pair, token_scale, H // 32, BH, False, G,
        )  # fmt: skip


@read_once
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
    G: gl.constexpr,
    P: gl.constexpr,
    LOOPED: gl.constexpr,
    TS: gl.constexpr,
    PS: gl.constexpr,
    LW: gl.constexpr,
    CREGS: gl.constexpr,
    LREGS: gl.constexpr,
):
    BH: gl.constexpr = 2 if LAYOUT == "separated" else 1
    rings = make_rings(desc_w, desc_s, BH, T, TS, PS, LW, G)
    tiles = gl.load(num_blocks_ptr) * tiles_of(I, G)
    start_roles(
        consume,
        (
            rings, bias_ptr, block_expert_ptr, block_rows_ptr, tiles, a_ptr, a_scale_ptr, num_pairs, limit, alpha, beta,
            linear_beta, H, I, A_STRIDE, ACTIVATION, HAS_LIMIT, HAS_BIAS, FORMAT, RULE, VIA_BF16, T, P, LOOPED, TS, PS,
            BH, G,
        ),
        token_loader,
        (
            rings[1], x_ptr, pairs_ptr, block_rows_ptr, tiles, num_pairs, topk, H, I, X_STRIDE, WIDE, T, TS, LW, G,
        ),
        weight_loader,
        (desc_w, desc_s, rings[0], block_expert_ptr, tiles, H, I, BH, PS, G),
        fact_finder,
        (
            rings[2], scale_ptr, x_scale_ptr, pairs_ptr, block_expert_ptr, tiles, num_pairs, topk, H, I, BH, T, G,
        ),
        G, LW, CREGS, LREGS,
    )  # fmt: skip
