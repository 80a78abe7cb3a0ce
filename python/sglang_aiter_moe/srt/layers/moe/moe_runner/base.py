"""The runner's configuration, by SGLang's names (``sglang.srt.layers.moe.moe_runner.base``).

Inside SGLang its own ``MoeRunnerConfig`` takes this place: the runner only reads attributes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class MoeRunnerConfig:
    """What a layer's model says about its experts.

    Attributes:
        num_experts: routed experts over all ranks, ``num_local_experts`` of them here.
        top_k: experts per token.
        activation: SGLang's name: ``silu``, ``gelu``, ``swiglu`` or ``situ``.
        apply_router_weight_on_input: the routing weight multiplies the input (top-1 only).
        no_combine: return ``[M, K, H]`` instead of the sum over ``K``.
        gemm1_alpha: SwiGLU-OAI's alpha; for ``situ``, beta.
        gemm1_beta: SwiGLU-OAI's addend of up.
        gemm1_clamp_limit: SwiGLU-OAI's limit; for ``situ``, linear_beta.
        swiglu_limit: clamp of plain SwiGLU (DeepSeek-V4).
        gate_up_interleaved: checkpoint rows are g0, u0, g1, u1, ... instead of all gate, all up.
    """

    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
