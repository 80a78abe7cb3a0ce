"""The reasons of refusals, by the plan's own errors."""

import sys
from dataclasses import replace

import pytest

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.matrix.one_cell import Outcome
from sglang_aiter_moe.matrix.refusals import OTHER, REFUSALS, reason_of
from sglang_aiter_moe.testing.plans import A8W4, BOUND, ITLV, K3, PLAIN, gptoss, plan
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def refused(text):
    return Outcome("load", "ContractError", text)


CK = {"AITER_FLYDSL_FORCE": "0", "AITER_KSPLIT": "1"}
PLANS = [
    (K3, {A8W4: "true"}, {}, "unclear spelling"),
    (gptoss(1), {ITLV: "yes"}, {}, "unclear spelling"),
    (gptoss(1), {BOUND: "many"}, {}, "no integer"),
    (K3, {}, {"aiter": "0.1.14"}, "AITER too old"),
    (gptoss(1), {}, {"aiter": "0.1.12"}, "AITER too old"),
    (K3, {A8W4: "1"}, {"arch": "gfx942"}, "mode that the architecture has not got"),
    (MoeSpec("swiglu", **PLAIN, swiglu_limit=5.0), {}, {}, "limit"),
    (MoeSpec("silu", **PLAIN), {ITLV: "1"}, {}, "kernel that guesses the row order"),
    (MoeSpec("silu", **PLAIN), {ITLV: "1", **CK}, {}, "no such kernel"),
    (MoeSpec("gelu", **PLAIN), {ITLV: "1", BOUND: "0"}, {}, "activation"),
    (replace(K3, expert_parallel=True), {}, {}, "expert mask"),
    (replace(K3, has_bias=True), {}, {}, "expert biases"),
    (gptoss(1), {ITLV: "0"}, {"arch": "gfx942"}, "mode that the architecture has not got"),
]


@pytest.mark.parametrize("spec, env, target, key", PLANS)
def test_reasons_of_plans(spec, env, target, key):
    with pytest.raises(ContractError) as caught:
        plan(spec, env, **target)
    assert reason_of(refused(str(caught.value))).key == key


@pytest.mark.parametrize(
    "text, key",
    [
        ("layer 0 was loaded under another environment: X was '1' and is None", "changed after load"),
        ("layer 0 has no valid weights: connection lost", "failed update"),
        ("Current platform gfx942 not support mxfp4 computation", "mode that the architecture has not got"),
        ("a16w4 SiTUv2 is not supported: expert-parallel masking.", "expert mask"),
        ("something else", "other"),
    ],
)  # fmt: skip
def test_reasons_of_other_errors(text, key):
    assert reason_of(refused(text)).key == key


def test_keys_are_unique():
    assert len({reason.key for reason in (*REFUSALS, OTHER)}) == len(REFUSALS) + 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
