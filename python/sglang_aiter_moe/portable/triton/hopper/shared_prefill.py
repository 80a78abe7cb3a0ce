"""The product of the shared prefill form (A8W4, A4W4, many tokens): fp8 ``wgmma``, tokens from shared memory, weights
from registers (Gluon).

Four roles in a program, one program an SM, none of which waits for the others but through rings:

* *weights*, one warp: bulk copies of words and scales, as AITER stored them, into a ring;
* *tokens*: ``cp.async`` of 128 columns of a block's rows into a ring;
* *facts*, one warp: reads ahead what a tile needs once (rows' largest scales, pairs, tokens' scales);
* *consumers*, two to four groups of four warps, each for 64 rows of a tile: words become e5m2 (``mx_prefill``:
  relative to their row's largest scale), are multiplied, and what follows a tile. They are here. The groups do not wait
  for each other but where a ring is full, so that one multiplies while the other decodes, adds or finishes a tile. Each
  is code of its own.

**Numbers.** A token has one scale for its whole row, so that products of any number of steps can share an accumulator;
P steps of 128 columns do (fp8 ``wgmma`` adds with few bits), then they are added in float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sglang_aiter_moe.portable.triton.hopper.fp8 import acc_layout, barrier, operand_layout
from sglang_aiter_moe.portable.triton.hopper.mx_prefill import decode_step, operand
from sglang_aiter_moe.portable.triton.hopper.prefill import lane_layout
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_decode import (
    HALF,
    WARPS,
    lane_scales,
    lane_words,
    load_slot,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_rings import (
    advance,
    group_pairs,
    most1,
    most2,
    narrow,
)


@gluon.jit
def first_words(ring, BH: gl.constexpr, BESIDE: gl.constexpr, G: gl.constexpr, g: gl.constexpr):
    """Loads the first step's words, and where the rings stand then: (words, scale words), (slot, parity) of words, of
    tokens."""
    full, empty = ring[2]
    mbarrier.wait(full.index(0), 0)
    loaded = load_slot(ring, 0, BH, BESIDE, G, g)
    fence_async_shared()
    barrier()
    mbarrier.arrive(empty.index(0))
    return loaded[0], loaded[1], 0, 0, 0, 0


@gluon.jit
def group_rows(smem, here, G: gl.constexpr, g: gl.constexpr):
    """``[64]`` of a tile's references or factors."""
    return smem.index(here * group_pairs(G) + g // 2).slice(g % 2 * HALF, HALF)


@gluon.jit
def step_operand(ops, N: gl.constexpr):
    """A step's operand ``[64, 128]``."""
    a0 = operand(ops[0], N, HALF, WARPS)
    a1 = operand(ops[1], N, HALF, WARPS)
    a2 = operand(ops[2], N, HALF, WARPS)
    a3 = operand(ops[3], N, HALF, WARPS)
    a = gl.join(gl.join(a0, a2), gl.join(a1, a3))  # [64, 32, 2, 2]
    a = gl.reshape(gl.permute(a, (0, 2, 3, 1)), (HALF, 128))
    return gl.convert_layout(a, operand_layout(N, WARPS), assert_trivial=True)


@gluon.jit
def start(ops, tokens, N: gl.constexpr, MOST: gl.constexpr, part, more: gl.constexpr):
    """Starts a step's four products: as one of 128 columns they share descriptors and a fence."""
    x = narrow(tokens, N, MOST).permute((1, 0))
    return warpgroup_mma(step_operand(ops, N), x, part, use_acc=more, is_async=True)


@gluon.jit
def zeros(N: gl.constexpr):
    """``[64, N]``; without columns a stand-in that nothing reads."""
    if N > 0:
        return gl.zeros([HALF, N], gl.float32, layout=acc_layout(N, WARPS))
    else:
        return 0


@gluon.jit
def one_step(
    tokens, ring, at, reference, part1, part2, step, more, last, last_use, STEPS: gl.constexpr, N1: gl.constexpr,
    N2: gl.constexpr, T: gl.constexpr, TS: gl.constexpr, PS: gl.constexpr, BH: gl.constexpr, BESIDE: gl.constexpr,
    G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """The products ``[64, N1]`` and ``[64, N2]`` of group ``g`` and of one step, added to the parts if ``more``.
    ``last``: no tile follows."""
    tokens1, tokens2, token_bars = tokens
    token_full, token_empty = token_bars
    full, empty = ring[2]
    words, scales, slot, phase, ts, tp = at
    ops = decode_step(
        lane_words(words, BH, BESIDE), lane_scales(scales, step, BH, BESIDE), reference, HALF, WARPS
    )
    part1 = warpgroup_mma_init(part1)
    if N2 > 0:
        part2 = warpgroup_mma_init(part2)
    mbarrier.wait(token_full.index(ts), tp)
    fence_async_shared()
    part1 = start(ops, tokens1.index(ts), N1, most1(T), part1, more)
    if N2 > 0:
        part2 = start(ops, tokens2.index(ts), N2, most2(T), part2, more)
    # The next step's words; after the last this slot once more, which nobody fills again.
    follows = (step < STEPS - 1) | (last == 0)
    next_slot, next_phase = advance(slot, phase, PS)
    next_slot = gl.where(follows, next_slot, slot)
    mbarrier.wait(full.index(next_slot), next_phase, pred=follows)
    words, scales = load_slot(ring, next_slot, BH, BESIDE, G, g)
    fence_async_shared()
    if N2 > 0:
        part1, part2 = warpgroup_mma_wait(0, deps=[part1, part2])
    else:
        part1 = warpgroup_mma_wait(0, deps=[part1])
    barrier()
    mbarrier.arrive(token_empty.index(ts), pred=last_use)
    mbarrier.arrive(empty.index(next_slot), pred=follows)
    ts, tp = advance(ts, tp, TS)
    return part1, part2, (words, scales, next_slot, next_phase, ts, tp)


@gluon.jit
def some_steps(
    tokens, ring, at, reference, step, last, last_use, P: gl.constexpr, STEPS: gl.constexpr, N1: gl.constexpr,
    N2: gl.constexpr, T: gl.constexpr, TS: gl.constexpr, PS: gl.constexpr, BH: gl.constexpr, BESIDE: gl.constexpr,
    G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """P steps from ``step`` on in one accumulator."""
    part1 = zeros(N1)
    part2 = zeros(N2)
    for p in gl.static_range(P):
        part1, part2, at = one_step(
            tokens, ring, at, reference, part1, part2, step + p, p > 0, last, last_use, STEPS, N1, N2, T, TS, PS, BH,
            BESIDE, G, g,
        )  # fmt: skip
    return part1, part2, at


@gluon.jit
def add(acc1, acc2, part1, part2, N2: gl.constexpr):
    acc1 += part1
    if N2 > 0:
        acc2 += part2
    return acc1, acc2


@gluon.jit
def multiply_tile(
    tokens, ring, at, facts, here, last, last_use, STEPS: gl.constexpr, P: gl.constexpr, LOOPED: gl.constexpr,
    N1: gl.constexpr, N2: gl.constexpr, T: gl.constexpr, TS: gl.constexpr, PS: gl.constexpr, BH: gl.constexpr,
    BESIDE: gl.constexpr, G: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """All steps of a row tile, and where the rings stand then (``first_words``).

    LOOPED: a loop of one step, which is less code than P steps, and clears what it has added. ptxas of CUDA 12.8 ends
    with a signal for loops of two."""
    L: gl.constexpr = gl.SliceLayout(1, lane_layout(HALF, WARPS, 1))
    reference = group_rows(facts[0], here, G, g).load(L)
    if LOOPED and STEPS > 2:
        acc1 = zeros(N1)
        acc2 = zeros(N2)
        part1 = zeros(N1)
        part2 = zeros(N2)
        for step in range(STEPS):
            part1, part2, at = one_step(
                tokens, ring, at, reference, part1, part2, step, True, last, last_use, STEPS, N1, N2, T, TS, PS, BH,
                BESIDE, G, g,
            )  # fmt: skip
            if STEPS > P:
                if (step % P == P - 1) | (step == STEPS - 1):
                    acc1, acc2 = add(acc1, acc2, part1, part2, N2)
                    part1 = zeros(N1)
                    if N2 > 0:
                        part2 = zeros(N2)
        if STEPS > P:
            return acc1, acc2, at
        else:
            return part1, part2, at
    elif STEPS <= P:
        return some_steps(
            tokens, ring, at, reference, 0, last, last_use, STEPS, STEPS, N1, N2, T, TS, PS, BH, BESIDE, G, g
        )  # fmt: skip
    else:
        acc1 = zeros(N1)
        acc2 = zeros(N2)
        for group in range(STEPS // P):
            part1, part2, at = some_steps(
                tokens, ring, at, reference, group * P, last, last_use, P, STEPS, N1, N2, T, TS, PS, BH, BESIDE, G, g
            )  # fmt: skip
            acc1, acc2 = add(acc1, acc2, part1, part2, N2)
        if STEPS % P > 0:
            part1, part2, at = some_steps(
                tokens, ring, at, reference, STEPS - STEPS % P, last, last_use, STEPS % P, STEPS, N1, N2, T, TS, PS,
                BH, BESIDE, G, g,
            )  # fmt: skip
            acc1, acc2 = add(acc1, acc2, part1, part2, N2)
        return acc1, acc2, at


@gluon.jit
def halves(v, N: gl.constexpr):
    """The first and the last N / 2 columns of an accumulator."""
    first, last = gl.split(gl.permute(gl.reshape(v, (HALF, 2, N // 2)), (0, 2, 1)))
    L: gl.constexpr = acc_layout(N // 2, WARPS)
    return (
        gl.convert_layout(first, L, assert_trivial=True),
        gl.convert_layout(last, L, assert_trivial=True),
    )
