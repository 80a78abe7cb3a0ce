"""MXFP4 experts for AITER: which layout SiTUv2 takes, and a layer's way from raw bytes to packed ones.

The patches of ``sglang.srt.layers.quantization.mxfp4`` are made of these functions.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from sglang_aiter_moe.contract.layouts import deinterleave_gate_up_rows, weight_layout
from sglang_aiter_moe.contract.modes import SITUV2_A4W4, SITUV2_A8W4
from sglang_aiter_moe.contract.plan import MoePlan
from sglang_aiter_moe.contract.scale_layouts import ScaleLayout, scale_layout
from sglang_aiter_moe.contract.spec import A16W4_KERNEL, A16W4_KERNELS
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import (
    AiterMoeQuantInfo,
    AiterQuantType,
    is_traced_or_captured,
)
from sglang_aiter_moe.srt.layers.quantization.mxfp4_checkpoint import check_and_pad
from sglang_aiter_moe.srt.layers.quantization.mxfp4_raw_form import raw_forms
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import WEIGHTS, LayerWeights, weights_of
from sglang_aiter_moe.srt.model_executor.model_runner_components import ranks

#: Where a prepared layer keeps its plan, and the tensors that AITER is called with.
PLAN = "aiter_moe_plan"
OPERANDS = "aiter_moe_operands"


def _aiter_situ_uses_gu_interleaved_weights() -> bool:
    """Whether AITER's SiTUv2 kernel on gfx950 reads w13 GU-interleaved, under the flags as they are.

    True for A8W4, False for A4W4 and, other than sglang#33838 says, for A16W4: the kernels of every
    AITER release were executed, and only A8W4's reads interleaved bytes (docs/contract.md section 0).
    ``SGLANG_AITER_MOE_A16W4_KERNEL=gu_interleaved`` states an AITER whose A16W4 kernel is built to
    read them as well. The flags are read as AITER reads them: on for exactly ``1``. ``plan_moe``
    refuses every other spelling; this function only says what the kernel does.
    """
    if os.environ.get(SITUV2_A8W4) == "1":
        return True
    if os.environ.get(SITUV2_A4W4) == "1":
        return False
    kernel = os.environ.get(A16W4_KERNEL, A16W4_KERNELS[0])
    if kernel not in A16W4_KERNELS:
        raise ContractError(
            f"{A16W4_KERNEL} is {kernel!r}",
            allowed=", ".join(A16W4_KERNELS),
            fix=f"type `export {A16W4_KERNEL}=separated`, or unset it",
        )
    return kernel == "gu_interleaved"


def prepare_weights(layer: Any, plan: MoePlan) -> None:
    """Brings a layer's raw tensors into the form that its plan's kernels read, and stores the plan.

    Weights are packed in place, one expert at a time; scales too unless the layout pads them. The
    layer's parameters stay the same objects with their ``weight_loader`` and other attributes.

    Args:
        layer: with raw ``w13_weight``, ``w13_weight_scale``, ``w2_weight``, ``w2_weight_scale`` and,
            if ``plan.spec.has_bias``, ``w13_weight_bias`` and ``w2_weight_bias``; see
            :mod:`.mxfp4_checkpoint`. Afterwards scales have their packed, 2-D shape, biases are
            float32 with the gate half first, ``layer.aiter_moe_plan`` is the plan, and the weights
            carry the attribute ``is_shuffled`` that AITER looks at.
        plan: from ``plan_moe``. A layer that already has these bytes only takes over the plan; one
            that was opened for an update (:mod:`.mxfp4_reload`) is packed again, where it was.

    Raises:
        ContractError: the tensors do not fit the plan, the layer is laid out otherwise, or somebody wrote to it
            around its loaders.
    """
    prepared = getattr(layer, PLAN, None)
    state = weights_of(layer)
    if prepared is not None:
        if prepared.bytes_key() != plan.bytes_key():
            raise ContractError(
                f"{plan.spec.name} is already laid out as {prepared.w13_layout} by another plan",
                allowed="one layout from load to the next load",
                fix="load the checkpoint again, or unpack the layer first",
            )
        setattr(layer, PLAN, plan)
        if state is not None:
            state.plan = plan
            state.verify()
            state.close()
        return
    forms = raw_forms(layer, plan)
    check_and_pad(layer, plan)
    interleaved = plan.spec.gate_up_interleaved
    for name, layout, mixed in (
        ("w13_weight", plan.w13_layout, interleaved),
        ("w2_weight", plan.w2_layout, False),
    ):
        raw = getattr(layer, name).data
        weight_layout(layout).pack(raw, raw, gate_up_interleaved=mixed, what=name)
    for name, layout, mixed in (
        ("w13_weight_scale", plan.w13_scale_layout, interleaved),
        ("w2_weight_scale", plan.w2_scale_layout, False),
    ):
        _pack_scale(getattr(layer, name), scale_layout(layout), mixed, name)
    bias = getattr(layer, "w13_weight_bias", None)
    if plan.spec.has_bias and interleaved:
        bias.data = deinterleave_gate_up_rows(bias.data.unsqueeze(-1)).squeeze(-1)
    mark_prepared(layer, plan)
    setattr(layer, WEIGHTS, LayerWeights(layer, plan, forms))


def restore_raw(layer: Any) -> None:
    """Brings a prepared layer's tensors back into the raw form that its loaders write, in place.

    What SGLang calls ``restore_weights_before_loading``. Calls refuse until :func:`prepare_weights`.
    A layer that is raw stays as it is.
    """
    state = weights_of(layer)
    if state is not None:
        state.open()


def mark_prepared(layer: Any, plan: MoePlan) -> None:
    """Records that a layer's tensors are packed by ``plan``, for the runner and for AITER."""
    for name in ("w13_weight", "w2_weight"):
        # AITER's only sign; lost by every view, copy and new Parameter, hence never read by us.
        getattr(layer, name).is_shuffled = True
    setattr(layer, OPERANDS, (_fp4_view(layer.w13_weight), _fp4_view(layer.w2_weight)))
    setattr(layer, PLAN, plan)
    ranks.announce()


