"""The plan against portable's dispatch, over every combination: what is planned has to be what AITER would run.

The two share no code (test_isolation.py), so an agreement says something about both.
"""

import itertools
import sys

import pytest

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.plan import plan_moe
from sglang_aiter_moe.contract.spec import MoeSpec, Target
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import effective_limit
from sglang_aiter_moe.portable import explain
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

TOKENS = (1, 3, 64, 255, 256, 512, 16384, 16385, 32768, 131072)
SHAPES = {  # experts, topk, hidden, intermediate
    "k3": (896, 16, 3584, 384),
    "k3-512": (896, 16, 3584, 512),
    "gpt-oss-tp1": (128, 4, 2880, 2880),
    "gpt-oss-tp8": (128, 4, 2880, 384),
    "deepseek-v4": (384, 6, 7168, 384),
    "qwen3.5": (512, 10, 4096, 512),
    "minimax-m3": (129, 5, 6144, 384),
    "small": (8, 2, 512, 256),
}
ACTIVATIONS = ("silu", "gelu", "swiglu", "situv2")
ARCHES = ("gfx942", "gfx950", "gfx1250")
RELEASES = ("0.1.14", "0.1.16", "0.1.18", "0.1.19", "0.1.19.post1", "6dc26b7a8", "0.1.20")
ENVIRONMENTS = (
    {},
    {"AITER_SITUV2_A8W4": "1"},
    {"AITER_SITUV2_A4W4": "1"},
    {"AITER_SITUV2_A8W4": "1", "AITER_SITUV2_A4W4": "1"},
    {"AITER_SITUV2_A8W4": "0", "AITER_SITUV2_A4W4": "1"},
    {"AITER_FORCE_A8W4": "1"},
    {"AITER_FLYDSL_FORCE": "0"},
    {"AITER_FLYDSL_FORCE": "0", "AITER_KSPLIT": "1"},
    {"AITER_BF16_FP8_MOE_BOUND": "0"},
    {"AITER_BF16_FP8_MOE_BOUND": "0", "SGLANG_USE_AITER_MOE_GU_ITLV": "1"},
    {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0", "SGLANG_USE_AITER_MOE_GU_ITLV": "0"},
    {"SGLANG_USE_AITER_MOE_GU_ITLV": "0"},
    {"AITER_BYPASS_TUNE_CONFIG": "1"},
)
DIRTY = tuple(
    {flag: value}
    for flag in ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "AITER_FORCE_A8W4")
    for value in ("", "true", "True", "yes", " 1", "01")
)
VARIANTS = (
    {},
    {"has_bias": True},
    {"expert_parallel": True},
    {"swiglu_limit": 7.0},
    {"swiglu_limit": 10.0},
    {"doweight_stage1": True},
)
# the plan's names of scale layouts -> what portable says is read
SCALES = {
    "separated": "separated",
    "a16w4": "separated",
    "a16w4_gate_up": "gu_interleaved",
    "n32k4": "n32k4",
    "n32k4_gate_up": "n32k4_gu",
}
FAMILIES = {
    "flydsl_a16w4": {"flydsl_a16w4"},
    "flydsl_a8w4": {"flydsl_a8w4", "opus_a8w4"},
    "flydsl_a4w4": {"flydsl_a4w4"},
    "silu_tuned": {"mxmoe", "asm", "flydsl_a4w4", "ck2stages"},
    "ck2stages": {"ck2stages"},
    "cktile": {"cktile"},
    "cktile_splitk": {"cktile_splitk"},
    "grouped_gfx1250": {"grouped_gfx1250"},
}


def spec_of(activation, shape, **variant):
    experts, topk, hidden, inter = SHAPES[shape]
    return MoeSpec(activation, experts, topk, hidden, inter, beta=4.0, linear_beta=25.0, **variant)


def run_as_planned(plan, spec, tokens, arch, aiter, env, a16w4_kernel):
    return explain(
        tokens=tokens,
        num_experts=spec.num_experts,
        topk=spec.topk,
        hidden_size=plan.padded_hidden_size,
        intermediate_size=plan.padded_intermediate_size,
        activation=spec.activation.value,
        arch=arch,
        aiter=aiter,
        a16w4_kernel=a16w4_kernel,
        env=env,
        has_bias=spec.has_bias,
        has_expert_mask=spec.expert_parallel,
        doweight_stage1=spec.doweight_stage1,
        **plan.call_kwargs,
    )


