"""Deliberate mistakes: each breaks one decision of a case that passes, and has to collapse.

A check that accepts these would accept anything. Each mistake is one that has been made: see the
case's `why`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from sglang_aiter_moe import environ
from sglang_aiter_moe.contract.plan import MoePlan, plan_moe
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.metrics import cosine, logits_diff
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore
from sglang_aiter_moe.srt.layers.quantization.mxfp4 import prepare_weights
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import WEIGHTS
from sglang_aiter_moe.verify import harness
from sglang_aiter_moe.verify.batches import Batch
from sglang_aiter_moe.verify.cases import (
    INTERLEAVED,
    K3_OPT,
    SEPARATED,
    SITUV2_ENV,
    Case,
    bounded_case,
    gfx1250_case,
    situv2_case,
)
from sglang_aiter_moe.verify.harness import Loaded, Machine
from sglang_aiter_moe.verify.layers import K3, gpt_oss_120b
from sglang_aiter_moe.verify.results import ControlResult

TOKENS = 16


@dataclass(frozen=True)
class Control:
    """One mistake.

    Attributes:
        name: the mistake and the case that it is made in.
        case: what would be right.
        why: where this mistake comes from.
        change_module: makes it in the checkpoint tensors, before they are laid out.
        change_plan: makes it in the plan that lays the weights out and calls.
        change_packed: makes it in the packed tensors.
        env_at_call: variables that are set between load and call, which the runner must refuse.
    """

    name: str
    case: Case
    why: str
    change_module: Callable[[torch.nn.Module], None] | None = None
    change_plan: Callable[[MoePlan], MoePlan] | None = None
    change_packed: Callable[[torch.nn.Module, torch.nn.Module], None] | None = None
    env_at_call: Mapping[str, str] | None = None


def select(pattern: str | None = None) -> list[Control]:
    """The controls whose name matches a glob; None for all."""
    return [c for c in all_controls() if pattern is None or fnmatchcase(c.name, pattern)]


def all_controls() -> Iterator[Control]:
    """Every control."""
    layer = K3.with_experts(8)
    flipped = {
        "A16W4": SITUV2_ENV["A8W4"],
        "A8W4": SITUV2_ENV["A16W4"],
        "A4W4": {**SITUV2_ENV["A4W4"], **SITUV2_ENV["A8W4"]},
    }
    for mode in SITUV2_ENV:
        case = situv2_case(layer, mode, TOKENS)
        other = SEPARATED if case.layout == INTERLEAVED else INTERLEAVED
        yield Control(
            f"control/{mode}/wrong-layout",
            case,
            "SGLang 0.5.20 to 0.5.23 packs A16W4 interleaved; its kernel reads separated",
            change_plan=lambda plan, other=other: with_layout(plan, other),
        )
        yield Control(
            f"control/{mode}/gate-up-swapped",
            case,
            "checkpoints that store up before gate",
            change_module=swap_gate_up,
        )
        yield Control(
            f"control/{mode}/flag-flipped-after-load",
            case,
            "the layout is fixed at load, the mode is chosen at every call",
            env_at_call={**flipped[mode], **K3_OPT},
        )
        yield Control(
            f"control/{mode}/unshuffled-bytes",
            case,
            "is_shuffled set on bytes that never were (sglang#26884 the other way round)",
            change_packed=put_raw_weights_back,
        )
        yield Control(
            f"control/{mode}/scale-form-mixed-up",
            case,
            "weights in one form, scales in the other",
            change_plan=mix_up_scales,
        )
        yield Control(
            f"control/{mode}/beta-missing",
            case,
            "without beta and linear_beta AITER takes 1 and 1 here, 4 and 25 elsewhere",
            change_plan=without_betas,
        )
    yield Control(
        "control/A4W4-gfx1250/gfx950-interleaving",
        gfx1250_case(layer, "A4W4", 33),
        "gfx950 alternates tiles of 16 rows, gfx1250 single rows",
        change_plan=lambda plan: replace(plan, w13_layout=INTERLEAVED),
    )
    yield Control(
        "control/gpt-oss/checkpoint-rows-taken-for-halves",
        bounded_case(gpt_oss_120b(8).with_experts(8), 4, interleave=True),
        "gpt-oss stores g0, u0, g1, u1, ...; most checkpoints store all gate rows first",
        change_plan=lambda plan: replace(plan, spec=replace(plan.spec, gate_up_interleaved=False)),
    )


def with_layout(plan: MoePlan, layout: str) -> MoePlan:
    """The plan with w13 and its scales in the other gfx950 layout."""
    scale = {SEPARATED: "separated", INTERLEAVED: "a16w4_gate_up"}[layout]
    return replace(plan, w13_layout=layout, w13_scale_layout=scale)


def mix_up_scales(plan: MoePlan) -> MoePlan:
    """The plan with w13's scales, and only them, in the other form."""
    form = "separated" if plan.w13_layout == INTERLEAVED else "a16w4_gate_up"
    return replace(plan, w13_scale_layout=form)


