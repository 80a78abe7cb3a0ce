"""Runs a layer's experts through ``aiter.fused_moe``: one call, one ``gate_mode``, one output buffer.

The names, fields and results are those of ``sglang.srt.layers.moe.moe_runner.aiter`` (0.5.17 to
0.5.23), so that the same code runs with and without SGLang. Two fields are new: ``gate_mode``, which
says what the packed bytes are, and ``plan``, the layer's :class:`~sglang_aiter_moe.contract.plan.MoePlan`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt import switch
from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter_api, expert_ids
from sglang_aiter_moe.srt.layers.moe.moe_runner.call_arguments import (
    activation_name,
    call_arguments,
    check_planned_input,
    resolve_gate_mode,
)

__all__ = [
    "AiterMoeQuantInfo",
    "AiterQuantType",
    "AiterRunnerCore",
    "AiterRunnerInput",
    "AiterRunnerOutput",
    "compute",
    "delivered",
    "is_stated",
    "resolve_gate_mode",
]


class AiterQuantType(str, Enum):  # noqa: UP042, as in SGLang
    """Members of ``aiter.QuantType`` by name."""

    NONE = "No"
    PER_TOKEN = "per_Token"
    PER_128X128 = "per_128x128"
    PER_1X32 = "per_1x32"


@dataclass
class AiterMoeQuantInfo:
    """A layer's weights as AITER takes them.

    Shapes: ``E`` local experts, ``I`` intermediate and ``H`` hidden size including their pads.

    Attributes:
        w13_weight, w2_weight: ``[E, 2I, H/2]`` and ``[E, H, I/2]``, two E2M1 codes a byte, packed.
        w13_scale, w2_scale: E8M0, in the packed scale layout.
        a13_scale, a2_scale: static activation scales; None for MXFP4.
        b13, b2: float32 ``[E, 2I]`` and ``[E, H]``, or None.
        expert_mask: int32, non-zero where an expert is here; None without expert parallelism.
        doweight_stage1: the routing weight multiplies before the activation.
        hidden_pad, intermediate_pad: how many of ``H`` and ``I`` are padding.
        swiglu_limit: clamp of gate and up; 0: none.
        fp8_activations: MXFP4 experts with MXFP8 activations at any token count (SGLang 0.5.23).
        fused_moe_kwargs: further keywords for ``fused_moe``; ``gate_mode`` and ``activation`` in it
            are taken out and resolved.
        gate_mode: what the packed w13 rows are. ``separated`` is also what the field says when
            nobody wrote it, so it gives way to the other writers (:func:`resolve_gate_mode`).
        plan: the layer's plan; None for layers that no plan was made for.
    """

    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    quant_type: AiterQuantType = AiterQuantType.NONE
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    a13_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    expert_mask: torch.Tensor | None = None
    doweight_stage1: bool = False
    hidden_pad: int = 0
    intermediate_pad: int = 0
    swiglu_limit: float = 0.0
    fp8_activations: bool = False
    fused_moe_kwargs: dict[str, Any] | None = None
    gate_mode: str = "separated"
    plan: Any = None


@dataclass
class AiterRunnerInput:
    """Tokens and their routing on this rank.

    Attributes:
        hidden_states: ``[M, H]``.
        topk_ids: int32 ``[M, K]``; negative: no expert (expert parallelism only).
        topk_weights: float32 ``[M, K]``.
        quant_type: of the activations.
        a1_scale: scale of activations that the dispatcher already quantised.
        num_local_tokens: int32 tensor of one element: how many of the ``M`` rows are tokens.
        output_dtype: of the result; None: that of ``hidden_states``.
        output: buffer that the result has to be in; it is what the runner returns.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    quant_type: AiterQuantType
    a1_scale: torch.Tensor | None = None
    num_local_tokens: torch.Tensor | None = None
    output_dtype: torch.dtype | None = None
    output: torch.Tensor | None = None

    @property
    def runner_backend(self) -> Any:
        return _runner_backend()


@dataclass
class AiterRunnerOutput:
    """``hidden_states``: ``[M, H]``, or ``[M, K, H]`` with ``no_combine``."""

    hidden_states: torch.Tensor

    @property
    def runner_backend(self) -> Any:
        return _runner_backend()


