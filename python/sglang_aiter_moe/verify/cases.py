"""What `sglang-aiter-moe verify` runs: each case with the decisions that are expected of the plan.

The expectations are written down by hand from docs/contract.md (sections 0 and b.4) and not taken from
`plan_moe`, so that a plan that decides otherwise fails its case even if the numbers came out right.

A name is `layer/decision/mTOKENS`; where a layer has fewer experts than its model, the
name says so (`k3-e8` holds 8 experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from sglang_aiter_moe.verify.layers import (
    DEEPSEEK_V4,
    K3,
    K3_FULL_WIDTH,
    MINIMAX_M3,
    QWEN3_5,
    Layer,
    gpt_oss_120b,
)

K3_TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
K3_TOKENS_BY_DEFAULT = 256
BOUND_TOKENS = (255, 256, 257)

SEPARATED = "separated"
INTERLEAVED = "gu_interleaved"
INTERLEAVED_GFX1250 = "gu_interleaved_gfx1250"

# The environment that asks for each SiTUv2 mode; everything else is unset while a case runs.
SITUV2_ENV: Mapping[str, Mapping[str, str]] = {
    "A16W4": {},
    "A8W4": {"AITER_SITUV2_A8W4": "1"},
    "A4W4": {"AITER_SITUV2_A4W4": "1"},
}
# Layers with tuned rows whose kernels quantise between the stages themselves (docs/contract.md
# section d): FlyDSL in the epilogue, mxmoe by RoundUp from float32. All others get RoundUp from bf16.
_TUNED_REQUANTIZATION = {
    ("gpt-oss-120b-tp1", "A8W4"): "epilogue",
    ("deepseek-v4-like", "A8W4"): "epilogue",
    ("qwen3.5-397b", "A4W4"): "roundup_fp32",
    ("minimax-m3", "A4W4"): "epilogue",
}
# K3's 384 columns stay 384 (else they are padded to 512).
K3_OPT = {"SGLANG_AITER_K3_OPT": "1"}


@dataclass(frozen=True)
class Case:
    """One layer, one target, one batch.

    Attributes:
        name: unique; what `--case` matches.
        layer: whose experts.
        tokens: rows of the batch, M.
        mode: expected activation mode at this many tokens.
        layout: expected layout of w13.
        gate_mode: expected `gate_mode` of the call.
        env: variables that are set while the case runs.
        arch: GPU architecture whose rules hold.
        aiter: AITER release whose rules hold.
        a16w4_kernel: which rows the A16W4 kernel of that AITER is built to read.
        unused_slots: every how many-th routing slot is -1 (no expert); 0 for none.
        requantization: the oracle's rule between the stages, by the kernel family.
        full: runs only with `--full`.
    """

    name: str
    layer: Layer
    tokens: int
    mode: str
    layout: str
    gate_mode: str
    env: Mapping[str, str] = field(default_factory=dict)
    arch: str = "gfx950"
    aiter: str = "0.1.20"
    a16w4_kernel: str = SEPARATED
    unused_slots: int = 0
    requantization: str = "roundup"
    full: bool = False


def select(pattern: str | None = None, *, full: bool = False) -> list[Case]:
    """The cases to run, in an order that prepares each layer's weights once.

    Args:
        pattern: glob over names, None for all; a name that is matched without any wildcard runs
            also if it belongs to the full set.
        full: also the cases that take long.
    """
    exact = pattern is not None and not any(mark in pattern for mark in "*?[")
    return [
        case
        for case in all_cases()
        if (full or exact or not case.full) and (pattern is None or fnmatchcase(case.name, pattern))
    ]


def all_cases() -> Iterator[Case]:
    """Every case, default and full."""
    yield from _k3()
    yield from _k3_targets()
    yield from _expert_parallel()
    yield from _gpt_oss()
    yield from _deepseek_v4()
    yield from _separated_models()


def situv2_case(layer: Layer, mode: str, tokens: int, **changes) -> Case:
    """A SiTUv2 layer on gfx950 with the flags of a mode; `changes` are fields of the case."""
    interleaved = mode == "A8W4"
    # AITER's tuned rows for K3 at TP8 requantise in the epilogue of stage 1; its heuristic kernels
    # hand bf16 to a quantisation kernel (docs/contract.md section d).
    tuned = layer.shape.intermediate == K3.shape.intermediate
    values = {
        "name": f"{layer.name}/{mode}/m{tokens}",
        "layer": layer,
        "tokens": tokens,
        "mode": mode,
        "layout": INTERLEAVED if interleaved else SEPARATED,
        "gate_mode": "interleave" if interleaved else "separated",
        "env": {**SITUV2_ENV[mode], **K3_OPT},
        "requantization": "epilogue" if tuned else "roundup",
    }
    return Case(**{**values, **changes})


def gfx1250_case(layer: Layer, mode: str, tokens: int) -> Case:
    """A SiTUv2 layer on gfx1250, where AITER_FORCE_A8W4 alone chooses the mode."""
    force = {"A4W4": {}, "A8W4": {"AITER_FORCE_A8W4": "1"}}[mode]
    return situv2_case(
        layer,
        mode,
        tokens,
        name=f"{layer.name}/{mode}-gfx1250/m{tokens}",
        layout=INTERLEAVED_GFX1250,
        gate_mode="interleave",
        env={**force, **K3_OPT},
        arch="gfx1250",
        requantization="roundup",
    )


def _k3() -> Iterator[Case]:
    """The 17 token counts of AITER's tuned K3 table, at K3's real size, in all three modes."""
    for mode in SITUV2_ENV:
        for tokens in K3_TOKENS:
            yield situv2_case(K3, mode, tokens, full=tokens > K3_TOKENS_BY_DEFAULT)


def _k3_targets() -> Iterator[Case]:
    """What changes with the release, the architecture, the kernel's build, the padding, the batch."""
    small = K3.with_experts(8)
    name = small.name
    for mode in SITUV2_ENV:
        yield situv2_case(small, mode, 0)
        yield situv2_case(small, mode, 16)
        for tokens in BOUND_TOKENS:  # SiTUv2 has no bound: nothing may change there
            yield situv2_case(small, mode, tokens)
    yield situv2_case(small, "A16W4", 7, name=f"{name}/A16W4-gfx942/m7", arch="gfx942")
    yield situv2_case(small, "A16W4", 7, name=f"{name}/A16W4-aiter-0.1.19/m7", aiter="0.1.19")
    yield situv2_case(small, "A8W4", 7, name=f"{name}/A8W4-aiter-0.1.19/m7", aiter="0.1.19")
    yield situv2_case(
        small, "A4W4", 7, name=f"{name}/A4W4-aiter-0.1.19.post1/m7", aiter="0.1.19.post1"
    )
    # This release does not know the flag, so it runs A16W4, and the plan has to say so.
    env = {**SITUV2_ENV["A4W4"], **K3_OPT}
    yield situv2_case(
        small, "A16W4", 7, name=f"{name}/A4W4-flag-aiter-0.1.19/m7", env=env, aiter="0.1.19"
    )
    both = {**SITUV2_ENV["A4W4"], **SITUV2_ENV["A8W4"], **K3_OPT}
    yield situv2_case(small, "A8W4", 7, name=f"{name}/both-flags/m7", env=both)
    for tokens in (1, 64):
        yield situv2_case(
            small,
            "A16W4",
            tokens,
            name=f"{name}/A16W4-kernel-gu_interleaved/m{tokens}",
            layout=INTERLEAVED,
            gate_mode="interleave",
            env={**K3_OPT, "SGLANG_AITER_MOE_A16W4_KERNEL": INTERLEAVED},
            a16w4_kernel=INTERLEAVED,
        )
    for mode in ("A4W4", "A8W4"):
        yield gfx1250_case(small, mode, 33)