def without_betas(plan: MoePlan) -> MoePlan:
    """The plan whose call passes neither beta nor linear_beta."""
    betas = ("beta", "linear_beta")
    kwargs = {name: value for name, value in plan.call_kwargs.items() if name not in betas}
    return replace(plan, call_kwargs=kwargs)


def swap_gate_up(module: torch.nn.Module) -> None:
    """Up rows first, then gate rows."""
    for name in ("w13_weight", "w13_weight_scale"):
        parameter = getattr(module, name)
        parameter.data = torch.cat(parameter.data.chunk(2, dim=1)[::-1], dim=1)


def put_raw_weights_back(module: torch.nn.Module, raw: torch.nn.Module) -> None:
    """Overwrites the packed weights, but not their scales, with checkpoint bytes, and nobody watches them."""
    setattr(module, WEIGHTS, None)
    for name in ("w13_weight", "w2_weight"):
        getattr(module, name).data.copy_(getattr(raw, name).data)


def run_control(
    control: Control, path: Path, batch: Batch, expected: torch.Tensor, machine: Machine
) -> ControlResult:
    """Makes the mistake and says how far off the result is, and whether the runner refused it.

    Args:
        control: the mistake.
        path: the layer's checkpoint file.
        batch: tokens and routing.
        expected: the oracle's output for what was meant.
        machine: where to run.
    """
    case = control.case
    must_be_refused = control.env_at_call is not None
    try:
        with environ.exactly(case.env), harness.aiter_of(case, machine):
            loaded, refused = _load_with_mistake(control, path, machine), ""
            call_env = case.env if control.env_at_call is None else control.env_at_call
            with environ.exactly(call_env):
                if must_be_refused:
                    refused = _refusal(loaded, case, batch, machine)
                    _make_blind(loaded)
                output = harness.call(loaded, case.layer, batch, machine.device)
    except Exception as error:  # a control that does not come to numbers shows nothing
        return ControlResult(
            control.name,
            must_be_refused=must_be_refused,
            error=f"{type(error).__name__}: {error}",
        )
    return ControlResult(
        control.name,
        cosine=cosine(output, expected),
        logits_diff=logits_diff(output, expected),
        refused=refused,
        must_be_refused=must_be_refused,
    )


def _load_with_mistake(control: Control, path: Path, machine: Machine) -> Loaded:
    case = control.case
    plan = plan_moe(harness.spec_of(case.layer), harness.target_of(case, machine))
    if control.change_plan is not None:
        plan = control.change_plan(plan)
    module = harness.load_module(path, machine.device)
    if control.change_module is not None:
        control.change_module(module)
    prepare_weights(module, plan)
    if control.change_packed is not None:
        control.change_packed(module, harness.load_module(path, machine.device))
    return Loaded(module, plan, AiterRunnerCore(harness.runner_config(case.layer)))


def _make_blind(loaded: Loaded) -> None:
    """Makes the plan take the environment of now for that of the load, and so see no change."""
    target = replace(loaded.plan.target, env=dict(os.environ))
    loaded.module.aiter_moe_plan = replace(loaded.plan, target=target)


def _refusal(loaded: Loaded, case: Case, batch: Batch, machine: Machine) -> str:
    try:
        harness.call(loaded, case.layer, batch, machine.device)
    except ContractError as error:
        return str(error)
    return ""
