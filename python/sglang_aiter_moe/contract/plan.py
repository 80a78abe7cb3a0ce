"""``plan_moe``: the only place that decides how one MXFP4 MoE layer is laid out and called."""

from __future__ import annotations

import math
from typing import Any

from packaging.version import InvalidVersion, Version

from sglang_aiter_moe import environ
from sglang_aiter_moe.contract import modes, refusals
from sglang_aiter_moe.contract.families import Choice, Query, choose
from sglang_aiter_moe.contract.modes import ActivationMode
from sglang_aiter_moe.contract.moe_plan import (
    PLAN_VERSION,
    Bypass,
    Decision,
    MoePlan,
    TokenRange,
)
from sglang_aiter_moe.contract.padding import Padding, choose_padding
from sglang_aiter_moe.contract.routes import GU_ITLV, Route, choose_route
from sglang_aiter_moe.contract.spec import MAX_TOKENS, MoeSpec, Target
from sglang_aiter_moe.contract.tuned import tables_with, tier_starts
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import SWIGLU_DEFAULT_LIMIT, Activation

__all__ = [
    "PLAN_VERSION",
    "Bypass",
    "Decision",
    "MoePlan",
    "TokenRange",
    "plan_moe",
]

SMALLM = "SGLANG_ROCM_SMALLM_MOE"
_CONTRACT = "docs/contract.md section "

#: (w13, w13 scale, w2 scale) layouts that go together; w2 itself is always separated.
_LAYOUTS = {
    "separated": ("separated", "separated"),
    "gu_interleaved": ("a16w4_gate_up", "a16w4"),
    "gu_interleaved_gfx1250": ("n32k4_gate_up", "n32k4"),
}


def plan_moe(spec: MoeSpec, target: Target) -> MoePlan:
    """Decides how a layer is laid out and called.

    Args:
        spec: the layer.
        target: where it runs.

    Returns:
        The plan, each decision with its reason.

    Raises:
        ContractError: for every combination that AITER refuses, crashes on, or computes silently
            wrong; the message says what is allowed and what to do.
    """
    refusals.check_layer(spec)
    refusals.check_environment(target)
    refusals.check_aiter(spec, target)
    route = choose_route(spec, target)
    refusals.check_quantisation(target, {mode for _, mode in route.modes})
    padding = choose_padding(spec, target.arch)
    ranges = _ranges(spec, target, route, padding)
    kwargs, kwarg_decisions = _call_kwargs(spec, target, route, padding)
    w13_scale, w2_scale = _LAYOUTS[route.layout]
    decisions = (
        _about_aiter(target),
        *route.decisions,
        *_about_layouts(route, w13_scale, w2_scale),
        Decision("padding", _sizes(padding), padding.reason, _CONTRACT + "c, sglang#27201"),
        *kwarg_decisions,
        *(_about_range(part) for part in ranges),
        *_notes(spec, target, route, padding),
    )
    return MoePlan(
        spec=spec,
        target=target,
        ranges=ranges,
        gate_mode=route.gate_mode,
        w13_layout=route.layout,
        w13_scale_layout=w13_scale,
        w2_layout="separated",
        w2_scale_layout=w2_scale,
        padded_hidden_size=padding.hidden_size,
        padded_intermediate_size=padding.intermediate_size,
        hidden_pad=padding.hidden_pad,
        intermediate_pad=padding.intermediate_pad,
        call_kwargs=kwargs,
        decisions=decisions,
        bypasses=_bypasses(spec, target, route, padding),
    )


# --- kernel families ---------------------------------------------------------------------------


def _ranges(
    spec: MoeSpec, target: Target, route: Route, padding: Padding
) -> tuple[TokenRange, ...]:
    starts = {
        *tier_starts(),
        *(first for first, _ in route.modes),
        spec.num_experts // spec.topk + 1,
    }
    edges = sorted(start for start in starts if 1 <= start < MAX_TOKENS)
    parts: list[TokenRange] = []
    for first, end in zip(edges, [*edges[1:], MAX_TOKENS], strict=True):
        mode = route.mode_at(first)
        choices = _choose(spec, target, route, padding, mode, first)
        for choice in choices:
            refusals.check_choice(
                spec, target, mode, choice, route.layout, route.gate_mode, _count(first, end - 1)
            )
        expected = choices[0]
        part = TokenRange(
            first, end - 1, mode, expected.family.name, expected.tuned, expected.reason
        )
        same = parts and (parts[-1].mode, parts[-1].family, parts[-1].tuned, parts[-1].reason) == (
            part.mode,
            part.family,
            part.tuned,
            part.reason,
        )
        if same:
            first = parts.pop().first
            part = TokenRange(first, end - 1, mode, part.family, part.tuned, part.reason)
        parts.append(part)
    return tuple(parts)


