"""Biased grouped top-k in one Triton launch: one program a token.

The rule, and what special values give, are those of ``portable.routing``; the ``K`` experts come in ascending
order. Logits and bias are read in their own dtypes and widened in registers, so nothing is converted beforehand.

**What is compared.** ``choice = sigmoid(logit) + bias`` in float32, and only as far as float32 can tell: with
``t`` the ``K``-th largest, an expert above ``t + margin`` is chosen, one below ``t - margin`` is not. ``margin``
(:func:`_margin`) is twice the most that a float32 choice differs from the float64 one. Where exactly ``K``
experts are left, that is the float64 answer. Where more are left (near ties, equal inputs, rows of NaN), those
between the two bounds are ranked by the bits of their float64 choices, the lowest expert first among equals.
Groups are settled in the same way: by float32 where that is certain, else by float64. So the chosen set is that
of float64 arithmetic always, and float64 is computed for the rows that need it alone.

**Weights** are float32 from a sigmoid good to 4e-7, or float64 rounded at the end where a chosen score is below
2^-80 (float32 would underflow) or the logits are float64.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...errors import ContractError

THRESHOLDS = ("sort", "count", "lanes")
"""How the ``K``-th largest choice is found."""

_MAX_EXPERTS = 4096  # a program holds one row in registers

_LOWEST = tl.constexpr(-(1 << 31))
_LOWEST64 = tl.constexpr(-(1 << 63))
_TINY = tl.constexpr(2.0**-80)


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
def _sigmoid(x, PTX: tl.constexpr):
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
def _sigmoid64(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float64)))


@triton.jit
def _numbers(value):
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
def _ordered64(value):
    bits = value.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _margin(choice):
    """Twice the most by which a float32 choice is off: 2.4e-7 in the sigmoid, half an ulp in bias and in sum."""
    return 9.5367431640625e-07 + 2.384185791015625e-07 * tl.abs(choice)


@triton.jit
def _expert(position, SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Position in the padded ``[GROUPS, GROUP]`` row -> expert."""
    if GROUPS > 1 and GROUP != SIZE:
        return position // GROUP * SIZE + position % GROUP
    return position  # with adjacent addresses, so that loads are wide


@triton.jit
def _best_two(choice, SIZE: tl.constexpr):
    """Choices ``[G, S]`` -> the two largest of each group ``[G]``; 0 for the second of one."""
    best = tl.max(choice, axis=1)
    if SIZE == 1:
        return best, best * 0.0
    is_best = choice == best[:, None]
    second = tl.max(tl.where(is_best, -float("inf"), choice), axis=1)
    twice = tl.sum(is_best.to(tl.int32), axis=1) > 1
    return best, tl.where(twice, best, second)


@triton.jit
def _ranks(score, groups):
    """How many of the scores ``[G]`` come before each: the larger, and of equal ones the lower group."""
    group = tl.arange(0, score.shape[0])
    before = score[None, :] > score[:, None]
    before |= (score[None, :] == score[:, None]) & (group[None, :] < group[:, None])
    return tl.sum((before & (group[None, :] < groups)).to(tl.int32), axis=1)


@triton.jit
def _groups_that_stay(choice, groups, KEPT: tl.constexpr, SIZE: tl.constexpr):
    """float32 choices ``[G, S]`` -> whether each group stays ``[G]``, and whether float64 must agree."""
    best, second = _best_two(choice, SIZE)
    score = _numbers(best + second)
    group = tl.arange(0, score.shape[0])
    real = group < groups
    last = tl.max(tl.where((_ranks(score, groups) == KEPT - 1) & real, score, -float("inf")), 0)
    # The two may cancel: what is lost is a part of the larger one.
    largest = tl.max(tl.where(real, tl.maximum(tl.abs(best), tl.abs(second)), 0.0), axis=0)
    margin = 3 * _margin(largest)
    stays = real & ~(score < last - margin)
    return stays, tl.sum(stays.to(tl.int32), axis=0) == KEPT


