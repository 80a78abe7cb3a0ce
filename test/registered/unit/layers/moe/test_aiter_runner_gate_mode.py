"""Who states the runner's ``gate_mode``, and that one call has one. AITER is a recording fake."""

import itertools
import sys

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner
from sglang_aiter_moe.srt.layers.moe.moe_runner import call_arguments
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import make_info, make_plan, run

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_amd_ci(est_time=4, stage="stage-b", runner_config="1-gpu-small-amd")


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


def test_mx_layers_without_any_writer_say_separated(aiter):
    run()
    assert aiter.call["gate_mode"] == "separated"


@pytest.mark.parametrize("limit", [0.0, 7.0])
@pytest.mark.parametrize("mode", ["separated", "interleave"])
def test_plan_states_the_mode_with_and_without_a_limit(aiter, monkeypatch, mode, limit):
    a8w4 = "1" if mode == "interleave" else "0"
    monkeypatch.setenv("AITER_SITUV2_A8W4", a8w4)
    plan = make_plan(env={"AITER_SITUV2_A8W4": a8w4})
    assert plan.gate_mode == mode
    run(info=make_info(plan=plan, swiglu_limit=limit))
    assert aiter.call["gate_mode"] == mode


@pytest.mark.parametrize("limit", [0.0, 7.0])
@pytest.mark.parametrize("mode", ["separated", "interleave"])
def test_fused_moe_kwargs_state_the_mode(aiter, mode, limit):
    kwargs = {"gate_mode": mode, "block_size_M": 64}
    run(info=make_info(fused_moe_kwargs=kwargs, swiglu_limit=limit))
    assert aiter.call["gate_mode"] == mode
    assert aiter.call["block_size_M"] == 64
    assert kwargs == {"gate_mode": mode, "block_size_M": 64}, "the layer's dictionary was changed"


def test_a_limit_alone_means_interleave(aiter):
    """SGLang #26208: DeepSeek-V4."""
    run(info=make_info(swiglu_limit=10.0))
    assert aiter.call["gate_mode"] == "interleave"
    assert aiter.call["swiglu_limit"] == 10.0


def test_a_limit_alone_means_separated_where_sglang_loads_separated(aiter, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_AITER_MOE_GU_ITLV", "0")
    run(info=make_info(swiglu_limit=10.0))
    assert aiter.call["gate_mode"] == "separated"


def test_the_field_states_the_mode_of_an_unclamped_layer(aiter):
    """sglang#30993: without a limit no gate_mode went out, over interleaved bytes."""
    run(info=make_info(gate_mode="interleave"))
    assert aiter.call["gate_mode"] == "interleave"


def test_every_combination_of_writers_gives_one_mode_or_an_error():
    """Against the order of the rule, written out a second time."""
    modes = (None, "separated", "interleave")
    errors = 0
    for plan, kwargs, limit, field in itertools.product(modes, modes, modes, modes[1:]):
        statements = {m for m in (plan, kwargs, field if field != "separated" else None) if m}
        arguments = {"plan": plan, "kwargs": kwargs, "limit": limit, "field": field}
        if len(statements) > 1:
            errors += 1
            with pytest.raises(ContractError, match="says"):
                call_arguments.resolve_gate_mode(**arguments)
            continue
        expected = statements.pop() if statements else (limit or field)
        assert call_arguments.resolve_gate_mode(**arguments) == expected, arguments
    assert errors == 21  # of 54: 9 plan/kwargs pairs x 2 fields, times 3 limits


@pytest.mark.parametrize("mode", [None, "", "interleaved", "INTERLEAVE"])
def test_a_word_that_is_no_gate_mode_is_refused(aiter, mode):
    with pytest.raises(ContractError, match="gate_mode"):
        run(info=make_info(gate_mode=mode))
    assert not aiter.calls


def test_control_a_runner_that_drops_the_mode_is_seen(aiter, monkeypatch):
    """Shows that the checks above bite: without the write they would find no gate_mode."""
    monkeypatch.setattr(call_arguments, "_write_gate_mode", lambda *_: None)
    run(info=make_info(gate_mode="interleave"))
    assert "gate_mode" not in aiter.call


def test_aiter_without_gate_mode_runs_separated_layers_only():
    with fake_aiter.installed(without=("gate_mode",)) as fake:
        run()
        assert "gate_mode" not in fake.call
        run(info=make_info(fused_moe_kwargs={"gate_mode": "separated"}))
        assert "gate_mode" not in fake.call
        with pytest.raises(ContractError, match="does not know"):
            run(info=make_info(gate_mode="interleave"))


def test_who_states_what_the_bytes_are():
    assert not runner.is_stated(make_info()) and not runner.is_stated(object())
    assert runner.is_stated(make_info(plan=make_plan()))
    assert runner.is_stated(make_info(gate_mode="interleave"))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