def _choose(
    spec: MoeSpec,
    target: Target,
    route: Route,
    padding: Padding,
    mode: ActivationMode,
    tokens: int,
) -> tuple[Choice, ...]:
    def read(name: str) -> Any:
        return environ.VARIABLES[name].aiter_reads(target.env.get(name))

    return choose(
        Query(
            activation=spec.activation,
            mode=mode,
            gate_mode=route.gate_mode,
            arch=target.arch,
            hidden=padding.hidden_size,
            intermediate=padding.intermediate_size,
            experts=spec.num_experts,
            topk=spec.topk,
            tokens=tokens,
            expert_mask=spec.expert_parallel,
            doweight=spec.doweight_stage1,
            capabilities=target.capabilities,
            flydsl_force=read("AITER_FLYDSL_FORCE"),
            ksplit=read("AITER_KSPLIT"),
            bypass_tuned=bool(read("AITER_BYPASS_TUNE_CONFIG")),
            own_table=bool(read("AITER_CONFIG_FMOE")),
        )
    )


# --- the call ----------------------------------------------------------------------------------


def _call_kwargs(
    spec: MoeSpec, target: Target, route: Route, padding: Padding
) -> tuple[dict[str, Any], list[Decision]]:
    kwargs: dict[str, Any] = {"gate_mode": route.gate_mode.value}
    decisions = [
        Decision(
            "gate_mode",
            route.gate_mode.value,
            "it says what the packed bytes are, with or without a limit",
            _CONTRACT + "a.4, sglang#30993",
        )
    ]
    if padding.hidden_pad or padding.intermediate_pad:
        kwargs |= {
            "hidden_pad": padding.hidden_pad,
            "intermediate_pad": padding.intermediate_pad,
        }
    limit = spec.swiglu_limit if spec.swiglu_limit != math.inf else None
    if spec.activation is Activation.SWIGLU or limit:
        kwargs["swiglu_limit"] = float(limit or SWIGLU_DEFAULT_LIMIT)
        reason = (
            "the model's" if limit else "SwiGLU-OAI's own, which AITER takes when none is stated"
        )
        decisions.append(
            Decision("swiglu_limit", str(kwargs["swiglu_limit"]), reason, _CONTRACT + "c")
        )
    if spec.activation is Activation.SITUV2:
        kwargs |= {"beta": float(spec.beta), "linear_beta": float(spec.linear_beta)}
        decisions.append(
            Decision(
                "betas",
                f"beta {spec.beta}, linear_beta {spec.linear_beta}",
                "always passed: left out, AITER takes 1/1 on one path and 4/25 on another",
                _CONTRACT + "c, g.3",
            )
        )
    return _known(spec, target, kwargs), decisions


def _known(spec: MoeSpec, target: Target, kwargs: dict[str, Any]) -> dict[str, Any]:
    known = target.capabilities.kwargs
    # Left out, these two mean what we would pass: AITER's default, and zero data.
    harmless = {"hidden_pad", "intermediate_pad"}
    if spec.activation is Activation.SWIGLU and kwargs["swiglu_limit"] == SWIGLU_DEFAULT_LIMIT:
        harmless.add("swiglu_limit")
    for name in [name for name in kwargs if name not in known]:
        if name not in harmless:
            raise ContractError(
                f"AITER ({target.capabilities.name}) does not know the keyword {name}, "
                f"which {spec.name} needs ({kwargs[name]})",
                allowed="an AITER whose fused_moe takes it (docs/contract.md section e)",
                fix="install AITER v0.1.20",
            )
        del kwargs[name]
    return kwargs