class AiterRunnerCore:
    """One layer's runner.

    Args:
        config: SGLang's ``MoeRunnerConfig`` or the one of :mod:`.base`.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self._limit_gate_mode = limit_gate_mode()

    def run(
        self,
        runner_input: AiterRunnerInput,
        quant_info: AiterMoeQuantInfo,
        running_state: dict,
        hooks: Any = None,
    ) -> AiterRunnerOutput:
        """See :func:`compute`. ``hooks`` is SGLang's and unused, as in SGLang's AITER runner."""
        return AiterRunnerOutput(
            compute(
                self.config,
                runner_input,
                quant_info,
                running_state,
                limit_gate_mode=self._limit_gate_mode,
            )
        )

    @property
    def runner_backend(self) -> Any:
        return _runner_backend()


def compute(
    config: Any,
    runner_input: AiterRunnerInput,
    quant_info: AiterMoeQuantInfo,
    running_state: Mapping[str, Any] | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
    limit_gate_mode: str = "interleave",
    no_combine_supported: bool | None = None,
) -> torch.Tensor:
    """Calls ``aiter.fused_moe`` once for one layer and one batch.

    Takes this file's dataclasses or SGLang's own of the same names; a field that an older release does
    not have counts as its default.

    Args:
        config: the runner's configuration.
        runner_input: tokens and routing.
        quant_info: weights.
        running_state: what SGLang's permute step left.
        extras: keywords that the caller's SGLang release always sends
            (``moe_sorting_dispatch_policy`` from 0.5.22).
        limit_gate_mode: what a ``swiglu_limit`` without any other writer stands for.
        no_combine_supported: overrides the look at AITER's signature.

    Returns:
        ``[M, H]`` (``[M, K, H]`` with ``config.no_combine``) in ``output_dtype``. If
        ``runner_input.output`` or a published buffer fits, it is that object.

    Raises:
        NotImplementedError: ``no_combine`` with an AITER that has no such keyword.
        ContractError: the plan no longer holds, two writers differ, or the input is bad.
    """
    no_combine = config.no_combine
    if no_combine:
        if no_combine_supported is None:
            no_combine_supported = _aiter_fused_moe_supports_no_combine()
        if not no_combine_supported:
            raise NotImplementedError(
                "no_combine=True, but aiter.fused_moe has no keyword `no_combine`. Use an AITER "
                "build that has it, or a runner backend that returns the experts' outputs uncombined."
            )

    hidden_states = runner_input.hidden_states
    shape = hidden_states.shape  # each look at it makes a new one
    buffer = None if no_combine else _output_buffer(runner_input, quant_info)
    if shape[0] == 0:
        return _empty_result(runner_input, quant_info, no_combine, buffer)

    plan = getattr(quant_info, "plan", None)
    if plan is not None and not is_traced_or_captured(hidden_states):
        check_planned_input(runner_input, plan, shape)
        plan.check_still_holds()

    quant_type = runner_input.quant_type._value_  # .value is a Python property
    activation = activation_name(config, plan)
    aiter_api.refresh(activation, quant_type)
    api = aiter_api.current()
    arguments = call_arguments(
        config,
        runner_input,
        quant_info,
        plan,
        api.activations[activation],
        api.quant_types[quant_type],
        api,
        limit_gate_mode,
    )
    if extras:
        for name, value in extras.items():
            arguments.setdefault(name, value)
    if no_combine:
        arguments["no_combine"] = True
    elif buffer is not None:
        if "output" in arguments or arguments.get("stage2_scatter") is not None:
            buffer = None  # the caller has its own destination
        elif api.takes_output and _kernel_may_write(buffer, hidden_states, quant_info):
            arguments["output"] = buffer

    if quant_info.expert_mask is not None:
        arguments["topk_ids"], arguments["topk_weight"] = expert_ids.reroute_invalid(
            runner_input.topk_ids, runner_input.topk_weights, quant_info, running_state
        )
    try:
        result = api.fused_moe(**arguments)
    except IndexError as error:
        raise expert_ids.out_of_range(arguments["topk_ids"], quant_info) from error
    return result if buffer is None else zero_copy_context.deliver(result, buffer)


def is_stated(quant_info: Any) -> bool:
    """Whether somebody says what a layer's bytes are, by a plan or a ``gate_mode``: then :func:`compute` calls."""
    if getattr(quant_info, "plan", None) is not None:
        return True
    return getattr(quant_info, "gate_mode", "separated") != "separated"


