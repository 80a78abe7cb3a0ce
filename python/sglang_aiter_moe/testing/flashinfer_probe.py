"""SGLang's FlashInfer MXFP4 path with a stand-in for the kernel: which tensor comes back?

``python -m sglang_aiter_moe.testing.flashinfer_probe PORT MODEL``. The backend is ``auto`` on a machine
without ROCm: the only patch in force is the vendor-neutral one. The stand-in writes its ``output`` argument
and returns another tensor, as some FlashInfer releases do.
"""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import torch

from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.probe_layers import EXPERTS, HIDDEN, INTER, TOPK

TOKENS = 3


def kernel(*args: Any, output: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """Stands for ``trtllm_fp4_block_scale_moe``."""
    output.fill_(7)
    return [torch.full_like(output, 9)]


def bypassed_dispatch() -> Any:
    from sglang.srt.layers.moe import topk as module
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    config = module.TopKConfig(top_k=TOPK)
    logits = torch.zeros(TOKENS, EXPERTS)
    topk = module.BypassedTopKOutput(x, logits, config, None, None)
    return StandardDispatchOutput(hidden_states=x, hidden_states_scale=None, topk_output=topk)


def layer_tensors() -> dict[str, Any]:
    one = torch.zeros(1)
    return {
        "w13_weight": one,
        "w2_weight": one,
        "w13_weight_scale": one,
        "w2_weight_scale": one,
        "w13_weight_bias": one,
        "w2_weight_bias": one,
        "gemm1_alpha": one,
        "gemm1_beta": one,
        "gemm1_clamp_limit": one,
    }


def by_method(dispatched: Any) -> Any:
    """Up to 0.5.19 the kernel is called in ``Mxfp4MoEMethod.apply``."""
    from sglang.srt.layers.quantization import mxfp4

    mxfp4.trtllm_fp4_block_scale_moe, mxfp4._is_cpu = kernel, False
    method = object.__new__(mxfp4.Mxfp4MoEMethod)
    method.__dict__.update(
        use_deep_gemm=False,
        use_mega_moe=False,
        use_marlin=False,
        use_flashinfer=True,
        _fi_kernel="trtllm_sm100",
        flashinfer_mxfp4_moe_precision="bf16",
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTER,
        moe_runner_config=SimpleNamespace(activation="silu"),
    )
    layer = SimpleNamespace(
        **layer_tensors(), num_experts=EXPERTS, num_local_experts=EXPERTS, moe_ep_rank=0
    )
    return method.apply(layer, dispatched)


def by_runner(dispatched: Any) -> Any:
    """From 0.5.20 it is called in the runner."""
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm

    sys.modules["flashinfer"] = types.ModuleType("flashinfer")
    sys.modules["flashinfer"].trtllm_fp4_block_scale_moe = kernel
    quant_info = flashinfer_trtllm.FlashInferTrtllmGenMxfp4MoeQuantInfo(
        **layer_tensors(),
        global_num_experts=EXPERTS,
        local_expert_offset=0,
        local_num_experts=EXPERTS,
        intermediate_size_per_partition=INTER,
        hidden_size=HIDDEN,
        flashinfer_mxfp4_moe_precision="bf16",
    )
    run = flashinfer_trtllm._fused_experts_flashinfer_mxfp4_sm100_trtllm_gen
    return run(dispatched, quant_info, SimpleNamespace(activation="silu"))


def observe() -> dict[str, Any]:
    from sglang.srt.layers import zero_copy_context
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm

    flashinfer_trtllm.trtllm_moe_enable_pdl = lambda *args: False
    new = hasattr(flashinfer_trtllm, "_fused_experts_flashinfer_mxfp4_sm100_trtllm_gen")
    buffer = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    with zero_copy_context.set_moe_output(buffer):
        result = (by_runner if new else by_method)(bypassed_dispatch()).hidden_states
    return {"is_published": result is buffer, "value": result.float().mean().item()}


def main(port: int, model_path: str) -> None:
    from sglang_aiter_moe import plugin

    sglang_process.become_single_rank(model_path, port)
    plugin.self_check()
    patched = observe()
    states = [state.as_dict() for state in plugin.states()]
    plugin.unregister()
    sglang_process.print_result(
        release=sglang_process.release(), patched=patched, released=observe(), states=states
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
