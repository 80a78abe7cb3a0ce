"""What is refused, one function per kind. Each refusal names the value, what is allowed, what to do.

Source: docs/contract.md sections b.3, b.4, b.5, c and g; compile.md's facts are in section b.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from packaging.version import InvalidVersion, Version

from sglang_aiter_moe import environ
from sglang_aiter_moe.contract.capabilities import FEATURES, Capabilities
from sglang_aiter_moe.contract.families import Choice
from sglang_aiter_moe.contract.modes import ActivationMode, GateMode
from sglang_aiter_moe.contract.spec import MoeSpec, Target
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import (
    SWIGLU_ALPHA,
    SWIGLU_DEFAULT_LIMIT,
    Activation,
)

_INTEGERS = (
    "AITER_BF16_FP8_MOE_BOUND",
    "GPTOSS_SWIGLU_MXFP4_BF16_BOUND",
    "AITER_KSPLIT",
    "AITER_BYPASS_TUNE_CONFIG",
    "AITER_USE_NT",
)


def check_environment(target: Target) -> None:
    """Variables that break every layer, whatever its activation."""
    env = target.env
    for name in _INTEGERS:
        variable = environ.VARIABLES[name]
        try:
            variable.aiter_reads(env.get(name))
        except ValueError:
            raise ContractError(
                f"{name}={env[name]!r} is no integer: AITER raises ValueError {_when(variable)}",
                allowed=f"{name} unset ({variable.default}) or an integer",
                fix=f"type `unset {name}`",
            ) from None
    if target.arch == "gfx1250":
        _check_grouped_path(env)
        return
    for name in ("AITER_USE_GROUPED_GEMM", "AITER_FORCE_GFX1250"):
        if environ.VARIABLES[name].aiter_reads(env.get(name)):
            raise ContractError(
                f"{name}={env[name]!r} sends {target.arch} to the gfx1250 kernels, which read another layout",
                allowed=f"{name} unset or 0 on {target.arch}",
                fix=f"type `unset {name}`",
            )


def _check_grouped_path(env: Mapping[str, str]) -> None:
    disable, override = "AITER_DISABLE_GROUPED_A8W4", "AITER_GROUPED_STAGE1_WEIGHT_LAYOUT"
    if environ.VARIABLES[disable].aiter_reads(env.get(disable)):
        raise ContractError(
            f"{disable}={env[disable]!r} leaves gfx1250 without a kernel that reads its layout",
            allowed=f"{disable} unset or 0",
            fix=f"type `unset {disable}`",
        )
    if environ.VARIABLES[override].aiter_reads(env.get(override)) not in ("", "gugu"):
        raise ContractError(
            f"{override}={env[override]!r} makes the grouped kernels read another layout than is laid out",
            allowed=f"{override} unset or gugu",
            fix=f"type `unset {override}`",
        )


def check_aiter(spec: MoeSpec, target: Target) -> None:
    """An AITER that is too old for the layer, or whose FlyDSL does not fit."""
    capabilities = target.capabilities
    _need(capabilities, "pads_and_bias", "hidden_pad, intermediate_pad and biases")
    _need(capabilities, "gate_mode", "the gate_mode keyword")
    _need(capabilities, "gate_mode_decides", "a gate_mode that decides the activation type")
    if spec.activation is Activation.SITUV2:
        _need(capabilities, "situv2", "SiTUv2")
    if target.arch == "gfx1250":
        _need(capabilities, "gfx1250_shuffle", "the gfx1250 layouts and grouped kernels")
        if not capabilities.flydsl_available:
            raise ContractError(
                "FlyDSL is not available to AITER on gfx1250, whose grouped kernels need it",
                allowed="an installed flydsl",
                fix=f"type `pip install flydsl=={capabilities.flydsl_needed or '0.3.1'}`",
            )
    if spec.no_combine and not capabilities.has("no_combine"):
        raise ContractError(
            f"no_combine is set for {spec.name}, and AITER ({capabilities.name}) has no such keyword",
            allowed="no_combine unset with this AITER",
            fix="combine the experts' results, or use another MoE backend for this layer",
        )
    needed, have = capabilities.flydsl_needed, capabilities.flydsl
    if capabilities.flydsl_available and needed and have and _is_older(have, needed):
        raise ContractError(
            f"flydsl is {have}, and AITER ({capabilities.name}) is built for {needed}: AITER's own check "
            "passes, and its kernels then fail to build at the first request",
            allowed=f"flydsl {needed}",
            fix=f"type `pip install flydsl=={needed}`",
        )


def _is_older(have: str, needed: str) -> bool:
    try:
        return Version(have) < Version(needed)
    except InvalidVersion:
        raise ContractError(
            f"flydsl states the version {have!r}, which cannot be compared with {needed}",
            allowed=f"flydsl {needed}",
            fix=f"type `pip install flydsl=={needed}`",
        ) from None


def _need(capabilities: Capabilities, feature: str, what: str) -> None:
    if not capabilities.has(feature):
        since = FEATURES[feature].since
        raise ContractError(
            f"AITER ({capabilities.name}) has not got {what}",
            allowed=f"AITER v{since} or newer",
            fix=f"install AITER v{since} or newer",
        )


def check_layer(spec: MoeSpec) -> None:
    """What no kernel computes for this layer, on any architecture."""
    if spec.activation is Activation.SITUV2:
        _check_situv2(spec)
    if spec.activation is Activation.SWIGLU and spec.alpha != SWIGLU_ALPHA:
        raise ContractError(
            f"alpha is {spec.alpha} for {spec.name}: AITER's SwiGLU has {SWIGLU_ALPHA} built in",
            allowed=f"alpha = {SWIGLU_ALPHA}",
            fix="use another MoE backend for this model",
        )
    if spec.swiglu_limit is not None and spec.swiglu_limit < 0:
        raise ContractError(
            f"swiglu_limit is {spec.swiglu_limit} for {spec.name}",
            allowed="None, 0 (both: none stated) or a positive number",
            fix="take it from the model's config",
        )
    if spec.doweight_stage1:
        raise ContractError(
            f"doweight_stage1 is set for {spec.name}: the FlyDSL kernels refuse it, what AITER picks in "
            "their place is undefined for SiTUv2 and GELU, and the mxmoe kernels ignore it",
            allowed="routing weights applied to the experts' outputs",
            fix="leave apply_router_weight_on_input off, or use another MoE backend",
        )
    if spec.shared_expert:
        raise ContractError(
            f"a shared expert is handed to fused_moe for {spec.name}: that branch drops beta and "
            "linear_beta, and its weights are not part of the plan",
            allowed="shared experts of their own, or fused as further routed experts",
            fix="do not pass shared_w1 and shared_expert_id to AITER",
        )


def _check_situv2(spec: MoeSpec) -> None:
    for name in ("beta", "linear_beta"):
        value = getattr(spec, name)
        if value is None or not 0 < value < math.inf:
            raise ContractError(
                f"{name} is {value} for {spec.name}; left out, AITER takes 1 on one path and 4 or 25 on another",
                allowed="a finite number above 0",
                fix=f"pass {name} from the model's config (Kimi K3: beta 4, linear_beta 25)",
            )
    if spec.swiglu_limit and spec.swiglu_limit != math.inf:
        raise ContractError(
            f"swiglu_limit is {spec.swiglu_limit} for the SiTUv2 layer {spec.name}: some of AITER's kernels "
            "clamp with it, others and its reference do not",
            allowed="no limit",
            fix="leave swiglu_limit unset for SiTUv2",
        )


def check_quantisation(target: Target, used: set[ActivationMode]) -> None:
    """A8W4 with AITER's measuring switch on: activations are cast with scales of 1."""
    name = "AITER_MOE_A8W4_BYPASS_QUANT"
    on = environ.VARIABLES[name].aiter_reads(target.env.get(name))
    if on and ActivationMode.A8W4 in used and target.arch != "gfx1250":
        raise ContractError(
            f"{name}={target.env[name]!r} casts A8W4 activations with scales of 1",
            allowed=f"{name} unset or 0",
            fix=f"type `unset {name}` and start again: AITER reads it at import",
        )


