"""Stage 2 of the shared prefill form (Gluon): TILES tiles of w2 of one expert, 64 rows a group, times a block of its
tokens, whose columns stay in shared memory from tile to tile where they fit (KEPT)."""

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
def tiles_of(H, G):
    return (H + 64 * G - 1) // (64 * G)


@gluon.constexpr_function
def items_of(H, G, TILES):
    """Of TILES row tiles, the last one perhaps of fewer."""
    return (tiles_of(H, G) + TILES - 1) // TILES


@gluon.jit
def tiles_in(item, H: gl.constexpr, G: gl.constexpr, TILES: gl.constexpr):
    return gl.minimum(TILES, tiles_of(H, G) - item * TILES)


@gluon.jit
def first_row(item, tile, H: gl.constexpr, G: gl.constexpr, TILES: gl.constexpr):
    """A tile that would reach past H begins earlier: its rows are computed twice, to the same bits."""
    return gl.minimum((item * TILES + tile) * (64 * G), max(H - 64 * G, 0))


@gluon.jit
def store(
    acc, facts, here, bias_ptr, part_ptr, num_pairs, n0, FIRST: gl.constexpr, H: gl.constexpr, HAS_BIAS: gl.constexpr,
    N: gl.constexpr, G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """64 rows from n0 on, straight from the accumulator: two rows a lane, 16 rows (32 bytes) a warp and pair."""
    if N > 64:
        first, last = halves(acc, N)
        store(
            first, facts, here, bias_ptr, part_ptr, num_pairs, n0, FIRST, H, HAS_BIAS, N // 2, G, g
        )
        store(
            last, facts, here, bias_ptr, part_ptr, num_pairs, n0, FIRST + N // 2, H, HAS_BIAS, N // 2, G, g
        )  # fmt: skip
    else:
        A: gl.constexpr = acc_layout(N, WARPS)
        factor = group_rows(facts[1], here, G, g).load(gl.SliceLayout(1, A))
        token = facts[3].index(here).slice(FIRST, N).load(gl.SliceLayout(0, A))
        acc = acc * factor[:, None] * token[None, :]
        L: gl.constexpr = part_layout(N, HALF, WARPS)
        pair = facts[2].index(here).slice(FIRST, N).load(gl.SliceLayout(0, L))
        y = gl.permute(gl.reshape(acc, (HALF // 16, 2, 8, N)), (0, 2, 1, 3))
        y = gl.convert_layout(gl.reshape(y, (HALF, N)), L, assert_trivial=True)
        n = n0 + gl.arange(0, HALF, layout=gl.SliceLayout(1, L))
        if HAS_BIAS:
            y += gl.load(bias_ptr + n, mask=n < H, other=0.0)[:, None]
        there = (pair < num_pairs)[None, :]
        if H < HALF * G:
            there = there & (n < H)[:, None]
        # In this order: one instruction for an address. More than L2 holds: it had better keep tokens.
        gl.store(
            (part_ptr + n)[:, None] + (pair.to(gl.int64) * H)[None, :],
            y.to(gl.bfloat16),
            mask=there,
            eviction_policy="evict_first",
        )


@gluon.jit
def consume(
    rings, bias_ptr, block_expert_ptr, block_rows_ptr, items, part_ptr, num_pairs, H: gl.constexpr, I: gl.constexpr,
    HAS_BIAS: gl.constexpr, TILES: gl.constexpr, KEPT: gl.constexpr, T: gl.constexpr, P: gl.constexpr,
    LOOPED: gl.constexpr, TS: gl.constexpr, PS: gl.constexpr, G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    ITEMS: gl.constexpr = items_of(H, G, TILES)
    STEPS: gl.constexpr = (I + 127) // 128
    facts = rings[2]
    here = 0
    here_phase = 0
    if gl.program_id(0) < items:
        words, scales, slot, phase, ts, tp = first_words(rings[0], 1, True, G, g)
        for item in range(gl.program_id(0), items, gl.num_programs(0)):
            b = item // ITEMS
            n = gl.load(block_rows_ptr + b)
            bias = bias_ptr
            if HAS_BIAS:
                bias = bias_ptr + gl.load(block_expert_ptr + b).to(gl.int64) * H
            after_ts = ts + 0
            after_tp = tp + 0
            count = tiles_in(item % ITEMS, H, G, TILES)
            for tile in range(count):
                n0 = first_row(item % ITEMS, tile, H, G, TILES) + g * HALF
                start_ts = ts if KEPT else after_ts
                start_tp = tp if KEPT else after_tp
                last = (item + gl.num_programs(0) >= items) & (tile == count - 1)
                mbarrier.wait(facts[4][0].index(here), here_phase)
                for j in gl.static_range(number_of_choices(T)):
                    if (n > columns(T, j - 1)) & (n <= columns(T, j)):
                        N1: gl.constexpr = columns1(T, j)
                        N2: gl.constexpr = columns2(T, j)
                        last_use = (tile == count - 1) if KEPT else True
                        acc1, acc2, at = multiply_tile(
                            rings[1], rings[0], (words, scales, slot, phase, start_ts, start_tp), facts, here, last,
                            last_use, STEPS, P, LOOPED, N1, N2, T, TS, PS, 1, True, G, g,
                        )  # fmt: skip
                        words = at[0]
                        scales = at[1]
                        slot = at[2]
                        phase = at[3]
                        after_ts = at[4]
                        after_tp = at[5]
                        store(
                            acc1, facts, here, bias, part_ptr, num_pairs, n0, 0, H, HAS_BIAS, N1, G, g
                        )  # fmt: skip
                        if N2 > 0:
                            store(
                                acc2, facts, here, bias, part_ptr, num_pairs, n0, N1, H, HAS_BIAS, N2, G, g
                            )  # fmt: skip
                barrier()  # all have read them
                mbarrier.arrive(facts[4][1].index(here))
                here, here_phase = advance(here, here_phase, FACTS)
            ts = after_ts + 0
            tp = after_tp + 0


@gluon.jit
def token_loader(
    ring, a_ptr, pairs_ptr, block_rows_ptr, items, num_pairs, H: gl.constexpr, I: gl.constexpr, A_STRIDE: gl.constexpr,
    WIDE: gl.constexpr, TILES: gl.constexpr, KEPT: gl.constexpr, T: gl.constexpr, TS: gl.constexpr,
    LW: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    ITEMS: gl.constexpr = items_of(H, G, TILES)
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b = item // ITEMS
        n = gl.load(block_rows_ptr + b)
        for _time in range(1 if KEPT else tiles_in(item % ITEMS, H, G, TILES)):
            slot, phase = copy_tokens(
                ring, slot, phase, a_ptr, pairs_ptr + b * T, n, num_pairs, 1, (I + 127) // 128, A_STRIDE, WIDE, T, TS,
                LW,
            )  # fmt: skip


@gluon.jit
def weight_loader(
    desc_w, desc_s, ring, block_expert_ptr, items, H: gl.constexpr, I: gl.constexpr, TILES: gl.constexpr,
    PS: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    ITEMS: gl.constexpr = items_of(H, G, TILES)
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e = gl.load(block_expert_ptr + item // ITEMS)
        for tile in range(tiles_in(item % ITEMS, H, G, TILES)):
            n0 = first_row(item % ITEMS, tile, H, G, TILES)
            slot, phase = copy_weights(
                desc_w, desc_s, ring, slot, phase, e, n0 // 16, (I + 127) // 128, PS, 1, G
            )


@gluon.jit
def fact_finder(
    facts, scale_ptr, a_scale_ptr, pairs_ptr, block_expert_ptr, items, num_pairs, H: gl.constexpr, I: gl.constexpr,
    TILES: gl.constexpr, T: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    ITEMS: gl.constexpr = items_of(H, G, TILES)
    GROUP: gl.constexpr = (I // 32 + 7) // 8 * 64
    here = 0
    phase = 0
    g = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, fact_layout())))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b = item // ITEMS
        e = gl.load(block_expert_ptr + b).to(gl.int64)
        pair, token_scale = block_facts(a_scale_ptr, pairs_ptr + b * T, num_pairs, 1, T)
        for tile in range(tiles_in(item % ITEMS, H, G, TILES)):
            n0 = first_row(item % ITEMS, tile, H, G, TILES)
            here, phase = tile_facts(
                facts, here, phase, scale_ptr + e * (H // 32 * GROUP), n0 // 32 + g, 0, H // 32 - 1, GROUP, 4, pair,
                token_scale, I // 32, 1, True, G,
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
    G: gl.constexpr,
    P: gl.constexpr,
    LOOPED: gl.constexpr,
    TS: gl.constexpr,
    PS: gl.constexpr,
    LW: gl.constexpr,
    CREGS: gl.constexpr,
    LREGS: gl.constexpr,
):
    rings = make_rings(desc_w, desc_s, 1, T, TS, PS, LW, G)
    items = gl.load(num_blocks_ptr) * items_of(H, G, TILES)
    start_roles(
        consume,
        (
            rings, bias_ptr, block_expert_ptr, block_rows_ptr, items, part_ptr, num_pairs, H, I, HAS_BIAS, TILES, KEPT,
            T, P, LOOPED, TS, PS, G,
        ),
        token_loader,
        (
            rings[1], a_ptr, pairs_ptr, block_rows_ptr, items, num_pairs, H, I, A_STRIDE, WIDE, TILES, KEPT, T, TS, LW,
            G,
        ),
        weight_loader,
        (desc_w, desc_s, rings[0], block_expert_ptr, items, H, I, TILES, PS, G),
        fact_finder,
        (
            rings[2], scale_ptr, a_scale_ptr, pairs_ptr, block_expert_ptr, items, num_pairs, H, I, TILES, T, G,
        ),
        G, LW, CREGS, LREGS,
    )  # fmt: skip
