"""Layers, targets and variable names that the tests of ``contract/`` share."""

from __future__ import annotations

from typing import Any

from sglang_aiter_moe.contract import Capabilities, MoePlan, MoeSpec, Target, plan_moe, shard

A8W4, A4W4 = "AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4"
ITLV = "SGLANG_USE_AITER_MOE_GU_ITLV"
BOUND = "AITER_BF16_FP8_MOE_BOUND"
FORCE_A8W4 = "AITER_FORCE_A8W4"
KERNEL = "SGLANG_AITER_MOE_A16W4_KERNEL"

K3 = MoeSpec("situv2", 896, 16, 3584, 384, beta=4.0, linear_beta=25.0, name="k3")
QWEN = MoeSpec("silu", 512, 10, 4096, 256, name="qwen3.5")
MINIMAX = MoeSpec("swiglu", 129, 5, 6144, 384, name="minimax-m3")
DEEPSEEK = MoeSpec("silu", 384, 6, 7168, 384, swiglu_limit=10.0, name="deepseek-v4")
#: A shape that no tuned table has.
PLAIN: dict[str, Any] = {
    "num_experts": 64,
    "topk": 8,
    "hidden_size": 2048,
    "intermediate_size": 512,
}

# (w13, w13 scale, w2, w2 scale)
SEPARATED = ("separated", "separated", "separated", "separated")
INTERLEAVED = ("gu_interleaved", "a16w4_gate_up", "separated", "a16w4")
GFX1250 = ("gu_interleaved_gfx1250", "n32k4_gate_up", "separated", "n32k4")


def gptoss(tp: int) -> MoeSpec:
    """gpt-oss-120b on a full rank of this tensor parallelism."""
    return MoeSpec(
        "swiglu",
        128,
        4,
        2880,
        shard(2880, tp),
        gate_up_interleaved=True,
        has_bias=True,
        swiglu_limit=7.0,
        name=f"gpt-oss tp{tp}",
    )


def situv2(num_experts: int, topk: int, hidden: int, intermediate: int, **options: Any) -> MoeSpec:
    """A SiTUv2 layer with K3's constants."""
    return MoeSpec(
        "situv2", num_experts, topk, hidden, intermediate, beta=4.0, linear_beta=25.0, **options
    )


def plan(
    spec: MoeSpec,
    env: dict[str, str] | None = None,
    arch: str = "gfx950",
    aiter: str | Capabilities = "0.1.20",
    **target: Any,
) -> MoePlan:
    """``plan_moe`` for a release, or for given capabilities."""
    capabilities = Capabilities.for_release(aiter) if isinstance(aiter, str) else aiter
    return plan_moe(spec, Target(arch, capabilities, env or {}, **target))


def layouts(made: MoePlan) -> tuple[str, str, str, str]:
    """The plan's four layout names."""
    return made.w13_layout, made.w13_scale_layout, made.w2_layout, made.w2_scale_layout