def delivered(output: Any, runner_input: Any) -> Any:
    """What SGLang's own call of ``fused_moe`` returned, in the published buffer if there is one that fits."""
    result = output.hidden_states
    if not zero_copy_context.is_published() or not isinstance(result, torch.Tensor):
        return output
    if not switch.enabled() or getattr(runner_input, "output", None) is not None:
        return output
    buffer = zero_copy_context.get_moe_output_spec(result.shape, result.dtype, result.device)
    if buffer is not None and buffer is not result:
        output.hidden_states = zero_copy_context.deliver(result, buffer)
    return output


def is_traced_or_captured(tensor: torch.Tensor) -> bool:
    """Whether this runs once to be replayed: torch.compile, FakeTensor or a CUDA/HIP graph capture.

    There the plan was checked by the eager calls before, and reading the environment would freeze it.
    """
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def limit_gate_mode() -> str:
    """What SGLang's loaders did to layers with a ``swiglu_limit`` and no plan (sglang#26208).

    They interleave unless ``SGLANG_USE_AITER_MOE_GU_ITLV`` is off.
    """
    raw = os.environ.get("SGLANG_USE_AITER_MOE_GU_ITLV", "true")
    return "separated" if raw.lower() in ("false", "0", "no", "n") else "interleave"


def _aiter_fused_moe_supports_no_combine() -> bool:
    """Whether the installed ``aiter.fused_moe`` names ``no_combine`` (SGLang's name for the probe)."""
    aiter_api.refresh()
    return aiter_api.current().takes_no_combine


def _aiter_fused_moe_supports_output() -> bool:
    """Whether the installed ``aiter.fused_moe`` names ``output`` (SGLang's name for the probe)."""
    aiter_api.refresh()
    return aiter_api.current().takes_output


def _output_buffer(
    runner_input: AiterRunnerInput, quant_info: AiterMoeQuantInfo
) -> torch.Tensor | None:
    """Where the result has to be: the input's ``output``, else what a caller has published."""
    output = getattr(runner_input, "output", None)  # from SGLang 0.5.22
    if output is None and not zero_copy_context.is_published():
        return None
    hidden_states = runner_input.hidden_states
    tokens, width = hidden_states.shape[0], quant_info.w2_weight.shape[1]
    dtype = runner_input.output_dtype or hidden_states.dtype
    if output is not None:
        if output.dtype != dtype or tuple(output.shape) != (tokens, width):
            raise ContractError(
                f"AiterRunnerInput.output is {tuple(output.shape)} {output.dtype}",
                allowed=f"{(tokens, width)} {dtype}, the shape and dtype of the result",
                fix="pass a view of that shape, or None",
            )
        return output
    published = zero_copy_context.get_moe_output_spec
    found = published((tokens, width), dtype, hidden_states.device)
    plan = getattr(quant_info, "plan", None)
    if found is None and plan is not None and plan.spec.hidden_size != width:
        # The model's width is the one without padding (gpt-oss: 2880 of 3072).
        found = published((tokens, plan.spec.hidden_size), dtype, hidden_states.device)
    return found


def _kernel_may_write(
    buffer: torch.Tensor, hidden_states: torch.Tensor, quant_info: AiterMoeQuantInfo
) -> bool:
    if buffer.shape[-1] != quant_info.w2_weight.shape[1]:
        return False
    if torch.compiler.is_compiling() or isinstance(buffer, FakeTensor):
        return buffer is not hidden_states
    return zero_copy_context.kernel_may_write(buffer, hidden_states)


def _empty_result(
    runner_input: AiterRunnerInput,
    quant_info: AiterMoeQuantInfo,
    no_combine: bool,
    buffer: torch.Tensor | None,
) -> torch.Tensor:
    """No tokens: AITER is not called (it fails on empty tensors, sglang#38773)."""
    if buffer is not None:
        return buffer
    hidden_states = runner_input.hidden_states
    dtype = runner_input.output_dtype or hidden_states.dtype
    if no_combine:
        topk = runner_input.topk_ids.shape[-1]
        return hidden_states.new_empty((0, topk, hidden_states.shape[-1]), dtype=dtype)
    if dtype == hidden_states.dtype:
        return hidden_states
    return hidden_states.new_empty((0, quant_info.w2_weight.shape[1]), dtype=dtype)


def _runner_backend() -> Any:
    """SGLang's ``MoeRunnerBackend.AITER`` where SGLang is imported, else its value."""
    utils = sys.modules.get("sglang.srt.layers.moe.utils")
    return "aiter" if utils is None else utils.MoeRunnerBackend.AITER
