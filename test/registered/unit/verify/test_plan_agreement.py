"""Plan against portable's dispatch, over combinations drawn from everything that either of them looks at.

The two share no code: what a plan lays out and asks for has to be what AITER, by portable, reads and
computes; and what AITER cannot compute has to be refused.
"""

import itertools
import random
import sys
from dataclasses import replace

import pytest

from sglang_aiter_moe.contract.spec import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.plan_agreement import (
    Situation,
    disagreements,
    right_alternatives,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

ACTIVATIONS = ("silu", "gelu", "swiglu", "situv2")
ARCHES = ("gfx942", "gfx950", "gfx1250")
RELEASES = (
    *("0.1.13", "0.1.14", "0.1.15", "0.1.16", "0.1.17", "0.1.18"),
    *("0.1.19", "0.1.19.post1", "6dc26b7a8", "0.1.20", "e4048607a"),
)
# experts, top-k, hidden, intermediate: with tuned rows of their own, of another activation, without.
SHAPES = {
    "k3": (896, 16, 3584, 384),
    "k3-padded": (896, 16, 3584, 512),
    "gpt-oss-tp1": (128, 4, 2880, 2880),
    "gpt-oss-tp8": (128, 4, 2880, 384),
    "deepseek-v4": (384, 6, 7168, 384),
    "kimi-k2": (384, 8, 7168, 256),
    "qwen3.5": (512, 10, 4096, 256),
    "minimax-m3": (129, 5, 6144, 384),
    "untuned": (32, 4, 1024, 160),
    "few-experts": (16, 2, 4096, 1536),
}
# Value None: not set. Spellings that the two programs read differently are among them.
VARIABLES = {
    "AITER_SITUV2_A8W4": (None, None, "0", "1", "1", "true", ""),
    "AITER_SITUV2_A4W4": (None, None, "0", "1", "1", "True", " 1"),
    "AITER_FORCE_A8W4": (None, None, "0", "1", "", "true"),
    "SGLANG_USE_AITER_MOE_GU_ITLV": (None, "0", "1", "false", "true"),
    "AITER_BF16_FP8_MOE_BOUND": (None, None, "0", "1", "100", "256"),
    "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": (None, None, "0", "100"),
    "AITER_FLYDSL_FORCE": (None, None, "0", "1"),
    "AITER_KSPLIT": (None, None, "1", "4"),
    "AITER_BYPASS_TUNE_CONFIG": (None, None, "1"),
    "SGLANG_AITER_K3_OPT": (None, "1"),
}
DRAWS = 1500


def spec_of(activation, shape="k3", **changes):
    experts, topk, hidden, intermediate = SHAPES[shape]
    return MoeSpec(
        activation,
        experts,
        topk,
        hidden,
        intermediate,
        beta=4.0 if activation == "situv2" else None,
        linear_beta=25.0 if activation == "situv2" else None,
        name=shape,
        **changes,
    )


def draw(random_, activation, arch):
    spec = spec_of(
        activation,
        random_.choice(list(SHAPES)),
        has_bias=random_.random() < 0.25,
        expert_parallel=random_.random() < 0.25,
        doweight_stage1=random_.random() < 0.05,
        swiglu_limit=random_.choice((None, None, 7.0, 4.0)),
        gate_up_interleaved=random_.random() < 0.5,
    )
    env = {name: random_.choice(values) for name, values in VARIABLES.items()}
    return Situation(
        spec,
        arch,
        random_.choice(RELEASES),
        random_.choice(("separated", "gu_interleaved")),
        random_.random() < 0.85,
        {name: value for name, value in env.items() if value is not None},
    )


@pytest.mark.parametrize(("activation", "arch"), list(itertools.product(ACTIVATIONS, ARCHES)))
def test_what_is_planned_is_what_aiter_reads_and_computes(activation, arch):
    random_ = random.Random(f"{activation} {arch}")
    plans = 0
    for _ in range(DRAWS):
        situation = draw(random_, activation, arch)
        try:
            plan = situation.plan()
        except ContractError:
            continue  # and no other exception
        plans += 1
        wrong = disagreements(situation, plan)
        assert not wrong, f"{situation}: {wrong[:3]}"
    # Nothing was compared if nothing was planned; three of the twelve have no kernel that is right.
    no_kernel = {("silu", "gfx942"), ("gelu", "gfx942"), ("gelu", "gfx1250")}
    assert (plans > 20) == ((activation, arch) not in no_kernel), plans


SITU_A8W4 = {"AITER_SITUV2_A8W4": "1"}
SITU_A4W4 = {"AITER_SITUV2_A4W4": "1"}
SEPARATED = {"SGLANG_USE_AITER_MOE_GU_ITLV": "0"}
INTERLEAVED = {"SGLANG_USE_AITER_MOE_GU_ITLV": "1"}

# What AITER refuses, crashes on or computes wrongly whatever it is handed (docs/contract.md b.3, b.4, g).
HOPELESS = {
    "A16W4 with an expert mask": Situation(spec_of("situv2", expert_parallel=True)),
    "A16W4 with biases": Situation(spec_of("situv2", has_bias=True)),
    "A8W4 with biases and the layout stage 2": Situation(
        spec_of("situv2", has_bias=True), env=SITU_A8W4
    ),
    "A4W4 with biases and the layout stage 2": Situation(
        spec_of("situv2", has_bias=True), env=SITU_A4W4
    ),
    "A8W4 on gfx942": Situation(spec_of("situv2"), arch="gfx942", env=SITU_A8W4),
    "A4W4 on gfx942": Situation(spec_of("situv2"), arch="gfx942", env=SITU_A4W4),
    "SiTUv2 without FlyDSL": Situation(spec_of("situv2"), flydsl=False),
    "A8W4 without FlyDSL": Situation(spec_of("situv2"), flydsl=False, env=SITU_A8W4),
    "SiTUv2 before v0.1.19": Situation(spec_of("situv2"), aiter="0.1.18"),
    "SiTUv2, weight on the input": Situation(spec_of("situv2", doweight_stage1=True)),
    "A8W4, weight on the input": Situation(spec_of("situv2", doweight_stage1=True), env=SITU_A8W4),
    "GELU by FlyDSL is SiLU": Situation(spec_of("gelu", "untuned")),
    "GELU on gfx942": Situation(spec_of("gelu", "untuned"), arch="gfx942"),
    "SiLU on gfx942": Situation(spec_of("silu", "untuned"), arch="gfx942"),
    "SwiGLU on Qwen3.5's SiLU rows": Situation(
        spec_of("swiglu", "qwen3.5"), env={**SEPARATED, "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"}
    ),
    "SiLU on SiLU rows that know no mask": Situation(
        spec_of("silu", "qwen3.5", expert_parallel=True), env=SEPARATED
    ),
    "separated SwiGLU on gfx942": Situation(
        spec_of("swiglu", "gpt-oss-tp1"), arch="gfx942", env=SEPARATED
    ),
    "interleaved SiLU below the bound": Situation(
        spec_of("silu", "deepseek-v4", swiglu_limit=10.0), env=INTERLEAVED
    ),
    "another limit than CK-tile's": Situation(
        spec_of("swiglu", "gpt-oss-tp1", swiglu_limit=4.0, has_bias=True)
    ),
    "gfx1250 before v0.1.18": Situation(
        spec_of("swiglu", "untuned"), arch="gfx1250", aiter="0.1.17"
    ),
    "gfx1250 without FlyDSL": Situation(spec_of("situv2"), arch="gfx1250", flydsl=False),
}


@pytest.mark.parametrize("name", HOPELESS)
def test_what_aiter_cannot_compute_is_refused(name):
    situation = HOPELESS[name]
    asked = situation.env.get("SGLANG_USE_AITER_MOE_GU_ITLV")
    kept = {"0": ["separated"], "1": ["gu_interleaved"]}.get(asked)
    right = [x for x in right_alternatives(situation) if kept is None or x in kept]
    assert right == []  # by portable, no layout would be right
    with pytest.raises(ContractError) as refusal:
        situation.plan()
    assert refusal.value.fix


@pytest.mark.parametrize(
    ("situation", "layout"),
    [
        (Situation(spec_of("situv2")), "separated"),
        (Situation(spec_of("situv2"), env=SITU_A8W4), "gu_interleaved"),
        (Situation(spec_of("situv2"), env=SITU_A4W4), "separated"),
        (Situation(spec_of("situv2"), env={**SITU_A8W4, **SITU_A4W4}), "gu_interleaved"),
        (Situation(spec_of("situv2"), env=SITU_A4W4, aiter="0.1.19"), "separated"),
        (Situation(spec_of("situv2"), a16w4_kernel="gu_interleaved"), "gu_interleaved"),
        (Situation(spec_of("situv2"), arch="gfx942"), "separated"),
        (Situation(spec_of("situv2"), arch="gfx1250"), "gu_interleaved_gfx1250"),
        (Situation(spec_of("silu", "qwen3.5"), env=SEPARATED), "separated"),
    ],
)
def test_the_planned_layout_is_the_only_right_one(situation, layout):
    assert right_alternatives(situation) == [layout]
    assert situation.plan().w13_layout == layout


BITES = {
    "w13": {"w13_layout": "gu_interleaved"},
    "w13 scales": {"w13_scale_layout": "a16w4_gate_up"},
    "w2": {"w2_layout": "gu_interleaved"},
    "w2 scales": {"w2_scale_layout": "n32k4"},
    "no betas": {"call_kwargs": {"gate_mode": "separated"}},
    "other betas": {"call_kwargs": {"gate_mode": "separated", "beta": 1.0, "linear_beta": 1.0}},
    "a limit": {
        "call_kwargs": {
            "gate_mode": "separated",
            "beta": 4.0,
            "linear_beta": 25.0,
            "swiglu_limit": 7.0,
        }
    },
    "an unknown gate mode": {"call_kwargs": {"gate_mode": "up_first"}},
    "a keyword that AITER lacks": {"call_kwargs": {"gate_mode": "separated", "alpha": 1.0}},
}


@pytest.mark.parametrize("name", BITES)
def test_a_wrong_plan_is_seen(name):
    situation = Situation(spec_of("situv2"))
    plan = situation.plan()
    assert disagreements(situation, plan) == []
    assert disagreements(situation, replace(plan, **BITES[name]))


@pytest.mark.parametrize(
    "changes",
    [
        {"env": SITU_A8W4},
        {"env": SITU_A4W4},
        {"a16w4_kernel": "gu_interleaved"},
        {"arch": "gfx1250"},
        {"aiter": "0.1.18"},
        {"flydsl": False},
        {"spec": spec_of("situv2", expert_parallel=True)},
        {"spec": spec_of("situv2", has_bias=True)},
    ],
)
def test_a_plan_for_another_situation_is_seen(changes):
    situation = Situation(spec_of("situv2"))
    plan = situation.plan()
    assert disagreements(replace(situation, **changes), plan)


def test_pads_that_cover_real_columns_are_seen():
    situation = Situation(spec_of("swiglu", "gpt-oss-tp1"))
    plan = situation.plan()
    assert plan.call_kwargs["intermediate_pad"] == 192
    wider = replace(plan, call_kwargs={**plan.call_kwargs, "intermediate_pad": 256})
    assert any("columns are padding" in text for text in disagreements(situation, wider))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
