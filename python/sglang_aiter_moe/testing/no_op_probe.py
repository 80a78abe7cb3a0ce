"""What SGLang does on the paths that the patch set is not about, with the plugin and without it.

``python -m sglang_aiter_moe.testing.no_op_probe PORT``. Every case goes through SGLang's own permute
function, ``AiterRunnerCore.run`` and unpermute function; what arrives at ``aiter.fused_moe`` is recorded. The
plugin is in force first, then it is taken out of the process and the same cases run again.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.probe_layers import EXPERTS, HIDDEN, INTER, TOPK, routing

TOKENS = 4


def described(value: Any) -> str:
    """A value that can be compared between two runs: tensors by dtype, shape and content."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(data).hexdigest()[:16]
        return f"{value.dtype} {tuple(value.shape)} {digest}"
    return repr(value)


def quant_infos() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, runner configuration, AiterMoeQuantInfo fields) of each path, as SGLang's methods fill them."""
    from aiter import ActivationType
    from sglang.srt.layers.moe.moe_runner.aiter import AiterQuantType as Q

    def weights(dtype: torch.dtype, packed: int = 1) -> dict[str, torch.Tensor]:
        return {
            "w13_weight": torch.zeros(EXPERTS, 2 * INTER, HIDDEN // packed).to(dtype),
            "w2_weight": torch.zeros(EXPERTS, HIDDEN, INTER // packed).to(dtype),
        }

    scales = {"w13_scale": torch.ones(EXPERTS, 4, 2), "w2_scale": torch.ones(EXPERTS, 2, 2)}
    fp8, byte = weights(torch.float8_e4m3fn), weights(torch.uint8, packed=2)
    silu: dict[str, Any] = {"activation": "silu"}
    yield "bf16", silu, {**weights(torch.bfloat16), "quant_type": Q.NONE}
    yield "bf16 gelu", {"activation": "gelu"}, {**weights(torch.bfloat16), "quant_type": Q.NONE}
    yield "fp8 block", silu, {**fp8, **scales, "quant_type": Q.PER_128X128}
    yield "fp8 per token", silu, {**fp8, **scales, "quant_type": Q.PER_TOKEN}
    limited = {**fp8, **scales, "quant_type": Q.PER_128X128, "swiglu_limit": 10.0}
    yield "deepseek-v4 fp8", {**silu, "swiglu_limit": 10.0}, limited
    yield "int4-fp8", silu, {**byte, **scales, "quant_type": Q.PER_TOKEN}
    yield "quark mxfp4", silu, {**byte, **scales, "quant_type": Q.PER_1X32}
    situ = {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0}
    yield "quark mxfp4 situ", situ, {**byte, **scales, "quant_type": Q.PER_1X32}
    stated = {"activation": ActivationType.Swiglu, "gate_mode": "interleave"}
    mxfp8 = {**byte, **scales, "quant_type": Q.PER_1X32, "swiglu_limit": 7.0}
    yield "mxfp8 with its own kwargs", silu, {**mxfp8, "fused_moe_kwargs": stated}
    pads = {"hidden_pad": 64, "intermediate_pad": 128}
    yield "fp8 block padded", silu, {**fp8, **scales, "quant_type": Q.PER_128X128, **pads}


def dispatch_outputs() -> dict[str, Any]:
    from sglang.srt.layers.moe.token_dispatcher.deepep import (
        DeepEPLLDispatchOutput,
        DeepEPNormalDispatchOutput,
    )
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    x, ids, weights = routing(TOKENS)
    received = ids.clone()
    received[0, 0] = -1  # an empty slot
    topk = StandardTopKOutput(weights, ids, torch.zeros(TOKENS, EXPERTS))
    return {
        "standard": StandardDispatchOutput(
            hidden_states=x, hidden_states_scale=None, topk_output=topk
        ),
        "deepep_normal": DeepEPNormalDispatchOutput(x, None, received, weights, [TOKENS]),
        "deepep_ll": DeepEPLLDispatchOutput(
            x, None, received, weights, torch.tensor([TOKENS]), TOKENS
        ),
    }


def record_calls(gfx95: bool) -> dict[str, dict[str, str]]:
    """``"path / format"`` -> what ``fused_moe`` was called with, and the result's description."""
    import aiter.fused_moe
    from sglang.srt.layers.moe.moe_runner import aiter as runner
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig, PermuteMethodPool

    real = aiter.fused_moe.fused_moe
    calls: list[dict[str, Any]] = []

    @functools.wraps(real)
    def fused_moe(**call: Any) -> torch.Tensor:
        calls.append(call)
        return call["hidden_states"] * 2

    had = getattr(runner, "is_gfx95_supported", None)
    aiter.fused_moe.fused_moe = fused_moe
    if had is not None:
        runner.is_gfx95_supported = lambda: gfx95
    found = {}
    try:
        for path, config_fields, info_fields in quant_infos():
            config = MoeRunnerConfig(
                num_experts=EXPERTS, num_local_experts=EXPERTS, top_k=TOPK, **config_fields
            )
            for form, dispatched in dispatch_outputs().items():
                mask = None if form == "standard" else torch.ones(EXPERTS + 1, dtype=torch.int32)
                info = runner.AiterMoeQuantInfo(**info_fields, expert_mask=mask)
                core, state = runner.AiterRunnerCore(config), {}
                permute = PermuteMethodPool.get_pre_permute(form, "aiter")
                unpermute = PermuteMethodPool.get_post_permute("aiter", form)
                given = permute(dispatched, info, config, state)
                try:
                    output = core.run(given, info, state)
                except TypeError as error:  # before gfx95 SGLang passes some keywords twice
                    found[f"{path} / {form}"] = {"error": str(error), "case": f"{path} / {form}"}
                    continue
                result = unpermute(output, info, config, state)
                call = {name: described(value) for name, value in calls[-1].items()}
                found[f"{path} / {form}"] = {
                    **call,
                    "result": described(result.hidden_states),
                    "result type": type(result).__name__,
                }
    finally:
        aiter.fused_moe.fused_moe = real
        if had is not None:
            runner.is_gfx95_supported = had
    return found


def packed_weights() -> dict[str, str]:
    """Parameters that SGLang makes of other MoE methods and runners, byte by byte."""
    from sglang.srt.layers.quantization import mxfp4

    from sglang_aiter_moe.testing.controls import _open_mxfp4

    before = dict(vars(mxfp4))
    _open_mxfp4()
    mxfp4.dynamic_mxfp4_quant = sys.modules["aiter.ops.triton.quant"].dynamic_mxfp4_quant
    try:
        layer = torch.nn.Module()
        method = mxfp4.Mxfp4DynamicQuantMoEMethod()
        method.create_weights(layer, EXPERTS, HIDDEN, INTER, torch.bfloat16)
        generator = torch.Generator().manual_seed(1)
        for name in ("w13_weight", "w2_weight"):
            parameter = getattr(layer, name)
            parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16()
        method.process_weights_after_loading(layer)
        return {f"dynamic mxfp4 {n}": described(p.data) for n, p in layer.named_parameters()}
    finally:
        for name, value in before.items():
            setattr(mxfp4, name, value)


def other_runner_parameters() -> dict[str, str]:
    """An MXFP4 layer for a runner that the user named: shapes and dtypes as SGLang allocates them."""
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization import mxfp4

    real = utils.get_moe_runner_backend
    chosen = lambda: MoeRunnerBackend.TRITON  # noqa: E731
    utils.get_moe_runner_backend = mxfp4.get_moe_runner_backend = chosen
    try:
        layer = torch.nn.Module()
        layer.num_local_experts, layer.hidden_size = EXPERTS, HIDDEN
        layer.intermediate_size_per_partition = INTER
        method = mxfp4.Mxfp4MoEMethod(prefix="test")
        method.create_weights(layer, EXPERTS, HIDDEN, INTER, torch.bfloat16)
        return {f"triton runner {n}": described(p.data) for n, p in layer.named_parameters()}
    finally:
        utils.get_moe_runner_backend = mxfp4.get_moe_runner_backend = real


def everything() -> dict[str, Any]:
    return {
        "calls": record_calls(gfx95=False),
        "calls on gfx95": record_calls(gfx95=True),
        "weights": {**packed_weights(), **other_runner_parameters()},
    }


def main(port: int, model_path: str) -> None:
    from sglang_aiter_moe import plugin

    sglang_process.become_single_rank(model_path, port)
    plugin.self_check()
    in_force = sum(state.status.value == "in force" for state in plugin.states())
    patched = everything()
    plugin.unregister()
    released = everything()
    sglang_process.print_result(
        release=sglang_process.release(), in_force=in_force, patched=patched, released=released
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
