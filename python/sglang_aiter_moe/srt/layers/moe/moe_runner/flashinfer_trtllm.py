"""FlashInfer's MXFP4 kernel writes the published buffer; then that buffer has to come back."""

from __future__ import annotations

from typing import Any

import torch

from sglang_aiter_moe.srt.layers import zero_copy_context


def apply(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Around ``Mxfp4MoEMethod.apply`` up to 0.5.19, which calls the kernel itself."""
    published = _published_for(dispatch_output) if method.use_flashinfer else None
    return _with_published(original(method, layer, dispatch_output), published)


def fused_experts(original: Any, dispatch_output: Any, quant_info: Any, config: Any) -> Any:
    """Around ``_fused_experts_flashinfer_mxfp4_sm100_trtllm_gen`` from 0.5.20."""
    published = _published_for(dispatch_output)
    return _with_published(original(dispatch_output, quant_info, config), published)


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
