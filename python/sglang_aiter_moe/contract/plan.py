"""``plan_moe``: the only place that decides how one MXFP4 MoE layer is laid out and called."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from sglang_aiter_moe import environ
from sglang_aiter_moe.contract import modes
from sglang_aiter_moe.contract.modes import ActivationMode, GateMode
from sglang_aiter_moe.contract.padding import choose_padding
from sglang_aiter_moe.contract.spec import MAX_TOKENS, MoeSpec, Target
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import SWIGLU_DEFAULT_LIMIT, Activation

PLAN_VERSION = 1

#: The variables that a loaded layer depends on, read by AITER at every call.
WATCHED = (
    "AITER_SITUV2_A8W4",
    "AITER_SITUV2_A4W4",
    "AITER_FORCE_A8W4",
    "AITER_BF16_FP8_MOE_BOUND",
    "AITER_FLYDSL_FORCE",
)


@dataclass(frozen=True)
class Decision:
    """One decision of a plan.

    Attributes:
        subject: what was decided, e.g. ``"w13_layout"``.
        value: the outcome, as text.
        reason: why, in one sentence.
        source: where the fact is from, e.g. ``"docs/contract.md section 0"``.
    """

    subject: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True)
class TokenRange:
    """What AITER runs for token counts ``first <= M <= last`` (``last`` None: without bound)."""

    first: int
    last: int | None
    mode: ActivationMode
    family: str
    tuned: bool | None
    reason: str

    def __contains__(self, tokens: int) -> bool:
        return self.first <= tokens and (self.last is None or tokens <= self.last)


@dataclass(frozen=True)
class MoePlan:
    """How one layer is laid out and called. Frozen; :meth:`to_json` and :meth:`from_json` carry it."""

    spec: MoeSpec
    target: Target
    ranges: tuple[TokenRange, ...]
    gate_mode: GateMode
    w13_layout: str
    w13_scale_layout: str
    w2_layout: str
    w2_scale_layout: str
    padded_hidden_size: int
    padded_intermediate_size: int
    hidden_pad: int
    intermediate_pad: int
    decisions: tuple[Decision, ...]
    kwargs: tuple[tuple[str, Any], ...]
    watched: tuple[tuple[str, str | None], ...] = ()
    call_kwargs: Mapping[str, Any] = field(init=False, compare=False, repr=False)
    _watched_raw: tuple = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_watched_raw", environ.encoded(self.watched))
        object.__setattr__(self, "call_kwargs", MappingProxyType(dict(self.kwargs)))

    def range_for(self, tokens: int) -> TokenRange:
        """The range that a token count falls in.

        Raises:
            ContractError: for fewer than 1 token or more than AITER can index.
        """
        for part in self.ranges:
            if tokens in part:
                return part
        raise ContractError(
            f"{tokens} tokens",
            allowed=f"1 to {self.ranges[-1].last}",
            fix="return early for an empty batch; split a larger one",
        )

    def mode_for(self, tokens: int) -> ActivationMode:
        """The activation mode that AITER picks for this many tokens."""
        return self.range_for(tokens).mode

    def family_for(self, tokens: int) -> str:
        """The kernel family that AITER is expected to pick for this many tokens."""
        return self.range_for(tokens).family

    @property
    def modes(self) -> tuple[ActivationMode, ...]:
        """Every mode that occurs, in order of token count."""
        return tuple(dict.fromkeys(part.mode for part in self.ranges))

    def check_still_holds(self) -> None:
        """Refuses a call whose environment is not the one the layer was loaded under.

        About a microsecond. Does nothing while torch.compile traces; the runner does not call it
        while a graph is captured.

        Raises:
            ContractError: naming the variable, its value at load and its value now.
        """
        if torch.compiler.is_compiling():
            return
        if environ.holds(self._watched_raw):
            return
        get = os.environ.get
        for name, value in self.watched:
            if get(name) != value:
                raise ContractError(
                    f"{name} was {value!r} when {self.spec.name} was loaded and is {get(name)!r} now",
                    allowed="the value it was loaded under: the weights are laid out for it",
                    fix=f"restore {name}, or load the weights again",
                )

    def to_json(self) -> str:
        """The plan as JSON, with its version."""
        return json.dumps(
            {
                "version": PLAN_VERSION,
                "spec": self.spec.to_dict(),
                "target": self.target.to_dict(),
                "ranges": [vars(part) for part in self.ranges],
                "gate_mode": self.gate_mode.value,
                "layouts": [
                    self.w13_layout,
                    self.w13_scale_layout,
                    self.w2_layout,
                    self.w2_scale_layout,
                ],
                "sizes": [
                    self.padded_hidden_size,
                    self.padded_intermediate_size,
                    self.hidden_pad,
                    self.intermediate_pad,
                ],
                "decisions": [vars(d) for d in self.decisions],
                "kwargs": dict(self.kwargs),
                "watched": dict(self.watched),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> MoePlan:
        """The inverse of :meth:`to_json`.

        Raises:
            ContractError: for JSON that is no plan, or one of another version.
        """
        data = json.loads(text)
        if data.get("version") != PLAN_VERSION:
            raise ContractError(
                f"plan version {data.get('version')!r}",
                allowed=str(PLAN_VERSION),
                fix="lay the weights out again with this release",
            )
        return cls(
            MoeSpec.from_dict(data["spec"]),
            Target.from_dict(data["target"]),
            tuple(
                TokenRange(**{**part, "mode": ActivationMode(part["mode"])})
                for part in data["ranges"]
            ),
            GateMode(data["gate_mode"]),
            *data["layouts"],
            *data["sizes"],
            tuple(Decision(**d) for d in data["decisions"]),
            tuple(data["kwargs"].items()),
            tuple(data["watched"].items()),
        )


def plan_moe(spec: MoeSpec, target: Target) -> MoePlan:
    """Decides how a layer is laid out and called.

    Raises:
        ContractError: for every combination that AITER refuses, crashes on, or computes silently
            wrong.
    """
    decisions: list[Decision] = []
    situ = spec.activation is Activation.SITUV2
    caps = target.capabilities
    if not caps.has("gate_mode_decides"):
        raise ContractError(
            f"AITER {caps.name} has no gate_mode",
            allowed="AITER v0.1.14 or newer",
            fix="install a newer AITER",
        )
    if situ and not caps.has("situv2"):
        raise ContractError(
            f"AITER {caps.name} has no SiTUv2",
            allowed="AITER v0.1.19 or newer",
            fix="install a newer AITER",
        )
    if situ and (spec.beta is None or spec.linear_beta is None):
        raise ContractError(
            f"beta is {spec.beta}, linear_beta {spec.linear_beta}",
            allowed="both set: AITER's paths default to 1/1 or to 4/25",
            fix="pass the checkpoint's values (Kimi K3: 4 and 25)",
        )
    mode = ActivationMode.A16W4
    if situ:
        mode = modes.situv2_mode(target.env, has_a4w4_flag=caps.has("situv2_a4w4"))
    if target.arch == "gfx1250":
        mode = modes.gfx1250_mode(target.env)
        layout, scale, w2_scale = "gu_interleaved_gfx1250", "n32k4_gate_up", "n32k4"
    elif mode is ActivationMode.A8W4 or (
        situ and mode is ActivationMode.A16W4 and target.a16w4_kernel == "gu_interleaved"
    ):
        layout, scale, w2_scale = "gu_interleaved", "a16w4_gate_up", "a16w4"
    else:
        layout, scale, w2_scale = "separated", "separated", "separated"
    gate_mode = GateMode.SEPARATED if layout == "separated" else GateMode.INTERLEAVE
    decisions.append(Decision("w13_layout", layout, "first version", "docs/contract.md section 0"))
    padding = choose_padding(spec, target.arch)
    kwargs: dict[str, Any] = {"gate_mode": gate_mode.value}
    if padding.hidden_pad or padding.intermediate_pad:
        kwargs |= {
            "hidden_pad": padding.hidden_pad,
            "intermediate_pad": padding.intermediate_pad,
        }
    if spec.activation is Activation.SWIGLU:
        kwargs["swiglu_limit"] = float(spec.swiglu_limit or SWIGLU_DEFAULT_LIMIT)
    if situ:
        kwargs |= {"beta": float(spec.beta), "linear_beta": float(spec.linear_beta)}
    return MoePlan(
        spec,
        target,
        (TokenRange(1, MAX_TOKENS - 1, mode, "unknown", None, "first version"),),
        gate_mode,
        layout,
        scale,
        "separated",
        w2_scale,
        padding.hidden_size,
        padding.intermediate_size,
        padding.hidden_pad,
        padding.intermediate_pad,
        tuple(decisions),
        tuple(kwargs.items()),
        tuple((name, target.env.get(name)) for name in WATCHED),
    )
