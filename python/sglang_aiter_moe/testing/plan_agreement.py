"""Does AITER, by portable's dispatch, read and compute what a plan lays out and asks for?

Plan and portable were written from the same facts but share no code, so what they agree on is not one
mistake made once. `faults` is what is wrong with one call; a plan whose calls have none is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from sglang_aiter_moe import portable
from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.moe_plan import MoePlan
from sglang_aiter_moe.contract.padding import choose_padding
from sglang_aiter_moe.contract.plan import plan_moe
from sglang_aiter_moe.contract.spec import MAX_TOKENS, MoeSpec, Target
from sglang_aiter_moe.numerics.activations import SWIGLU_DEFAULT_LIMIT, Activation
from sglang_aiter_moe.portable.resolution import Resolution

# portable names a scale layout after the weights that it belongs to. The separated form and the a16w4
# form without gate/up differ in padding only (docs/contract.md section a.3).
SCALE_FORMS = {
    "separated": "separated",
    "a16w4": "separated",
    "a16w4_gate_up": "gu_interleaved",
    "n32k4": "n32k4",
    "n32k4_gate_up": "n32k4_gu",
}
# The plan's families that stand for several of AITER's.
FAMILIES = {
    "flydsl_a8w4": {"flydsl_a8w4", "opus_a8w4"},
    "silu_tuned": {"mxmoe", "asm", "flydsl_a4w4", "ck2stages"},
}
BOUNDARIES = (1, 2, 3, 16, 255, 256, 257, 511, 512, 16384, 16385, 32767, 32768, 131072)


@dataclass(frozen=True)
class Situation:
    """A layer and where it runs, in words that both sides understand.

    Attributes:
        spec: the layer.
        arch, aiter, a16w4_kernel, flydsl: as `portable.install` takes them.
        env: the environment, the whole of it.
    """

    spec: MoeSpec
    arch: str = "gfx950"
    aiter: str = "0.1.20"
    a16w4_kernel: str = "separated"
    flydsl: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def target(self) -> Target:
        """The plan's view of where it runs.

        Raises:
            ContractError: an AITER that the plan does not know.
        """
        capabilities = Capabilities.for_release(self.aiter)
        capabilities = capabilities.with_flydsl(None, available=self.flydsl)
        return Target(self.arch, capabilities, self.env, a16w4_kernel=self.a16w4_kernel)

    def plan(self) -> MoePlan:
        """The plan.

        Raises:
            ContractError: the plan refuses.
        """
        return plan_moe(self.spec, self.target())

    def resolve(self, plan: MoePlan, tokens: int) -> Resolution:
        """What AITER does with a plan's call at a token count.

        Raises:
            Whatever AITER raises.
        """
        spec = self.spec
        kwargs = dict(plan.call_kwargs)
        return portable.explain(
            tokens=tokens,
            num_experts=spec.num_experts,
            topk=spec.topk,
            hidden_size=plan.padded_hidden_size,
            intermediate_size=plan.padded_intermediate_size,
            activation=spec.activation.value,
            arch=self.arch,
            aiter=self.aiter,
            a16w4_kernel=self.a16w4_kernel,
            flydsl=self.flydsl,
            env=self.env,
            has_bias=spec.has_bias,
            has_expert_mask=spec.expert_parallel,
            doweight_stage1=spec.doweight_stage1,
            hidden_pad=kwargs.pop("hidden_pad", 0),
            intermediate_pad=kwargs.pop("intermediate_pad", 0),
            **kwargs,
        )


def token_counts(plan: MoePlan) -> list[int]:
    """Token counts at which something could change: both ends of each range, and AITER's bounds."""
    ends = {end for part in plan.ranges for end in (part.first, part.last)}
    return sorted(ends | {tokens for tokens in BOUNDARIES if tokens < MAX_TOKENS})


def disagreements(situation: Situation, plan: MoePlan) -> list[str]:
    """What is wrong with the calls of a plan, each with its token count; empty if nothing is."""
    found = []
    for tokens in token_counts(plan):
        try:
            resolved = situation.resolve(plan, tokens)
        except Exception as error:  # any exception is AITER failing on a planned call
            found.append(f"{tokens} tokens: AITER raises {type(error).__name__}: {error}")
            continue
        for fault in (*faults(plan, resolved), *surprises(plan, resolved, tokens)):
            found.append(f"{tokens} tokens, {resolved.family}: {fault}")
    return found


