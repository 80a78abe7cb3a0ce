"""The plan itself: what was decided for one layer, frozen, and whether it still holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from sglang_aiter_moe import environ
from sglang_aiter_moe.contract.layouts import weight_layout
from sglang_aiter_moe.contract.modes import ActivationMode, GateMode
from sglang_aiter_moe.contract.scale_layouts import scale_layout
from sglang_aiter_moe.contract.spec import MoeSpec, Target
from sglang_aiter_moe.errors import ContractError, check_integer
from sglang_aiter_moe.numerics.activations import Activation

PLAN_VERSION = 1

#: Variables that AITER reads at a call, or at the first call of a shape, and that a right result
#: depends on. AITER_FORCE_GFX1250 does nothing without AITER_USE_GROUPED_GEMM.
_WATCHED_GFX9 = (
    "AITER_BF16_FP8_MOE_BOUND",
    "AITER_BYPASS_TUNE_CONFIG",
    "AITER_USE_GROUPED_GEMM",
)
_WATCHED_GFX1250 = (
    "AITER_BF16_FP8_MOE_BOUND",
    "AITER_FORCE_A8W4",
    "AITER_DISABLE_GROUPED_A8W4",
    "AITER_GROUPED_STAGE1_WEIGHT_LAYOUT",
)
_WATCHED_FOR = {
    Activation.SITUV2: ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4"),
    Activation.SILU: ("AITER_FLYDSL_FORCE", "AITER_KSPLIT"),
    Activation.GELU: ("AITER_FLYDSL_FORCE", "AITER_KSPLIT"),
}


def watched_variables(activation: Activation, arch: str) -> tuple[str, ...]:
    """The variables that may not change between the load of a layer and its calls."""
    if arch == "gfx1250":
        return _WATCHED_GFX1250
    return (*_WATCHED_FOR.get(activation, ()), *_WATCHED_GFX9)


@dataclass(frozen=True)
class Decision:
    """One decision of a plan.

    Attributes:
        subject: what was decided, e.g. ``"w13_layout"``; ``"note"`` for what the reader should know.
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
    """What AITER is expected to run for ``first <= M <= last`` tokens.

    Attributes:
        first, last: token counts, both included.
        mode: activation mode.
        family: kernel family (``families.FAMILIES``).
        tuned: whether AITER has a tuned row; None if only its own table knows.
        reason: why this family.
    """

    first: int
    last: int
    mode: ActivationMode
    family: str
    tuned: bool | None
    reason: str

    def __contains__(self, tokens: int) -> bool:
        return self.first <= tokens <= self.last


@dataclass(frozen=True)
class Bypass:
    """A kernel of SGLang that goes around ``fused_moe`` and never sees ``gate_mode``.

    Attributes:
        name: SGLang's name for it.
        variable: what switches it off when set to 0.
        active: whether SGLang would use it for this layer.
        allowed: whether it may: it reads the bytes as this plan lays them out.
        reason: one sentence.
    """

    name: str
    variable: str
    active: bool
    allowed: bool
    reason: str


