"""Layers with loaders as SGLang's ``FusedMoE`` has them, without SGLang; a small plan of each layout for them."""

from __future__ import annotations

from typing import Any

import torch

from sglang_aiter_moe.contract import MoePlan, MoeSpec
from sglang_aiter_moe.numerics import RawExperts
from sglang_aiter_moe.srt.layers.quantization.mxfp4 import prepare_weights
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import guarded, updating
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.raw_layers import make_raw_layer


def small_gpt_oss(experts: int = 4, hidden: int = 192, inter: int = 192) -> MoeSpec:
    """Rows alternate, sizes are padded, biases are bf16 in the checkpoint."""
    return MoeSpec(
        "swiglu",
        experts,
        2,
        hidden,
        inter,
        gate_up_interleaved=True,
        has_bias=True,
        swiglu_limit=7.0,
    )


#: A small plan of each layout.
PLANS = {
    "separated": plans.plan(plans.situv2(4, 2, 256, 128)),
    "interleaved": plans.plan(plans.situv2(4, 2, 256, 128), {plans.A8W4: "1"}),
    "gfx1250": plans.plan(plans.situv2(4, 2, 256, 128), arch="gfx1250"),
    # K3's I per rank: w2's 12 columns of scales become 16, so raw and packed sizes differ.
    "scale padding": plans.plan(plans.situv2(3, 2, 256, 384), {plans.A8W4: "1"}),
    "padding": plans.plan(small_gpt_oss()),
    "padded halves": plans.plan(MoeSpec("silu", 4, 2, 192, 96), {plans.ITLV: "0"}),
}
#: An interleaved layer that errors call "layer 5".
TWO_EXPERTS = plans.plan(plans.situv2(2, 1, 256, 128, name="layer 5"), {plans.A8W4: "1"})


def load_shard(
    param: torch.Tensor, loaded: torch.Tensor, name: str, shard_id: str, expert_id: int
) -> None:
    """Writes one expert's w1 (gate), w3 (up) or w2, or all experts when both ids are None."""
    if expert_id is None:
        param.data.copy_(loaded)
        return
    target = param.data[expert_id]
    if shard_id in ("w1", "w3"):
        half = target.shape[0] // 2
        target = target[:half] if shard_id == "w1" else target[half:]
    target.copy_(loaded)


def tensors_of(experts: RawExperts) -> dict[str, torch.Tensor]:
    """Raw tensors by parameter name."""
    found = {
        "w13_weight": experts.w13,
        "w13_weight_scale": experts.w13_scale,
        "w2_weight": experts.w2,
        "w2_weight_scale": experts.w2_scale,
        "w13_weight_bias": experts.b13,
        "w2_weight_bias": experts.b2,
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def loaded_layer(plan: MoePlan, raw: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A layer with ``weight_loader`` on each parameter, loaded with ``raw`` and laid out."""
    layer = torch.nn.Module()
    layer.layer_id = 0
    for name, tensor in raw.items():
        parameter = torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
        parameter.weight_loader = guarded(layer, name, load_shard)
        layer.register_parameter(name, parameter)
    load(layer, raw)
    prepare_weights(layer, plan)
    return layer


def load(layer: Any, raw: dict[str, torch.Tensor], experts: Any = None) -> None:
    """Through the loaders: expert by expert where gate and up are halves, else all at once."""
    for name, tensor in raw.items():
        parameter = getattr(layer, name)
        if experts is None:
            parameter.weight_loader(parameter, tensor, name, None, None)
            continue
        for expert in experts:
            shards = {"w2": tensor[expert]}
            if name.startswith("w13"):
                shards = dict(zip(("w1", "w3"), tensor[expert].chunk(2), strict=True))
            for shard, part in shards.items():
                parameter.weight_loader(parameter, part, name, shard_id=shard, expert_id=expert)


def failed_update(
    layer: Any, raw: dict[str, torch.Tensor], reason: str = "connection lost"
) -> None:
    """An update that writes ``raw`` and fails then.

    Raises:
        AssertionError: its error did not come out.
    """
    try:
        with updating():
            load(layer, raw)
            raise OSError(reason)
    except OSError:
        return
    raise AssertionError("the error of an update has to come out")


def random_raw(spec: MoeSpec, seed: int, *, bias_dtype: torch.dtype = torch.bfloat16) -> dict:
    """Raw tensors of a random layer."""
    raw = tensors_of(make_raw_layer(spec, 1, seed=seed).experts)
    return {n: t.to(bias_dtype) if n.endswith("bias") else t for n, t in raw.items()}


def packed_bytes(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the layer's tensors."""
    return {name: parameter.data.clone() for name, parameter in layer.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two layers are bit-identical."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def identity(layer: torch.nn.Module) -> dict[str, tuple]:
    """What an update in place does not change: object, address, loader and shape by parameter name."""
    return {
        name: (id(p), p.data_ptr(), p.weight_loader, tuple(p.shape))
        for name, p in layer.named_parameters()
    }


def nan_scales(layer: torch.nn.Module) -> list[bool]:
    """Whether the scales of w13 and of w2 are NaN throughout."""
    scales = (layer.w13_weight_scale, layer.w2_weight_scale)
    return [bool((scale == 0xFF).all()) for scale in scales]