def faults(plan: MoePlan, resolved: Resolution) -> Iterable[str]:
    """Why the result would be wrong: other bytes read, or something else computed."""
    for name in ("w13_layout", "w2_layout"):
        planned, read = getattr(plan, name), getattr(resolved, name)
        if planned != read:
            yield f"{name} is {planned}, AITER reads {read}"
    for name in ("w13_scale_layout", "w2_scale_layout"):
        planned, read = SCALE_FORMS[getattr(plan, name)], getattr(resolved, name)
        if planned != read:
            yield f"{name} is {planned}, AITER reads {read}"
    spec = plan.spec
    if resolved.activation != spec.activation.value:
        yield f"the activation is {spec.activation}, AITER computes {resolved.activation}"
    limit = _limit(spec)
    if resolved.limit != limit:
        yield f"the limit is {limit}, AITER clamps with {resolved.limit}"
    betas = (resolved.beta, resolved.linear_beta)
    if spec.activation is Activation.SITUV2 and betas != (spec.beta, spec.linear_beta):
        yield f"beta and linear_beta are {spec.beta}, {spec.linear_beta}, AITER takes {betas}"
    if spec.has_bias and not (resolved.uses_bias1 and resolved.uses_bias2):
        yield "there are biases, AITER drops them"
    if spec.doweight_stage1 != resolved.weight_on_input:
        yield f"doweight_stage1 is {spec.doweight_stage1}, AITER does {resolved.weight_on_input}"
    hidden = plan.padded_hidden_size - spec.hidden_size
    inter = plan.padded_intermediate_size - spec.intermediate_size
    for name, pad in (
        ("hidden_skip_k", hidden),
        ("hidden_skip_n", hidden),
        ("intermediate_skip_n", inter),
        ("intermediate_skip_k", inter),
    ):
        if getattr(resolved, name) > pad:
            yield f"{pad} columns are padding, AITER leaves out {getattr(resolved, name)} ({name})"


def surprises(plan: MoePlan, resolved: Resolution, tokens: int) -> Iterable[str]:
    """Right results by another way than the plan says: what an operator reads in it would be wrong."""
    if resolved.mode != str(plan.mode_for(tokens)):
        yield f"the mode is {plan.mode_for(tokens)}, AITER runs {resolved.mode}"
    part = plan.range_for(tokens)
    # None: whether a tuned row is there is not known, and the plan holds with and without. Nor is it
    # with an expert mask, where it depends on whether the caller adds a masked slot (section b.2).
    known = part.tuned is not None and not plan.spec.expert_parallel
    if known and resolved.family not in FAMILIES.get(part.family, {part.family}):
        yield f"the family is {part.family}, AITER picks {resolved.family}"


def right_alternatives(situation: Situation) -> list[str]:
    """Layouts with which AITER would compute a situation rightly at every token count.

    For a refused situation these would be plans that it has been denied.
    """
    spec = situation.spec
    padding = choose_padding(spec, situation.arch)
    kwargs = {"hidden_pad": padding.hidden_pad, "intermediate_pad": padding.intermediate_pad}
    if spec.activation is Activation.SITUV2:
        kwargs |= {"beta": spec.beta, "linear_beta": spec.linear_beta}
    if _limit(spec) is not None:
        kwargs["swiglu_limit"] = _limit(spec)
    right = []
    for layout, (scale, w2_scale, gate_mode) in _LAYOUTS.items():
        call = SimpleNamespace(
            spec=spec,
            w13_layout=layout,
            w13_scale_layout=scale,
            w2_layout="separated",
            w2_scale_layout=w2_scale,
            padded_hidden_size=padding.hidden_size,
            padded_intermediate_size=padding.intermediate_size,
            call_kwargs={**kwargs, "gate_mode": gate_mode},
        )
        try:
            if not any(
                fault
                for tokens in BOUNDARIES
                for fault in faults(call, situation.resolve(call, tokens))
            ):
                right.append(layout)
        except Exception:  # AITER raises: this is no alternative
            continue
    return right


_LAYOUTS = {
    "separated": ("separated", "separated", "separated"),
    "gu_interleaved": ("a16w4_gate_up", "a16w4", "interleave"),
    "gu_interleaved_gfx1250": ("n32k4_gate_up", "n32k4", "interleave"),
}


def _limit(spec: MoeSpec) -> float | None:
    if spec.swiglu_limit and spec.swiglu_limit != float("inf"):
        return float(spec.swiglu_limit)
    return SWIGLU_DEFAULT_LIMIT if spec.activation is Activation.SWIGLU else None
