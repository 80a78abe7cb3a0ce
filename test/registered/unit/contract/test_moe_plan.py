"""The plan as an object: JSON, pickling, and whether it still holds (field L3)."""

import json
import pickle
import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.contract import MoePlan
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.plans import (
    A4W4,
    A8W4,
    BOUND,
    DEEPSEEK,
    FORCE_A8W4,
    ITLV,
    K3,
    QWEN,
    gptoss,
    plan,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


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


def test_json_of_another_version():
    data = json.loads(plan(K3).to_json())
    with pytest.raises(ContractError, match="the plan has version 2"):
        MoePlan.from_json(json.dumps({**data, "version": 2}))


def test_json_of_a_tampered_plan():
    data = json.loads(plan(K3).to_json())
    for change in (
        {"gate_mode": "sideways"},
        {"extra": 1},
        {"ranges": [{"first": 1}]},
        {"ranges": []},
        {"w13_layout": "sideways"},
        {"w2_scale_layout": "sideways"},
    ):
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
    alternating = replace(K3, gate_up_interleaved=True)
    assert plan(K3).bytes_key() != plan(alternating).bytes_key()


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


def test_a_harmless_change_is_looked_at_once(clean, monkeypatch):
    made = plan(K3)
    clean.setenv(A8W4, "0")
    made.check_still_holds()
    monkeypatch.setattr("sglang_aiter_moe.contract.plan.plan_moe", None)
    made.check_still_holds()


def test_what_a_call_is_told_is_one_plain_dict():
    """For the runner: the keywords and both pads, whether or not AITER has to be told of them."""
    made = plan(K3)
    assert made.stated == {
        "gate_mode": "separated", "beta": 4.0, "linear_beta": 25.0, "hidden_pad": 0, "intermediate_pad": 0,
    }  # fmt: skip
    half = plan(gptoss(2))
    assert half.stated == {**half.call_kwargs} | {
        "hidden_pad": half.hidden_pad, "intermediate_pad": half.intermediate_pad,
    }  # fmt: skip


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
