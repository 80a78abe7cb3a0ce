"""Kernel families: what each reads, computes and drops, and which one AITER picks.

Source: docs/contract.md sections a.4 (layouts read), b.3 (order of choice), c (what is dropped).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.modes import ActivationMode, GateMode
from sglang_aiter_moe.contract.tuned import Lookup, lookup
from sglang_aiter_moe.numerics.activations import Activation

_SILU, _GELU = Activation.SILU, Activation.GELU
_SWIGLU, _SITUV2 = Activation.SWIGLU, Activation.SITUV2


@dataclass(frozen=True)
class Family:
    """A kernel family.

    Attributes:
        name: ours, used in plans.
        reads: the w13 layout that it reads.
        activations: what it computes; anything else is computed as one of these, or not at all.
        limit: what it does with swiglu_limit: ``"any"`` honours it, ``"seven"`` has 7.0 built in,
            ``"none"`` ignores it.
        bias: whether both biases are added.
        expert_mask: whether an expert mask is honoured.
        flydsl: whether it needs FlyDSL.
        wrong: why it never gives a right result, None for a family that can.
    """

    name: str
    reads: str
    activations: frozenset[Activation]
    limit: str
    bias: bool
    expert_mask: bool = True
    flydsl: bool = False
    wrong: str | None = None


_ALL_FLYDSL = frozenset({_SILU, _SWIGLU, _SITUV2})

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "flydsl_a16w4",
            "separated",
            frozenset({_SITUV2}),
            "none",
            bias=False,
            expert_mask=False,
            flydsl=True,
        ),
        Family("flydsl_a4w4", "separated", _ALL_FLYDSL, "any", bias=True, flydsl=True),
        Family("flydsl_a8w4", "gu_interleaved", _ALL_FLYDSL, "any", bias=True, flydsl=True),
        Family("cktile", "gu_interleaved", frozenset({_SWIGLU}), "seven", bias=True),
        Family("cktile_splitk", "separated", frozenset({_SWIGLU}), "seven", bias=True),
        Family(
            "cktile_splitk_auto",
            "gu_interleaved",
            frozenset(),
            "none",
            bias=False,
            wrong="CK-tile's split-k epilogue takes MXFP4 rows for interleaved, whatever they are, and has "
            "no branch for SiTUv2 and GELU",
        ),
        Family("ck2stages", "separated", frozenset({_SILU, _GELU}), "none", bias=False),
        Family(
            "ck2stages_no_kernel",
            "separated",
            frozenset(),
            "none",
            bias=False,
            wrong="CK 2-stage has no such kernel (AITER raises 'Unsupported scales/output dtype!' or "
            "'Unsupported activation for ck_moe_stage1')",
        ),
        Family(
            "silu_tuned", "separated", frozenset({_SILU}), "none", bias=False, expert_mask=False
        ),
        Family(
            "grouped_gfx1250",
            "gu_interleaved_gfx1250",
            _ALL_FLYDSL,
            "any",
            bias=True,
            flydsl=True,
        ),
    )
}


@dataclass(frozen=True)
class Query:
    """One layer at one token count, as AITER's dispatch sees it."""

    activation: Activation
    mode: ActivationMode
    gate_mode: GateMode
    arch: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    tokens: int
    expert_mask: bool
    doweight: bool
    capabilities: Capabilities
    flydsl_force: bool
    ksplit: int
    bypass_tuned: bool
    own_table: bool


@dataclass(frozen=True)
class Choice:
    """A family that AITER may pick.

    Attributes:
        family: from :data:`FAMILIES`.
        tuned: whether by a tuned row; None if that is not known.
        bias: whether both biases are added.
        reason: one sentence.
    """

    family: Family
    tuned: bool | None
    bias: bool
    reason: str


def choose(query: Query) -> tuple[Choice, ...]:
    """The families that AITER may pick, the expected one first; some may not be able to compute the layer.

    Tuned rows differ between releases and files, so what happens without one is always among them.
    """
    if query.arch == "gfx1250":
        family = FAMILIES["grouped_gfx1250"]
        return (Choice(family, False, family.bias, "gfx1250 has one path: grouped GEMMs"),)
    found = _look_up(query)
    name, why = _on_miss(query)
    missed = FAMILIES[name]
    tuned: list[Choice] = []
    for row in found.rows:
        family = FAMILIES[row.family]
        # The names in gptoss_a16w4 are marks, not kernels; and FlyDSL's need FlyDSL.
        if row.family == "cktile" or (family.flydsl and not query.capabilities.flydsl_available):
            continue
        tuned.append(Choice(family, True, family.bias and not row.drops_bias, found.reason))
    expected = None if query.own_table else bool(found.rows) and found.rows[0].sure
    if found.rows and not found.rows[0].sure:
        expected = None
    miss = Choice(missed, expected, missed.bias, f"{found.reason}; {why}")
    if tuned and expected:
        return (*tuned, Choice(missed, False, missed.bias, why))
    return (miss, *tuned)


def _look_up(query: Query) -> Lookup:
    if query.arch != "gfx950":
        return Lookup((), f"AITER ships no MXFP4 rows for {query.arch}")
    if query.own_table:
        return Lookup((), "AITER_CONFIG_FMOE stands in for AITER's tables")
    if query.bypass_tuned:
        return Lookup((), "AITER_BYPASS_TUNE_CONFIG sets AITER's tables aside")
    topks = (query.topk, query.topk - 1) if query.expert_mask else (query.topk,)
    shape = (query.hidden, query.intermediate, query.experts)
    return lookup(query.activation, query.mode, shape, topks, query.tokens, query.capabilities)


def _on_miss(query: Query) -> tuple[str, str]:
    swiglu = query.activation is _SWIGLU
    if swiglu and query.gate_mode is not GateMode.SEPARATED:
        return "cktile", "interleaved SwiGLU goes to CK-tile"
    if _flydsl_takes(query):
        name = f"flydsl_{query.mode.value.lower()}"
        return name, f"FlyDSL's heuristic {query.mode} kernels take it"
    if swiglu and query.mode is ActivationMode.A16W4:
        return "cktile_splitk", "separated SwiGLU with bf16 activations goes to CK-tile split-k"
    if swiglu or _splits_k(query):
        return "cktile_splitk_auto", "without FlyDSL it goes to CK-tile split-k"
    if query.mode is ActivationMode.A4W4 and query.activation in (_SILU, _GELU):
        return "ck2stages", "CK 2-stage takes it"
    return "ck2stages_no_kernel", "CK 2-stage is what is left"


def _flydsl_takes(query: Query) -> bool:
    capabilities = query.capabilities
    if not capabilities.flydsl_available or query.doweight:
        return False
    if query.mode is ActivationMode.A16W4:
        return query.activation is _SITUV2
    if query.activation in (_SWIGLU, _SITUV2):
        return True
    return query.flydsl_force and capabilities.has("flydsl_force")


def _splits_k(query: Query) -> bool:
    if query.ksplit:
        return query.ksplit > 1
    return query.tokens * query.topk <= query.experts