def disagreements(plan, spec, arch, aiter, env, a16w4_kernel="separated"):
    """What AITER would do otherwise than planned, over token counts."""
    found = []
    for tokens in TOKENS:
        try:
            r = run_as_planned(plan, spec, tokens, arch, aiter, env, a16w4_kernel)
        except Exception as error:
            found.append(f"{tokens}: AITER raises {error!r}")
            continue
        limit = effective_limit(spec.activation, spec.swiglu_limit)
        pairs = {
            "mode": (plan.mode_for(tokens).value, r.mode),
            "w13": (plan.w13_layout, r.w13_layout),
            "w13 scale": (SCALES[plan.w13_scale_layout], r.w13_scale_layout),
            "w2": (plan.w2_layout, r.w2_layout),
            "w2 scale": (SCALES[plan.w2_scale_layout], r.w2_scale_layout),
            "activation": (spec.activation.value, r.activation),
            "limit": (limit, float("inf") if r.limit is None else r.limit),
        }
        if spec.activation == "situv2":
            pairs["betas"] = ((spec.beta, spec.linear_beta), (r.beta, r.linear_beta))
        if spec.has_bias:
            pairs["biases"] = ((True, True), (r.uses_bias1, r.uses_bias2))
        part = plan.range_for(tokens)
        # Where the plan does not know whether a row is there, it has checked both outcomes. Under an
        # expert mask that depends on the caller's top-k (section b.2).
        if part.tuned is not None and not spec.expert_parallel:
            if part.family != "silu_tuned":
                pairs["tuned"] = (part.tuned, r.tuned)
            if r.family not in FAMILIES.get(part.family, ()):
                pairs["family"] = (part.family, r.family)
        skipped = max(
            r.hidden_skip_k, r.hidden_skip_n, r.intermediate_skip_n, r.intermediate_skip_k
        )
        padding = max(
            plan.padded_hidden_size - spec.hidden_size,
            plan.padded_intermediate_size - spec.intermediate_size,
        )
        if skipped > padding:
            pairs["pads"] = (padding, skipped)
        found += [f"{tokens}: {k} planned {a}, AITER {b}" for k, (a, b) in pairs.items() if a != b]
    return found


def planned(activation, shape, arch, aiter, env, **variant):
    """(plan, spec), or the refusal in place of the plan."""
    spec = spec_of(activation, shape, **variant)
    target = Target(arch, Capabilities.for_release(aiter), env)
    try:
        return plan_moe(spec, target), spec
    except ContractError as refusal:
        return refusal, spec


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("arch", ARCHES)
def test_what_is_planned_is_what_runs(activation, arch):
    plans = 0
    wrong = []
    # the releases differ on gfx950 alone, but for what comes with SiTUv2 and gfx1250
    releases = RELEASES if arch == "gfx950" else ("0.1.16", "0.1.18", "0.1.20")
    for aiter, env, shape, variant in itertools.product(releases, ENVIRONMENTS, SHAPES, VARIANTS):
        plan, spec = planned(activation, shape, arch, aiter, env, **variant)
        if isinstance(plan, ContractError):
            continue
        plans += 1
        here = f"{aiter} {env} {shape} {variant}"
        wrong += [f"{here}: {d}" for d in disagreements(plan, spec, arch, aiter, env)]
    assert not wrong, f"{len(wrong)} of {plans} plans, first: " + "\n".join(wrong[:10])
    # gfx942 has SiTUv2 A16W4 and interleaved SwiGLU alone
    assert (
        plans > 0
        or (arch == "gfx942" and activation in ("silu", "gelu"))
        or (arch, activation) == ("gfx1250", "gelu")
    )


@pytest.mark.parametrize("env", DIRTY, ids=str)
@pytest.mark.parametrize("arch", ARCHES)
def test_unclean_flags_give_no_plan_where_they_matter(arch, env):
    plan, spec = planned("situv2", "k3", arch, "0.1.20", env)
    if isinstance(plan, ContractError):
        assert next(iter(env)) in str(plan)
    else:  # the flag is not read on this architecture
        assert disagreements(plan, spec, arch, "0.1.20", env) == []


@pytest.mark.parametrize("kernel", ["separated", "gu_interleaved"])
@pytest.mark.parametrize("env", ENVIRONMENTS[:5], ids=str)
def test_both_builds_of_the_a16w4_kernel(kernel, env):
    spec = spec_of("situv2", "k3")
    target = Target("gfx950", Capabilities.for_release("0.1.20"), env, a16w4_kernel=kernel)
    plan = plan_moe(spec, target)
    assert disagreements(plan, spec, "gfx950", "0.1.20", env, kernel) == []
    other = {"separated": "gu_interleaved", "gu_interleaved": "separated"}[kernel]
    differs = disagreements(plan, spec, "gfx950", "0.1.20", env, other)
    assert bool(differs) == (plan.mode_for(1).value == "A16W4")


def test_the_comparison_bites():
    """Each wrong decision shows."""
    env = {"AITER_SITUV2_A8W4": "1"}
    plan, spec = planned("situv2", "k3", "gfx950", "0.1.20", env)
    assert disagreements(plan, spec, "gfx950", "0.1.20", env) == []
    assert disagreements(plan, spec, "gfx950", "0.1.20", {})  # flag gone after load
    assert disagreements(plan, spec, "gfx950", "0.1.20", {"AITER_SITUV2_A8W4": "true"})
    assert disagreements(plan, spec, "gfx942", "0.1.20", env)
    assert disagreements(plan, spec, "gfx950", "0.1.18", env)
    plan, spec = planned("swiglu", "gpt-oss-tp1", "gfx950", "0.1.20", {}, has_bias=True)
    assert disagreements(plan, spec, "gfx950", "0.1.20", {}) == []
    assert disagreements(plan, spec, "gfx950", "0.1.20", {"AITER_BF16_FP8_MOE_BOUND": "0"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
