"""verify passes on the code as it is, and fails on each part that is broken on purpose.

The layers are cut to four experts and narrow widths so that a run takes about a second; the cases of the
command itself are at real sizes.
"""

import functools
import json
import os
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from sglang_aiter_moe.cli import app
from sglang_aiter_moe.contract import plan as plan_module
from sglang_aiter_moe.contract import routes
from sglang_aiter_moe.contract.layouts import Separated
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.verify import cases, controls, harness, run
from sglang_aiter_moe.verify.layers import K3, gpt_oss_120b
from sglang_aiter_moe.verify.results import CaseResult, ControlResult, Report

register_cpu_ci(est_time=60, suite="base-a-test-cpu")


def cut(layer, **shape):
    small = layer.with_experts(4)
    shape = {"hidden": 512, "intermediate": 128, **shape}
    return replace(small, name=f"{layer.name}-cut", shape=replace(small.shape, **shape))


SMALL_K3 = cut(K3)
SMALL_GPT_OSS = cut(gpt_oss_120b(8), hidden=480, intermediate=96)


def k3(mode, tokens=6, **changes):
    # No tuned row has this shape, so the intermediate is quantised by a kernel of its own.
    return cases.situv2_case(SMALL_K3, mode, tokens, **{"requantization": "roundup", **changes})


def one(case):
    return run.run([case], backend="cpu").cases[0]


@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_situv2_passes(mode):
    result = one(k3(mode))
    assert result.passed, result
    assert result.logits_diff < 1e-5
    assert result.unquantised_logits_diff >= result.logits_diff


@pytest.mark.parametrize(("tokens", "mode"), [(3, "A16W4"), (256, "A8W4")])
def test_padding_biases_and_checkpoint_rows_pass(tokens, mode):
    result = one(cases.bounded_case(SMALL_GPT_OSS, tokens, interleave=True))
    assert result.mode == mode
    assert result.passed, result


def test_no_tokens_pass():
    result = one(k3("A16W4", tokens=0))
    assert result.passed, result


def test_a_plan_that_packs_a16w4_interleaved_fails(monkeypatch):
    """The published rule: everything but A4W4 is interleaved."""
    real = routes._route_situv2

    def published(target):
        return real(replace(target, a16w4_kernel="gu_interleaved"))

    monkeypatch.setattr(routes, "_route_situv2", published)
    result = one(k3("A16W4"))
    assert not result.passed  # the plan itself sees that no kernel reads what it would lay out
    assert "ContractError" in result.error
    monkeypatch.setattr(plan_module.refusals, "check_choice", lambda *args: None)
    result = one(k3("A16W4"))
    assert not result.passed
    assert result.cosine < 0.1
    assert "expected A16W4, separated, separated" in result.error
    assert one(k3("A8W4")).passed  # the other modes are as they were


def test_a_plan_that_picks_another_mode_than_expected_fails_even_if_the_numbers_agree(monkeypatch):
    """The plan of an AITER without the A4W4 flag: layout and numbers agree, the decision does not."""
    monkeypatch.setattr(plan_module, "choose_route", _a16w4_whatever_the_flags_say)
    result = one(k3("A4W4"))
    assert not result.passed
    assert "the plan decides A16W4" in result.error
    assert result.logits_diff < 1e-5


def _a16w4_whatever_the_flags_say(spec, target):
    return routes.choose_route(spec, replace(target, env={}))


def test_a_layout_that_packs_wrongly_fails(monkeypatch):
    monkeypatch.setattr(Separated, "pack", lambda self, raw, out=None, **kwargs: raw)
    result = one(k3("A16W4"))
    assert not result.passed
    assert result.cosine < 0.1


def test_a_call_with_another_constant_fails(monkeypatch):
    real = plan_module._call_kwargs

    def other_beta(*args):
        kwargs, decisions = real(*args)
        return {**kwargs, "beta": 3.0}, decisions

    monkeypatch.setattr(plan_module, "_call_kwargs", other_beta)
    result = one(k3("A16W4"))
    assert not result.passed
    assert result.cosine > 0.99  # not a collapse, and still seen


def test_an_exception_is_a_failed_case_and_the_others_run(monkeypatch):
    bad = k3("A16W4", name="bad", env={"AITER_SITUV2_A8W4": "true"})
    report = run.run([bad, k3("A16W4")], backend="cpu")
    assert [case.passed for case in report.cases] == [False, True]
    assert "AITER_SITUV2_A8W4" in report.cases[0].error
    assert not report.holds


@functools.cache
def passes_without_mistake(mode):
    return one(k3(mode, tokens=8)).passed


def small_controls():
    for control in controls.all_controls():
        kind = control.name.rpartition("/")[2]
        if control.case.layer.name == "k3-e8" and control.case.arch == "gfx950":
            case = k3(control.case.mode, tokens=8)
            yield pytest.param(replace(control, case=case), id=f"{case.mode}-{kind}")


@pytest.mark.parametrize("control", list(small_controls()))
def test_controls_collapse(control):
    result = run.run([], [control], backend="cpu").controls[0]
    assert result.collapsed, result
    if control.env_at_call is not None:
        assert "AITER_SITUV2_A8W4" in result.refused
    # The same case without the mistake is right: it is the mistake that collapses.
    assert passes_without_mistake(control.case.mode)


def test_a_control_whose_mistake_makes_no_difference_is_reported():
    control = controls.Control("none", k3("A16W4"), "no mistake at all")
    result = run.run([], [control], backend="cpu").controls[0]
    assert not result.collapsed
    assert result.logits_diff < 1e-5


