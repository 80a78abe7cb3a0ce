"""plan_moe is total: every combination of inputs gives a plan or a ContractError, nothing else."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.contract import (
    SCALE_LAYOUTS,
    WEIGHT_LAYOUTS,
    ActivationMode,
    Capabilities,
    GateMode,
    MoePlan,
    MoeSpec,
    Target,
    plan_moe,
)
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

FLAGS = ["0", "1", "", "true", "True", "TRUE", "yes", "on", " 1", "01", "junk", "2"]
NUMBERS = ["0", "1", "256", "257", "-1", "99999999999", " 256 ", "junk", "", "1.5"]
CHOICES = {
    "AITER_SITUV2_A8W4": FLAGS,
    "AITER_SITUV2_A4W4": FLAGS,
    "AITER_FORCE_A8W4": FLAGS,
    "SGLANG_USE_AITER_MOE_GU_ITLV": FLAGS,
    "AITER_FLYDSL_FORCE": FLAGS,
    "AITER_USE_GROUPED_GEMM": FLAGS,
    "AITER_FORCE_GFX1250": FLAGS,
    "AITER_DISABLE_GROUPED_A8W4": FLAGS,
    "AITER_MOE_A8W4_BYPASS_QUANT": FLAGS,
    "SGLANG_ROCM_SMALLM_MOE": FLAGS,
    "AITER_BF16_FP8_MOE_BOUND": NUMBERS,
    "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": NUMBERS,
    "AITER_KSPLIT": NUMBERS,
    "AITER_BYPASS_TUNE_CONFIG": NUMBERS,
    "AITER_CONFIG_FMOE": ["", "/table.csv"],
    "AITER_GROUPED_STAGE1_WEIGHT_LAYOUT": ["gguu", "gugu", " GUGU ", "junk"],
    "SGLANG_AITER_MOE_A16W4_KERNEL": ["separated", "gu_interleaved", "interleaved", ""],
}
RELEASES = [
    "0.1.7", "0.1.12", "0.1.13", "0.1.14", "0.1.16", "0.1.17", "0.1.18", "0.1.19", "0.1.19.post1",
    "0.1.20", "0.1.20.post1", "0.2.0", "6dc26b7a8", "e4048607a535", "4.x", "deadbeef", "",
]  # fmt: skip
SHAPES = [
    (896, 16, 3584, 384),
    (896, 16, 3584, 512),
    (112, 16, 3584, 3072),
    (128, 4, 2880, 2880),
    (128, 4, 2880, 1440),
    (32, 4, 2880, 736),
    (384, 6, 7168, 384),
    (257, 9, 6144, 512),
    (512, 10, 4096, 256),
    (129, 5, 6144, 384),
    (8, 2, 256, 128),
    (4, 2, 64, 32),
]
NUMBER = st.one_of(
    st.none(), st.sampled_from([0, 0.0, 1.0, 4.0, 7.0, 25.0, -1.0, float("inf"), float("nan"), "4"])
)
environments = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()}
)
few_variables = st.dictionaries(st.sampled_from(list(CHOICES)), st.integers(0, 11), max_size=3).map(
    lambda picked: {n: CHOICES[n][i % len(CHOICES[n])] for n, i in picked.items()}
)
flags = st.booleans()


def check_is_whole(plan: MoePlan) -> None:
    assert plan.w13_layout in WEIGHT_LAYOUTS and plan.w2_layout == "separated"
    assert plan.w13_scale_layout in SCALE_LAYOUTS and plan.w2_scale_layout in SCALE_LAYOUTS
    assert plan.gate_mode in (GateMode.SEPARATED, GateMode.INTERLEAVE)
    assert (plan.gate_mode is GateMode.SEPARATED) == (plan.w13_layout == "separated")
    assert plan.call_kwargs["gate_mode"] == plan.gate_mode.value
    assert set(plan.call_kwargs) <= plan.target.capabilities.kwargs
    assert plan.ranges[0].first == 1 and plan.ranges[-1].last == 2**24 - 1
    for one, other in zip(plan.ranges, plan.ranges[1:], strict=False):
        assert other.first == one.last + 1
    for tokens in (1, 2, 255, 256, 257, 32768, 2**24 - 1):
        assert isinstance(plan.mode_for(tokens), ActivationMode)
        assert plan.family_for(tokens)
    for tokens in (0, -1, 2**24):
        with pytest.raises(ContractError):
            plan.mode_for(tokens)
    assert 0 <= plan.hidden_pad <= plan.padded_hidden_size - plan.spec.hidden_size
    assert 0 <= plan.intermediate_pad <= plan.padded_intermediate_size - plan.spec.intermediate_size
    assert plan.hidden_pad % 64 == plan.intermediate_pad % 64 == 0
    assert all(d.reason and d.source and d.value for d in plan.decisions)
    assert MoePlan.from_json(plan.to_json()) == plan
    experts, width, inter = (
        plan.spec.num_experts, plan.padded_hidden_size, plan.padded_intermediate_size,
    )  # fmt: skip
    WEIGHT_LAYOUTS[plan.w13_layout].check((experts, 2 * inter, width // 2))
    WEIGHT_LAYOUTS[plan.w2_layout].check((experts, width, inter // 2), a16w4_form=True)
    SCALE_LAYOUTS[plan.w13_scale_layout].check((experts, 2 * inter, width // 32))
    SCALE_LAYOUTS[plan.w2_scale_layout].check((experts, width, inter // 32))


@settings(max_examples=800, deadline=None)
@given(
    activation=st.sampled_from(["silu", "gelu", "swiglu", "situv2", "situ", "", None, 3]),
    arch=st.sampled_from(["gfx942", "gfx950", "gfx1250", "gfx950:sramecc+", "gfx90a", "", None]),
    release=st.sampled_from(RELEASES),
    flydsl=st.sampled_from([None, "0.2.4", "0.3.0", "0.3.1"]),
    flydsl_available=flags,
    shape=st.one_of(st.sampled_from(SHAPES), st.tuples(*[st.integers(-1, 4096)] * 4)),
    env=st.one_of(few_variables, environments),
    limit=NUMBER,
    beta=NUMBER,
    linear_beta=NUMBER,
    alpha=st.sampled_from([1.702, 1.0, None, float("nan")]),
    has_bias=flags,
    expert_parallel=flags,
    doweight_stage1=st.sampled_from([False, False, False, True]),
    shared_expert=st.sampled_from([False, False, False, True]),
    no_combine=st.sampled_from([False, False, False, True]),
)
def test_total(activation, arch, release, flydsl, flydsl_available, shape, env, limit, **layer):
    try:
        capabilities = Capabilities.for_release(release)
        capabilities = capabilities.with_flydsl(flydsl, available=flydsl_available)
        spec = MoeSpec(activation, *shape, swiglu_limit=limit, **layer)
        plan = plan_moe(spec, Target(arch, capabilities, env))
    except ContractError as error:
        assert error.what and error.allowed and error.fix
        return
    check_is_whole(plan)


@settings(max_examples=200, deadline=None)
@given(
    activation=st.sampled_from(["silu", "gelu", "swiglu", "situv2"]),
    arch=st.sampled_from(["gfx942", "gfx950", "gfx1250"]),
    release=st.sampled_from(["0.1.18", "0.1.19", "0.1.19.post1", "0.1.20", "6dc26b7a8"]),
    shape=st.sampled_from(SHAPES),
    env=few_variables,
    has_bias=flags,
    expert_parallel=flags,
)
def test_total_near_the_right_side(activation, arch, release, shape, env, **layer):
    """The same over combinations that are mostly sound, so that plans are checked too."""
    try:
        spec = MoeSpec(activation, *shape, beta=4.0, linear_beta=25.0, **layer)
        plan = plan_moe(spec, Target(arch, Capabilities.for_release(release), env))
    except ContractError as error:
        assert error.what and error.allowed and error.fix
        return
    check_is_whole(plan)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
