"""The plan against portable's dispatch, over every combination of flags, architectures, releases and layers.

What is planned has to be what AITER would run. test/registered/unit/verify/test_plan_agreement.py draws from more
values of each variable and looks at refusals; here the grid is complete.
"""

import itertools
import sys

import pytest

from sglang_aiter_moe.contract.spec import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.plan_agreement import Situation, disagreements
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

SHAPES = {  # experts, topk, hidden, intermediate
    "k3": (896, 16, 3584, 384),
    "gpt-oss-tp8": (128, 4, 2880, 384),
    "untuned": (8, 2, 512, 256),
}
ACTIVATIONS = ("silu", "gelu", "swiglu", "situv2")
ARCHES = ("gfx942", "gfx950", "gfx1250")
RELEASES = ("0.1.14", "0.1.16", "0.1.18", "0.1.19", "0.1.19.post1", "6dc26b7a8", "0.1.20")
A8W4, A4W4, FORCE = "AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "AITER_FORCE_A8W4"
ENVIRONMENTS = (
    *(
        dict(itertools.compress(((A8W4, a8), (A4W4, a4)), (a8, a4)))
        for a8 in (None, "0", "1")
        for a4 in (None, "0", "1")
    ),
    {FORCE: "0"},
    {FORCE: "1"},
    {"AITER_FLYDSL_FORCE": "0"},
    {"AITER_FLYDSL_FORCE": "0", "AITER_KSPLIT": "1"},
    {"AITER_BF16_FP8_MOE_BOUND": "0"},
    {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0", "SGLANG_USE_AITER_MOE_GU_ITLV": "0"},
    {"SGLANG_USE_AITER_MOE_GU_ITLV": "0"},
    {"SGLANG_USE_AITER_MOE_GU_ITLV": "1"},
)
UNCLEAN = [
    {flag: value}
    for flag in (A8W4, A4W4, FORCE)
    for value in ("", "true", "True", "yes", " 1", "01")
]
LAYERS = ({}, {"has_bias": True}, {"expert_parallel": True}, {"swiglu_limit": 7.0})


def spec_of(activation, shape, **more):
    return MoeSpec(activation, *SHAPES[shape], beta=4.0, linear_beta=25.0, **more)


def plan_or_none(situation):
    try:
        return situation.plan()
    except ContractError:
        return None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("arch", ARCHES)
def test_what_is_planned_is_what_runs(activation, arch):
    plans, wrong = 0, []
    for aiter, env, shape, layer in itertools.product(RELEASES, ENVIRONMENTS, SHAPES, LAYERS):
        situation = Situation(spec_of(activation, shape, **layer), arch, aiter, env=env)
        plan = plan_or_none(situation)
        if plan is not None:
            plans += 1
            wrong += [f"{aiter} {env} {shape} {layer}: {d}" for d in disagreements(situation, plan)]
    assert not wrong, f"{len(wrong)} disagreements of {plans} plans, first: " + "\n".join(
        wrong[:10]
    )
    no_kernel = (("silu", "gfx942"), ("gelu", "gfx942"), ("gelu", "gfx1250"))
    assert (plans > 0) == ((activation, arch) not in no_kernel)


@pytest.mark.parametrize("env", UNCLEAN, ids=str)
@pytest.mark.parametrize("arch", ARCHES)
def test_unclean_flags_give_no_plan_where_they_matter(arch, env):
    situation = Situation(spec_of("situv2", "k3"), arch, env=env)
    plan = plan_or_none(situation)
    assert plan is None or disagreements(situation, plan) == []
    if arch == "gfx950" and FORCE not in env:
        assert plan is None


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