def _bypasses(spec: MoeSpec, target: Target, route: Route, padding: Padding) -> tuple[Bypass, ...]:
    if spec.activation is not Activation.SILU or target.arch != "gfx950":
        return ()
    try:
        has = target.sglang is None or Version(target.sglang) >= Version("0.5.21")
    except InvalidVersion:
        has = True
    if not has:
        return ()
    on = environ.VARIABLES[SMALLM].sglang_reads(target.env.get(SMALLM))
    plain = not (spec.has_bias or spec.swiglu_limit or spec.expert_parallel)
    unpadded = padding.intermediate_size == spec.intermediate_size
    allowed = route.layout == "separated" and plain and unpadded
    reason = "it reads the separated bytes as they are, with bf16 activations"
    if route.layout != "separated":
        reason = f"it reads separated bytes, and this layer is {route.layout}"
    elif not allowed:
        reason = "it is not known to take biases, a limit, a mask or padding"
    return (Bypass("smallm_moe_gfx950", SMALLM, bool(on), allowed, reason),)


# --- reasons -----------------------------------------------------------------------------------


def _about_layouts(route: Route, w13_scale: str, w2_scale: str) -> tuple[Decision, ...]:
    return (
        Decision(
            "w13_scale_layout", w13_scale, f"it goes with {route.layout} w13", _CONTRACT + "a.3"
        ),
        Decision("w2_layout", "separated", "w2 has one row order in every mode", _CONTRACT + "a.1"),
        Decision(
            "w2_scale_layout", w2_scale, f"it goes with {route.layout} w13", _CONTRACT + "a.3"
        ),
    )


def _about_aiter(target: Target) -> Decision:
    capabilities = target.capabilities
    known = "identified" if capabilities.identified else "not identified: the newest rule is taken"
    return Decision("aiter", capabilities.name, f"{known} ({capabilities.how})", _CONTRACT + "e")


def _about_range(part: TokenRange) -> Decision:
    tuned = {True: "tuned", False: "not tuned", None: "perhaps tuned"}
    return Decision(
        "family",
        f"{_count(part.first, part.last)} tokens: {part.family}, {tuned[part.tuned]}",
        part.reason,
        _CONTRACT + "b.2, b.3",
    )


def _count(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first} and more" if last == MAX_TOKENS - 1 else f"{first} to {last}"


def _sizes(padding: Padding) -> str:
    return (
        f"hidden {padding.hidden_size} (hidden_pad {padding.hidden_pad}), intermediate "
        f"{padding.intermediate_size} (intermediate_pad {padding.intermediate_pad})"
    )


def _notes(spec: MoeSpec, target: Target, route: Route, padding: Padding) -> list[Decision]:
    def note(value: str, reason: str, section: str) -> Decision:
        return Decision("note", value, reason, _CONTRACT + section)

    env, capabilities = target.env, target.capabilities
    situ = spec.activation is Activation.SITUV2
    notes = []
    if situ and env.get(modes.SITUV2_A8W4) == env.get(modes.SITUV2_A4W4) == "1":
        notes.append(note("both SiTUv2 flags are 1", "A8W4 wins in AITER", "b.1"))
    if situ and not capabilities.has("runtime_betas"):
        notes.append(
            note(
                "betas are compiled in",
                "each beta pair builds kernels of its own, at first use",
                "e",
            )
        )
    if not capabilities.has("round_up_scales"):
        notes.append(
            note("activation scales are rounded to even", "RoundUp came with AITER v0.1.16", "d")
        )
    if spec.expert_parallel and target.arch == "gfx950":
        notes.append(
            note(
                "tuned rows are looked up with top-k less one",
                "AITER expects one always-masked slot beside the routed experts",
                "b.2",
            )
        )
    if route.layout == "gu_interleaved" and target.arch == "gfx950" and not situ:
        shape = (padding.hidden_size, padding.intermediate_size, spec.num_experts, spec.topk)
        tables = tables_with(spec.activation, ActivationMode.A4W4, *shape)
        if tables:
            reason = f"type `export {GU_ITLV}=0` for MXFP4 activations on those kernels"
            notes.append(note(f"{tables} tunes this shape for separated w13", reason, "b.4"))
    for name in ("AITER_FLYDSL_STAGE2_FP8", "AITER_MXFP4_INTERMEDIATE"):
        if environ.VARIABLES[name].aiter_reads(env.get(name)):
            notes.append(note(f"{name} is on", "the intermediate is quantised further", "b.5"))
    return notes
