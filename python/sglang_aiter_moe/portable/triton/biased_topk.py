"""Biased grouped top-k in one Triton launch: one program a token.

The rule, and what special values give, are those of ``portable.routing``. Logits and bias are read
in their own dtypes and widened in registers, so nothing is converted beforehand and nothing derived
from the bias is kept: a captured graph reads the parameter at every replay.

A choice (float64) and its expert become one int64 *key* that orders as the rule asks: the float64
bits, mapped to the order of integers, with the lowest bits replaced by the inverted position of the
expert (10 bits for 513 to 1024 experts). Keys are unique, so a plain integer top-k breaks ties by
the lowest expert; choices that agree to 42 significant bits count as ties.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...errors import ContractError

_MAX_EXPERTS = 4096  # a program holds one row in registers

_LOWEST = tl.constexpr(-(1 << 63))
_MAGNITUDE = tl.constexpr((1 << 63) - 1)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float64)))


@triton.jit
def _key(value, position, POSITIONS: tl.constexpr):
    """float64 values, NaN excluded, and their positions -> int64 in the same order, all distinct."""
    bits = value.to(tl.int64, bitcast=True)
    bits ^= (bits >> 63) & _MAGNITUDE
    return (bits & -POSITIONS) | (position ^ (POSITIONS - 1)).to(tl.int64)


@triton.jit
def _expert(position, SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Position in the padded ``[GROUPS, GROUP]`` row -> expert."""
    if GROUPS > 1 and GROUP != SIZE:
        return position // GROUP * SIZE + position % GROUP
    return position  # with adjacent addresses, so that loads are wide


@triton.jit
def _numbers(value):
    """NaN -> -Inf."""
    return tl.where(value == value, value, -float("inf"))


@triton.jit
def _groups_that_stay(choice, keys, groups, KEPT: tl.constexpr, SIZE: tl.constexpr):
    """Choices and keys ``[G, S]`` of ``groups`` (padded to G) -> ``[G]`` bool."""
    GROUPS: tl.constexpr = choice.shape[0]
    score = tl.max(choice, axis=1)
    if SIZE > 1:
        best = tl.max(keys, axis=1)
        score += tl.max(tl.where(keys == best[:, None], -float("inf"), choice), axis=1)
    group = tl.arange(0, GROUPS)
    rank = _key(_numbers(score), group, GROUPS)
    rank = tl.where(group < groups, rank, _LOWEST)
    ranked = tl.sort(rank, descending=True)
    return rank >= tl.max(tl.where(group == KEPT - 1, ranked, _LOWEST), axis=0)


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
    GROUPS: tl.constexpr,  # powers of two that hold the groups, a group, and WIDTH
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    if PDL:
        # Starts while the kernel before still runs; nothing of its output is read above this line.
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    in_width = slot < WIDTH
    weights_ptr += row * weights_row + slot * weights_slot
    ids_ptr += row * ids_row + slot * ids_slot
    if COUNT_IS_TENSOR:
        tokens = tl.load(tokens_ptr)
    if row >= tokens:
        tl.store(weights_ptr, tl.zeros([SLOTS], tl.float32), mask=in_width)
        tl.store(ids_ptr, tl.zeros([SLOTS], tl.int32) + padded_id, mask=in_width)
    else:
        POSITIONS: tl.constexpr = GROUPS * GROUP
        position = tl.arange(0, POSITIONS)
        expert = _expert(position, SIZE, GROUPS, GROUP)
        real = expert < experts
        if GROUPS > 1:
            real &= position % GROUP < SIZE
        logits_ptr += row * logits_row
        logits = tl.load(logits_ptr + expert * logits_expert, mask=real, other=0.0)
        bias = tl.load(bias_ptr + row * bias_row + expert * bias_expert, mask=real, other=0.0)
        scores = _sigmoid(logits)
        choice = _numbers(scores + bias.to(tl.float64))
        # Below every key of a choice; the groups that stay hold at least TOPK experts.
        keys = tl.where(real, _key(choice, position, POSITIONS), _LOWEST)
        if KEPT > 0:
            stay = _groups_that_stay(
                tl.reshape(tl.where(real, choice, -float("inf")), [GROUPS, GROUP]),
                tl.reshape(keys, [GROUPS, GROUP]),
                groups,
                KEPT,
                SIZE,
            )
            stay = tl.broadcast_to(stay[:, None], [GROUPS, GROUP])
            keys = tl.where(tl.reshape(stay, [POSITIONS]), keys, _LOWEST)
        best = tl.topk(keys, SLOTS) if SLOTS < POSITIONS else tl.sort(keys, descending=True)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        chosen = (best & (POSITIONS - 1)).to(tl.int32) ^ (POSITIONS - 1)
        score = tl.gather(scores, chosen, axis=0)
        routed = slot < TOPK
        chosen = _expert(chosen, SIZE, GROUPS, GROUP)
        if RENORMALIZE:
            total = tl.sum(tl.where(routed, score, 0.0), axis=0)
            score *= tl.where(total > 0, scale / total, 0.0)
        else:
            score *= scale
        weight = score.to(tl.float32)
        if WIDTH > TOPK:
            weight = tl.where(routed, weight, shared_weight)
            chosen = tl.where(routed, chosen, experts + slot - TOPK)
        tl.store(weights_ptr, weight, mask=in_width)
        tl.store(ids_ptr, chosen, mask=in_width)


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
) -> None:
    """:func:`portable.routing.biased_topk` into ``out``; the arguments are checked already.

    ``num_warps`` and ``pdl`` (programmatic dependent launch, NVIDIA from sm_90 on) are for measuring;
    None takes what was measured best.
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
    slots_block = max(2, triton.next_power_of_2(ids.shape[1]))
    group_block = triton.next_power_of_2(size)
    group_block = max(group_block, slots_block // groups_block, 16 // groups_block)
    counted = isinstance(num_tokens, torch.Tensor)
    if num_warps is None:
        num_warps = _num_warps(groups_block * group_block, tokens)
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
            num_warps=num_warps,
            **({"launch_pdl": True} if pdl else {}),
        )


def _num_warps(positions: int, tokens: int) -> int:
    # Measured on an H200 (docs/performance.md): many warps a row while rows are few and its latency counts.
    few = tokens <= 512
    return max(1, min(8, positions // 64) if few else min(4, positions // 256))


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
