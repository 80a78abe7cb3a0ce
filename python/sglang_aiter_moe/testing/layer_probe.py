"""Builds SGLang's real MXFP4 layers in one process, without an engine, and reports what they do.

``python -m sglang_aiter_moe.testing.layer_probe CHECKPOINTS PORT``: run by the tests once for each SGLang
release. Prints one line ``RESULT {json}``; the tests judge it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from sglang_aiter_moe.numerics.oracle import routed_moe
from sglang_aiter_moe.srt.releases import FIRST
from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.carrier_reference import CarrierReference
from sglang_aiter_moe.testing.probe_layers import (
    EXPERTS,
    FLAGS,
    HIDDEN,
    INTERLEAVED,
    MODES,
    SITU,
    agreement,
    call_layer,
    error_of,
    fused_moe,
    random_experts,
    routing,
    variables,
)

#: A row whose last chosen and first rejected expert are this close may turn in bf16.
CLEAR_ROUTING = 0.005


# --- whole blocks, loaded from checkpoint files ------------------------------------------------


def clear_rows(reference: CarrierReference, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bf16 inputs ``[M, H]`` whose routing is clear, and the reference's outputs."""
    generator = torch.Generator().manual_seed(3)
    block = reference._kimi_mlp if reference.kimi else reference._gpt_oss_mlp
    inputs, outputs = [], []
    for _ in range(24):
        x = torch.randn(1, reference.config["hidden_size"], generator=generator).bfloat16()
        reference.routing_margin = float("inf")
        y = block(x.float(), layer)
        if reference.routing_margin > CLEAR_ROUTING:
            inputs.append(x)
            outputs.append(y)
    return torch.cat(inputs), torch.cat(outputs)