def check_choice(
    spec: MoeSpec,
    target: Target,
    mode: ActivationMode,
    choice: Choice,
    layout: str,
    gate_mode: GateMode,
    tokens: str,
) -> None:
    """Refuses a kernel family that AITER picks and that cannot compute the layer.

    Args:
        spec, target: the layer and where it runs.
        mode: the activation mode.
        choice: what AITER picks.
        layout: how w13 is laid out.
        gate_mode: what the call says.
        tokens: for which token counts, as text.
    """
    family = choice.family
    where = (
        f"{spec.activation} {mode} with gate_mode {gate_mode} on {target.arch} for {tokens} tokens"
    )
    if target.arch == "gfx942" and mode is not ActivationMode.A16W4:
        raise ContractError(
            f"{where}: gfx942 has no {mode} kernel; AITER picks it all the same and aborts",
            allowed="A16W4 on gfx942",
            fix=_gfx942_fix(spec),
        )
    if family.wrong:
        raise ContractError(
            f"{where} reaches {family.name}: {choice.reason}. {family.wrong}",
            allowed=_kernels_for(spec, target),
            fix=_route_fix(spec, target, mode, gate_mode),
        )
    if spec.activation not in family.activations:
        computed = "/".join(sorted(a.value for a in family.activations))
        raise ContractError(
            f"{where} reaches {family.name}, which computes {computed} alone, without a word: {choice.reason}",
            allowed=_kernels_for(spec, target),
            fix=_activation_fix(target, choice),
        )
    reads = target.a16w4_kernel if family.name == "flydsl_a16w4" else family.reads
    if reads != layout:
        raise ContractError(
            f"{where} reaches {family.name}, which reads w13 {reads}, not {layout}: {choice.reason}",
            allowed="one layout for every token count",
            fix=_route_fix(spec, target, mode, gate_mode),
        )
    if spec.expert_parallel and not family.expert_mask:
        raise ContractError(
            f"{where} with an expert mask: {family.name} takes none ({choice.reason})",
            allowed="tensor parallelism, or a mode whose kernels take a mask",
            fix=_mask_fix(spec, mode),
        )
    if spec.has_bias and not choice.bias:
        raise ContractError(
            f"{where} with biases: {family.name} drops or refuses them ({choice.reason})",
            allowed="a layer without biases, or a shape and mode whose kernels add them",
            fix="use another MoE backend for this layer",
        )
    _check_limit(spec, choice, where)