def moe_quant_info(layer: Any, expert_mask: torch.Tensor | None = None) -> AiterMoeQuantInfo:
    """What the runner needs of a prepared layer.

    Args:
        layer: after :func:`prepare_weights`.
        expert_mask: with expert parallelism, the dispatcher's.

    Raises:
        ContractError: the layer is not prepared, is being updated, an update of it failed, or somebody wrote to
            it around its loaders.
    """
    plan = getattr(layer, PLAN, None)
    if plan is None:
        raise ContractError(
            "the layer has no plan: its weights are not laid out",
            allowed="a layer after prepare_weights",
            fix="call prepare_weights(layer, plan_moe(spec, target)) once the checkpoint is loaded",
        )
    state = weights_of(layer)
    w13, w2 = getattr(layer, OPERANDS)
    if state is not None and not state.is_callable:
        state.refuse_call()
        if not is_traced_or_captured(w13):
            state.verify()
    if not is_traced_or_captured(w13) and not _shares(w13, layer.w13_weight, w2, layer.w2_weight):
        if state is not None:
            state.verify()
        mark_prepared(layer, plan)
        w13, w2 = getattr(layer, OPERANDS)
    has_bias = plan.spec.has_bias
    return AiterMoeQuantInfo(
        w13_weight=w13,
        w2_weight=w2,
        quant_type=AiterQuantType.PER_1X32,
        w13_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
        b13=layer.w13_weight_bias if has_bias else None,
        b2=layer.w2_weight_bias if has_bias else None,
        expert_mask=expert_mask,
        doweight_stage1=plan.spec.doweight_stage1,
        hidden_pad=plan.hidden_pad,
        intermediate_pad=plan.intermediate_pad,
        swiglu_limit=plan.call_kwargs.get("swiglu_limit") or 0.0,
        gate_mode=plan.gate_mode.value,
        plan=plan,
    )


def pad_hidden_states(hidden_states: torch.Tensor, plan: MoePlan) -> torch.Tensor:
    """``[M, H]`` with zero columns up to the plan's padded hidden size; padded ones are returned as is.

    Raises:
        ContractError: the width is neither the model's nor the padded one.
    """
    width, padded = hidden_states.shape[-1], plan.padded_hidden_size
    if width == padded:
        return hidden_states
    if width != plan.spec.hidden_size:
        raise ContractError(
            f"hidden_states has {width} columns",
            allowed=f"{plan.spec.hidden_size}, or {padded} with the padding",
            fix="pass the hidden states of the layer that the plan was made for",
        )
    return torch.nn.functional.pad(hidden_states, (0, padded - width))


def _pack_scale(parameter: torch.Tensor, layout: ScaleLayout, interleaved: bool, name: str) -> None:
    raw = parameter.data
    shape = layout.packed_shape(raw.shape)
    in_place = math.prod(shape) == raw.numel()
    out = raw.view(shape) if in_place else None
    parameter.data = layout.pack(raw, out, gate_up_interleaved=interleaved, what=name)


def _fp4_view(weight: torch.Tensor) -> torch.Tensor:
    view = weight.detach().view(torch.float4_e2m1fn_x2)
    view.is_shuffled = True
    return view


def _shares(*pairs: torch.Tensor) -> bool:
    views, weights = pairs[::2], pairs[1::2]
    return all(v.data_ptr() == w.data_ptr() for v, w in zip(views, weights, strict=True))
