"""The plan of each row of docs/contract.md section b.4, and of the models of section f."""

import json
import pickle
import sys

import pytest
import torch

from sglang_aiter_moe.contract import Capabilities, MoePlan, MoeSpec, Target, plan_moe, shard
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

A8W4, A4W4 = "AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4"
ITLV = "SGLANG_USE_AITER_MOE_GU_ITLV"
BOUND = "AITER_BF16_FP8_MOE_BOUND"
FORCE_A8W4 = "AITER_FORCE_A8W4"
KERNEL = "SGLANG_AITER_MOE_A16W4_KERNEL"

K3 = MoeSpec("situv2", 896, 16, 3584, 384, beta=4.0, linear_beta=25.0, name="k3")
QWEN = MoeSpec("silu", 512, 10, 4096, 256, name="qwen3.5")
MINIMAX = MoeSpec("swiglu", 129, 5, 6144, 384, name="minimax-m3")
DEEPSEEK = MoeSpec("silu", 384, 6, 7168, 384, swiglu_limit=10.0, name="deepseek-v4")
PLAIN = {"num_experts": 64, "topk": 8, "hidden_size": 2048, "intermediate_size": 512}


def gptoss(tp):
    return MoeSpec(
        "swiglu",
        128,
        4,
        2880,
        shard(2880, tp),
        gate_up_interleaved=True,
        has_bias=True,
        swiglu_limit=7.0,
        name=f"gpt-oss tp{tp}",
    )


def plan(spec, env=None, arch="gfx950", aiter="0.1.20", **target):
    capabilities = Capabilities.for_release(aiter) if isinstance(aiter, str) else aiter
    return plan_moe(spec, Target(arch, capabilities, env or {}, **target))


def layouts(made):
    return made.w13_layout, made.w13_scale_layout, made.w2_layout, made.w2_scale_layout


SEPARATED = ("separated", "separated", "separated", "separated")
INTERLEAVED = ("gu_interleaved", "a16w4_gate_up", "separated", "a16w4")
GFX1250 = ("gu_interleaved_gfx1250", "n32k4_gate_up", "separated", "n32k4")

# --- SiTUv2: section 0 -----------------------------------------------------------------------------

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
    assert plan(K3, {A4W4: "1"}, aiter="0.1.19.post1").modes == ("A4W4",)
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
    "env, name",
    [
        ({"AITER_DISABLE_GROUPED_A8W4": "1"}, "AITER_DISABLE_GROUPED_A8W4"),
        ({"AITER_GROUPED_STAGE1_WEIGHT_LAYOUT": "gguu"}, "AITER_GROUPED_STAGE1_WEIGHT_LAYOUT"),
    ],
)
def test_gfx1250_grouped_path_is_the_only_one(env, name):
    with pytest.raises(ContractError, match=name):
        plan(K3, env, "gfx1250")
    plan(K3, {"AITER_GROUPED_STAGE1_WEIGHT_LAYOUT": " GUGU "}, "gfx1250")
    plan(K3, env)


def test_gfx1250_needs_its_shuffles_and_flydsl():
    with pytest.raises(ContractError, match=r"v0\.1\.18"):
        plan(QWEN, arch="gfx1250", aiter="0.1.17")
    without = Capabilities.for_release("0.1.20").with_flydsl(None, available=False)
    with pytest.raises(ContractError, match="flydsl"):
        plan(K3, arch="gfx1250", aiter=without)
    with pytest.raises(ContractError, match="gelu"):
        plan(MoeSpec("gelu", **PLAIN), arch="gfx1250")


