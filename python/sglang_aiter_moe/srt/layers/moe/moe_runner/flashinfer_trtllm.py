"""FlashInfer's MXFP4 kernel: the published buffer that it writes comes back, and its routing bias stays wide."""

from __future__ import annotations

from typing import Any

import torch

from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe import topk as bias_policy


def apply(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Around ``Mxfp4MoEMethod.apply`` up to 0.5.19, which calls the kernel itself."""
    published = _published_for(dispatch_output) if method.use_flashinfer else None
    return _with_published(original(method, layer, dispatch_output), published)


def fused_experts(original: Any, dispatch_output: Any, quant_info: Any, config: Any) -> Any:
    """Around ``_fused_experts_flashinfer_mxfp4_sm100_trtllm_gen`` from 0.5.20."""
    published = _published_for(dispatch_output)
    return _with_published(original(dispatch_output, quant_info, config), published)


def situ_routing_bias(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """SiTUv2 through FlashInfer's TRT-LLM kernel (SM100), which routes by itself with a bf16 bias.

    SGLang rounds the bias to bf16 once and keeps that on the layer. The kernel's routing takes no other dtype, so
    a bias that bf16 cannot hold is routed by ``select_experts`` instead (``to_standard``; the kernel takes
    chosen experts for SiTUv2, too). One that is bf16 already is looked at again in every call.
    """
    output = getattr(dispatch_output, "topk_output", None)
    config = getattr(output, "topk_config", None)
    bias = getattr(config, "correction_bias", None)
    runner = getattr(method, "moe_runner_config", None)
    if bias is None or getattr(runner, "activation", None) != "situ":
        return original(method, layer, dispatch_output)
    if bias_policy.is_narrower(torch.bfloat16, bias.dtype):
        layer_id = getattr(layer, "layer_id", None)
        dispatch_output = dispatch_output._replace(topk_output=output.to_standard(layer_id))
    else:
        # The parameter itself: where only this patch acts, nothing would bring a copy up to date.
        layer._situ_routing_bias_bf16 = bias.to(torch.bfloat16)
    return original(method, layer, dispatch_output)


def _published_for(dispatch_output: Any) -> torch.Tensor | None:
    hidden_states = dispatch_output.hidden_states
    shape = (hidden_states.shape[0], hidden_states.shape[-1])
    return zero_copy_context.get_moe_output_spec(shape, torch.bfloat16, hidden_states.device)


def _with_published(combine_input: Any, published: torch.Tensor | None) -> Any:
    result = combine_input.hidden_states
    # A deferred finalize returns no tensor: nothing has been written yet.
    if published is None or result is published or not isinstance(result, torch.Tensor):
        return combine_input
    return combine_input._replace(hidden_states=published)
