"""Three ways to compute the miniature's experts: trainable, by the oracle, and as a server computes them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from sglang_aiter_moe.contract.plan import MoePlan, plan_moe
from sglang_aiter_moe.contract.spec import MoeSpec, Target
from sglang_aiter_moe.miniature.model import BETA, LIMIT, LINEAR_BETA, Shape
from sglang_aiter_moe.miniature.quantise import fake_activation, fake_weight
from sglang_aiter_moe.numerics.activations import Activation, apply_gate_up
from sglang_aiter_moe.numerics.mxfp4 import quantize_mxfp4
from sglang_aiter_moe.numerics.oracle import RawExperts, routed_moe

OTHER_LAYOUT = {
    "separated": ("gu_interleaved", "a16w4_gate_up"),
    "gu_interleaved": ("separated", "separated"),
}


def activation_arguments(shape: Shape) -> dict:
    """The activation of a shape and its constants."""
    if shape.kimi:
        return {"activation": Activation.SITUV2, "beta": BETA, "linear_beta": LINEAR_BETA}
    return {"activation": Activation.SWIGLU, "limit": LIMIT}


class TrainableExperts(nn.Module):
    """All experts for all tokens, weighed by the routing (0 for an expert that was not chosen).

    Four times the work of a sorted form, in three plain products: at this size the quicker one. Weights and
    activations are rounded as ``mode`` says; None rounds nothing.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.mode = shape, None
        e, h, i = shape.experts, shape.latent, shape.inter
        self.gate, self.up, self.down = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        self.gate_bias, self.up_bias = nn.ParameterList(), nn.ParameterList()
        self.down_bias = nn.ParameterList()
        for _ in range(shape.layers):
            self.gate.append(torch.randn(e, i, h) * h**-0.5)
            self.up.append(torch.randn(e, i, h) * h**-0.5)
            self.down.append(torch.randn(e, h, i) * i**-0.5)
            if not shape.kimi:
                self.gate_bias.append(torch.zeros(e, i))
                self.up_bias.append(torch.zeros(e, i))
                self.down_bias.append(torch.zeros(e, h))

    def _weight(self, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (w if self.mode is None else fake_weight(w)).to(dtype)

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.mode is None else fake_activation(x, self.mode)

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int
    ) -> torch.Tensor:
        shape, dtype = self.shape, x.dtype
        chosen = torch.zeros(len(x), shape.experts, device=x.device, dtype=weights.dtype)
        chosen = chosen.scatter(1, ids, weights).to(dtype)
        x = self._activation(x)
        halves = []
        for name in ("gate", "up"):
            w = self._weight(getattr(self, name)[layer], dtype).flatten(0, 1)
            bias = None
            if not shape.kimi:
                bias = getattr(self, f"{name}_bias")[layer].flatten().to(dtype)
            halves.append(nn.functional.linear(x, w, bias))
        y = self._activation(
            apply_gate_up(gate=halves[0], up=halves[1], **activation_arguments(shape))
        )
        y = (y.view(len(x), shape.experts, shape.inter) * chosen[..., None]).flatten(1)
        down = self._weight(self.down[layer], dtype).transpose(1, 2).reshape(-1, shape.latent)
        out = y @ down
        return out if shape.kimi else out + chosen @ self.down_bias[layer].to(dtype)

    @torch.no_grad()
    def raw(self, layer: int) -> RawExperts:
        """A layer's experts in MXFP4, gate rows first; biases rounded to bfloat16, as checkpoints have them."""
        gate, up, down = (getattr(self, n)[layer].cpu() for n in ("gate", "up", "down"))
        w13, w13_scale = quantize_mxfp4(torch.cat([gate, up], 1).contiguous())
        w2, w2_scale = quantize_mxfp4(down.contiguous())
        biases = {}
        if not self.shape.kimi:
            b13 = torch.cat([self.gate_bias[layer], self.up_bias[layer]], 1)
            biases = {
                "b13": b13.bfloat16().float().cpu(),
                "b2": self.down_bias[layer].bfloat16().float().cpu(),
            }
        return RawExperts(*(t.view(torch.uint8) for t in (w13, w13_scale, w2, w2_scale)), **biases)


