"""The plan of each row of docs/contract.md section b.4, and of the models of section f."""

import sys
from dataclasses import replace

import pytest

from sglang_aiter_moe.contract import Capabilities, MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.plans import (
    A4W4,
    A8W4,
    BOUND,
    DEEPSEEK,
    INTERLEAVED,
    ITLV,
    K3,
    MINIMAX,
    PLAIN,
    QWEN,
    SEPARATED,
    gptoss,
    layouts,
    plan,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")


BY_TOKENS = [
    # spec, env, arch, layouts, {tokens: (mode, family)}
    (
        gptoss(1),
        {},
        "gfx950",
        INTERLEAVED,
        {1: ("A16W4", "cktile"), 255: ("A16W4", "cktile"), 256: ("A8W4", "flydsl_a8w4")},
    ),
    (
        gptoss(8),
        {ITLV: "1"},
        "gfx950",
        INTERLEAVED,
        {255: ("A16W4", "cktile"), 256: ("A8W4", "cktile"), 257: ("A8W4", "cktile")},
    ),
    (
        gptoss(1),
        {ITLV: "0"},
        "gfx950",
        SEPARATED,
        {255: ("A16W4", "cktile_splitk"), 256: ("A4W4", "flydsl_a4w4")},
    ),
    (
        gptoss(4),
        {ITLV: "false", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "300"},
        "gfx950",
        SEPARATED,
        {299: ("A16W4", "cktile_splitk"), 300: ("A4W4", "flydsl_a4w4")},
    ),
    (
        gptoss(2),
        {BOUND: "0"},
        "gfx950",
        INTERLEAVED,
        {1: ("A8W4", "cktile"), 32768: ("A8W4", "cktile")},
    ),
    (
        gptoss(8),
        {},
        "gfx942",
        INTERLEAVED,
        {1: ("A16W4", "cktile"), 4096: ("A16W4", "cktile")},
    ),
    (MINIMAX, {ITLV: "0"}, "gfx950", SEPARATED, {1: ("A16W4", "cktile_splitk"), 256: ("A4W4", "flydsl_a4w4")}),
    (QWEN, {}, "gfx950", SEPARATED, {1: ("A4W4", "silu_tuned"), 4096: ("A4W4", "silu_tuned")}),
    (
        MoeSpec("silu", **PLAIN),
        {ITLV: "0"},
        "gfx950",
        SEPARATED,
        {1: ("A4W4", "flydsl_a4w4"), 4096: ("A4W4", "flydsl_a4w4")},
    ),
    (
        DEEPSEEK,
        {BOUND: "0"},
        "gfx950",
        INTERLEAVED,
        {1: ("A8W4", "flydsl_a8w4"), 4096: ("A8W4", "flydsl_a8w4")},
    ),
    (
        MoeSpec("gelu", **PLAIN),
        {"AITER_FLYDSL_FORCE": "0", "AITER_KSPLIT": "1"},
        "gfx950",
        SEPARATED,
        {1: ("A4W4", "ck2stages"), 4096: ("A4W4", "ck2stages")},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "spec, env, arch, expected, at", BY_TOKENS, ids=lambda v: getattr(v, "name", None)
)
def test_by_tokens(spec, env, arch, expected, at):
    made = plan(spec, env, arch)
    assert layouts(made) == expected
    assert made.gate_mode == ("separated" if expected is SEPARATED else "interleave")
    for tokens, wanted in at.items():
        assert (made.mode_for(tokens), made.family_for(tokens)) == wanted, tokens


def test_betas_are_passed_as_they_are():
    made = plan(MoeSpec("situv2", 896, 16, 3584, 384, beta=1.0, linear_beta=1.0))
    assert made.call_kwargs["beta"] == made.call_kwargs["linear_beta"] == 1.0


@pytest.mark.parametrize("limit, passed", [(None, 7.0), (0, 7.0), (7.0, 7.0)])
def test_swiglu_limit_is_always_passed(limit, passed):
    made = plan(MoeSpec("swiglu", **PLAIN, swiglu_limit=limit))
    assert made.call_kwargs["swiglu_limit"] == passed
    assert made.call_kwargs["gate_mode"] == "interleave"  # field L4: with or without a limit


def test_swiglu_with_another_limit_has_one_way():
    env = {ITLV: "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"}
    made = plan(MoeSpec("swiglu", **PLAIN, swiglu_limit=5.0), env)
    assert made.modes == ("A4W4",) and made.call_kwargs["swiglu_limit"] == 5.0


def test_silu_limit():
    assert plan(DEEPSEEK, {BOUND: "0"}).call_kwargs["swiglu_limit"] == 10.0
    for limit in (None, 0, float("inf")):
        spec = MoeSpec("silu", 384, 6, 7168, 384, swiglu_limit=limit)
        assert "swiglu_limit" not in plan(spec, {BOUND: "0"}).call_kwargs


@pytest.mark.parametrize(
    "spec, env, arch, sglang, expected",
    [
        (QWEN, {}, "gfx950", "0.5.23", (True, True)),
        (QWEN, {}, "gfx950", None, (True, True)),
        (QWEN, {"SGLANG_ROCM_SMALLM_MOE": "0"}, "gfx950", "0.5.21", (False, True)),
        (QWEN, {}, "gfx950", "0.5.20", None),
        (QWEN, {}, "gfx1250", "0.5.23", None),
        (K3, {}, "gfx950", "0.5.23", None),
        (DEEPSEEK, {BOUND: "0"}, "gfx950", "0.5.23", (True, False)),
        (MoeSpec("silu", **PLAIN), {ITLV: "1", BOUND: "0"}, "gfx950", "0.5.23", (True, False)),
        (MoeSpec("silu", **PLAIN, swiglu_limit=3.0), {}, "gfx950", "0.5.23", (True, False)),
    ],
)
def test_bypass(spec, env, arch, sglang, expected):
    planned = plan(spec, env, arch, sglang=sglang)
    made, interleaved = planned.bypasses, planned.w13_layout != "separated"
    if expected is None:
        assert made == ()
    else:
        (bypass,) = made
        kept_off = (
            "" if expected[1] else "separated bytes, and this layer" if interleaved else "a limit"
        )
        assert (kept_off or "reads the separated bytes as they are") in bypass.reason
        assert bypass.name == "smallm_moe_gfx950"
        assert bypass.variable == "SGLANG_ROCM_SMALLM_MOE"
        assert (bypass.active, bypass.allowed) == expected


def test_every_decision_has_a_reason_and_a_source():
    made = plan(gptoss(2))
    subjects = {d.subject for d in made.decisions}
    assert subjects >= {
        "aiter", "mode", "w13_layout", "w13_scale_layout", "w2_layout", "w2_scale_layout",
        "gate_mode", "padding", "swiglu_limit", "family",
    }  # fmt: skip
    assert all(d.reason and "contract.md section" in d.source for d in made.decisions)


def test_unidentified_aiter_is_said():
    made = plan(K3, {A4W4: "1"}, aiter=Capabilities.newest("no AITER here"))
    assert made.modes == ("A4W4",)
    assert "not identified" in made.explain("aiter") and "no AITER here" in made.explain("aiter")


def without(*features):
    known = Capabilities.for_release("0.1.20")
    return replace(known, features=known.features - set(features), name="a build of one's own")


def test_a_keyword_that_this_aiter_does_not_know():
    """Left out where leaving it out says the same, refused where it does not."""
    spec = MoeSpec("swiglu", **PLAIN)
    assert "swiglu_limit" not in plan(spec, aiter=without("swiglu_limit")).call_kwargs
    with pytest.raises(ContractError, match="keyword swiglu_limit"):
        plan(DEEPSEEK, {BOUND: "0"}, aiter=without("swiglu_limit"))
    with pytest.raises(ContractError, match="SiTUv2"):
        plan(K3, aiter=without("situv2"))
    env = {ITLV: "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"}
    with pytest.raises(ContractError, match="keyword swiglu_limit"):
        plan(MoeSpec("swiglu", **PLAIN, swiglu_limit=5.0), env, aiter=without("swiglu_limit"))
    plan(MoeSpec("swiglu", **PLAIN, swiglu_limit=7.0), env, aiter=without("swiglu_limit"))


def test_an_sglang_without_a_release_counts_as_new():
    assert plan(QWEN, sglang="main").bypasses


def test_notes():
    def notes(*args, **kwargs):
        return [d.value for d in plan(*args, **kwargs).decisions if d.subject == "note"]

    assert notes(K3) == []
    assert any("compiled in" in n for n in notes(K3, aiter="0.1.19"))
    assert any("rounded to even" in n for n in notes(MINIMAX, {ITLV: "0"}, aiter="0.1.14"))
    assert any("STAGE2_FP8" in n for n in notes(K3, {"AITER_FLYDSL_STAGE2_FP8": "1"}))
    masked = MoeSpec("silu", **PLAIN, expert_parallel=True)
    assert any("top-k less one" in n for n in notes(masked))
    assert not any("top-k less one" in n for n in notes(MoeSpec("silu", **PLAIN)))
    assert not any("top-k less one" in n for n in notes(masked, arch="gfx1250"))
    # b.2 tunes gpt-oss's shape with MXFP4 activations too; K3's rows are of its own mode.
    assert any("tunes this shape for separated w13" in n for n in notes(gptoss(1)))
    for other in (
        notes(gptoss(1), {ITLV: "0"}),
        notes(K3, {A8W4: "1"}),
        notes(gptoss(1), arch="gfx942"),
    ):
        assert not any("tunes this shape" in n for n in other)


def test_ranges_are_as_few_as_can_be():
    """Neighbouring token counts of the same mode, family and reason are one range."""
    assert [(r.first, r.last) for r in plan(K3).ranges] == [(1, 16384), (16385, 2**24 - 1)]
    assert [(r.first, r.last) for r in plan(K3, {A4W4: "1"}).ranges] == [(1, 2**24 - 1)]
    starts = [r.first for r in plan(MINIMAX, {ITLV: "0"}).ranges]
    assert starts == [1, 256]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