def _check_limit(spec: MoeSpec, choice: Choice, where: str) -> None:
    limit = spec.swiglu_limit or None
    if spec.activation is not Activation.SWIGLU:
        if choice.family.limit == "none" and limit not in (None, math.inf):
            raise ContractError(
                f"swiglu_limit is {limit}; {where} reaches {choice.family.name}, which ignores it",
                allowed="no limit, or a mode whose kernels clamp",
                fix="type `export AITER_BF16_FP8_MOE_BOUND=0 SGLANG_USE_AITER_MOE_GU_ITLV=1` "
                "(A8W4, as DeepSeek-V4 runs) on gfx950",
            )
    elif choice.family.limit == "seven" and limit not in (None, SWIGLU_DEFAULT_LIMIT):
        raise ContractError(
            f"swiglu_limit is {limit}; {where} reaches {choice.family.name}, which has "
            f"{SWIGLU_DEFAULT_LIMIT} built in",
            allowed=f"{SWIGLU_DEFAULT_LIMIT}",
            fix="type `export SGLANG_USE_AITER_MOE_GU_ITLV=0 GPTOSS_SWIGLU_MXFP4_BF16_BOUND=0` "
            "(A4W4 at every token count) on gfx950",
        )


def _when(variable: environ.Variable) -> str:
    return "in every MoE call" if "every call" in variable.when else "at import or the first call"


def _kernels_for(spec: MoeSpec, target: Target) -> str:
    if target.arch == "gfx942":
        return "SiTUv2 in A16W4, or interleaved SwiGLU, on gfx942"
    if target.arch == "gfx1250":
        return "SiLU, SwiGLU and SiTUv2 on gfx1250"
    if spec.activation is Activation.GELU:
        return "GELU on CK 2-stage alone: gfx950, separated, FlyDSL and split-k off"
    if spec.activation is Activation.SITUV2:
        return "SiTUv2 on FlyDSL kernels"
    return f"{spec.activation} in a combination that has a kernel (docs/contract.md section b.4)"


def _gfx942_fix(spec: MoeSpec) -> str:
    if spec.activation is Activation.SITUV2:
        return "type `unset AITER_SITUV2_A8W4 AITER_SITUV2_A4W4`"
    if spec.activation is Activation.SWIGLU:
        return "type `export SGLANG_USE_AITER_MOE_GU_ITLV=1`"
    return "use another MoE backend, or gfx950"


def _route_fix(spec: MoeSpec, target: Target, mode: ActivationMode, gate_mode: GateMode) -> str:
    if target.arch == "gfx942":
        return _gfx942_fix(spec)
    if not target.capabilities.flydsl_available:
        needed = target.capabilities.flydsl_needed or "0.3.1"
        return f"type `pip install flydsl=={needed}`"
    if spec.activation is Activation.GELU:
        return "type `export SGLANG_USE_AITER_MOE_GU_ITLV=0 AITER_FLYDSL_FORCE=0 AITER_KSPLIT=1`"
    if gate_mode is GateMode.INTERLEAVE and mode is ActivationMode.A16W4:
        return (
            "type `export AITER_BF16_FP8_MOE_BOUND=0` (A8W4 at every token count), or "
            "`export SGLANG_USE_AITER_MOE_GU_ITLV=0` (separated, A4W4)"
        )
    if not target.capabilities.has("flydsl_force"):
        return "install AITER v0.1.16 or newer"
    return "type `unset AITER_FLYDSL_FORCE AITER_KSPLIT`"


def _activation_fix(target: Target, choice: Choice) -> str:
    if target.arch == "gfx1250":
        return "use another MoE backend for this layer"
    if choice.tuned:
        return "type `export AITER_BYPASS_TUNE_CONFIG=1`, which makes AITER ignore its tuned rows"
    return "type `export SGLANG_USE_AITER_MOE_GU_ITLV=0 AITER_FLYDSL_FORCE=0 AITER_KSPLIT=1`"


def _mask_fix(spec: MoeSpec, mode: ActivationMode) -> str:
    if spec.activation is Activation.SITUV2 and mode is ActivationMode.A16W4:
        return "type `export AITER_SITUV2_A8W4=1` on gfx950, or run without expert parallelism"
    return "type `export AITER_BYPASS_TUNE_CONFIG=1`, or run without expert parallelism"
