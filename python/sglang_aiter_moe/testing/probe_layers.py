"""One MXFP4 layer of SGLang with random experts, and what else the probes share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang_aiter_moe.environ import exactly
from sglang_aiter_moe.numerics.metrics import cosine, relative_error
from sglang_aiter_moe.numerics.oracle import RawExperts
from sglang_aiter_moe.testing import sglang_process

INTERLEAVED = "SGLANG_USE_AITER_MOE_GU_ITLV"
FLAGS = ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4")
MODES = {"A16W4": {}, "A8W4": {FLAGS[0]: "1"}, "A4W4": {FLAGS[1]: "1"}}
SITU = {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0}
EXPERTS, TOPK, HIDDEN, INTER = 8, 2, 256, 256


def variables(values: dict[str, str]) -> AbstractContextManager[None]:
    """The SiTUv2 flags exactly as given, and further variables, for the length of a block."""
    return exactly(values, FLAGS)


def error_of(call: Callable[[], Any]) -> dict[str, str] | None:
    """Type and text of what a call raises; None if it returns."""
    try:
        call()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return None


def agreement(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    return {"cosine": cosine(got, want), "relative_error": relative_error(got, want)}


def random_experts(seed: int = 5) -> RawExperts:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    return RawExperts(
        w13=draw(0, 256, EXPERTS, 2 * INTER, HIDDEN // 2),
        w13_scale=draw(121, 124, EXPERTS, 2 * INTER, HIDDEN // 32),
        w2=draw(0, 256, EXPERTS, HIDDEN, INTER // 2),
        w2_scale=draw(121, 124, EXPERTS, HIDDEN, INTER // 32),
    )


def fused_moe(raw: RawExperts, **fields: Any) -> torch.nn.Module:
    """SGLang's ``FusedMoE`` with MXFP4 experts, loaded through its ``weight_loader``."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    layer = FusedMoE(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        layer_id=0,
        top_k=TOPK,
        params_dtype=torch.bfloat16,
        quant_config=Mxfp4Config(is_checkpoint_mxfp4_serialized=True),
        **{"gate_up_interleaved": False} if sglang_process.release() != "0.5.13" else {},
        **fields,
    )
    for expert in range(EXPERTS):
        for suffix, w13, w2 in (("", raw.w13, raw.w2), ("_scale", raw.w13_scale, raw.w2_scale)):
            parts = {"w1": w13[expert, :INTER], "w3": w13[expert, INTER:], "w2": w2[expert]}
            for shard, tensor in parts.items():
                name = f"{'w2' if shard == 'w2' else 'w13'}_weight{suffix}"
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    return layer.eval()


def routing(tokens: int, seed: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)])
    weights = torch.rand(tokens, TOPK, generator=generator)
    return x, ids.to(torch.int32), weights


@torch.no_grad()
def call_layer(layer: torch.nn.Module, x, ids, weights) -> torch.Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return layer(x, StandardTopKOutput(weights, ids, torch.zeros(len(x), EXPERTS)))
