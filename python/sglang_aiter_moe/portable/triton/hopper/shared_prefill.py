"""The product of the shared prefill form (A8W4, A4W4, many tokens): both operands of fp8 ``wgmma`` from shared memory
(Gluon).

Five roles in a program, one program an SM, none of which waits for the others but through rings:

* *weights*, one warp: bulk copies of words and scales, as AITER stored them, into a ring;
* *tokens*: ``cp.async`` of 128 columns of a block's rows into a ring;
* *facts*, one warp: reads ahead what a tile needs once (rows' largest scales, pairs, tokens' scales);
* *decoders*: words of a slot become e5m2 (``mx_prefill``: relative to their row's largest scale), in the layout that
  ``wgmma`` reads, once for all tokens of the block;
* *consumers*, eight warps: nothing but products, sums and what follows a tile. They are here.

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

from sglang_aiter_moe.portable.triton.hopper.fp8 import acc_layout, barrier
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_rings import (
    ROWS,
    advance,
    most1,
    most2,
    narrow,
)

CONSUMERS = gl.constexpr(8)
"""Warps."""


@gluon.jit
def release(operand_bars, token_bars, slot, token_slot, last_use):
    """Both slots have been read, by all."""
    barrier()
    mbarrier.arrive(operand_bars[1].index(slot))
    mbarrier.arrive(token_bars[1].index(token_slot), pred=last_use)


@gluon.jit
def some_steps(
    tokens, operand_ring, at, last_use, P: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, T: gl.constexpr,
    TS: gl.constexpr, AS: gl.constexpr, SAME: gl.constexpr,
):  # fmt: skip
    """``[128, N1]`` and ``[128, N2]``: P steps in one accumulator. SAME: tokens are where the operands are."""
    tokens1, tokens2, token_bars = tokens
    operands, operand_bars = operand_ring
    slot, phase, ts, tp = at
    W: gl.constexpr = CONSUMERS
    part1 = warpgroup_mma_init(gl.zeros([ROWS, N1], gl.float32, layout=acc_layout(N1, W)))
    part2 = 0
    if N2 > 0:
        part2 = warpgroup_mma_init(gl.zeros([ROWS, N2], gl.float32, layout=acc_layout(N2, W)))
    if SAME:
        ts = slot
        tp = phase
    before = slot + 0
    token_before = ts + 0
    for p in gl.static_range(P):
        mbarrier.wait(token_bars[0].index(ts), tp)
        mbarrier.wait(operand_bars[0].index(slot), phase)
        fence_async_shared()
        a = operands.index(slot)
        x1 = narrow(tokens1.index(ts), N1, most1(T)).permute((1, 0))
        part1 = warpgroup_mma(a, x1, part1, use_acc=p > 0, is_async=True)
        if N2 > 0:
            x2 = narrow(tokens2.index(ts), N2, most2(T)).permute((1, 0))
            part2 = warpgroup_mma(a, x2, part2, use_acc=p > 0, is_async=True)
        if p > 0:
            if N2 > 0:
                part1, part2 = warpgroup_mma_wait(2, deps=[part1, part2])
                part1, part2 = warpgroup_mma_init(part1), warpgroup_mma_init(part2)
            else:
                part1 = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[part1]))
            release(operand_bars, token_bars, before, token_before, last_use)
        before = slot + 0
        token_before = ts + 0
        slot, phase = advance(slot, phase, AS)
        if SAME:
            ts = slot
            tp = phase
        else:
            ts, tp = advance(ts, tp, TS)
    if N2 > 0:
        part1, part2 = warpgroup_mma_wait(0, deps=[part1, part2])
    else:
        part1 = warpgroup_mma_wait(0, deps=[part1])
    release(operand_bars, token_bars, before, token_before, last_use)
    if SAME:
        return part1, part2, (slot, phase, 0, 0)
    else:
        return part1, part2, (slot, phase, ts, tp)


@gluon.jit
def add(acc1, acc2, part1, part2, N2: gl.constexpr):
    acc1 += part1
    if N2 > 0:
        acc2 += part2
    return acc1, acc2


@gluon.jit
def multiply_tile(
    tokens, operand_ring, at, last_use, STEPS: gl.constexpr, P: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr,
    T: gl.constexpr, TS: gl.constexpr, AS: gl.constexpr, SAME: gl.constexpr,
):  # fmt: skip
    """All steps of a row tile, and where the rings stand then. ``at``: slot and parity of operands, of tokens."""
    W: gl.constexpr = CONSUMERS
    if STEPS <= P:
        return some_steps(tokens, operand_ring, at, last_use, STEPS, N1, N2, T, TS, AS, SAME)
    else:
        acc1 = gl.zeros([ROWS, N1], gl.float32, layout=acc_layout(N1, W))
        acc2 = 0
        if N2 > 0:
            acc2 = gl.zeros([ROWS, N2], gl.float32, layout=acc_layout(N2, W))
        for _g in range(STEPS // P):
            part1, part2, at = some_steps(
                tokens, operand_ring, at, last_use, P, N1, N2, T, TS, AS, SAME
            )
            acc1, acc2 = add(acc1, acc2, part1, part2, N2)
        if STEPS % P > 0:
            part1, part2, at = some_steps(
                tokens, operand_ring, at, last_use, STEPS % P, N1, N2, T, TS, AS, SAME
            )
            acc1, acc2 = add(acc1, acc2, part1, part2, N2)
        return acc1, acc2, at


@gluon.jit
def halves(v, R: gl.constexpr, N: gl.constexpr):
    """The first and the last N / 2 columns of an accumulator."""
    first, last = gl.split(gl.permute(gl.reshape(v, (R, 2, N // 2)), (0, 2, 1)))
    L: gl.constexpr = acc_layout(N // 2, CONSUMERS)
    return (
        gl.convert_layout(first, L, assert_trivial=True),
        gl.convert_layout(last, L, assert_trivial=True),
    )