@dataclass(frozen=True)
class MoePlan:
    """How one layer is laid out and called.

    Attributes:
        spec, target: what was planned for.
        ranges: kernel families by token count, without gaps, from 1 token on.
        gate_mode: what the packed w13 bytes are, in AITER's words.
        w13_layout, w2_layout: names of ``layouts.WEIGHT_LAYOUTS``.
        w13_scale_layout, w2_scale_layout: names of ``scale_layouts.SCALE_LAYOUTS``.
        padded_hidden_size, padded_intermediate_size: sizes to allocate; what is padded is zero
            weights, 0x7F scales, zero biases.
        hidden_pad, intermediate_pad: what the kernels are told, at most what is padded.
        call_kwargs: optional keyword arguments of ``fused_moe``: exactly one ``gate_mode``, and none
            that the target's AITER does not know.
        decisions: each with its reason and source.
        bypasses: kernels that go around ``fused_moe``.
        stated: ``call_kwargs`` and the pads in a plain dict, for the call; not to be changed.
    """

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
    call_kwargs: Mapping[str, Any]
    decisions: tuple[Decision, ...]
    bypasses: tuple[Bypass, ...] = ()
    stated: dict[str, Any] = field(init=False, compare=False, repr=False)
    _watch: _Watch = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "call_kwargs", MappingProxyType(dict(self.call_kwargs)))
        pads = {"hidden_pad": self.hidden_pad, "intermediate_pad": self.intermediate_pad}
        object.__setattr__(self, "stated", {**self.call_kwargs, **pads})
        object.__setattr__(self, "_watch", _Watch(self))

    def __hash__(self) -> int:
        return hash((self.spec, self.ranges, self.w13_layout, self.gate_mode))

    def __reduce__(self):
        return MoePlan.from_json, (self.to_json(),)

    def range_for(self, tokens: int) -> TokenRange:
        """The range that a token count falls in.

        Raises:
            ContractError: for fewer than 1 token, more than AITER can index, or what is no integer.
        """
        check_integer("the token count", tokens, fix="pass how many rows the call has")
        for part in self.ranges:
            if tokens in part:
                return part
        raise ContractError(
            f"{tokens} tokens for {self.spec.name}",
            allowed=f"1 to {self.ranges[-1].last}",
            fix="return early for an empty batch, split one that is too large",
        )

    def mode_for(self, tokens: int) -> ActivationMode:
        """The activation mode that AITER picks for this many tokens."""
        return self.range_for(tokens).mode

    def family_for(self, tokens: int) -> str:
        """The kernel family that AITER is expected to pick for this many tokens."""
        return self.range_for(tokens).family

    def tuned_for(self, tokens: int) -> bool | None:
        """Whether AITER has a tuned row for this many tokens; None if only its own table knows."""
        return self.range_for(tokens).tuned

    @property
    def modes(self) -> tuple[ActivationMode, ...]:
        """Every mode that occurs, by token count."""
        return tuple(dict.fromkeys(part.mode for part in self.ranges))

    @property
    def aiter_activation(self) -> str:
        """The name in AITER's ``ActivationType``."""
        return self.spec.activation.value.capitalize()

    def explain(self, subject: str) -> str:
        """The reasons of the decisions on a subject, joined."""
        return "; ".join(d.reason for d in self.decisions if d.subject == subject)

    def bytes_key(self) -> tuple[Any, ...]:
        """Equal for two plans if and only if they lay out the same weights in the same bytes."""
        return (
            self.w13_layout,
            self.w13_scale_layout,
            self.w2_layout,
            self.w2_scale_layout,
            self.spec.num_experts,
            self.spec.hidden_size,
            self.spec.intermediate_size,
            self.padded_hidden_size,
            self.padded_intermediate_size,
            self.spec.gate_up_interleaved,
        )

    def check_still_holds(self) -> None:
        """Refuses a call under another environment than the layer was loaded under.

        About a microsecond while nothing changed. While torch.compile traces it returns at once; the
        runner does not call it while a graph is captured. So no environment is read in either.

        Raises:
            ContractError: naming what changed, from what to what.
        """
        if torch.compiler.is_compiling() or environ.holds(self._watch.loaded):
            return
        self._check_changes()

    def _check_changes(self) -> None:
        from sglang_aiter_moe.contract.plan import plan_moe

        changes = self._watch.changes()
        if not changes:
            return
        env = {**self.target.env, **{name: now for name, _, now in changes}}
        env = {name: value for name, value in env.items() if value is not None}
        what = ", ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in changes)
        restore = "; ".join(
            f"unset {name}" if old is None else f"export {name}={old}" for name, old, _ in changes
        )
        fix = f"type `{restore}`, or start again (an update of the weights keeps the layout of the load)"
        try:
            now = plan_moe(self.spec, replace(self.target, env=env))
        except ContractError as error:
            raise ContractError(
                f"{self.spec.name} was loaded under another environment: {what} ({error.what})",
                allowed="the environment of the load, for which the weights are laid out",
                fix=fix,
            ) from error
        if now.ranges != self.ranges or now.bytes_key() != self.bytes_key():
            raise ContractError(
                f"{self.spec.name} was loaded under another environment: {what}",
                allowed="the environment of the load, for which the weights are laid out",
                fix=fix,
            )
        self._watch.accept()

    def to_json(self) -> str:
        """The plan as JSON, with its version."""
        values = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("_watch", "stated", "spec", "target")
        }
        values["call_kwargs"] = dict(self.call_kwargs)
        for name in ("ranges", "decisions", "bypasses"):
            values[name] = [asdict(item) for item in values[name]]
        return json.dumps(
            {
                "version": PLAN_VERSION,
                "spec": self.spec.to_dict(),
                "target": self.target.to_dict(),
                **values,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> MoePlan:
        """The inverse of :meth:`to_json`.

        Raises:
            ContractError: for text that is no plan, or a plan of another version.
        """
        try:
            data = dict(json.loads(text))
            version = data.pop("version", None)
            if version != PLAN_VERSION:
                raise ContractError(
                    f"the plan has version {version!r}",
                    allowed=str(PLAN_VERSION),
                    fix="lay the weights out again with this release",
                )
            data["spec"] = MoeSpec.from_dict(data["spec"])
            data["target"] = Target.from_dict(data["target"])
            data["ranges"] = tuple(
                TokenRange(**{**part, "mode": ActivationMode(part["mode"])})
                for part in data["ranges"]
            )
            data["gate_mode"] = GateMode(data["gate_mode"])
            data["decisions"] = tuple(Decision(**item) for item in data["decisions"])
            data["bypasses"] = tuple(Bypass(**item) for item in data["bypasses"])
            if not data["ranges"]:
                raise ValueError("no range of token counts")
            for name in ("w13_layout", "w2_layout"):
                weight_layout(data[name])
            for name in ("w13_scale_layout", "w2_scale_layout"):
                scale_layout(data[name])
            return cls(**data)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, ContractError):
                raise
            raise ContractError(
                f"this is no plan: {type(error).__name__}: {error}",
                allowed="what MoePlan.to_json gives",
                fix="take the plan from the file's metadata unchanged",
            ) from error


class _Watch:
    """The raw values of the watched variables at load, and a quick look at them."""

    def __init__(self, plan: MoePlan) -> None:
        self.names = watched_variables(plan.spec.activation, plan.target.arch)
        self._loaded = {name: plan.target.env.get(name) for name in self.names}
        #: What ``environ.holds`` compares.
        self.loaded = environ.encoded(self._loaded.items())

    def changes(self) -> list[tuple[str, str | None, str | None]]:
        """(name, value at load, value now) of each variable that differs."""
        now = [(name, old, os.environ.get(name)) for name, old in self._loaded.items()]
        return [change for change in now if change[1] != change[2]]

    def accept(self) -> None:
        """Takes the present values for the same as those of the load."""
        self.loaded = environ.encoded(environ.snapshot(self.names).items())