def test_a_flag_flip_that_the_runner_lets_pass_is_reported(monkeypatch):
    flip = next(c for c in controls.all_controls() if c.name.endswith("flag-flipped-after-load"))
    monkeypatch.setattr(controls, "_refusal", lambda *args: "")
    result = run.run([], [replace(flip, case=k3("A16W4"))], backend="cpu").controls[0]
    assert result.logits_diff > 0.5
    assert not result.collapsed


def result_of(**changes):
    values = {
        "name": "n",
        "activation": "situv2",
        "mode": "A16W4",
        "layout": "separated",
        "gate_mode": "separated",
        "tokens": 1,
        "experts": 1,
        "cosine": 1.0,
        "logits_diff": 0.0,
        "rel_err": 0.0,
        "unquantised_logits_diff": 0.0,
    }
    return CaseResult(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"logits_diff": float("nan")},
        {"unquantised_logits_diff": float("nan")},
        {"logits_diff": 1e-4},
        {"mode": "A8W4", "logits_diff": 1e-3},
        {"mode": "A4W4", "logits_diff": 1e-3},
        {"mode": "A8W4", "unquantised_logits_diff": 0.004},
        {"mode": "A4W4", "unquantised_logits_diff": 0.0625},
        {"error": "something"},
    ],
)
def test_thresholds(changes):
    assert result_of().passed
    assert not result_of(**changes).passed


def test_a_report_holds_only_if_everything_does():
    good, bad = result_of(), result_of(error="x")
    collapsed = ControlResult("c", cosine=0.0, logits_diff=1.0)
    standing = ControlResult("c", cosine=1.0, logits_diff=0.0)
    nan = ControlResult("c", cosine=float("nan"), logits_diff=float("nan"))
    not_run = ControlResult("c", error="x", logits_diff=1.0)
    assert Report("cpu", (good,), (collapsed, nan)).holds
    assert not Report("cpu", (), ()).holds
    for broken in (
        Report("cpu", (good, bad), (collapsed,)),
        Report("cpu", (good,), (collapsed, standing)),
        Report("cpu", (good,), (not_run,)),
    ):
        assert not broken.holds


def test_a_real_aiter_runs_only_what_it_is(monkeypatch):
    machine = harness.Machine("aiter", torch.device("cpu"), "gfx950")
    monkeypatch.setattr(run, "choose_machine", lambda backend: machine)
    monkeypatch.setattr(run, "_grouped", lambda cases, controls: {})
    here, other_arch = k3("A16W4"), k3("A16W4", name="gfx942", arch="gfx942")
    other_release = k3("A16W4", name="old", aiter="0.1.19")
    other_build = k3("A16W4", name="built", a16w4_kernel="gu_interleaved")
    report = run.run([here, other_arch, other_release, other_build], backend="aiter")
    assert report.not_run == ("gfx942", "old", "built")
    assert not report.holds  # nothing was checked


def test_a_users_environment_does_not_reach_the_cases(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    assert one(k3("A16W4")).passed
    assert os.environ["AITER_SITUV2_A8W4"] == "1"


@pytest.fixture
def small_tables(monkeypatch):
    monkeypatch.setattr(cases, "all_cases", lambda: iter([k3("A16W4"), k3("A8W4")]))
    wrong = [c for c in controls.all_controls() if c.name == "control/A16W4/wrong-layout"]
    small = [replace(control, case=k3("A16W4")) for control in wrong]
    monkeypatch.setattr(controls, "all_controls", lambda: iter(small))


def test_command_writes_the_promised_json(small_tables, tmp_path):
    arguments = ["verify", "--backend", "cpu", "--scratch", str(tmp_path), "--json", "-"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["backend"], report["passed"], report["failed"]) == ("cpu", 2, 0)
    assert set(report["cases"][0]) >= {
        "name",
        "activation",
        "mode",
        "layout",
        "gate_mode",
        "tokens",
        "experts",
        "cosine",
        "logits_diff",
        "rel_err",
        "passed",
    }
    assert report["cases"][0]["layout"] == "separated"
    assert report["cases"][1]["layout"] == "gu_interleaved"
    assert set(report["controls"][0]) >= {"name", "cosine", "collapsed"}
    assert report["controls"][0]["collapsed"] is True
    assert "2 cases passed, 0 failed; 1 of 1 controls collapsed" in result.stderr
    assert list(tmp_path.iterdir()) == []  # no weights are left behind


def test_command_fails_when_a_case_fails(small_tables, monkeypatch):
    monkeypatch.setattr(Separated, "pack", lambda self, raw, out=None, **kwargs: raw)
    result = CliRunner().invoke(app, ["verify", "--backend", "cpu", "--json", "-"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failed"] >= 1


def test_command_refuses_what_it_cannot_do(small_tables):
    assert CliRunner().invoke(app, ["verify", "--case", "nothing*"]).exit_code == 2
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        result = CliRunner().invoke(app, ["verify", "--backend", "triton"])
        assert result.exit_code == 2
        assert "sees no GPU" in result.stderr
    with pytest.raises(ContractError, match=r"AITER is not installed|no ROCm GPU"):
        run.choose_machine("aiter")


@pytest.mark.parametrize("place", ["nowhere/report.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, place):
    monkeypatch.setattr(run, "run", lambda *_, **__: pytest.fail("the work was begun"))
    target = str(tmp_path / place)
    result = CliRunner().invoke(app, ["verify", "--case", "k3-e8/A16W4/m16", "--json", target])
    assert result.exit_code == 2 and "--json" in result.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
