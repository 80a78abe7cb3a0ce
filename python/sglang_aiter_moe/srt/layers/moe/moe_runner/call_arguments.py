"""The keywords of one ``fused_moe`` call, each with exactly one writer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter_api import ACTIVATION_TYPES, AiterApi

GATE_MODES = ("separated", "interleave")

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int32, torch.int64)

# What a layer's own keywords may not replace.
OPERANDS = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "quant_type")

# AITER's SwiGLU-OAI has both constants built in (docs/contract.md section c, swiglu_limit).
SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_BETA = 1.0


def resolve_gate_mode(
    *, plan: str | None, kwargs: str | None, limit: str | None, field: str
) -> str:
    """What ``gate_mode`` the call carries.

    The first that is there decides: the layer's plan, ``fused_moe_kwargs['gate_mode']``, what a
    ``swiglu_limit`` stands for, ``AiterMoeQuantInfo.gate_mode``. The plan, the keyword and a field
    that says something else than its default are statements about the bytes, and must agree; the
    limit is only a hint, from SGLang releases that had no field.

    Args:
        plan, kwargs: the gate mode by these writers, None where they say nothing.
        limit: what the limit stands for, None without a limit.
        field: ``AiterMoeQuantInfo.gate_mode``.

    Raises:
        ContractError: two statements differ, or one is not a gate mode.
    """
    stated = plan
    if kwargs is not None:
        if stated is not None and stated != kwargs:
            raise _two_writers("plan.gate_mode", stated, "fused_moe_kwargs['gate_mode']", kwargs)
        stated = kwargs
    if field != "separated":
        if stated is not None and stated != field:
            writer = "plan.gate_mode" if plan else "fused_moe_kwargs['gate_mode']"
            raise _two_writers(writer, stated, "AiterMoeQuantInfo.gate_mode", field)
        stated = field
    if stated is None:
        stated = field if limit is None else limit
    if stated not in GATE_MODES:
        raise ContractError(
            f"gate_mode={stated!r}",
            allowed="'separated' (all gate rows, then all up rows) or 'interleave'",
            fix="pass the one that w13 was packed for",
        )
    return stated


def check_planned_input(runner_input: Any, plan: Any, shape: torch.Size) -> None:
    """Tokens and routing of a call against the layer's plan; only shapes and dtypes are looked at.

    AITER takes the number of tokens from ``topk_ids`` and the widths from the weights, and reads what
    is there.

    Args:
        runner_input: an ``AiterRunnerInput``.
        plan: the layer's plan.
        shape: of its ``hidden_states``.

    Raises:
        ContractError: naming the tensor that does not fit.
    """
    hidden_states, ids = runner_input.hidden_states, runner_input.topk_ids
    weights, width = runner_input.topk_weights, plan.padded_hidden_size
    routing = ids.shape
    quantised = runner_input.a1_scale is not None
    if not quantised and (
        len(shape) != 2 or shape[1] != width or hidden_states.dtype not in ACTIVATION_DTYPES
    ):
        raise ContractError(
            f"hidden_states is {tuple(shape)} {hidden_states.dtype}",
            allowed=f"(tokens, {width}) bfloat16 or float16",
            fix="pass the tokens of the layer that the plan was made for (pad_hidden_states)",
        )
    if len(routing) != 2 or routing[0] != shape[0] or ids.dtype not in ID_DTYPES:
        raise ContractError(
            f"topk_ids is {tuple(routing)} {ids.dtype} for {shape[0]} tokens",
            allowed="(tokens, top-k) int32, one row a token",
            fix="pass the routing of these tokens",
        )
    if weights.shape != routing or not weights.dtype.is_floating_point:
        raise ContractError(
            f"topk_weights is {tuple(weights.shape)} {weights.dtype} beside topk_ids {tuple(routing)}",
            allowed="float32 of the shape of topk_ids",
            fix="pass the weights that the routing gave with the ids",
        )


def activation_name(config: Any, plan: Any) -> str:
    """The activation to ask AITER for, a key of ``ACTIVATION_TYPES``.

    The plan knows it; without one, ``silu`` with an alpha is SwiGLU-OAI, as from sglang 0.5.21 on.

    Raises:
        ContractError: an activation that AITER does not have, or constants that its kernels do not.
    """
    if plan is not None:
        return plan.spec.activation._value_  # .value is a Python property
    name = config.activation
    if name not in ACTIVATION_TYPES:
        raise ContractError(
            f"activation={name!r}",
            allowed=", ".join(ACTIVATION_TYPES),
            fix="use another runner backend for this model",
        )
    alpha = config.gemm1_alpha
    if alpha is None or name not in ("silu", "swiglu"):
        return name
    beta = getattr(config, "gemm1_beta", None)
    if alpha != SWIGLU_OAI_ALPHA or beta not in (None, SWIGLU_OAI_BETA):
        raise ContractError(
            f"gemm1_alpha={alpha}, gemm1_beta={beta} for SwiGLU",
            allowed=f"{SWIGLU_OAI_ALPHA} and {SWIGLU_OAI_BETA}, which AITER has built in",
            fix="use another runner backend for this model",
        )
    return "swiglu"


def call_arguments(
    config: Any,
    runner_input: Any,
    quant_info: Any,
    plan: Any,
    activation: Any,
    quant_type: Any,
    api: AiterApi,
    limit_gate_mode: str,
) -> dict[str, Any]:
    """Every keyword of the call, in one dict: a call of keywords beside a dict copies them one by one.

    Args:
        config: the runner's configuration.
        runner_input: an ``AiterRunnerInput``.
        quant_info: an ``AiterMoeQuantInfo``.
        plan: the layer's plan, or None.
        activation: the member of ``aiter.ActivationType``.
        quant_type: the member of ``aiter.QuantType``.
        api: the AITER that is called.
        limit_gate_mode: what a ``swiglu_limit`` without other writers stands for.

    Raises:
        ContractError: two writers of one keyword differ, or AITER lacks a keyword that matters.
    """
    a1_scale = runner_input.a1_scale
    arguments = {
        "hidden_states": runner_input.hidden_states,
        "w1": quant_info.w13_weight,
        "w2": quant_info.w2_weight,
        "topk_weight": runner_input.topk_weights,
        "topk_ids": runner_input.topk_ids,
        "quant_type": quant_type,
        "activation": activation,
        "w1_scale": quant_info.w13_scale,
        "w2_scale": quant_info.w2_scale,
        "a1_scale": quant_info.a13_scale if a1_scale is None else a1_scale,
        "a2_scale": quant_info.a2_scale,
        "bias1": quant_info.b13,
        "bias2": quant_info.b2,
        "expert_mask": quant_info.expert_mask,
        "doweight_stage1": quant_info.doweight_stage1,
        "hidden_pad": quant_info.hidden_pad,
        "intermediate_pad": quant_info.intermediate_pad,
    }
    if runner_input.num_local_tokens is not None:
        arguments["num_local_tokens"] = runner_input.num_local_tokens
    if runner_input.output_dtype is not None:
        arguments["dtype"] = runner_input.output_dtype

    limit = None
    field = getattr(quant_info, "gate_mode", "separated")
    fused_moe_kwargs = quant_info.fused_moe_kwargs
    fp8_activations = getattr(quant_info, "fp8_activations", False)
    if plan is not None:
        _check_planned(quant_info, plan)
        arguments.update(plan.stated)
        agrees = field == "separated" or field == arguments["gate_mode"]
        if agrees and not fused_moe_kwargs and not fp8_activations:
            return arguments  # the usual call
    elif config.activation == "situ":
        _write_situ_betas(arguments, config)
    elif quant_info.swiglu_limit > 0:
        arguments["swiglu_limit"] = quant_info.swiglu_limit
        limit = limit_gate_mode

    kwargs_mode = None
    if fused_moe_kwargs:
        kwargs_mode = _plain(fused_moe_kwargs.get("gate_mode"))
        _write_fused_moe_kwargs(arguments, fused_moe_kwargs, plan)
    plan_mode = None if plan is None else _plain(plan.gate_mode)
    field = _plain(field)
    gate_mode = resolve_gate_mode(plan=plan_mode, kwargs=kwargs_mode, limit=limit, field=field)
    if plan_mode or kwargs_mode or limit or field != "separated" or _is_mx(runner_input):
        _write_gate_mode(arguments, gate_mode, api)
    if fp8_activations and gate_mode == "interleave":
        _write_fp8_activations(arguments, runner_input, api)
    return arguments


def _plain(mode: Any) -> Any:
    """The string of a gate mode that may be an enum member."""
    return getattr(mode, "value", mode)


def _check_planned(quant_info: Any, plan: Any) -> None:
    """What the plan was not made for may be what its kernels refuse or drop.

    The plan states fewer pads than there are where a kernel could not take them all.
    """
    spec = plan.spec
    if quant_info.expert_mask is not None:
        if not spec.expert_parallel:
            raise _not_planned("expert_mask", spec)
    elif spec.expert_parallel:
        raise ContractError(
            f"AiterMoeQuantInfo.expert_mask is None, but {spec.name} was planned for expert parallelism",
            allowed="the dispatcher's mask: without one AITER takes global expert ids for local ones",
            fix="pass layer.dispatcher.expert_mask_gpu, or plan with expert_parallel=False",
        )
    if quant_info.b13 is not None and not spec.has_bias:
        raise _not_planned("b13", spec)
    if quant_info.b2 is not None and not spec.has_bias:
        raise _not_planned("b2", spec)
    if quant_info.doweight_stage1 and not spec.doweight_stage1:
        raise _not_planned("doweight_stage1", spec)
    if quant_info.hidden_pad and quant_info.hidden_pad != plan.hidden_pad:
        raise _other_pad("hidden_pad", quant_info, plan)
    if quant_info.intermediate_pad and quant_info.intermediate_pad != plan.intermediate_pad:
        raise _other_pad("intermediate_pad", quant_info, plan)


def _other_pad(name: str, quant_info: Any, plan: Any) -> ContractError:
    given, planned = f"{name}={getattr(quant_info, name)}", f"{name}={getattr(plan, name)}"
    return _two_writers("the layer's plan", planned, "AiterMoeQuantInfo", given)


def _not_planned(name: str, spec: Any) -> ContractError:
    return ContractError(
        f"AiterMoeQuantInfo.{name} is given, but {spec.name} was planned without",
        allowed="what the plan was made for",
        fix="say so in the MoeSpec, so that plan_moe can refuse what AITER cannot do",
    )


def _is_mx(runner_input: Any) -> bool:
    """MX layers always carry a gate mode; other quantisations only if somebody states one.

    So BF16 and FP8 layers are called exactly as SGLang calls them.
    """
    return runner_input.quant_type.value == "per_1x32"


def _write_gate_mode(arguments: dict[str, Any], gate_mode: str, api: AiterApi) -> None:
    if api.takes_gate_mode:
        arguments["gate_mode"] = gate_mode
    elif gate_mode != "separated":
        raise ContractError(
            f"gate_mode={gate_mode!r}, which the installed aiter.fused_moe does not know",
            allowed="'separated', the only form of an AITER without gate_mode",
            fix="install AITER v0.1.14 or newer",
        )


def _write_situ_betas(arguments: dict[str, Any], config: Any) -> None:
    """SiTUv2's constants without a plan: AITER's defaults differ by kernel (contract.md section c)."""
    for keyword, field in (("beta", "gemm1_alpha"), ("linear_beta", "gemm1_clamp_limit")):
        value = getattr(config, field)
        if value is None or not value > 0:
            raise ContractError(
                f"MoeRunnerConfig.{field}={value!r} for activation 'situ'",
                allowed=f"a positive number: it is SiTUv2's {keyword}",
                fix=f"pass the model's {keyword} (Kimi K3: beta 4, linear_beta 25)",
            )
        arguments[keyword] = float(value)


def _write_fp8_activations(arguments: dict[str, Any], runner_input: Any, api: AiterApi) -> None:
    if runner_input.hidden_states.dtype != torch.bfloat16:
        return
    if not api.takes_quant_dtype_a:
        raise ContractError(
            "AiterMoeQuantInfo.fp8_activations=True, and aiter.fused_moe has no quant_dtype_a",
            allowed="an AITER whose fused_moe names quant_dtype_a",
            fix="install such a build, or set fp8_activations to False",
        )
    arguments.setdefault("quant_dtype_a", api.package.dtypes.fp8)


def _write_fused_moe_kwargs(
    arguments: dict[str, Any], fused_moe_kwargs: Mapping[str, Any], plan: Any
) -> None:
    """Merges the caller's own keywords; ``gate_mode`` is resolved elsewhere."""
    extra = dict(fused_moe_kwargs)
    extra.pop("gate_mode", None)
    activation = extra.pop("activation", None)
    if activation is not None:
        if plan is not None and activation != arguments["activation"]:
            raise _two_writers(
                "the layer's plan",
                arguments["activation"],
                "fused_moe_kwargs['activation']",
                activation,
            )
        arguments["activation"] = activation
    _write(arguments, extra, "fused_moe_kwargs")


def _write(arguments: dict[str, Any], more: Mapping[str, Any], writer: str) -> None:
    """Adds keywords; one that is there already has to be unset or say the same."""
    for name, value in more.items():
        if name in OPERANDS:
            raise _two_writers("the runner", "<a tensor of this call>", f"{writer}: {name}", value)
        there = arguments.get(name)
        if there is None or there is value:
            arguments[name] = value
        elif isinstance(there, torch.Tensor) or isinstance(value, torch.Tensor):
            raise _two_writers("AiterMoeQuantInfo", f"{name}=<tensor>", writer, f"{name}=<another>")
        elif there != value:
            if not there:  # 0 or False: the field's default
                arguments[name] = value
            else:
                raise _two_writers(
                    "AiterMoeQuantInfo", f"{name}={there}", writer, f"{name}={value}"
                )


def _two_writers(first: str, value: Any, second: str, other: Any) -> ContractError:
    return ContractError(
        f"{first} says {value!r}, {second} says {other!r}",
        allowed="one writer, or two that agree",
        fix=f"drop it from {second}, or prepare the layer again with a plan that says {other!r}",
    )
