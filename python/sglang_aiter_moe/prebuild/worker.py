"""Calls a planned layer once at one token count, on the GPU: what a server builds there is built then.

``python -m sglang_aiter_moe.prebuild.worker PLAN.json TOKENS [--device cuda]``, one process a call. The layer
has its real sizes, because AITER chooses kernels by them, and zeros for weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from sglang_aiter_moe.contract.plan import MoePlan
from sglang_aiter_moe.contract.spec import BLOCK
from sglang_aiter_moe.numerics.activations import Activation
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore, AiterRunnerInput
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization.mxfp4 import (
    moe_quant_info,
    pad_hidden_states,
    prepare_weights,
)

_SGLANG_NAME = {Activation.SITUV2: "situ"}
_ONE = 127  # E8M0 of 1.0 (OCP MX specification)


def zero_layer(plan: MoePlan, device: torch.device) -> torch.nn.Module:
    """A layer of the plan's sizes: zero codes, scales of 1.0, laid out by the plan."""
    spec = plan.spec
    experts, hidden, inter = spec.num_experts, spec.hidden_size, spec.intermediate_size
    layer = torch.nn.Module()
    for name, rows, columns in (("w13", 2 * inter, hidden), ("w2", hidden, inter)):
        weight = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8, device=device)
        scale = torch.full((experts, rows, columns // BLOCK), _ONE, dtype=torch.uint8)
        tensors = {f"{name}_weight": weight, f"{name}_weight_scale": scale.to(device)}
        if spec.has_bias:
            tensors[f"{name}_weight_bias"] = torch.zeros(experts, rows, device=device)
        for key, tensor in tensors.items():
            layer.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))
    prepare_weights(layer, plan)
    return layer


def call(plan: MoePlan, layer: torch.nn.Module, tokens: int, device: torch.device) -> torch.Tensor:
    """One call of the runner with ``tokens`` tokens; returns its output."""
    spec = plan.spec
    situ, swiglu = spec.activation is Activation.SITUV2, spec.activation is Activation.SWIGLU
    config = MoeRunnerConfig(
        num_experts=spec.num_experts,
        num_local_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        intermediate_size_per_partition=spec.intermediate_size,
        top_k=spec.topk,
        activation=_SGLANG_NAME.get(spec.activation, spec.activation.value),
        gemm1_alpha=spec.beta if situ else spec.alpha if swiglu else None,
        gemm1_clamp_limit=spec.linear_beta if situ else spec.swiglu_limit if swiglu else None,
        swiglu_limit=None if situ or swiglu else spec.swiglu_limit,
        gate_up_interleaved=spec.gate_up_interleaved,
    )
    hidden = torch.zeros(tokens, spec.hidden_size, dtype=torch.bfloat16, device=device)
    # Experts spread over the tokens, as routing does: some kernels look at how many are in use.
    slots = torch.arange(tokens * spec.topk, dtype=torch.int32) % spec.num_experts
    mask = None
    if spec.expert_parallel:
        # AITER's convention: local experts first, then one slot that is always masked.
        mask = torch.ones(spec.num_experts + 1, dtype=torch.int32, device=device)
        mask[-1] = 0
    info = moe_quant_info(layer, mask)
    inputs = AiterRunnerInput(
        hidden_states=pad_hidden_states(hidden, plan),
        topk_ids=slots.view(tokens, spec.topk).to(device),
        topk_weights=torch.full((tokens, spec.topk), 1 / spec.topk, device=device),
        quant_type=info.quant_type,
    )
    return AiterRunnerCore(config).run(inputs, info, {}).hidden_states


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    plan = MoePlan.from_json(options.plan.read_text(encoding="utf-8"))
    device = torch.device(options.device)
    layer = zero_layer(plan, device)
    start = time.monotonic()
    output = call(plan, layer, options.tokens, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{options.tokens} tokens: {time.monotonic() - start:.1f} s, {tuple(output.shape)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
