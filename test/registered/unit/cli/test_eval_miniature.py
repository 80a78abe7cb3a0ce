"""`eval --task miniature` with servers that the test makes up: what is served, what is judged, how it exits."""

import json
import sys

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.cli import app, eval_miniature
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation.exact_match import gate
from sglang_aiter_moe.evaluation.miniature_runs import Asked, Run
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


@pytest.fixture
def served(monkeypatch):
    """Right answers by whether a layout is wrong; which settings were served, with which SGLang."""
    log, right = [], {False: 200, True: 0}

    def run(setting, sglang, folder, *, questions, say):
        log.append((setting, sglang))
        say(f"{setting} [x]")  # brackets are no markup
        count = right[setting.wrong_layout]
        return Run(
            setting, str(sglang), [Asked("kimi", count, gate(4000, 4000, questions), ("a", "b"))]
        )

    monkeypatch.setattr(eval_miniature, "run", run)
    monkeypatch.setattr(eval_miniature, "sglang_for", lambda release, python: release or "0.5.23")
    return log, right


def invoke(*arguments):
    return CliRunner().invoke(app, ["eval", *arguments, "--json", "-"])


def test_by_default_every_mode_with_both_layouts(served):
    result = invoke()
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert [(r["mode"], r["release"], r["accuracy"], r["layout"]) for r in report["modes"]] == [
        ("A16W4", "0.5.23", 1.0, "separated"),
        ("A8W4", "0.5.23", 1.0, "gu_interleaved"),
        ("A4W4", "0.5.23", 1.0, "separated"),
    ]
    assert [(r["mode"], r["layout"], r["accuracy"]) for r in report["wrong_layout"]] == [
        ("A16W4", "gu_interleaved", 0.0),
        ("A8W4", "separated", 0.0),
        ("A4W4", "gu_interleaved", 0.0),
    ]


@pytest.mark.parametrize("wrong, count", [(False, 194), (True, 40)])
def test_a_missed_gate_or_a_wrong_layout_that_answers_fails(served, wrong, count):
    served[1][wrong] = count
    result = invoke("--mode", "A8W4")
    assert result.exit_code == 1 and not json.loads(result.stdout)["holds"]


def test_releases_ranks_and_sglang_alone(served):
    invoke(
        *("--mode", "A16W4", "--release", "0.5.20", "--release", "0.5.22"),
        *("--no-wrong-layout", "--without-plugin", "--tp", "2"),
    )
    assert [(s.plugin, s.ranks, release) for s, release in served[0]] == [
        (True, 2, "0.5.20"),
        (False, 2, "0.5.20"),
        (True, 2, "0.5.22"),
        (False, 2, "0.5.22"),
    ]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--model", "gpt_oss", "--update"], "--update"),
        (["--model", "gpt_oss", "--mode", "A4W4"], "--mode"),
        (["--mode", "A4W8"], "A4W8"),
        (["--task", "sums"], "--task"),
        (["--base-url", "http://127.0.0.1:1"], "--base-url"),
    ],
)
def test_what_does_not_go_together_is_refused(served, arguments, named):
    result = invoke(*arguments)
    assert result.exit_code == 2 and named in result.output and not served[0]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--questions", "1"], "questions need 0 right"),
        (["--questions", "1000000"], "--questions"),
        (["--tp", "3"], "intermediate_size"),
        (["--release", "0.5.20", "--release", "9.9.9"], "9.9.9"),
        (["--logs", __file__], "--logs"),
    ],
)
def test_what_cannot_be_served_or_judged_is_refused_before_the_first_server(
    served, monkeypatch, arguments, named
):
    def sglang_for(release, python):
        if release == "9.9.9":
            raise ContractError(f"--release {release}", allowed="0.5.20", fix="choose it")
        return release or "0.5.23"

    monkeypatch.setattr(eval_miniature, "sglang_for", sglang_for)
    result = invoke(*arguments)
    assert result.exit_code and not served[0]
    assert named in result.output + str(result.exception)


def test_empty_answers_and_the_other_checkpoints_words_are_shown(monkeypatch):
    answered = Asked("kimi", 198, gate(4000, 4000, 200), ("a", ""), other_dialect=1, empty=1)
    monkeypatch.setattr(
        eval_miniature, "run", lambda setting, *_, **__: Run(setting, "0.5.23", [answered])
    )
    monkeypatch.setattr(eval_miniature, "sglang_for", lambda release, python: None)
    arguments = ["--mode", "A16W4", "--no-wrong-layout"]
    result = CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "198 of 200, 1 in the other's words, 1 empty" in result.output


def test_what_was_answered_before_a_server_failed_is_shown(monkeypatch):
    def run(setting, *_, **__):
        if setting.mode == "A8W4":
            raise ContractError("the server did not start", allowed="one that does", fix="look")
        return Run(setting, "0.5.23", [Asked("kimi", 197, gate(4000, 4000, 200), ("a", "a"))])

    monkeypatch.setattr(eval_miniature, "run", run)
    monkeypatch.setattr(eval_miniature, "sglang_for", lambda release, python: None)
    arguments = ["--mode", "A16W4", "--mode", "A8W4", "--no-wrong-layout"]
    result = CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "197 of 200" in result.output
    assert "the server did not start" in result.output


def test_gpt_oss_has_one_mode(served):
    assert invoke("--model", "gpt_oss", "--no-wrong-layout").exit_code == 0
    assert [(s.model, s.mode) for s, _ in served[0]] == [("gpt_oss", "A16W4")]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