@pytest.mark.parametrize("name", ["AITER_USE_GROUPED_GEMM", "AITER_FORCE_GFX1250"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_gfx1250_path_elsewhere_is_refused(name, arch):
    for value in ("1", "true", "True", "yes", "YES"):
        with pytest.raises(ContractError, match=f"{name}='{value}'"):
            plan(K3, {name: value}, arch)
    for value in ("0", "on", ""):
        plan(K3, {name: value}, arch)


@pytest.mark.parametrize(
    "beta, linear_beta", [(None, 25.0), (4.0, None), (0.0, 25.0), (4.0, -1.0), (float("inf"), 25.0)]
)
def test_betas_are_needed(beta, linear_beta):
    """field L12: left out, they are 1/1 on one path and 4/25 on another."""
    with pytest.raises(ContractError, match="beta"):
        plan(MoeSpec("situv2", 896, 16, 3584, 384, beta=beta, linear_beta=linear_beta))


def test_betas_are_passed_as_they_are():
    made = plan(MoeSpec("situv2", 896, 16, 3584, 384, beta=1.0, linear_beta=1.0))
    assert made.call_kwargs["beta"] == made.call_kwargs["linear_beta"] == 1.0


@pytest.mark.parametrize("env", [{}, {A8W4: "1"}, {A4W4: "1"}])
def test_situv2_refusals(env):
    limited = MoeSpec("situv2", 896, 16, 3584, 384, beta=4.0, linear_beta=25.0, swiglu_limit=7.0)
    with pytest.raises(ContractError, match="swiglu_limit"):
        plan(limited, env)
    for option in ("doweight_stage1", "shared_expert", "no_combine"):
        spec = MoeSpec("situv2", 896, 16, 3584, 384, beta=4.0, linear_beta=25.0, **{option: True})
        with pytest.raises(ContractError, match=r"doweight|shared|no_combine"):
            plan(spec, env)


def test_a16w4_takes_no_mask_and_no_bias():
    """field L14: at load, not at the first forward."""
    masked = MoeSpec(
        "situv2", 112, 16, 3584, 3072, beta=4.0, linear_beta=25.0, expert_parallel=True
    )
    with pytest.raises(ContractError, match="mask") as caught:
        plan(masked)
    assert "AITER_SITUV2_A8W4=1" in caught.value.fix
    assert plan(masked, {A8W4: "1"}).modes == ("A8W4",)
    assert plan(masked, {A4W4: "1"}).modes == ("A4W4",)
    biased = MoeSpec("situv2", 112, 16, 3584, 3072, beta=4.0, linear_beta=25.0, has_bias=True)
    with pytest.raises(ContractError, match="bias"):
        plan(biased)


def test_layout_stage2_drops_the_bias():
    """section c: the tuned K3 rows' stage 2 adds no bias; the heuristic kernels do."""
    options = {"beta": 4.0, "linear_beta": 25.0, "has_bias": True}
    with pytest.raises(ContractError, match="bias"):
        plan(MoeSpec("situv2", 896, 16, 3584, 384, **options), {A4W4: "1"})
    plan(MoeSpec("situv2", 112, 16, 3584, 3072, **options), {A4W4: "1"})


def test_without_flydsl_situv2_has_no_kernel():
    without = Capabilities.for_release("0.1.20").with_flydsl(None, available=False)
    for env in ({}, {A8W4: "1"}, {A4W4: "1"}):
        with pytest.raises(ContractError, match="flydsl"):
            plan(K3, env, aiter=without)


# --- SwiGLU, SiLU, GELU: section b.4 ---------------------------------------------------------------

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


REFUSED = [
    # spec, env, arch, fragment of the message, fragment of the fix
    (MoeSpec("silu", **PLAIN), {ITLV: "1"}, "gfx950", "A16W4", f"export {BOUND}=0"),
    (MoeSpec("silu", **PLAIN), {ITLV: "1", BOUND: "256"}, "gfx950", "A16W4", f"export {BOUND}=0"),
    (MoeSpec("silu", **PLAIN), {}, "gfx942", "gfx942 has no A4W4", "another MoE backend"),
    (MoeSpec("silu", **PLAIN), {ITLV: "1"}, "gfx942", "reaches", "another MoE backend"),
    (MoeSpec("silu", **PLAIN), {"AITER_FLYDSL_FORCE": "0"}, "gfx950", "split-k", "unset"),
    (MoeSpec("silu", **PLAIN), {ITLV: "yes"}, "gfx950", ITLV, f"export {ITLV}="),
    (MoeSpec("silu", **PLAIN), {ITLV: ""}, "gfx950", ITLV, f"export {ITLV}="),
    (MoeSpec("gelu", **PLAIN), {}, "gfx950", "which computes", "AITER_FLYDSL_FORCE=0"),
    (MoeSpec("gelu", **PLAIN), {"AITER_FLYDSL_FORCE": "0"}, "gfx950", "split-k", "AITER_KSPLIT=1"),
    (MoeSpec("gelu", **PLAIN), {ITLV: "1", BOUND: "0"}, "gfx950", "which computes", "export"),
    (gptoss(1), {ITLV: "0"}, "gfx942", "gfx942 has no A4W4", f"{ITLV}=1"),
    (MoeSpec("swiglu", **PLAIN, alpha=1.0), {}, "gfx950", "alpha", "another MoE backend"),
    (MoeSpec("swiglu", **PLAIN, swiglu_limit=5.0), {}, "gfx950", "built in", f"{ITLV}=0"),
    (MoeSpec("swiglu", **PLAIN, swiglu_limit=5.0), {ITLV: "0"}, "gfx950", "built in", f"{ITLV}=0"),
    (MoeSpec("swiglu", **PLAIN, swiglu_limit=float("inf")), {}, "gfx950", "built in", ""),
    (MoeSpec("swiglu", **PLAIN, swiglu_limit=-1.0), {}, "gfx950", "swiglu_limit", ""),
    (DEEPSEEK, {}, "gfx950", "ignores it", f"{BOUND}=0"),
    (MoeSpec("silu", 512, 10, 4096, 256, has_bias=True), {}, "gfx950", "bias", ""),
    (MoeSpec("silu", 512, 10, 4096, 256, expert_parallel=True), {}, "gfx950", "mask", ""),
    # section g.4: the second lookup ignores the activation, and mxmoe computes SiLU
    (MoeSpec("swiglu", 384, 8, 7168, 512), {ITLV: "0"}, "gfx950", "silu alone", "BYPASS"),
    (MoeSpec("swiglu", 257, 8, 6144, 512), {ITLV: "0"}, "gfx950", "silu alone", "BYPASS"),
    (
        MoeSpec("situv2", 385, 9, 7168, 256, beta=4.0, linear_beta=25.0),
        {A4W4: "1"},
        "gfx950",
        "silu alone",
        "BYPASS",
    ),
    # a SwiGLU layer of K3's shape meets K3's bf16 rows, whose kernel reads separated bytes
    (MoeSpec("swiglu", 896, 16, 3584, 384), {}, "gfx950", "flydsl_a16w4", "BYPASS"),
    (K3, {BOUND: "junk"}, "gfx950", "ValueError in every MoE call", f"unset {BOUND}"),
    (QWEN, {BOUND: ""}, "gfx942", "ValueError", f"unset {BOUND}"),
    (K3, {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "1.5"}, "gfx950", "ValueError", "unset"),
    (K3, {"AITER_KSPLIT": "x"}, "gfx950", "ValueError", "unset"),
    (DEEPSEEK, {BOUND: "0", "AITER_MOE_A8W4_BYPASS_QUANT": "1"}, "gfx950", "BYPASS_QUANT", "unset"),
    (K3, {A8W4: "1", "AITER_MOE_A8W4_BYPASS_QUANT": "1"}, "gfx950", "BYPASS_QUANT", "unset"),
]


@pytest.mark.parametrize("spec, env, arch, what, fix", REFUSED)
def test_refused(spec, env, arch, what, fix):
    with pytest.raises(ContractError) as caught:
        plan(spec, env, arch)
    assert what in str(caught.value)
    assert fix in caught.value.fix


def test_tuned_rows_can_be_set_aside():
    spec = MoeSpec("swiglu", 384, 8, 7168, 512)
    made = plan(spec, {ITLV: "0", "AITER_BYPASS_TUNE_CONFIG": "1"})
    assert made.family_for(256) == "flydsl_a4w4" and made.tuned_for(256) is False


def test_silu_without_a_word_from_the_operator():
    """Interleaved SiLU has no kernel below the bound: separated then, interleaved once the bound is 0."""
    spec = MoeSpec("silu", **PLAIN)
    assert plan(spec).w13_layout == "separated"
    assert plan(spec, {BOUND: "0"}).w13_layout == "gu_interleaved"
    assert plan(spec, {BOUND: "1"}).w13_layout == "gu_interleaved"
    assert plan(spec, {BOUND: "2"}).w13_layout == "separated"


def test_old_aiter_leaves_silu_to_ck():
    """AITER_FLYDSL_FORCE came with v0.1.16; before it SiLU reaches CK-tile's split-k."""
    with pytest.raises(ContractError, match=r"v0\.1\.16"):
        plan(MoeSpec("silu", **PLAIN), aiter="0.1.14")
    assert plan(MoeSpec("silu", **PLAIN), aiter="0.1.16").family_for(1) == "flydsl_a4w4"


@pytest.mark.parametrize(
    "spec, aiter, since",
    [
        (K3, "0.1.18", "0.1.19"),
        (QWEN, "0.1.12", "0.1.13"),
        (QWEN, "0.1.13", "0.1.14"),
        (gptoss(1), "0.1.6", "0.1.7"),
    ],
)
def test_aiter_too_old(spec, aiter, since):
    with pytest.raises(ContractError, match=f"v{since} or newer"):
        plan(spec, aiter=aiter)


def test_flydsl_that_does_not_fit():
    """section e: v0.1.20's kernels do not build with 0.3.0, which AITER's own check lets pass."""
    with pytest.raises(ContractError, match=r"flydsl==0.3.1"):
        plan(K3, aiter=Capabilities.for_release("0.1.20").with_flydsl("0.3.0"))
    plan(K3, aiter=Capabilities.for_release("0.1.20").with_flydsl("0.3.1"))
    plan(K3, aiter=Capabilities.for_release("0.1.19.post2").with_flydsl("0.3.0"))


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


def test_an_imported_aiter_has_frozen_its_bound():
    frozen = Capabilities(
        Capabilities.for_release("0.1.20").features, "imported", swiglu_bf16_bound=512
    )
    made = plan(gptoss(1), {ITLV: "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"}, aiter=frozen)
    assert made.mode_for(511) == "A16W4" and made.mode_for(512) == "A4W4"


# --- padding: field L10 and L13, section f ---------------------------------------------------------

PADS = [
    # spec, env, allocated H and I, stated pads
    (K3, {}, (3584, 384), (0, 0)),
    (K3, {"SGLANG_AITER_K3_OPT": "0"}, (3584, 384), (0, 0)),
    (gptoss(1), {}, (3072, 3072), (192, 192)),
    (gptoss(2), {}, (3072, 1536), (192, 64)),
    (gptoss(4), {}, (3072, 768), (192, 0)),
    (gptoss(8), {}, (3072, 512), (192, 128)),
    (MINIMAX, {}, (6144, 384), (0, 0)),
    (QWEN, {}, (4096, 256), (0, 0)),
    (MoeSpec("situv2", 896, 16, 3584, 192, beta=4.0, linear_beta=25.0), {}, (3584, 256), (0, 64)),
]


@pytest.mark.parametrize("spec, env, sizes, pads", PADS, ids=lambda v: getattr(v, "name", None))
def test_padding(spec, env, sizes, pads):
    made = plan(spec, env)
    assert (made.padded_hidden_size, made.padded_intermediate_size) == sizes
    assert (made.hidden_pad, made.intermediate_pad) == pads
    stated = (made.call_kwargs.get("hidden_pad", 0), made.call_kwargs.get("intermediate_pad", 0))
    assert stated == pads


def test_shard():
    """sglang#27201: the loader divides whole blocks of 32, so TP4 and TP8 hold 736 and 384 columns."""
    assert [shard(2880, n) for n in (1, 2, 4, 8)] == [2880, 1440, 736, 384]
    assert [shard(3072, n) for n in (1, 2, 4, 8)] == [3072, 1536, 768, 384]
    for full, ranks in ((2881, 1), (0, 1), (2880, 0)):
        with pytest.raises(ContractError):
            shard(full, ranks)


# --- tuned rows --------------------------------------------------------------------------------

K3_COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def test_k3_tuned_rows():
    for tokens in K3_COUNTS:
        assert plan(K3, {A4W4: "1"}).tuned_for(tokens) is True
        assert plan(K3, {A8W4: "1"}).tuned_for(tokens) is True
        assert plan(K3).tuned_for(tokens) is (tokens <= 16384)
    padded = MoeSpec("situv2", 896, 16, 3584, 512, beta=4.0, linear_beta=25.0)
    assert plan(padded, {A4W4: "1"}).tuned_for(1) is False
    assert "384, not 512" in plan(padded, {A4W4: "1"}).range_for(1).reason
    assert plan(padded, {A8W4: "1"}).tuned_for(1) is True
    assert plan(K3, {A4W4: "1", "AITER_CONFIG_FMOE": "/t.csv"}).tuned_for(1) is None


def test_tuned_rows_that_interleaving_misses_are_named():
    note = [d for d in plan(MINIMAX).decisions if "minimax_m3_fp4" in d.value]
    assert note and f"export {ITLV}=0" in note[0].reason


# --- kernels that bypass fused_moe --------------------------------------------------------------


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
    made = plan(spec, env, arch, sglang=sglang).bypasses
    if expected is None:
        assert made == ()
    else:
        (bypass,) = made
        assert bypass.name == "smallm_moe_gfx950"
        assert bypass.variable == "SGLANG_ROCM_SMALLM_MOE"
        assert (bypass.active, bypass.allowed) == expected


# --- the plan as an object ------------------------------------------------------------------------


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


def test_json_and_pickle():
    made = plan(gptoss(4), {ITLV: "0"}, sglang="0.5.23")
    again = MoePlan.from_json(made.to_json())
    assert again == made and dict(again.call_kwargs) == dict(made.call_kwargs)
    assert again.mode_for(255) is made.mode_for(255)
    assert pickle.loads(pickle.dumps(made)) == made
    assert json.loads(made.to_json())["version"] == 1
    assert again != plan(gptoss(2), {ITLV: "0"}, sglang="0.5.23")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"version": 2}', '{"version": 1}'])
def test_json_that_is_no_plan(text):
    with pytest.raises(ContractError, match="plan"):
        MoePlan.from_json(text)


def test_json_of_a_tampered_plan():
    data = json.loads(plan(K3).to_json())
    for change in ({"gate_mode": "sideways"}, {"extra": 1}, {"ranges": [{"first": 1}]}):
        with pytest.raises(ContractError):
            MoePlan.from_json(json.dumps({**data, **change}))


def test_frozen():
    made = plan(K3)
    with pytest.raises(AttributeError):
        made.w13_layout = "gu_interleaved"
    with pytest.raises(TypeError):
        made.call_kwargs["gate_mode"] = "interleave"


def test_bytes_key():
    assert plan(K3).bytes_key() == plan(K3, {A4W4: "1"}).bytes_key()
    assert plan(K3).bytes_key() != plan(K3, {A8W4: "1"}).bytes_key()


# --- does it still hold? --------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch):
    for name in (
        A8W4,
        A4W4,
        BOUND,
        FORCE_A8W4,
        "AITER_BYPASS_TUNE_CONFIG",
        "AITER_USE_GROUPED_GEMM",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("loaded", [{}, {A8W4: "1"}, {A4W4: "1"}])
@pytest.mark.parametrize("name, value", [(A8W4, "1"), (A8W4, "true"), (A4W4, "1"), (A4W4, "")])
def test_a_flag_changed_after_load(clean, loaded, name, value):
    """field L3: refused, unless nothing about the layer changes."""
    made = plan(K3, loaded)
    for key, old in loaded.items():
        clean.setenv(key, old)
    made.check_still_holds()
    before = loaded.get(name)
    clean.setenv(name, value)
    same = before == value or (name == A4W4 and loaded.get(A8W4) == "1" and value == "1")
    if same:
        made.check_still_holds()
        return
    with pytest.raises(ContractError) as caught:
        made.check_still_holds()
    assert f"{name} was {before!r} and is {value!r}" in str(caught.value)
    wanted = f"unset {name}" if before is None else f"export {name}={before}"
    assert wanted in caught.value.fix
    if before is None:
        clean.delenv(name)
    else:
        clean.setenv(name, before)
    made.check_still_holds()


def test_a_flag_removed_after_load(clean):
    clean.setenv(A8W4, "1")
    made = plan(K3, {A8W4: "1"})
    clean.delenv(A8W4)
    with pytest.raises(ContractError, match="was '1' and is None"):
        made.check_still_holds()


def test_spelling_off_differently_changes_nothing(clean):
    made = plan(K3)
    clean.setenv(A8W4, "0")
    made.check_still_holds()
    clean.setenv(A8W4, "1")
    with pytest.raises(ContractError):
        made.check_still_holds()


def test_bound_changed_after_load(clean):
    clean.setenv(BOUND, "0")
    made = plan(DEEPSEEK, {BOUND: "0"})
    made.check_still_holds()
    clean.setenv(BOUND, "256")
    with pytest.raises(ContractError, match=BOUND):
        made.check_still_holds()
    clean.setenv(BOUND, "junk")
    with pytest.raises(ContractError, match="ValueError"):
        made.check_still_holds()


def test_a_variable_of_another_layer_may_change(clean):
    made = plan(QWEN)
    clean.setenv(A8W4, "true")
    made.check_still_holds()
    made = plan(K3, arch="gfx1250")
    clean.setenv(FORCE_A8W4, "1")
    with pytest.raises(ContractError, match=FORCE_A8W4):
        made.check_still_holds()


def test_traces_whole_and_reads_no_environment(clean):
    """The check and the keywords inside torch.compile(fullgraph): a changed flag is not looked at."""
    made = plan(K3)

    def call(x, *, gate_mode, beta, linear_beta):
        return x * beta + linear_beta if gate_mode == "separated" else -x

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        made.check_still_holds()
        return call(x, **made.call_kwargs)

    clean.setenv(A8W4, "1")
    x = torch.arange(4.0)
    assert torch.equal(run(x), x * 4 + 25)
    with pytest.raises(ContractError):
        made.check_still_holds()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