def _expert_parallel() -> Iterator[Case]:
    """A rank that holds some of the experts: expert_mask, and routing slots without an expert."""
    reduced = K3_FULL_WIDTH.with_experts(32)
    layers = (
        (reduced.with_expert_parallel(4, rank=3), False),
        (K3_FULL_WIDTH.with_expert_parallel(112, rank=1), True),
    )
    for layer, full in layers:
        for mode in ("A8W4", "A4W4"):  # AITER's A16W4 kernel takes no expert_mask
            yield situv2_case(layer, mode, 24, full=full)
            name = f"{layer.name}/{mode}-unused-slots/m24"
            yield situv2_case(layer, mode, 24, name=name, unused_slots=5, full=full)


def _gpt_oss() -> Iterator[Case]:
    """gpt-oss-120b: biases, limit, padding, interleaved checkpoint rows, both sides of the bound."""
    for tp in (1, 2, 4, 8):
        real = gpt_oss_120b(tp)
        for layer, full in ((real.with_experts(8), False), (real, True)):
            for tokens in (4, *BOUND_TOKENS) if tp == 8 and not full else (4, 256):
                yield bounded_case(layer, tokens, interleave=True, full=full)
    for tokens in (4, *BOUND_TOKENS):
        yield bounded_case(gpt_oss_120b(8).with_experts(8), tokens, interleave=False)


