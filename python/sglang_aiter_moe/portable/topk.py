"""``fused_topk``: softmax routing without groups (aiter.fused_moe.fused_topk)."""

from __future__ import annotations

import torch


def fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    topk_ids: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the experts, then the ``topk`` largest, larger first, of equal ones the lower id first.

    Args:
        hidden_states: ``[M, H]``; only M is looked at.
        gating_output: ``[M, E]`` router logits.
        renormalize: divide the chosen weights by their sum.
        topk_ids, topk_weights: int32 and fp32 ``[M, topk]`` to write to, else new ones.

    Returns:
        topk_weights fp32 and topk_ids int32, ``[M, topk]``.
    """
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise AssertionError("Number of tokens mismatch")
    scores = torch.softmax(gating_output.to(torch.float32), dim=-1)
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    values, ids = values[:, :topk], ids[:, :topk].to(torch.int32)
    if renormalize:
        values = values / values.sum(-1, keepdim=True)
    if topk_weights is None:
        topk_weights = torch.empty_like(values)
    if topk_ids is None:
        topk_ids = torch.empty_like(ids)
    topk_weights[: len(values)].copy_(values)
    topk_ids[: len(ids)].copy_(ids)
    return topk_weights[: len(values)], topk_ids[: len(ids)]