class OracleExperts:
    """The oracle, with the activation quantisation of ``mode`` (None: none, in float32)."""

    def __init__(self, shape: Shape, raw: list[RawExperts], mode: str | None = None) -> None:
        self.shape, self.raw, self.mode = shape, raw, mode

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int
    ) -> torch.Tensor:
        y = routed_moe(
            x,
            self.raw[layer],
            ids,
            weights,
            mode=self.mode,
            dtype=torch.float32,
            requantization="roundup",  # no tuned row has these sizes
            **activation_arguments(self.shape),
        )
        return y.to(x.dtype)


def layer_spec(shape: Shape, ranks: int = 1) -> MoeSpec:
    """The plan's view of a layer, on one of ``ranks`` tensor-parallel ranks."""
    return MoeSpec(
        activation=activation_arguments(shape)["activation"],
        num_experts=shape.experts,
        topk=shape.topk,
        hidden_size=shape.latent,
        intermediate_size=shape.inter // ranks,
        gate_up_interleaved=not shape.kimi,
        has_bias=not shape.kimi,
        swiglu_limit=None if shape.kimi else LIMIT,
        beta=BETA if shape.kimi else None,
        linear_beta=LINEAR_BETA if shape.kimi else None,
        name=f"miniature {shape.block}",
    )


class PlannedExperts:
    """What a server does: plan, lay out, and call what is installed as ``aiter``, under the environment as it is.

    Args:
        shape: the model's.
        raw: experts by layer, as a checkpoint of this shape stores them.
        target: where this runs.
        device: of the tensors.
        wrong_layout: lay w13 out as the plan did not say, and call as it did.
        ranks: tensor-parallel size that ``raw`` is one rank's share of.
    """

    def __init__(
        self,
        shape: Shape,
        raw: list[RawExperts],
        target: Target,
        device: str | torch.device = "cpu",
        *,
        wrong_layout: bool = False,
        ranks: int = 1,
    ) -> None:
        from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore
        from sglang_aiter_moe.srt.layers.quantization.mxfp4 import mark_prepared, prepare_weights

        self.shape = shape
        self.plan: MoePlan = plan_moe(layer_spec(shape, ranks), target)
        self.layers = []
        for experts in raw:
            module = _module(experts, device)
            plan = self.plan
            if wrong_layout:
                weight, scale = OTHER_LAYOUT[plan.w13_layout]
                plan = replace(plan, w13_layout=weight, w13_scale_layout=scale)
            prepare_weights(module, plan)
            mark_prepared(module, self.plan)
            self.layers.append(module)
        self.core = AiterRunnerCore(self._config(raw[0]))

    def _config(self, raw: RawExperts):
        from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig

        kimi = self.shape.kimi
        return MoeRunnerConfig(
            num_experts=raw.num_experts,
            num_local_experts=raw.num_experts,
            hidden_size=raw.hidden_size,
            intermediate_size_per_partition=raw.intermediate_size,
            top_k=self.shape.topk,
            activation="situ" if kimi else "swiglu",
            gemm1_alpha=BETA if kimi else 1.702,
            gemm1_clamp_limit=LINEAR_BETA if kimi else LIMIT,
            swiglu_limit=None,
            gate_up_interleaved=raw.gate_up_interleaved,
        )

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int
    ) -> torch.Tensor:
        from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerInput
        from sglang_aiter_moe.srt.layers.quantization.mxfp4 import moe_quant_info, pad_hidden_states

        info = moe_quant_info(self.layers[layer], None)
        call = AiterRunnerInput(
            hidden_states=pad_hidden_states(x.bfloat16(), self.plan),
            topk_ids=ids.to(torch.int32),
            topk_weights=weights.float(),
            quant_type=info.quant_type,
        )
        out = self.core.run(call, info, {}).hidden_states
        return out[:, : x.shape[1]].to(x.dtype)


class SummedRanks:
    """Tensor parallelism in one process: the ranks' results, added as an all-reduce adds them."""

    def __init__(self, ranks: list[PlannedExperts]) -> None:
        self.ranks, self.plan = ranks, ranks[0].plan

    def __call__(self, *arguments) -> torch.Tensor:
        return torch.stack([rank(*arguments) for rank in self.ranks]).sum(0)


def _module(raw: RawExperts, device: str | torch.device) -> nn.Module:
    """A module with SGLang's parameter names, as its loader leaves a layer."""
    module = nn.Module()
    tensors = {
        "w13_weight": raw.w13,
        "w13_weight_scale": raw.w13_scale,
        "w2_weight": raw.w2,
        "w2_weight_scale": raw.w2_scale,
        "w13_weight_bias": raw.b13,
        "w2_weight_bias": raw.b2,
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor = tensor.to(device, copy=True)
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module
