"""Small layers for tests of ``portable``: raw experts, their packed form, a routing, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.numerics.oracle import RawExperts

FP4 = torch.float4_e2m1fn_x2


def random_experts(
    experts: int, hidden: int, inter: int, seed: int = 0, bias: bool = False
) -> RawExperts:
    """Raw experts whose stage-1 products are of order 1 to 10."""
    g = torch.Generator().manual_seed(seed)

    def bytes_(low, high, *shape):
        return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)

    return RawExperts(
        bytes_(0, 256, experts, 2 * inter, hidden // 2),
        bytes_(120, 123, experts, 2 * inter, hidden // 32),
        bytes_(0, 256, experts, hidden, inter // 2),
        bytes_(120, 123, experts, hidden, inter // 32),
        torch.randn(experts, 2 * inter, generator=g) if bias else None,
        torch.randn(experts, hidden, generator=g) if bias else None,
    )


@dataclass
class Routed:
    """Inputs of one layer: ``x`` bf16 ``[M, H]``, ``ids`` int32 and ``weights`` fp32 ``[M, K]``."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def random_routing(tokens: int, experts: int, topk: int, hidden: int, seed: int = 0) -> Routed:
    """Distinct experts per token, weights that sum to 1."""
    g = torch.Generator().manual_seed(1000 + seed)
    scores = torch.rand(tokens, experts, generator=g)
    weights = torch.rand(tokens, topk, generator=g) + 0.1
    return Routed(
        torch.randn(tokens, hidden, generator=g).to(torch.bfloat16),
        scores.topk(topk, dim=-1).indices.to(torch.int32),
        weights / weights.sum(-1, keepdim=True),
    )


def pack(raw: RawExperts, form: str = "separated") -> dict[str, torch.Tensor]:
    """``w1, w2, w1_scale, w2_scale`` as a caller of AITER makes them, with the functions of the installation.

    Args:
        form: "separated", "gu_interleaved" (16-row tiles), "gfx1250" (single rows, n32k4 scales) or
            "raw" (weights unshuffled, scales shuffled).
    """
    experts, rows, _ = raw.w13.shape
    w13, w2 = raw.w13.view(FP4), raw.w2.view(FP4)
    s13 = raw.w13_scale.reshape(experts * rows, -1)
    s2 = raw.w2_scale.reshape(-1, raw.w2_scale.shape[-1])
    if form == "gfx1250":
        both = {"is_guinterleave": True, "gate_up": True}
        return {
            "w1": portable.moe_shuffle_weight(w13, experts, **both),
            "w2": portable.moe_shuffle_weight(w2, experts),
            "w1_scale": portable.moe_shuffle_scale(s13, experts, **both),
            "w2_scale": portable.moe_shuffle_scale(s2, experts),
        }
    gate_up = form == "gu_interleaved"
    shuffled = form != "raw"
    return {
        "w1": portable.shuffle_weight_a16w4(w13, 16, gate_up) if shuffled else w13,
        "w2": portable.shuffle_weight_a16w4(w2, 16, False) if shuffled else w2,
        "w1_scale": portable.shuffle_scale_a16w4(s13, experts, gate_up),
        "w2_scale": portable.shuffle_scale_a16w4(s2, experts, False),
    }


def fused_moe(routed: Routed, packed: dict[str, torch.Tensor], activation: str, **kwargs: Any):
    """Calls the ``fused_moe`` of the installation in force; ``activation`` by its AITER name ("Situv2")."""
    return portable.fused_moe(
        routed.x,
        topk_weight=routed.weights,
        topk_ids=routed.ids,
        activation=getattr(portable.ActivationType, activation),
        quant_type=portable.QuantType.per_1x32,
        **packed,
        **kwargs,
    )
