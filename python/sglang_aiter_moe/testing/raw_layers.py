"""Small MXFP4 layers with Gaussian weights, as a loader leaves them, and tokens for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.numerics import RawExperts, quantize_mxfp4, routed_moe


def k3_like(**changes: Any) -> MoeSpec:
    """A small SiTUv2 layer with K3's constants; fields of :class:`MoeSpec` in ``changes``."""
    sizes = {"num_experts": 4, "topk": 2, "hidden_size": 256, "intermediate_size": 128}
    return MoeSpec("situv2", beta=4.0, linear_beta=25.0, **{**sizes, **changes})


def quantized(shape: tuple[int, ...], generator: torch.Generator, std: float = 0.1):
    """Random MXFP4 ``(packed uint8 [..., K/2], E8M0 uint8 [..., K/32])`` of Gaussian values."""
    return quantize_mxfp4(torch.randn(shape, generator=generator) * std)


@dataclass
class RawLayer:
    """One layer's checkpoint tensors and a batch of tokens.

    Attributes:
        spec: what the layer is.
        experts: the raw tensors, for the oracle.
        hidden_states: bf16 ``[M, H]``; topk_ids: int32 ``[M, K]``; topk_weights: float32 ``[M, K]``.
    """

    spec: MoeSpec
    experts: RawExperts
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def module(self) -> torch.nn.Module:
        """A module with copies of the tensors under SGLang's parameter names."""
        layer = torch.nn.Module()
        names = {
            "w13_weight": self.experts.w13,
            "w13_weight_scale": self.experts.w13_scale,
            "w2_weight": self.experts.w2,
            "w2_weight_scale": self.experts.w2_scale,
            "w13_weight_bias": self.experts.b13,
            "w2_weight_bias": self.experts.b2,
        }
        for name, tensor in names.items():
            if tensor is not None:
                parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
                layer.register_parameter(name, parameter)
        return layer

    def expected(self, mode: str | None, **kwargs) -> torch.Tensor:
        """The oracle's float64 ``[M, H]``."""
        spec = self.spec
        if spec.activation == "situv2":
            kwargs = {"beta": spec.beta, "linear_beta": spec.linear_beta, **kwargs}
        return routed_moe(
            self.hidden_states,
            self.experts,
            self.topk_ids,
            self.topk_weights,
            activation=spec.activation,
            mode=mode,
            limit=spec.swiglu_limit,
            alpha=spec.alpha,
            **kwargs,
        )


def make_raw_layer(
    spec: MoeSpec, tokens: int, *, seed: int = 0, global_experts: int = 0
) -> RawLayer:
    """A random layer for ``spec``.

    Args:
        spec: sizes and activation.
        tokens: M.
        seed: of the generator.
        global_experts: how many experts the ids are drawn from; by default those of ``spec``.
    """
    generator = torch.Generator().manual_seed(seed)
    e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
    w13, w13_scale = quantized((e, 2 * i, h), generator)
    w2, w2_scale = quantized((e, h, i), generator)
    b13 = torch.randn(e, 2 * i, generator=generator) if spec.has_bias else None
    b2 = torch.randn(e, h, generator=generator) if spec.has_bias else None
    experts = RawExperts(w13, w13_scale, w2, w2_scale, b13, b2, spec.gate_up_interleaved)
    scores = torch.rand(tokens, global_experts or e, generator=generator)
    weights, ids = scores.topk(spec.topk, dim=-1)
    return RawLayer(
        spec,
        experts,
        torch.randn(tokens, h, generator=generator).bfloat16(),
        ids.to(torch.int32),
        weights / weights.sum(-1, keepdim=True),
    )