@torch.no_grad()
def call_block(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


def block_agreement(model: Any, path: Path, mode: str, layer: int = 1) -> dict[str, float]:
    x, want = clear_rows(CarrierReference(path, mode), layer)
    got = call_block(model.model.layers[layer].mlp, x)
    return agreement(got.float(), want) | {"rows": len(x)}


def probe_blocks(model_config: Any, path: Path, modes: dict) -> dict[str, Any]:
    """Each mode: the block against the float32 reference."""
    found = {}
    for mode, flags in modes.items():
        with variables(flags):
            model = sglang_process.build_carrier(model_config, path)
            found[mode] = block_agreement(model, path, mode)
    return found


def probe_unstated_limit(model_config: Any, path: Path) -> dict[str, Any]:
    """gpt-oss whose config states no limit, for which AITER takes 7: both layouts, and what is sent.

    Up to 0.5.23 SGLang sends ``gate_mode`` with a limit only (sglang#30993).
    """
    import aiter.fused_moe

    real, sent = aiter.fused_moe.fused_moe, []

    @functools.wraps(real)
    def recorded(**call: Any) -> torch.Tensor:
        sent.append(call.get("gate_mode"))
        return real(**call)

    config, found = model_config.hf_config, {}
    limit, config.swiglu_limit = config.swiglu_limit, None
    aiter.fused_moe.fused_moe = recorded
    try:
        for name, flags in {"interleave": {}, "separated": {INTERLEAVED: "0"}}.items():
            found[name] = probe_blocks(model_config, path, {"A16W4": flags})["A16W4"]
            found[name]["sent"] = sent[-1]
    finally:
        config.swiglu_limit, aiter.fused_moe.fused_moe = limit, real
    return found


def probe_flag_changes(model_config: Any, path: Path) -> dict[str, Any]:
    """A flag that changes after the load, and spellings that SGLang and AITER read differently."""
    with variables({}):
        model = sglang_process.build_carrier(model_config, path)
        block, x = (
            model.model.layers[0].mlp,
            torch.ones(2, model_config.hf_config.hidden_size).bfloat16(),
        )
        before = error_of(lambda: call_block(block, x))
        os.environ[FLAGS[0]] = "1"
        changed = error_of(lambda: call_block(block, x))
        os.environ.pop(FLAGS[0])
        restored = error_of(lambda: call_block(block, x))
    spellings = {}
    for value in ("true", "True", "yes", "", " 1", "01"):
        with variables({FLAGS[0]: value}):
            spellings[value] = error_of(lambda: sglang_process.build_carrier(model_config, path))
    return {"before": before, "changed": changed, "restored": restored, "spellings": spellings}


def probe_second_processing(model_config: Any, path: Path) -> dict[str, Any]:
    """process_weights_after_loading twice: nothing may change, the parameters stay the same objects."""
    with variables(MODES["A8W4"]):
        model = sglang_process.build_carrier(model_config, path)
    experts = model.model.layers[0].mlp.experts
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    before = {n: (getattr(experts, n), getattr(experts, n).data.clone()) for n in names}
    sglang_process.process_after_loading(model)
    return {
        "same_bytes": all(torch.equal(getattr(experts, n).data, c) for n, (_, c) in before.items()),
        "same_objects": all(getattr(experts, n) is p for n, (p, _) in before.items()),
    }


# --- single layers with random experts ---------------------------------------------------------


def probe_silu() -> dict[str, Any]:
    """Plain SiLU (no alpha in the checkpoint) has to stay SiLU: A4W4 on gfx950, separated."""
    raw = random_experts()
    x, ids, weights = routing(12)
    with variables({}):
        got = call_layer(fused_moe(raw, activation="silu"), x, ids, weights).float()
    common = {"mode": "A4W4", "dtype": torch.float32, "requantization": "roundup"}
    return {
        "silu": agreement(got, routed_moe(x, raw, ids, weights, activation="silu", **common)),
        "swiglu": agreement(
            got, routed_moe(x, raw, ids, weights, activation="swiglu", limit=7.0, **common)
        ),
    }


def probe_published_output() -> dict[str, Any]:
    """The tensor that a model publishes is the one that comes back."""
    from sglang.srt.layers import zero_copy_context
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    x, ids, weights = routing(5)
    with variables({}), torch.no_grad():
        layer = fused_moe(random_experts(), **SITU)
        plain = call_layer(layer, x, ids, weights)
        topk = StandardTopKOutput(weights, ids, torch.zeros(len(x), EXPERTS))
        dispatched = layer.dispatcher.dispatch(hidden_states=x, topk_output=topk)

        def run(buffer: torch.Tensor) -> torch.Tensor:
            with zero_copy_context.set_moe_output(buffer):
                return layer.quant_method.apply(layer, dispatched).hidden_states

        buffer = torch.full_like(plain, float("nan"))
        published = run(buffer)
        misfit = torch.full_like(plain, float("nan"), dtype=torch.float32)
        other = run(misfit)
    return {
        "same_object": published is buffer,
        "same_values": torch.equal(published, plain),
        "misfit_untouched": bool(misfit.isnan().all()) and torch.equal(other, plain),
    }


def probe_refusals() -> dict[str, Any]:
    """What AITER refuses at the first forward, refused when the layer is built."""
    with variables({}):
        return {
            "weight_on_input": error_of(
                lambda: fused_moe(random_experts(), **SITU, apply_router_weight_on_input=True)
            ),
            "no_betas": error_of(lambda: fused_moe(random_experts(), activation="situ")),
            "unknown_activation": error_of(lambda: fused_moe(random_experts(), activation="relu2")),
        }


# --- names that callers rely on ----------------------------------------------------------------


def probe_selector() -> dict[str, Any] | None:
    """``_aiter_situ_uses_gu_interleaved_weights``; None in releases without it."""
    from sglang.srt.layers.quantization import mxfp4

    selector = getattr(mxfp4, "_aiter_situ_uses_gu_interleaved_weights", None)
    if selector is None:
        return None
    cases = {
        "unset": {},
        "A8W4": {FLAGS[0]: "1"},
        "A4W4": {FLAGS[1]: "1"},
        "both": {FLAGS[0]: "1", FLAGS[1]: "1"},
        "A8W4=0": {FLAGS[0]: "0"},
        "stated": {"SGLANG_AITER_MOE_A16W4_KERNEL": "gu_interleaved"},
    }
    found = {}
    for name, values in cases.items():
        with variables(values):
            found[name] = selector()
    return found


def probe_quant_info() -> dict[str, Any]:
    """``AiterMoeQuantInfo`` and ``AiterRunnerInput`` as SGLang's own code makes them."""
    from sglang.srt.layers.moe.moe_runner import aiter
    from sglang.srt.layers.moe.moe_runner.base import MoeQuantInfo

    weight = torch.zeros(1)
    info = aiter.AiterMoeQuantInfo(w13_weight=weight, w2_weight=weight)
    call = aiter.AiterRunnerInput(weight, weight, weight, aiter.AiterQuantType.PER_1X32)
    return {
        "gate_mode": info.gate_mode,
        "is_moe_quant_info": isinstance(info, MoeQuantInfo),
        "module": type(info).__module__,
        "name": type(info).__qualname__,
        "output": getattr(call, "output", "no such field"),
        "backend": call.runner_backend.value,
    }


def probe_correction_bias() -> dict[str, Any]:
    """SGLang's TopK with bf16 logits and a float32 bias between 6.8 and 7.06 (spacing of bf16: 0.03)."""
    from sglang.srt.layers.moe.topk import TopK

    generator = torch.Generator().manual_seed(11)
    bias = 6.8 + 0.26 * torch.rand(64, generator=generator)
    logits = torch.randn(64, 64, generator=generator).bfloat16()
    topk = TopK(
        top_k=8,
        layer_id=0,
        use_grouped_topk=True,
        num_expert_group=1,
        topk_group=1,
        renormalize=True,
        scoring_func="sigmoid",
        correction_bias=torch.nn.Parameter(bias.clone(), requires_grad=False),
        routed_scaling_factor=1.0,
    )
    with torch.no_grad():
        ids = topk(torch.zeros(64, HIDDEN).bfloat16(), logits).topk_ids
    scores = torch.sigmoid(logits.double()) + bias.double()
    want = scores.topk(8, dim=-1).indices
    rows = sum(set(a) != set(b) for a, b in zip(ids.tolist(), want.tolist(), strict=True))
    found: dict[str, Any] = {"differing_rows": rows}
    config = topk.topk_config
    if hasattr(config, "correction_bias_for_dtype"):
        parameter = config.correction_bias
        first = config.correction_bias_for_dtype(torch.bfloat16)
        again = config.correction_bias_for_dtype(torch.bfloat16)
        parameter.data.copy_(bias + 1)  # does not bump the version counter
        updated = config.correction_bias_for_dtype(torch.bfloat16)
        found["cache"] = {
            "original_when_equal": config.correction_bias_for_dtype(torch.float32) is parameter,
            "dtype": str(first.dtype),
            "same_pointer": first.data_ptr() == again.data_ptr(),
            "fresh_after_copy": torch.equal(updated, (bias + 1).bfloat16()),
        }
    return found


def probe_origin() -> dict[str, Any]:
    """Whose code runs: SGLang's files, and what of our own package is in this process."""
    from sglang.srt.layers.quantization import mxfp4

    ours = ("srt.layers", "contract", "patches.glue", "plugin")
    loaded = [name for name in ours if f"sglang_aiter_moe.{name}" in sys.modules]
    return {"mxfp4": mxfp4.__file__, "loaded": loaded}


def probe_states() -> list[dict[str, str]]:
    """Every patch of the plugin."""
    from sglang_aiter_moe import plugin

    return [state.as_dict() for state in plugin.inspect_states()]


def probe_doctor() -> list[str]:
    """What ``sglang-aiter-moe doctor`` says about the patches, in this process."""
    from sglang_aiter_moe.cli.doctor_checks import examine

    findings = examine("kimi-k3", tp=8, ep=1, arch="gfx950")
    return [finding.text for finding in findings if finding.section == "patches"]


def main(checkpoints: Path, port: int) -> None:
    torch.set_num_threads(1)
    kimi, gpt_oss = checkpoints / "kimi", checkpoints / "gpt_oss"
    gpt_oss_alone = Version(sglang_process.release()) < Version(FIRST)
    config = sglang_process.become_single_rank(gpt_oss if gpt_oss_alone else kimi, port)
    gpt_oss_config = config if gpt_oss_alone else sglang_process.model_config_of(gpt_oss)
    probes: dict[str, Callable[[], Any]] = {
        "gpt_oss": lambda: probe_blocks(gpt_oss_config, gpt_oss, {"A16W4": {}}),
        "unstated_limit": lambda: probe_unstated_limit(gpt_oss_config, gpt_oss),
        "quant_info": probe_quant_info,
        "origin": probe_origin,
        "states": probe_states,
        "doctor": probe_doctor,
    }
    if gpt_oss_alone:
        probes["other_experts"] = lambda: error_of(
            lambda: fused_moe(random_experts(), activation="silu")
        )
    else:
        probes |= {
            "kimi": lambda: probe_blocks(config, kimi, MODES),
            "flags": lambda: probe_flag_changes(config, kimi),
            "second_processing": lambda: probe_second_processing(config, kimi),
            "silu": probe_silu,
            "published_output": probe_published_output,
            "refusals": probe_refusals,
            "selector": probe_selector,
            "correction_bias": probe_correction_bias,
        }
    if os.environ.get("CARRIER_CONTROL") == "in_tree":
        del probes["states"], probes["doctor"]  # asking the plugin would put it in
    sglang_process.report(probes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
