"""What stands between SGLang's signatures and the functions of ``srt``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe import topk as bias_policy
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner
from sglang_aiter_moe.srt.layers.quantization import mxfp4_method
from sglang_aiter_moe.srt.model_executor.model_runner_components import weight_updater


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


def create_weights(original: Any, method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """``Mxfp4MoEMethod.create_weights``: ours for layers that run through AITER.

    A second place for the self-check: the guard is gone where its module was imported again, or another
    plugin puts its own class in place of ``FusedMoE``.
    """
    from sglang_aiter_moe import plugin

    plugin.check_once()
    ours = mxfp4_method.takes_aiter_path(method)
    (mxfp4_method.create_weights if ours else original)(method, layer, *args, **kwargs)


def create_moe_runner(original: Any, method: Any, layer: Any, moe_runner_config: Any) -> None:
    """``Mxfp4MoEMethod.create_moe_runner``: ours for planned layers."""
    ours = mxfp4_method.is_planned(layer)
    (mxfp4_method.create_moe_runner if ours else original)(method, layer, moe_runner_config)


def process_weights_after_loading(original: Any, method: Any, layer: Any) -> None:
    """``Mxfp4MoEMethod.process_weights_after_loading``: ours for planned layers."""
    ours = mxfp4_method.is_planned(layer)
    (mxfp4_method.process_weights_after_loading if ours else original)(method, layer)


def apply(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
    """``Mxfp4MoEMethod.apply``: ours for planned layers."""
    ours = mxfp4_method.is_planned(layer)
    return (mxfp4_method.apply if ours else original)(method, layer, dispatch_output)


def run(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AiterRunnerCore.run``: layers with a plan or a stated ``gate_mode`` by it, all others as SGLang calls them.

    The published output buffer is returned in both cases. Every MoE layer of a server passes here at every
    step, whatever its weights are: hence one frame around SGLang's function, and :func:`quant_type`.
    """

    @functools.wraps(original)
    def patched(
        core: Any, runner_input: Any, quant_info: Any, running_state: dict, hooks: Any = None
    ) -> Any:
        if runner.is_stated(quant_info):
            output_class, extras = _of_this_release()
            return output_class(
                runner.compute(core.config, runner_input, quant_info, running_state, extras=extras)
            )
        output = original(core, runner_input, quant_info, running_state, hooks)
        return runner.delivered(output, runner_input) if is_published() else output

    is_published = zero_copy_context.is_published
    return patched


def quant_type(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_aiter_quant_type``: SGLang imports AITER's enum at every call, here the answer is kept.

    Another ``aiter`` in this process gives other answers.
    """
    known: dict[Any, Any] = {}
    package = None

    @torch.compiler.assume_constant_result
    @functools.wraps(original)
    def patched(quant_type: Any) -> Any:
        nonlocal package
        aiter = sys.modules.get("aiter")
        if aiter is not package:
            known.clear()
            package = aiter
        found = known.get(quant_type._value_)  # an Enum member's own hash is a Python function
        if found is None:
            found = known[quant_type._value_] = original(quant_type)
        return found

    return patched


@functools.cache
def _of_this_release() -> tuple[type, dict[str, Any]]:
    """SGLang's ``AiterRunnerOutput``, and what the release adds to every ``fused_moe`` call."""
    from sglang.srt.layers.moe.moe_runner import aiter

    policy = getattr(aiter, "_MOE_SORTING_DISPATCH_POLICY", None)
    return aiter.AiterRunnerOutput, {} if policy is None else {
        "moe_sorting_dispatch_policy": policy
    }


def select_experts(
    original: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    topk_config: Any,
    **kwargs: Any,
) -> Any:
    """``select_experts`` on logits that are at least as wide as the correction bias.

    While a graph is captured or code is traced, the config carries the copy of the bias that stays up to date.
    """
    dynamic = kwargs.get("dynamic_expert_bias")
    partials = kwargs.get("router_logits_partials")
    router_logits = bias_policy.select_experts_inputs(
        router_logits,
        topk_config,
        dynamic_expert_bias=dynamic,
        router_logits_partials=partials,
        strided_rows=_takes_strided_rows(),
    )
    bias = topk_config.correction_bias
    readers = bias
    if dynamic is None and partials is None:
        readers = bias_policy.bias_for_readers(topk_config, router_logits)
    if readers is bias:
        return original(hidden_states, router_logits, topk_config, **kwargs)
    topk_config.correction_bias = readers
    try:
        return original(hidden_states, router_logits, topk_config, **kwargs)
    finally:
        topk_config.correction_bias = bias


def _takes_strided_rows() -> bool:
    """Whether AITER's biased top-k takes rows with a stride: since aiter#4397, which also brought SiTUv2."""
    if torch.compiler.is_compiling():
        return False  # a copy costs nothing there, and a look at sys.modules cannot be traced
    activations = getattr(sys.modules.get("aiter"), "ActivationType", None)
    return hasattr(activations, "Situv2")


def topk_config_init(original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """``TopKConfig.__init__``: the owner of the bias's copies is there before anything is traced."""
    original(config, *args, **kwargs)
    bias_policy.correction_bias_of(config)


def restore_before_loading(original: Any, model: torch.nn.Module, target_device: Any) -> None:
    """``DefaultModelLoader.restore_weights_before_loading``, and then the layers that are laid out."""
    original(model, target_device)
    weight_updater.restore_raw_in(model)


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