def bounded_case(layer: Layer, tokens: int, *, interleave: bool, full: bool = False) -> Case:
    """A layer that AITER gives bf16 activations below 256 tokens, and quantised ones from there on."""
    above = "A8W4" if interleave else "A4W4"
    form = "interleave" if interleave else "separated"
    return Case(
        name=f"{layer.name}/{form}/m{tokens}",
        layer=layer,
        tokens=tokens,
        mode="A16W4" if tokens < 256 else above,
        layout=INTERLEAVED if interleave else SEPARATED,
        gate_mode=form,
        env={"SGLANG_USE_AITER_MOE_GU_ITLV": "1" if interleave else "0"},
        requantization=_TUNED_REQUANTIZATION.get((layer.name, above), "roundup"),
        full=full,
    )


def _deepseek_v4() -> Iterator[Case]:
    """SiLU with a limit, interleaved: A8W4 at every token count, which needs the bound at 0."""
    for layer, full in ((DEEPSEEK_V4.with_experts(8), False), (DEEPSEEK_V4, True)):
        for tokens in (1, 31, 256):
            yield Case(
                name=f"{layer.name}/interleave/m{tokens}",
                layer=layer,
                tokens=tokens,
                mode="A8W4",
                layout=INTERLEAVED,
                gate_mode="interleave",
                env={"AITER_BF16_FP8_MOE_BOUND": "0", "SGLANG_USE_AITER_MOE_GU_ITLV": "1"},
                requantization=_TUNED_REQUANTIZATION.get((layer.name, "A8W4"), "roundup"),
                full=full,
            )


def _separated_models() -> Iterator[Case]:
    """Qwen3.5 (SiLU, A4W4 at every token count) and MiniMax-M3 (SwiGLU, A4W4 from the bound on)."""
    for layer, full in ((QWEN3_5.with_experts(16), False), (QWEN3_5, True)):
        for tokens in (1, 31, 256):
            yield Case(
                name=f"{layer.name}/separated/m{tokens}",
                layer=layer,
                tokens=tokens,
                mode="A4W4",
                layout=SEPARATED,
                gate_mode="separated",
                env={"SGLANG_USE_AITER_MOE_GU_ITLV": "0"},
                requantization=_TUNED_REQUANTIZATION.get((layer.name, "A4W4"), "roundup"),
                full=full,
            )
    for layer, full in ((MINIMAX_M3.with_experts(8), False), (MINIMAX_M3, True)):
        for tokens in (1, 31, *BOUND_TOKENS):
            yield bounded_case(layer, tokens, interleave=False, full=full)
