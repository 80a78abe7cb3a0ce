"""`bench` finds every benchmark of the checkout, hands its options on and keeps standard output clean."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.cli import app
from sglang_aiter_moe.cli.bench import BENCHMARKS, NEEDS, script
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

TINY = ["--experts", "4", "--topk", "2", "--hidden", "256", "--inter", "128", "--calls", "2"]


def test_every_benchmark_is_there():
    assert [name for name in BENCHMARKS if not script(name).is_file()] == []


def test_an_unknown_benchmark_is_refused_with_the_known_ones():
    result = CliRunner().invoke(app, ["bench", "speed"])
    assert result.exit_code == 2
    assert "'speed'" in result.stderr
    assert all(name in result.stderr for name in BENCHMARKS)


def test_without_a_checkout_it_says_where_the_benchmarks_are(tmp_path: Path):
    with pytest.raises(ContractError, match="clone the repository"):
        script("host", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "x"], "separated by commas"),
        (["--concurrency", ""], "separated by commas"),
        (["--concurrency", "0"], "sizes of at least 1"),
        (["--concurrency", "2,2"], "taken for two rounds"),
        (["--input-len", "0"], "sizes of at least 1"),
        (["--dataset", "sharegpt"], "random, random-ids"),
        (["--dataset-path", "nowhere.json"], "is no file"),
        (["--gpus", "-1"], "--gpus"),
        (["--point-timeout", "0"], "--point-timeout"),
        (["--a", "url=nonsense"], "no server's address"),
        (["--out", "file"], "--out file: File exists"),
        (["--", "--tp", "0"], "--tp 0"),
    ],
)
def test_serving_refuses_before_an_environment_is_made(arguments, words, monkeypatch, tmp_path):
    def find(*given):
        pytest.fail("an SGLang is looked for, which may take minutes")

    monkeypatch.setattr("sglang_aiter_moe.serving.sglang_python.find", find)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["bench", "serving", "model", *arguments])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_a_machine_lacks_is_said_before_anything_runs(name, monkeypatch):
    """A traceback from inside the script named neither."""
    started = []
    monkeypatch.setattr(
        "subprocess.run",
        lambda command, **_: started.append(command) or SimpleNamespace(returncode=0),
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", name])
    said = " ".join(result.stderr.split())
    lacks = {"gpu": "sees none", "sglang": "SGLang is not installed here"}.get(NEEDS.get(name))
    assert (result.exit_code, len(started)) == ((0, 1) if lacks is None else (2, 0))
    assert lacks is None or (f"bench {name} " in said and lacks in said)
    ways_round = [["--", "--help"]] + [["--", "--sglang-path", "x"]] * (name == "host")
    for more in ways_round:
        assert CliRunner().invoke(app, ["bench", name, *more]).exit_code == 0


def test_needs_are_of_benchmarks():
    assert set(NEEDS) < set(BENCHMARKS)


def test_options_go_to_the_benchmark_and_json_alone_to_standard_output():
    command = [sys.executable, "-m", "sglang_aiter_moe", "bench", "cpu", "--json", "-"]
    options = [*TINY, "--modes", "A16W4", "--limit-s", "60"]
    result = subprocess.run(command + options, capture_output=True, text=True, check=True)
    assert list(json.loads(result.stdout)["modes"]) == ["A16W4"]


def test_a_benchmark_that_fails_fails_the_command(tmp_path: Path):
    # No call is faster than this bound.
    arguments = [*TINY, "--modes", "A16W4", "--limit-s", "0", "--json", str(tmp_path / "out.json")]
    assert CliRunner().invoke(app, ["bench", "cpu", *arguments]).exit_code != 0
    assert (tmp_path / "out.json").exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
