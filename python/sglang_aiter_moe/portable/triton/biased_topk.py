"""Biased grouped top-k in one Triton launch: one program a token.

The rule, and what special values give, are those of ``portable.routing``; the ``K`` experts come in ascending
order. Logits and bias are read in their own dtypes and widened in registers, so nothing is converted beforehand.

**What is compared.** ``choice = sigmoid(logit) + bias`` in float32, and only as far as float32 can tell: with
``t`` the ``K``-th largest, an expert above ``t + margin`` is chosen, one below ``t - margin`` is not. ``margin``
(``choices.margin_of``) is twice the most that a float32 choice differs from the float64 one. Where exactly ``K``
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
from .choices import (
    LOWEST64,
    TINY,
    best_two,
    counted_threshold,
    expert_at,
    groups_that_stay,
    margin_of,
    mark_best,
    numbers,
    ordered64,
    ranks,
    sigmoid,
    sigmoid64,
    sorted_threshold,
    totals,
)

THRESHOLDS = ("sort", "count")
"""How the ``K``-th largest choice is found."""

_MAX_EXPERTS = 4096  # a program holds one row in registers


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
    COUNTING: tl.constexpr,  # how the threshold is found
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
        expert = expert_at(position, SIZE, GROUPS, GROUP)
        live = expert < experts
        if GROUPS > 1:
            live &= position % GROUP < SIZE
        logits_ptr += row * logits_row
        logits = tl.load(logits_ptr + expert * logits_expert, mask=live, other=0.0)
        bias_ptr += row * bias_row
        bias = tl.load(bias_ptr + expert * bias_expert, mask=live, other=-float("inf"))
        score = sigmoid(logits, PTX)
        choice = numbers(score + bias.to(tl.float32))
        certain = True
        stays = live
        if KEPT > 0:
            kept, certain = groups_that_stay(
                tl.reshape(choice, [GROUPS, GROUP]), groups, KEPT, SIZE
            )
            kept = tl.broadcast_to(kept[:, None], [GROUPS, GROUP])
            stays = live & tl.reshape(kept, [POSITIONS])
        if COUNTING:
            low, high = counted_threshold(tl.where(stays, choice, -float("inf")), TOPK)
        else:
            low, high = sorted_threshold(choice, stays, TOPK, SLOTS)
        # An infinite bound makes NaN, of which no comparison is true.
        chosen = (stays & ~(choice < low - margin_of(low))).to(tl.int32)
        count, total, least = totals(chosen != 0, score)
        if count != TOPK or not certain:
            exact = numbers(sigmoid64(logits) + bias.to(tl.float64))
            near = chosen != 0
            above = (stays & (choice > high + margin_of(high))).to(tl.int32)
            need = TOPK - tl.sum(above, axis=0)
            if KEPT > 0:
                if not certain:
                    grouped = tl.reshape(tl.where(live, exact, -float("inf")), [GROUPS, GROUP])
                    first, second = best_two(grouped, SIZE)
                    rank = ranks(numbers(first + second), groups)
                    group = tl.arange(0, GROUPS)
                    kept = (rank < KEPT) & (group < groups)
                    kept = tl.broadcast_to(kept[:, None], [GROUPS, GROUP])
                    near = live & tl.reshape(kept, [POSITIONS])
                    above = tl.zeros([POSITIONS], tl.int32)
                    need = TOPK
            order = tl.where(near & (above == 0), ordered64(exact), LOWEST64)
            chosen = mark_best(order, above, need)
            count, total, least = totals(chosen != 0, score)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        picked = chosen != 0
        weight = score
        if RENORMALIZE:
            weight *= tl.where(total > 0, tl.math.div_rn(scale, total), 0.0)
        else:
            weight *= scale
        if least < TINY or logits_ptr.dtype.element_ty == tl.float64:
            wide = sigmoid64(logits)
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
            COUNTING=threshold == "count",
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
