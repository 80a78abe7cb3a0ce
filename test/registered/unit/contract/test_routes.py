"""Mode, layout and gate_mode: docs/contract.md sections 0 and b.1, field L1 to L5."""

import sys

import pytest

from sglang_aiter_moe.contract import Capabilities, MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.plans import (
    A4W4,
    A8W4,
    BOUND,
    FORCE_A8W4,
    GFX1250,
    INTERLEAVED,
    ITLV,
    K3,
    KERNEL,
    MINIMAX,
    PLAIN,
    QWEN,
    SEPARATED,
    gptoss,
    layouts,
    plan,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


SITUV2_RULE = [
    # env, mode, layouts, gate_mode
    ({}, "A16W4", SEPARATED, "separated"),
    ({A8W4: "0", A4W4: "0"}, "A16W4", SEPARATED, "separated"),
    ({A4W4: "1"}, "A4W4", SEPARATED, "separated"),
    ({A8W4: "0", A4W4: "1"}, "A4W4", SEPARATED, "separated"),
    ({A8W4: "1"}, "A8W4", INTERLEAVED, "interleave"),
    ({A8W4: "1", A4W4: "0"}, "A8W4", INTERLEAVED, "interleave"),
    ({A8W4: "1", A4W4: "1"}, "A8W4", INTERLEAVED, "interleave"),
]


@pytest.mark.parametrize("aiter", ["0.1.19.post1", "6dc26b7a8", "0.1.20", "e4048607a535"])
@pytest.mark.parametrize("env, mode, expected, gate_mode", SITUV2_RULE)
def test_situv2_rule(env, mode, expected, gate_mode, aiter):
    made = plan(K3, env, aiter=aiter)
    assert layouts(made) == expected
    assert made.gate_mode == gate_mode
    assert [made.mode_for(m) for m in (1, 256, 32768)] == [mode] * 3
    assert dict(made.call_kwargs) == {"gate_mode": gate_mode, "beta": 4.0, "linear_beta": 25.0}
    assert (made.padded_hidden_size, made.padded_intermediate_size) == (3584, 384)
    assert made.aiter_activation == "Situv2"


def test_both_flags_are_noted():
    notes = [d for d in plan(K3, {A8W4: "1", A4W4: "1"}).decisions if d.subject == "note"]
    assert any("both" in d.value and "A8W4" in d.reason for d in notes)
    assert not any("both" in d.value for d in plan(K3, {A8W4: "1"}).decisions)


@pytest.mark.parametrize("name", [A8W4, A4W4])
@pytest.mark.parametrize(
    "value, sglang",
    [
        ("", "off"),
        ("true", "on"),
        ("True", "on"),
        ("TRUE", "on"),
        ("yes", "off"),
        ("on", "off"),
        (" 1", "off"),
        ("1 ", "off"),
        ("01", "off"),
        ("2", "off"),
        ("false", "off"),
        ("junk", "off"),
    ],
)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
def test_unclean_flags_are_refused(name, value, sglang, arch):
    """field L2: what SGLang reads, what AITER reads (always off), and the line to type."""
    with pytest.raises(ContractError) as caught:
        plan(K3, {name: value}, arch)
    message = str(caught.value)
    assert f"{name}={value!r}" in message
    assert f"SGLang reads it as {sglang}, AITER as off" in message
    line = "1" if value.strip().lower() in ("true", "yes", "on", "1", "01") else "0"
    assert f"export {name}={line}`" in caught.value.fix


def test_flags_of_another_activation_are_not_read():
    assert plan(QWEN, {A8W4: "true"}).w13_layout == "separated"


def test_a_flag_that_aiter_does_not_know_is_named():
    """section 0: v0.1.19 ignores AITER_SITUV2_A4W4 and runs A16W4."""
    made = plan(K3, {A4W4: "1"}, aiter="0.1.19")
    assert made.modes == ("A16W4",) and layouts(made) == SEPARATED
    assert "ignores AITER_SITUV2_A4W4" in made.explain("mode")
    newer = plan(K3, {A4W4: "1"}, aiter="0.1.19.post1")
    assert newer.modes == ("A4W4",) and "ignores" not in newer.explain("mode")
    assert "ignores" not in plan(K3, {A8W4: "1", A4W4: "1"}).explain("mode")
    assert "ignores" not in plan(K3, aiter="0.1.19").explain("mode")
    assert plan(K3, {A8W4: "1"}, aiter="0.1.19").modes == ("A8W4",)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("how", ["variable", "argument"])
def test_a16w4_kernel_override(arch, how):
    env = {KERNEL: "gu_interleaved"} if how == "variable" else {}
    more = {"a16w4_kernel": "gu_interleaved"} if how == "argument" else {}
    made = plan(K3, env, arch, **more)
    assert made.modes == ("A16W4",) and layouts(made) == INTERLEAVED
    assert made.call_kwargs["gate_mode"] == "interleave"
    assert KERNEL in made.explain("w13_layout")


def test_a16w4_kernel_override_leaves_the_other_modes_alone():
    made = plan(K3, {KERNEL: "gu_interleaved", A4W4: "1"})
    assert made.modes == ("A4W4",) and layouts(made) == SEPARATED
    assert layouts(plan(gptoss(1), {KERNEL: "gu_interleaved", ITLV: "0"})) == SEPARATED


@pytest.mark.parametrize("value", ["", "interleaved", "Separated", "1"])
def test_a16w4_kernel_override_spelling(value):
    with pytest.raises(ContractError, match=f"{KERNEL} is '{value}'"):
        plan(K3, {KERNEL: value})


def test_departure_from_the_published_rule_is_noted():
    assert "#33838" in plan(K3).explain("w13_layout")


@pytest.mark.parametrize("flag", [A8W4, A4W4])
def test_gfx942_runs_a16w4_alone(flag):
    made = plan(K3, arch="gfx942")
    assert made.modes == ("A16W4",) and layouts(made) == SEPARATED
    with pytest.raises(ContractError, match=r"gfx942 has no A.W4 kernel") as caught:
        plan(K3, {flag: "1"}, "gfx942")
    assert "unset" in caught.value.fix


@pytest.mark.parametrize("spec", [K3, QWEN, gptoss(8), MINIMAX], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "env, mode", [({}, "A4W4"), ({FORCE_A8W4: "0"}, "A4W4"), ({FORCE_A8W4: "1"}, "A8W4")]
)
def test_gfx1250(spec, env, mode):
    made = plan(spec, env, "gfx1250")
    assert layouts(made) == GFX1250 and made.gate_mode == "interleave"
    assert made.modes == (mode,)
    assert (made.hidden_pad, made.intermediate_pad) == (0, 0)
    assert "hidden_pad" not in made.call_kwargs


def test_gfx1250_ignores_the_situv2_flags():
    assert plan(K3, {A8W4: "1"}, "gfx1250").modes == ("A4W4",)


@pytest.mark.parametrize("value", ["", "true", "01"])
def test_gfx1250_flag_spelling(value):
    """AITER tests for a substring of "1": the empty string is on for AITER and off for SGLang."""
    with pytest.raises(ContractError) as caught:
        plan(K3, {FORCE_A8W4: value}, "gfx1250")
    aiter = "on" if value == "" else "off"
    assert f"AITER as {aiter}" in str(caught.value)
    assert plan(K3, {FORCE_A8W4: value}).modes == ("A16W4",)  # gfx950 does not read it


@pytest.mark.parametrize(
    "value, layout",
    [(value, "separated") for value in ("0", "False", "NO", "n")]
    + [(value, "gu_interleaved") for value in ("1", "TRUE")],
)
def test_what_both_of_sglangs_parsers_read_alike_is_taken(value, layout):
    assert plan(gptoss(1), {ITLV: value}).w13_layout == layout


@pytest.mark.parametrize("value", ["yes", "y", "on", "off", "", " 1", "01", "junk"])
def test_what_they_read_differently_is_refused(value):
    with pytest.raises(ContractError, match="read it as on, one place in its runner as off"):
        plan(gptoss(1), {ITLV: value})
    assert plan(K3, {ITLV: value}).modes == ("A16W4",)  # SiTUv2 layers do not read it


def test_silu_without_a_word_from_the_operator():
    """Interleaved SiLU has no kernel below the bound: separated then, interleaved once the bound is 0."""
    spec = MoeSpec("silu", **PLAIN)
    assert plan(spec).w13_layout == "separated"
    assert plan(spec, {BOUND: "0"}).w13_layout == "gu_interleaved"
    assert plan(spec, {BOUND: "1"}).w13_layout == "gu_interleaved"
    assert plan(spec, {BOUND: "2"}).w13_layout == "separated"


def test_an_imported_aiter_has_frozen_its_bound():
    frozen = Capabilities(
        Capabilities.for_release("0.1.20").features, "imported", swiglu_bf16_bound=512
    )
    made = plan(gptoss(1), {ITLV: "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"}, aiter=frozen)
    assert made.mode_for(511) == "A16W4" and made.mode_for(512) == "A4W4"


def test_a_bound_of_two_leaves_one_token_to_bf16():
    for bound, alone in ((1, "A4W4"), (2, "A16W4")):
        made = plan(gptoss(1), {ITLV: "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": str(bound)})
        assert made.mode_for(1) == alone and made.mode_for(2) == "A4W4"


def test_a_bound_beyond_every_batch():
    """With the bound out of reach, separated SwiGLU runs bf16 activations alone, on gfx942 too."""
    env = {ITLV: "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": str(2**24)}
    for arch in ("gfx942", "gfx950"):
        made = plan(gptoss(1), env, arch)
        assert made.modes == ("A16W4",) and made.family_for(2**24 - 1) == "cktile_splitk"
    assert plan(gptoss(1), {**env, "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "-1"}).modes == ("A4W4",)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
