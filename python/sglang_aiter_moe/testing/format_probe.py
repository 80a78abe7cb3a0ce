"""The same expert weights in four formats through SGLang's real ``FusedMoE`` loaders.

``python -m sglang_aiter_moe.testing.format_probe CHECKPOINT PORT``: a Kimi-K3 carrier checkpoint
(compressed-tensors). Prints one line ``RESULT {json}``; the tests judge it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe.checkpoint.files import Checkpoint
from sglang_aiter_moe.checkpoint.rank import rank_tensors
from sglang_aiter_moe.numerics import RawExperts
from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.expert_files import FORMATS, expert_tensors

#: What a model's ``load_weights`` asks ``make_expert_params_mapping`` for: gate, down, up.
NAMES = {
    "compressed_tensors": ("w1", "w2", "w3"),
    "quark": ("gate_proj", "down_proj", "up_proj"),
}


def load_experts(experts: Any, kind: str, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    """Through the parameters' ``weight_loader``, as models do for each format."""
    parameters = dict(experts.named_parameters(recurse=False))
    if kind in NAMES:
        gate, down, up = NAMES[kind]
        mapping = type(experts).make_expert_params_mapping(
            ckpt_gate_proj_name=gate,
            ckpt_down_proj_name=down,
            ckpt_up_proj_name=up,
            num_experts=experts.num_experts,
        )
        loaded = 0
        for name, tensor in tensors.items():
            name = name.removeprefix(prefix.removesuffix("experts")).replace("_packed", "")
            for parameter, part, expert, shard in mapping:
                if part in name:
                    target = name.replace(part, parameter).removeprefix("experts.")
                    p = parameters[target]
                    p.weight_loader(p, tensor, target, shard_id=shard, expert_id=expert)
                    loaded += 1
        assert loaded == len(tensors)
        return
    for part, parameter in (("w13", "w13_weight"), ("w2", "w2_weight")):
        stored = {"w13": "gate_up_proj", "w2": "down_proj"}[part] if kind == "gpt_oss" else None
        for suffix, ending in (("", "_blocks"), ("_scale", "_scales")):
            name = f"{prefix}.{stored}{ending}" if stored else f"{prefix}.{parameter}{suffix}"
            tensor = tensors[name].flatten(2) if tensors[name].dim() == 4 else tensors[name]
            if stored and part == "w13":  # this layer's raw form has the gate half first
                tensor = torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)
            p = parameters[parameter + suffix]
            for expert in range(experts.num_experts):
                halves = {"w2": tensor[expert]}
                if part == "w13":
                    halves = dict(zip(("w1", "w3"), tensor[expert].chunk(2), strict=True))
                for shard, rows in halves.items():
                    p.weight_loader(
                        p, rows.contiguous(), parameter + suffix, shard_id=shard, expert_id=expert
                    )


def main(path: Path, port: int) -> dict[str, Any]:
    config = sglang_process.become_single_rank(path, port)
    model = sglang_process.build_carrier(config, path)
    from sglang_aiter_moe.srt.layers.quantization.mxfp4 import moe_quant_info
    from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import updating

    block = model.model.layers[0].mlp
    experts = block.experts
    (stored, *_) = Checkpoint(path).layers().values()
    raw = rank_tensors(stored, experts.aiter_moe_plan.spec)
    source = RawExperts(
        raw["w13_weight"], raw["w13_weight_scale"], raw["w2_weight"], raw["w2_weight_scale"]
    )
    other = RawExperts(
        *(t.flip(0) for t in (source.w13, source.w13_scale, source.w2, source.w2_scale))
    )
    prefix = stored.prefix
    x = torch.randn(4, config.hf_config.hidden_size, generator=torch.Generator().manual_seed(0))

    def state() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        moe_quant_info(experts)
        packed = {n: p.detach().clone() for n, p in experts.named_parameters(recurse=False)}
        with torch.no_grad():
            return packed, block(x.bfloat16())

    packed, output = state()
    found: dict[str, Any] = {"method": type(experts.quant_method).__name__}
    for kind in FORMATS:
        with updating():  # other weights first, so that nothing of the last format is left
            load_experts(experts, "quark", expert_tensors(other, "quark", prefix), prefix)
        scrambled = not torch.equal(state()[1], output)
        with updating():
            load_experts(experts, kind, expert_tensors(source, kind, prefix), prefix)
        got, result = state()
        found[kind] = {
            "scrambled": scrambled,
            "packed": all(torch.equal(got[n], packed[n]) for n in packed),
            "output": torch.equal(result, output),
        }
    return found


if __name__ == "__main__":
    sglang_process.print_result(**main(Path(sys.argv[1]), int(sys.argv[2])))
