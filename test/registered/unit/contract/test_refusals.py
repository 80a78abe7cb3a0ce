"""What the plan refuses, each with what to do: docs/contract.md section h, field L12, L14, L15."""

import sys

import pytest

from sglang_aiter_moe.contract import ActivationMode, Capabilities, GateMode, MoeSpec, Target
from sglang_aiter_moe.contract.families import FAMILIES, Choice
from sglang_aiter_moe.contract.refusals import check_choice
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.plans import (
    A4W4,
    A8W4,
    BOUND,
    DEEPSEEK,
    ITLV,
    K3,
    PLAIN,
    QWEN,
    gptoss,
    plan,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


REFUSED = [
    # spec, env, arch, fragment of the message, fragment of the fix
    (MoeSpec("silu", **PLAIN), {ITLV: "1"}, "gfx950", "A16W4", f"export {BOUND}=0"),
    (MoeSpec("silu", **PLAIN), {ITLV: "1", BOUND: "256"}, "gfx950", "A16W4", f"export {BOUND}=0"),
    (MoeSpec("silu", **PLAIN), {}, "gfx942", "gfx942 has no A4W4", "another MoE backend"),
    (MoeSpec("silu", **PLAIN), {ITLV: "1"}, "gfx942", "reaches", "another MoE backend"),
    (MoeSpec("silu", **PLAIN), {"AITER_FLYDSL_FORCE": "0"}, "gfx950", "split-k", "unset"),
    (MoeSpec("silu", **PLAIN), {ITLV: "yes"}, "gfx950", ITLV, f"export {ITLV}="),
    (MoeSpec("silu", **PLAIN), {ITLV: ""}, "gfx950", ITLV, f"export {ITLV}="),
    (
        gptoss(1),
        {ITLV: "off"},
        "gfx950",
        "read it as on, one place in its runner as off",
        f"export {ITLV}=",
    ),
    (gptoss(1), {ITLV: " 0"}, "gfx950", ITLV, f"export {ITLV}="),
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
    (MoeSpec("swiglu", 512, 9, 4096, 384), {ITLV: "0"}, "gfx950", "silu alone", "BYPASS"),
    (
        MoeSpec("gelu", 513, 11, 4096, 256),
        {"AITER_FLYDSL_FORCE": "0", "AITER_KSPLIT": "1"},
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


def test_ck_has_no_kernel_for_bf16_activations():
    with pytest.raises(ContractError, match=r"CK 2-stage has no such kernel") as caught:
        plan(MoeSpec("silu", **PLAIN), {ITLV: "1", "AITER_KSPLIT": "1"})
    assert f"export {BOUND}=0" in caught.value.fix


def test_gelu_on_gfx1250_has_no_line_to_type():
    with pytest.raises(ContractError) as caught:
        plan(MoeSpec("gelu", **PLAIN), arch="gfx1250")
    assert "another MoE backend" in caught.value.fix


@pytest.mark.parametrize("layout, fits", [("separated", True), ("gu_interleaved", False)])
def test_a_family_that_reads_another_layout(layout, fits):
    """No route leads there today; if one did, it would be refused."""
    family = FAMILIES["flydsl_a4w4"]
    choice = Choice(family, False, family.bias, "as a test")
    arguments = (
        MoeSpec("silu", **PLAIN),
        Target("gfx950", Capabilities.for_release("0.1.20")),
        ActivationMode.A4W4,
        choice,
        layout,
        GateMode.SEPARATED,
        "1",
    )
    if fits:
        check_choice(*arguments)
        return
    with pytest.raises(ContractError, match="reads w13 separated, not gu_interleaved"):
        check_choice(*arguments)


@pytest.mark.parametrize(
    "spec, env, arch, allowed",
    [
        (MoeSpec("silu", **PLAIN), {ITLV: "1"}, "gfx942", "SiTUv2 in A16W4, or interleaved SwiGLU"),
        (MoeSpec("silu", **PLAIN), {}, "gfx942", "A16W4 on gfx942"),
        (MoeSpec("gelu", **PLAIN), {}, "gfx950", "GELU on CK 2-stage alone"),
        (MoeSpec("gelu", **PLAIN), {}, "gfx1250", "SiLU, SwiGLU and SiTUv2 on gfx1250"),
        (
            MoeSpec("silu", **PLAIN),
            {ITLV: "1"},
            "gfx950",
            "silu in a combination that has a kernel",
        ),
    ],
)
def test_what_is_allowed(spec, env, arch, allowed):
    with pytest.raises(ContractError) as caught:
        plan(spec, env, arch)
    assert caught.value.allowed.startswith(allowed)


def test_a_flydsl_whose_version_says_nothing():
    odd = Capabilities.for_release("0.1.20").with_flydsl("unknown")
    with pytest.raises(ContractError, match="'unknown'"):
        plan(K3, aiter=odd)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