@triton.jit
def _sorted_threshold(choice, live, K: tl.constexpr, SLOTS: tl.constexpr):
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
def _narrowed(choice, left, right, steps, K: tl.constexpr):
    """Quarters ``[left, right]``, with at least ``K`` choices from ``left`` on and fewer above ``right``, until one
    bound has exactly ``K``."""
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
        steps = tl.where(right - left <= _margin(left), 0, steps - 1)
    return left, right


@triton.jit
def _counted_threshold(choice, K: tl.constexpr):
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
    return _narrowed(choice, left, right, tl.where(n_low >= K, 14, 0), K)


@triton.jit
def _lane_threshold(choice, K: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """The same bounds, counted from the ``K``-th largest of the lanes' maxima on, which few choices exceed.

    A lane is what one thread holds: four neighbours, every ``4 * LANES``.
    """
    WIDE: tl.constexpr = 4 if choice.shape[0] >= 4 * LANES else choice.shape[0] // LANES
    lanes = tl.reshape(choice, [choice.shape[0] // (LANES * WIDE), LANES, WIDE])
    best = _ordered(tl.max(tl.max(lanes, axis=2), axis=0))
    best = tl.topk(best, SLOTS) if LANES > SLOTS else tl.sort(best, descending=True)
    left = _float(tl.max(tl.where(tl.arange(0, SLOTS) == K - 1, best, _LOWEST), axis=0))
    top = _float(tl.max(best, axis=0))
    apart = top - left
    low, middle, high = left, left + apart * 0.0625, left + apart * 0.1875
    n_low, n_middle, n_high = _counts(choice, low, middle, high)
    found = (n_low == K) | (n_middle == K) | (n_high == K)
    right = tl.where(n_middle < K, middle, tl.where(n_high < K, high, top))
    left = tl.where(n_high >= K, high, tl.where(n_middle >= K, middle, low))
    # No step for infinite ones, of which the interval is no number.
    finite = (apart >= 0) & (apart < float("inf"))
    left = tl.where(finite, left, low)
    right = tl.where(found, left, tl.where(finite, right, top))
    return _narrowed(
        choice, left, right, tl.where(finite & (right - left > _margin(left)), 14, 0), K
    )


@triton.jit
def _both(count, total, least, count2, total2, least2):
    return count + count2, total + total2, tl.minimum(least, least2)


@triton.jit
def _totals(picked, score):
    """How many, the sum of their scores, and the least of them."""
    return tl.reduce(
        (picked.to(tl.int32), tl.where(picked, score, 0.0), tl.where(picked, score, 1.0)), 0, _both
    )


@triton.jit
def _best(order, chosen, count):
    """Adds the ``count`` best of ``order`` (int64) to ``chosen``, the lowest position first among equals."""
    position = tl.arange(0, order.shape[0])
    for _ in range(count):
        best = tl.max(order, axis=0)
        first = tl.min(tl.where(order == best, position, order.shape[0]), axis=0)
        chosen = tl.where(position == first, 1, chosen)
        order = tl.where(position == first, _LOWEST64, order)
    return chosen


@triton.jit(do_not_specialize=["tokens", "groups", "padded_id"])
def _biased_topk(
    logits_ptr,  # [M, E]
    bias_ptr,  # [E] or [M, E]
    weights_ptr,  # [M, WIDTH] float32
    ids_ptr,  # [M, WIDTH] int32
    tokens_ptr,  # how many rows are real, if COUNT is a tensor
    tokens,
    experts,
    groups,
    logits_row,
    logits_expert,
    bias_row,
    bias_expert,
    weights_row,
    weights_slot,
    ids_row,
    ids_slot,
    scale,
    padded_id,
    shared_weight,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,  # TOPK and the shared slots
    SIZE: tl.constexpr,  # experts a group
    KEPT: tl.constexpr,  # groups that stay; 0: all
    RENORMALIZE: tl.constexpr,
    COUNT_IS_TENSOR: tl.constexpr,
    PDL: tl.constexpr,
    GROUPS: tl.constexpr,  # powers of two that hold the groups, a group, TOPK and WIDTH
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    THRESHOLD: tl.constexpr,  # how it is found: an index of THRESHOLDS
    LANES: tl.constexpr,
    PTX: tl.constexpr,
):
    if PDL:
        # Starts while the kernel before still runs; nothing of its output is read above this line.
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * weights_row
    ids_ptr += row * ids_row
    if COUNT_IS_TENSOR:
        tokens = tl.load(tokens_ptr)
    column = tl.arange(0, COLUMNS)
    if row >= tokens:
        in_width = column < WIDTH
        tl.store(weights_ptr + column * weights_slot, tl.zeros([COLUMNS], tl.float32), in_width)
        tl.store(ids_ptr + column * ids_slot, tl.zeros([COLUMNS], tl.int32) + padded_id, in_width)
    else:
        POSITIONS: tl.constexpr = GROUPS * GROUP
        position = tl.arange(0, POSITIONS)
        expert = _expert(position, SIZE, GROUPS, GROUP)
        live = expert < experts
        if GROUPS > 1:
            live &= position % GROUP < SIZE
        logits_ptr += row * logits_row
        logits = tl.load(logits_ptr + expert * logits_expert, mask=live, other=0.0)
        bias_ptr += row * bias_row
        bias = tl.load(bias_ptr + expert * bias_expert, mask=live, other=-float("inf"))
        score = _sigmoid(logits, PTX)
        choice = _numbers(score + bias.to(tl.float32))
        certain = True
        stays = live
        if KEPT > 0:
            kept, certain = _groups_that_stay(
                tl.reshape(choice, [GROUPS, GROUP]), groups, KEPT, SIZE
            )
            kept = tl.broadcast_to(kept[:, None], [GROUPS, GROUP])
            stays = live & tl.reshape(kept, [POSITIONS])
        if THRESHOLD == 0:
            low, high = _sorted_threshold(choice, stays, TOPK, SLOTS)
        elif THRESHOLD == 1:
            low, high = _counted_threshold(tl.where(stays, choice, -float("inf")), TOPK)
        else:
            alive = tl.where(stays, choice, -float("inf"))
            low, high = _lane_threshold(alive, TOPK, SLOTS, LANES)
        # An infinite bound makes NaN, of which no comparison is true.
        chosen = (stays & ~(choice < low - _margin(low))).to(tl.int32)
        count, total, least = _totals(chosen != 0, score)
        if count != TOPK or not certain:
            exact = _numbers(_sigmoid64(logits) + bias.to(tl.float64))
            near = chosen != 0
            above = (stays & (choice > high + _margin(high))).to(tl.int32)
            need = TOPK - tl.sum(above, axis=0)
            if KEPT > 0:
                if not certain:
                    grouped = tl.reshape(tl.where(live, exact, -float("inf")), [GROUPS, GROUP])
                    first, second = _best_two(grouped, SIZE)
                    rank = _ranks(_numbers(first + second), groups)
                    group = tl.arange(0, GROUPS)
                    kept = (rank < KEPT) & (group < groups)
                    kept = tl.broadcast_to(kept[:, None], [GROUPS, GROUP])
                    near = live & tl.reshape(kept, [POSITIONS])
                    above = tl.zeros([POSITIONS], tl.int32)
                    need = TOPK
            order = tl.where(near & (above == 0), _ordered64(exact), _LOWEST64)
            chosen = _best(order, above, need)
            count, total, least = _totals(chosen != 0, score)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        picked = chosen != 0
        weight = score
        if RENORMALIZE:
            weight *= tl.where(total > 0, tl.math.div_rn(scale, total), 0.0)
        else:
            weight *= scale
        if least < _TINY or logits_ptr.dtype.element_ty == tl.float64:
            wide = _sigmoid64(logits)
            if RENORMALIZE:
                sum64 = tl.sum(tl.where(picked, wide, 0.0), axis=0)
                # First the quotient, which is at most 1: scale / total may be infinite.
                wide = tl.where(sum64 > 0, wide / sum64, wide * 0.0)
            weight = (wide * scale).to(tl.float32)
        slot = tl.cumsum(chosen, axis=0) - 1
        tl.store(weights_ptr + slot * weights_slot, weight, picked)
        tl.store(ids_ptr + slot * ids_slot, expert, picked)
        if WIDTH > TOPK:
            shared = (column >= TOPK) & (column < WIDTH)
            value = tl.zeros([COLUMNS], tl.float32) + shared_weight
            tl.store(weights_ptr + column * weights_slot, value, shared)
            tl.store(ids_ptr + column * ids_slot, experts + column - TOPK, shared)


def biased_topk_triton(
    logits: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
    num_tokens: torch.Tensor | int | None,
    padded_id: int,
    shared_weight: float,
    num_warps: int | None = None,
    pdl: bool | None = None,
    threshold: str | None = None,
) -> None:
    """:func:`portable.routing.biased_topk` into ``out``; the arguments are checked already.

    ``num_warps``, ``pdl`` (programmatic dependent launch, NVIDIA from sm_90 on) and ``threshold`` (one of
    :data:`THRESHOLDS`) are for measuring; None takes what was measured best.
    """
    tokens, experts = logits.shape
    if experts > _MAX_EXPERTS:
        raise ContractError(
            f"logits has {experts} experts",
            allowed=f"up to {_MAX_EXPERTS} in the Triton kernel",
            fix="pass backend='torch'",
        )
    weights, ids = out
    size = experts // num_expert_group
    groups_block = triton.next_power_of_2(num_expert_group)
    slots_block = max(2, triton.next_power_of_2(topk))
    group_block = triton.next_power_of_2(size)
    group_block = max(group_block, slots_block // groups_block, 16 // groups_block)
    counted = isinstance(num_tokens, torch.Tensor)
    # Measured on an H200 (docs/performance.md).
    small = groups_block * group_block <= 512
    if threshold is None:
        threshold = "count" if tokens > 512 or not small else "sort"
    if experts >= 1024:
        threshold = "sort"  # a count has ten bits
    if num_warps is None:
        num_warps = 1 if small and threshold == "count" else 4
    if pdl is None:
        pdl = _has_pdl(logits.device)
    with torch.cuda.device_of(logits):
        _biased_topk[(tokens,)](
            logits,
            bias,
            weights,
            ids,
            num_tokens if counted else ids,
            tokens if counted or num_tokens is None else num_tokens,
            experts,
            num_expert_group,
            logits.stride(0),
            logits.stride(1),
            bias.stride(0) if bias.dim() == 2 else 0,
            bias.stride(-1),
            weights.stride(0),
            weights.stride(1),
            ids.stride(0),
            ids.stride(1),
            float(routed_scaling_factor),
            padded_id,
            float(shared_weight),
            TOPK=topk,
            WIDTH=ids.shape[1],
            SIZE=size,
            KEPT=topk_group if topk_group < num_expert_group else 0,
            RENORMALIZE=renormalize,
            COUNT_IS_TENSOR=counted,
            PDL=pdl,
            GROUPS=groups_block,
            GROUP=group_block,
            SLOTS=slots_block,
            COLUMNS=triton.next_power_of_2(ids.shape[1]),
            THRESHOLD=THRESHOLDS.index(threshold),
            LANES=max(min(32 * num_warps, groups_block * group_block), slots_block),
            PTX=_runs_ptx(logits.device),
            num_warps=num_warps,
            **({"launch_pdl": True} if pdl else {}),
        )


def _runs_ptx(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not _interpreted()


def _interpreted() -> bool:
    return not isinstance(_biased_topk, triton.runtime.JITFunction)


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
