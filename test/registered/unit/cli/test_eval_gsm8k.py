"""`eval --task gsm8k` from end to end, against servers whose answers the test decides."""

import json
import sys
from decimal import Decimal

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.cli import app
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import gsm8k
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.scripted_server import ScriptedServer

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(25)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def right(prompt):
    number = int(prompt.rpartition("What is ")[2].split()[0])
    return f" It is {number + 1}.\n#### {number + 1}"


def wrong(prompt):
    return " #### 1000"


def run(data, *arguments):
    command = ["eval", "--task", "gsm8k", "--num", "20", "--data", str(data), *arguments]
    result = CliRunner().invoke(app, [*command, "--json", "-"])
    return result, json.loads(result.stdout) if result.stdout else None


def test_one_server(data):
    with ScriptedServer(right) as server:
        result, report = run(data, "--base-url", server.url)
    assert result.exit_code == 0, result.stderr
    (score,) = report["scores"]
    assert (score["right"], score["questions"], score["accuracy"]) == (20, 20, 1.0)
    assert score["interval"][0] == pytest.approx(0.025 ** (1 / 20))
    assert "20 of 20 right, 1.000, 95% interval 0.832 to 1.000" in result.stderr


def test_two_servers_are_compared(data):
    with ScriptedServer(right) as first, ScriptedServer(wrong) as second:
        result, report = run(data, "--base-url", first.url, "--base-url", second.url)
    assert [score["label"] for score in report["scores"]] == [first.url, second.url]
    assert report["comparison"]["first"] == first.url
    assert report["comparison"]["only_first"] == 20
    assert report["comparison"]["p_value"] == pytest.approx(2 / 2**20)
    assert "20 questions only the first has right, 0 only the second" in result.stderr


def test_one_server_before_and_after_a_restart(data, tmp_path):
    with ScriptedServer(right) as server:
        _, report = run(data, "--base-url", server.url)
        (tmp_path / "a8w4.json").write_text(json.dumps(report))
    with ScriptedServer(wrong) as server:
        against = ("--against", str(tmp_path / "a8w4.json"))
        _, report = run(data, "--base-url", server.url, *against)
    assert report["comparison"]["only_first"] == 20
    assert [score["right"] for score in report["scores"]] == [0, 20]  # this run first


@pytest.mark.parametrize(("least", "status"), [("0.17", 1), ("0.16", 0)])
def test_a_gate_fails_where_the_interval_excludes_it(data, least, status):
    # 0 of 20 right: the interval ends at 0.1684 (Newcombe 1998).
    with ScriptedServer(wrong) as server:
        result, _ = run(data, "--base-url", server.url, "--least", least)
    assert result.exit_code == status


def test_what_cannot_be_is_refused(data):
    with ScriptedServer(right) as server:
        url = ("--base-url", server.url)
        for arguments in ((), (*url, *url, *url), (*url, "--num", "21"), (*url, "--task", "mmlu")):
            result, _ = run(data, *arguments)
            assert result.exit_code == 2, arguments
        assert server.requests == []


def test_what_cannot_be_is_refused_in_words(data, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with ScriptedServer(right) as server:
        url = ("--base-url", server.url)
        _, report = run(data, *url, "--num", "19")
        (tmp_path / "other.json").write_text(json.dumps(report))
        before = len(server.requests)
        for arguments, words in (
            (("--base-url", "notaurl"), "no server's address"),
            (("--base-url", "file:///etc/passwd"), "no server's address"),
            ((*url, "--data", str(tmp_path / "bytes")), "is no text"),
            ((*url, "--num", "0"), "give --num 1 to 20"),
            ((*url, "--shots", "30"), "lower --shots to at most 24"),
            ((*url, "--least", "95"), "a share, 0 to 1"),
            ((*url, "--least", "nan"), "a share, 0 to 1"),
            ((*url, "--against", str(tmp_path / "other.json")), "19 other questions"),
        ):
            result, report = run(data, *arguments)
            assert result.exit_code == 2 and words in result.stderr, (arguments, result.stderr)
            assert words in json.dumps(report["refused"], ensure_ascii=False)
        assert len(server.requests) == before  # before the first question


@pytest.mark.parametrize("answer", [{"data": []}, [], {"data": [{"id": 3}]}, "no"])
def test_another_api_is_no_traceback(answer, monkeypatch):
    monkeypatch.setattr(gsm8k, "_call", lambda url, body, timeout_s: answer)
    question = gsm8k.Question("1 + 1?", "#### 2", Decimal(2))
    with pytest.raises(ContractError, match=r"v1/models answered .*"):
        gsm8k.score("http://h:1", [question], 1, shots=0)


def test_a_failing_server_is_no_low_score(data):
    with ScriptedServer(lambda prompt: None) as server:
        result, report = run(data, "--base-url", server.url)
    assert result.exit_code == 2 and "500" in result.stderr
    assert report.keys() == {"refused"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
