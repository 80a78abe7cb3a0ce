"""A plan as data for people: ranges, sizes, reasons, and what each variable would change."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.layouts import weight_layout
from sglang_aiter_moe.contract.plan import MoePlan, plan_moe
from sglang_aiter_moe.contract.scale_layouts import scale_layout
from sglang_aiter_moe.contract.spec import BLOCK, MoeSpec, Target
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.model_config import MoeLayers

UNSET = None

# What an operator may set or unset, one thing at a time.
CHANGES: tuple[Mapping[str, str | None], ...] = (
    {"AITER_SITUV2_A8W4": "1"},
    {"AITER_SITUV2_A8W4": UNSET, "AITER_SITUV2_A4W4": "1"},
    {"AITER_SITUV2_A8W4": UNSET, "AITER_SITUV2_A4W4": UNSET},
    {"SGLANG_AITER_MOE_A16W4_KERNEL": "gu_interleaved"},
    {"AITER_FORCE_A8W4": "1"},
    {"SGLANG_USE_AITER_MOE_GU_ITLV": "1"},
    {"SGLANG_USE_AITER_MOE_GU_ITLV": "0"},
    {"SGLANG_USE_AITER_MOE_GU_ITLV": "1", "AITER_BF16_FP8_MOE_BOUND": "0"},
    {"SGLANG_USE_AITER_MOE_GU_ITLV": "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"},
    {"AITER_FLYDSL_FORCE": "0"},
    {"AITER_BYPASS_TUNE_CONFIG": "1"},
)


@dataclass(frozen=True)
class Setting:
    """Where a model is to be served.

    Attributes:
        arch: GPU architecture.
        aiter: AITER's release or commit.
        env: the environment.
    """

    arch: str
    aiter: str
    env: Mapping[str, str]

    def plan(self, spec: MoeSpec) -> MoePlan:
        """The plan of a layer here.

        Raises:
            ContractError: the plan refuses.
        """
        return plan_moe(spec, Target(self.arch, Capabilities.for_release(self.aiter), self.env))

    def with_env(self, changes: Mapping[str, str | None]) -> Setting:
        """The same with some variables set, or unset where the value is None."""
        env = {name: value for name, value in self.env.items() if name not in changes}
        env |= {name: value for name, value in changes.items() if value is not None}
        return Setting(self.arch, self.aiter, env)


def describe(layers: MoeLayers, setting: Setting) -> dict[str, Any]:
    """The plan of a model's MoE layers on one rank, ready for JSON.

    Raises:
        ContractError: the plan refuses.
    """
    spec = layers.spec
    plan = setting.plan(spec)
    bytes_per_layer = packed_bytes(plan)
    return {
        "model": spec.name,
        "layers": layers.count,
        "activation": spec.activation.value,
        "experts": spec.num_experts,
        "topk": spec.topk,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "modes": [str(mode) for mode in plan.modes],
        "ranges": [{**asdict(part), "mode": str(part.mode)} for part in plan.ranges],
        "w13_layout": plan.w13_layout,
        "w13_scale_layout": plan.w13_scale_layout,
        "w2_layout": plan.w2_layout,
        "w2_scale_layout": plan.w2_scale_layout,
        "gate_mode": str(plan.gate_mode),
        "padded_hidden_size": plan.padded_hidden_size,
        "padded_intermediate_size": plan.padded_intermediate_size,
        "hidden_pad": plan.hidden_pad,
        "intermediate_pad": plan.intermediate_pad,
        "bytes_per_layer": bytes_per_layer,
        "bytes_per_rank": None if layers.count is None else layers.count * bytes_per_layer,
        "decisions": [asdict(decision) for decision in plan.decisions],
        "changes": what_would_change(spec, setting, plan),
        # whole, for `layout --pack --plan`
        "plan": json.loads(plan.to_json()),
    }


def packed_bytes(plan: MoePlan) -> int:
    """Bytes of one layer's packed weights, scales and biases on one rank."""
    experts = plan.spec.num_experts
    hidden, inter = plan.padded_hidden_size, plan.padded_intermediate_size
    total = 0
    for rows, columns, weights, scales in (
        (2 * inter, hidden, plan.w13_layout, plan.w13_scale_layout),
        (hidden, inter, plan.w2_layout, plan.w2_scale_layout),
    ):
        total += math.prod(weight_layout(weights).packed_shape((experts, rows, columns // 2)))
        total += math.prod(scale_layout(scales).packed_shape((experts, rows, columns // BLOCK)))
    if plan.spec.has_bias:
        total += 4 * experts * (2 * inter + hidden)
    return total


def what_would_change(spec: MoeSpec, setting: Setting, plan: MoePlan) -> list[dict[str, str]]:
    """What other settings of the variables would lead to; those that change nothing are left out."""
    now = _summary(plan)
    found = []
    for changes in CHANGES:
        other = setting.with_env(changes)
        if other.env == dict(setting.env):
            continue
        try:
            result = _summary(other.plan(spec))
        except ContractError as error:
            result = f"refused: {error.what}"
        if result != now:
            found.append({"change": _words(changes), "result": result})
    return found


def what_would_plan(spec: MoeSpec, setting: Setting) -> list[dict[str, str]]:
    """Settings under which a refused layer would have a plan."""
    found = []
    for changes in CHANGES:
        try:
            plan = setting.with_env(changes).plan(spec)
        except ContractError:
            continue
        found.append({"change": _words(changes), "result": _summary(plan)})
    return found


def _summary(plan: MoePlan) -> str:
    modes = " then ".join(str(mode) for mode in plan.modes)
    families = ", ".join(dict.fromkeys(part.family for part in plan.ranges))
    return f"{modes}, w13 {plan.w13_layout}, {families}"


def _words(changes: Mapping[str, str | None]) -> str:
    return " ".join(f"{n} unset" if v is None else f"{n}={v}" for n, v in changes.items())
