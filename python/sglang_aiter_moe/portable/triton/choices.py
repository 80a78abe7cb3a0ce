"""The steps of ``biased_topk``: scores, margins, which groups stay, thresholds, and the choice in float64."""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(1 << 31))
LOWEST64 = tl.constexpr(-(1 << 63))
TINY = tl.constexpr(2.0**-80)


@triton.jit
def _exp2(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _reciprocal(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    """float32, relative error below 4e-7 from -87 on (NaN stays): the product with log2(e) keeps its rounding error.

    ``PTX``: without the steps for infinite and subnormal numbers, which the bounds on x rule out.
    """
    x = tl.minimum(x.to(tl.float32), 87.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x, -87.0, propagate_nan=tl.PropagateNan.ALL)
    y = x * -1.4426950408889634
    rest = tl.fma(x, -1.4426950216293335, -y) - x * 1.925963033500865e-08
    e = _exp2(y, PTX)
    return _reciprocal(1.0 + tl.fma(e, rest * 0.6931471805599453, e), PTX)


@triton.jit
def sigmoid64(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float64)))


@triton.jit
def numbers(value):
    """NaN -> -Inf."""
    return tl.maximum(value, -float("inf"))


@triton.jit
def _ordered(value):
    """float32 without NaN -> int32 in the same order; its own inverse on the bits."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ordered64(value):
    bits = value.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def margin_of(choice):
    """Twice the most by which a float32 choice is off: 2.4e-7 in the sigmoid, half an ulp in bias and in sum."""
    return 9.5367431640625e-07 + 2.384185791015625e-07 * tl.abs(choice)


@triton.jit
def expert_at(position, SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Position in the padded ``[GROUPS, GROUP]`` row -> expert."""
    if GROUPS > 1 and GROUP != SIZE:
        return position // GROUP * SIZE + position % GROUP
    return position  # with adjacent addresses, so that loads are wide


@triton.jit
def best_two(choice, SIZE: tl.constexpr):
    """Choices ``[G, S]`` -> the two largest of each group ``[G]``; 0 for the second of one."""
    best = tl.max(choice, axis=1)
    if SIZE == 1:
        return best, best * 0.0
    is_best = choice == best[:, None]
    second = tl.max(tl.where(is_best, -float("inf"), choice), axis=1)
    twice = tl.sum(is_best.to(tl.int32), axis=1) > 1
    return best, tl.where(twice, best, second)


@triton.jit
def ranks(score, groups):
    """How many of the scores ``[G]`` come before each: the larger, and of equal ones the lower group."""
    group = tl.arange(0, score.shape[0])
    before = score[None, :] > score[:, None]
    before |= (score[None, :] == score[:, None]) & (group[None, :] < group[:, None])
    return tl.sum((before & (group[None, :] < groups)).to(tl.int32), axis=1)


@triton.jit
def groups_that_stay(choice, groups, KEPT: tl.constexpr, SIZE: tl.constexpr):
    """float32 choices ``[G, S]`` -> whether each group stays ``[G]``, and whether float64 must agree."""
    best, second = best_two(choice, SIZE)
    score = numbers(best + second)
    group = tl.arange(0, score.shape[0])
    real = group < groups
    last = tl.max(tl.where((ranks(score, groups) == KEPT - 1) & real, score, -float("inf")), 0)
    # The two may cancel: what is lost is a part of the larger one.
    largest = tl.max(tl.where(real, tl.maximum(tl.abs(best), tl.abs(second)), 0.0), axis=0)
    margin = 3 * margin_of(largest)
    stays = real & ~(score < last - margin)
    return stays, tl.sum(stays.to(tl.int32), axis=0) == KEPT


@triton.jit
def sorted_threshold(choice, live, K: tl.constexpr, SLOTS: tl.constexpr):
    """The ``K``-th largest choice, twice: by sorting."""
    ordered = tl.where(live, _ordered(choice), _LOWEST)
    best = (
        tl.topk(ordered, SLOTS) if ordered.shape[0] > SLOTS else tl.sort(ordered, descending=True)
    )
    if K == SLOTS:
        last = _float(tl.min(best, axis=0))
    else:
        last = _float(tl.max(tl.where(tl.arange(0, SLOTS) == K - 1, best, _LOWEST), axis=0))
    return last, last


@triton.jit
def _counts(choice, low, middle, high):
    """How many choices reach each of three bounds (fewer than 1024 experts)."""
    count = (choice >= low).to(tl.int32) + (choice >= middle).to(tl.int32) * 2048
    count += (choice >= high).to(tl.int32) * 4194304
    count = tl.sum(count, axis=0)
    return count & 2047, (count >> 11) & 2047, (count >> 22) & 1023


@triton.jit
def counted_threshold(choice, K: tl.constexpr):
    """``low <= high`` with at least ``K`` choices from ``low`` on, fewer than ``K`` above ``high``; equal if possible.

    By counting: three bounds a step, each step a quarter of the interval of the one before.
    """
    top = tl.max(choice, axis=0)
    low, middle, high = top - 64.0, top - 2.0, top - 0.25
    n_low, n_middle, n_high = _counts(choice, low, middle, high)
    left = tl.where(n_high >= K, high, tl.where(n_middle >= K, middle, low))
    right = tl.where(n_high >= K, top, tl.where(n_middle >= K, high, middle))
    right = tl.where(n_low >= K, right, low)
    left = tl.where(n_low >= K, left, -float("inf"))
    steps = tl.where(n_low >= K, 14, 0)
    while steps > 0:
        quarter = (right - left) * 0.25
        low, middle, high = left + quarter, left + 2 * quarter, left + 3 * quarter
        n_low, n_middle, n_high = _counts(choice, low, middle, high)
        right = tl.where(
            n_low < K, low, tl.where(n_middle < K, middle, tl.where(n_high < K, high, right))
        )
        left = tl.where(
            n_high >= K, high, tl.where(n_middle >= K, middle, tl.where(n_low >= K, low, left))
        )
        found = (n_low == K) | (n_middle == K) | (n_high == K)
        right = tl.where(found, left, right)
        # Closer than the margin, float64 has to decide anyway.
        steps = tl.where(right - left <= margin_of(left), 0, steps - 1)
    return left, right


@triton.jit
def _both(count, total, least, count2, total2, least2):
    return count + count2, total + total2, tl.minimum(least, least2)


@triton.jit
def totals(picked, score):
    """How many, the sum of their scores, and the least of them."""
    return tl.reduce(
        (picked.to(tl.int32), tl.where(picked, score, 0.0), tl.where(picked, score, 1.0)), 0, _both
    )


@triton.jit
def mark_best(order, chosen, count):
    """Adds the ``count`` best of ``order`` (int64) to ``chosen``, the lowest position first among equals."""
    position = tl.arange(0, order.shape[0])
    for _ in range(count):
        best = tl.max(order, axis=0)
        first = tl.min(tl.where(order == best, position, order.shape[0]), axis=0)
        chosen = tl.where(position == first, 1, chosen)
        order = tl.where(position == first, LOWEST64, order)
    return chosen
