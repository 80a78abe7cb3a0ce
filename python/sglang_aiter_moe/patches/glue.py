"""What stands between SGLang's signatures and the functions of ``srt``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe import topk as bias_policy
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner


def quant_info_with_plan(original: type) -> type:
    """SGLang's ``AiterMoeQuantInfo`` with the fields ``gate_mode`` and ``plan``."""

    @dataclass
    class AiterMoeQuantInfo(original):
        gate_mode: str = "separated"
        plan: Any = None

    return _named_like(original, AiterMoeQuantInfo)


def runner_input_with_output(original: type) -> type:
    """SGLang's ``AiterRunnerInput`` with the field ``output``, which it has from 0.5.22."""

    @dataclass
    class AiterRunnerInput(original):
        output: torch.Tensor | None = None

    return _named_like(original, AiterRunnerInput)


def _named_like(original: type, cls: type) -> type:
    cls.__module__, cls.__qualname__ = original.__module__, original.__qualname__
    return cls


def run(
    original: Any,
    core: Any,
    runner_input: Any,
    quant_info: Any,
    running_state: dict,
    hooks: Any = None,
) -> Any:
    """``AiterRunnerCore.run``: layers with a plan or a stated ``gate_mode`` by it, all others as SGLang calls them.

    The published output buffer is returned in both cases.
    """
    plan = getattr(quant_info, "plan", None)
    if plan is not None or getattr(quant_info, "gate_mode", "separated") != "separated":
        output_class, extras = _of_this_release()
        return output_class(
            runner.compute(core.config, runner_input, quant_info, running_state, extras=extras)
        )
    output = original(core, runner_input, quant_info, running_state, hooks)
    if not zero_copy_context.is_published():
        return output
    return _delivered(output, runner_input)


@functools.cache
def _of_this_release() -> tuple[type, dict[str, Any]]:
    """SGLang's ``AiterRunnerOutput``, and what the release adds to every ``fused_moe`` call."""
    from sglang.srt.layers.moe.moe_runner import aiter

    policy = getattr(aiter, "_MOE_SORTING_DISPATCH_POLICY", None)
    extras = {} if policy is None else {"moe_sorting_dispatch_policy": policy}
    return aiter.AiterRunnerOutput, extras


def _delivered(output: Any, runner_input: Any) -> Any:
    result = output.hidden_states
    if getattr(runner_input, "output", None) is not None or not isinstance(result, torch.Tensor):
        return output
    buffer = zero_copy_context.get_moe_output_spec(result.shape, result.dtype, result.device)
    if buffer is None or buffer is result:
        return output
    output.hidden_states = zero_copy_context.deliver(result, buffer)
    return output


def select_experts(
    original: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    topk_config: Any,
    **kwargs: Any,
) -> Any:
    """``select_experts`` on logits that are at least as wide as the correction bias."""
    router_logits = bias_policy.select_experts_inputs(
        router_logits,
        topk_config,
        dynamic_expert_bias=kwargs.get("dynamic_expert_bias"),
        router_logits_partials=kwargs.get("router_logits_partials"),
    )
    return original(hidden_states, router_logits, topk_config, **kwargs)


def refresh_biases_after(original: Any, *args: Any, **kwargs: Any) -> Any:
    """After weights were updated: what captured graphs read follows the parameters."""
    result = original(*args, **kwargs)
    bias_policy.refresh_correction_biases()
    return result


def flashinfer_apply(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """``Mxfp4MoEMethod.apply`` up to 0.5.19: FlashInfer writes the published buffer, which is returned."""
    published = _published_for(dispatch_output) if method.use_flashinfer else None
    return _with_published(original(method, layer, dispatch_output), published)


def flashinfer_runner(original: Any, dispatch_output: Any, quant_info: Any, config: Any) -> Any:
    """FlashInfer's MXFP4 runner from 0.5.20: the published buffer, which it writes, is returned."""
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


def switched_on(original: Any) -> bool:
    """The value of a switch that SGLang only sets on ROCm."""
    return True


def aiter_biased_grouped_topk(original: Any) -> Any:
    """AITER's function, as SGLang imports it on ROCm."""
    from aiter import biased_grouped_topk

    return biased_grouped_topk


def aiter_fused_topk(original: Any) -> Any:
    """AITER's function, as SGLang imports it on ROCm."""
    from aiter.fused_moe import fused_topk

    return fused_topk
