"""Stage 2 of the shared prefill form (Gluon): TILES tiles of 128 rows of w2 of one expert times a block of its tokens,
whose columns stay in shared memory from tile to tile where they fit (KEPT)."""

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
from sglang_aiter_moe.portable.triton.hopper.prefill_stage2 import part_layout
from sglang_aiter_moe.portable.triton.hopper.read_once import read_once
from sglang_aiter_moe.portable.triton.hopper.shared_prefill import (
    first_words,
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
    ROWS,
    advance,
    copy_tokens,
    copy_weights,
    make_rings,
)


@gluon.constexpr_function
def groups_of(H, TILES):
    """Of TILES row tiles."""
    return (H + 128 * TILES - 1) // (128 * TILES)


@gluon.jit
def first_row(group, tile, H: gl.constexpr, TILES: gl.constexpr):
    """A tile that would reach past H begins earlier: its rows are computed twice, to the same bits."""
    return gl.minimum((group * TILES + tile) * ROWS, max(H - ROWS, 0))


@gluon.jit
def store(
    acc, facts, here, bias_ptr, part_ptr, num_pairs, n0, FIRST: gl.constexpr, H: gl.constexpr, HAS_BIAS: gl.constexpr,
    N: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """64 rows from n0 on, straight from the accumulator: two rows a lane, 16 rows (32 bytes) a warp and pair."""
    if N > 64:
        first, last = halves(acc, N)
        store(first, facts, here, bias_ptr, part_ptr, num_pairs, n0, FIRST, H, HAS_BIAS, N // 2, g)
        store(
            last, facts, here, bias_ptr, part_ptr, num_pairs, n0, FIRST + N // 2, H, HAS_BIAS, N // 2, g
        )  # fmt: skip
    else:
        A: gl.constexpr = acc_layout(N, WARPS)
        factor = facts[1].index(here).slice(g * HALF, HALF).load(gl.SliceLayout(1, A))
        token = facts[3].index(here).slice(FIRST, N).load(gl.SliceLayout(0, A))
        acc = acc * factor[:, None] * token[None, :]
        L: gl.constexpr = part_layout(N, HALF, WARPS)
        pair = facts[2].index(here).slice(FIRST, N).load(gl.SliceLayout(0, L))
        y = gl.permute(gl.reshape(acc, (HALF // 16, 2, 8, N)), (0, 2, 1, 3))
        y = gl.convert_layout(gl.reshape(y, (HALF, N)), L, assert_trivial=True)
        n = n0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, L))
        if HAS_BIAS:
            y += gl.load(bias_ptr + n, mask=n < H, other=0.0)[:, None]
        out = part_ptr + pair.to(gl.int64)[None, :] * H + n[:, None]
        keep = (pair < num_pairs)[None, :] & (n < H)[:, None]
        # More than L2 holds: it had better keep tokens.
        gl.store(out, y.to(gl.bfloat16), mask=keep, eviction_policy="evict_first")


@gluon.jit
def consume(
    rings, bias_ptr, block_expert_ptr, block_rows_ptr, items, part_ptr, num_pairs, H: gl.constexpr, I: gl.constexpr,
    HAS_BIAS: gl.constexpr, TILES: gl.constexpr, KEPT: gl.constexpr, T: gl.constexpr, P: gl.constexpr,
    TS: gl.constexpr, PS: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = groups_of(H, TILES)
    STEPS: gl.constexpr = (I + 127) // 128
    facts = rings[2]
    here = 0
    here_phase = 0
    if gl.program_id(0) < items:
        words, scales, slot, phase, ts, tp = first_words(rings[0], 1, True, g)
        for item in range(gl.program_id(0), items, gl.num_programs(0)):
            b = item // GROUPS
            n = gl.load(block_rows_ptr + b)
            bias = bias_ptr
            if HAS_BIAS:
                bias = bias_ptr + gl.load(block_expert_ptr + b).to(gl.int64) * H
            after_ts = ts + 0
            after_tp = tp + 0
            for tile in range(TILES):
                n0 = first_row(item % GROUPS, tile, H, TILES) + g * HALF
                start_ts = ts if KEPT else after_ts
                start_tp = tp if KEPT else after_tp
                last = (item + gl.num_programs(0) >= items) & (tile == TILES - 1)
                mbarrier.wait(facts[4][0].index(here), here_phase)
                for j in gl.static_range(number_of_choices(T)):
                    if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                        N1: gl.constexpr = columns1(T, j)
                        N2: gl.constexpr = columns2(T, j)
                        last_use = (tile == TILES - 1) if KEPT else True
                        acc1, acc2, at = multiply_tile(
                            rings[1], rings[0], (words, scales, slot, phase, start_ts, start_tp), facts, here, last,
                            last_use, STEPS, P, N1, N2, T, TS, PS, 1, True, g,
                        )  # fmt: skip
                        words = at[0]
                        scales = at[1]
                        slot = at[2]
                        phase = at[3]
                        after_ts = at[4]
                        after_tp = at[5]
                        store(
                            acc1, facts, here, bias, part_ptr, num_pairs, n0, 0, H, HAS_BIAS, N1, g
                        )
                        if N2 > 0:
                            store(
                                acc2,
                                facts,
                                here,
                                bias,
                                part_ptr,
                                num_pairs,
                                n0,
                                N1,
                                H,
                                HAS_BIAS,
                                N2,
                                g,
                            )
                barrier()  # all have read them
                mbarrier.arrive(facts[4][1].index(here))
                here, here_phase = advance(here, here_phase, FACTS)
            ts = after_ts + 0
            tp = after_tp + 0


@gluon.jit
def token_loader(
    ring, a_ptr, pairs_ptr, block_rows_ptr, items, num_pairs, H: gl.constexpr, I: gl.constexpr, A_STRIDE: gl.constexpr,
    WIDE: gl.constexpr, TILES: gl.constexpr, KEPT: gl.constexpr, T: gl.constexpr, TS: gl.constexpr,
    LW: gl.constexpr,
):  # fmt: skip
    TIMES: gl.constexpr = 1 if KEPT else TILES
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b = item // groups_of(H, TILES)
        n = gl.load(block_rows_ptr + b)
        for _time in range(TIMES):
            slot, phase = copy_tokens(
                ring, slot, phase, a_ptr, pairs_ptr + b * T, n, num_pairs, 1, (I + 127) // 128, A_STRIDE, WIDE, T, TS,
                LW,
            )  # fmt: skip


@gluon.jit
def weight_loader(
    desc_w, desc_s, ring, block_expert_ptr, items, H: gl.constexpr, I: gl.constexpr, TILES: gl.constexpr,
    PS: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = groups_of(H, TILES)
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e = gl.load(block_expert_ptr + item // GROUPS)
        for tile in range(TILES):
            n0 = first_row(item % GROUPS, tile, H, TILES)
            slot, phase = copy_weights(
                desc_w, desc_s, ring, slot, phase, e, n0 // 16, (I + 127) // 128, PS, 1
            )


@gluon.jit
def fact_finder(
    facts, scale_ptr, a_scale_ptr, pairs_ptr, block_expert_ptr, items, num_pairs, H: gl.constexpr, I: gl.constexpr,
    TILES: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = groups_of(H, TILES)
    GROUP: gl.constexpr = (I // 32 + 7) // 8 * 64
    here = 0
    phase = 0
    g = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, fact_layout())))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b = item // GROUPS
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        pair, token_scale = block_facts(a_scale_ptr, pairs_ptr + b * T, num_pairs, 1, T)
        for tile in range(TILES):
            n0 = first_row(item % GROUPS, tile, H, TILES)
            here, phase = tile_facts(
                facts, here, phase, scale_ptr + e * (H // 32 * GROUP), gl.minimum(n0 // 32 + g, H // 32 - 1) * GROUP,
                pair, token_scale, I // 32, 1, True,
            )  # fmt: skip


@read_once
def stage2_shared(
    desc_w,  # shared_prefill_launch.descriptors
    desc_s,
    a_ptr,  # [pairs, A_STRIDE] e4m3
    a_scale_ptr,  # [pairs] float32
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
    KEPT: gl.constexpr,
    T: gl.constexpr,
    P: gl.constexpr,
    TS: gl.constexpr,
    PS: gl.constexpr,
    LW: gl.constexpr,
    CREGS: gl.constexpr,
    LREGS: gl.constexpr,
):
    rings = make_rings(desc_w, desc_s, 1, T, TS, PS, LW)
    items = gl.load(num_blocks_ptr) * groups_of(H, TILES)
    gl.warp_specialize(
        [
            (consume, (
                rings, bias_ptr, block_expert_ptr, block_rows_ptr, items, part_ptr, num_pairs, H, I, HAS_BIAS, TILES,
                KEPT, T, P, TS, PS, gl.constexpr(0),
            )),
            (consume, (
                rings, bias_ptr, block_expert_ptr, block_rows_ptr, items, part_ptr, num_pairs, H, I, HAS_BIAS, TILES,
                KEPT, T, P, TS, PS, gl.constexpr(1),
            )),
            (token_loader, (
                rings[1], a_ptr, pairs_ptr, block_rows_ptr, items, num_pairs, H, I, A_STRIDE, WIDE, TILES, KEPT, T, TS,
                LW,
            )),
            (weight_loader, (desc_w, desc_s, rings[0], block_expert_ptr, items, H, I, TILES, PS)),
            (fact_finder, (
                rings[2], scale_ptr, a_scale_ptr, pairs_ptr, block_expert_ptr, items, num_pairs, H, I, TILES, T,
            )),
        ],
        [4, LW, 1, 1],
        [CREGS, LREGS, LREGS, LREGS],
    )  # fmt: skip
