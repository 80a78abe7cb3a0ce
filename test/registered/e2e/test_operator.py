"""What the person who runs the server does, on the real SGLang: a newcomer's walk, GSM8K, the benchmark.

The model is the small random one of `make serve`; its times and its GSM8K score mean nothing, that the
commands work does.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_aiter_moe.testing.carrier_reference import CarrierReference, clear_prompts
from sglang_aiter_moe.testing.checkpoints import write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_server import ask, environment, serving

register_cpu_ci(est_time=240, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
STEPS = 5
QUESTIONS = 3


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as pip installs it from this checkout: a directory of its own, not the sources."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(target), str(ROOT)], check=True)
    return target


def environment_of(installed, **variables):
    """The environment of every process of the walk: the installed package, and the sources nowhere."""
    env = environment(**variables)
    paths = [p for p in env["PYTHONPATH"].split(os.pathsep) if p != str(ROOT / "python")]
    return env | {"PYTHONPATH": os.pathsep.join([str(installed), *paths])}


def run(words, env, folder):
    """One of our commands."""
    command = [sys.executable, "-m", "sglang_aiter_moe", *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def walk(installed, tmp_path_factory):
    """Doctor, what it says to type, plan, verify, serve: everything up to the question."""
    folder = tmp_path_factory.mktemp("walk")
    model = write_kimi_checkpoint(folder / "kimi")
    env = environment_of(installed, AITER_SITUV2_A8W4="true")  # SGLang reads on, AITER off
    steps = {}
    doctor = ("doctor", "--config", str(model), "--tp", "1")
    steps["contradictory"] = run(doctor, env, folder)
    line = re.search(r"`export (\w+)=(\w+)`", steps["contradictory"].stdout)
    name, value = line.groups()
    env[name] = value
    steps["fixed"] = run(doctor, env, folder)
    steps["plan"] = run(("plan", str(model), "--json", "-"), env, folder)
    steps["verify"] = run(("verify", "--case", "k3-e8/A8W4/m16", "--json", "-"), env, folder)
    with serving(model, folder / "server.log", env=env) as server:
        yield model, steps, server


def test_every_file_of_the_package_is_installed(installed):
    def files(root):
        found = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {str(p.relative_to(root)) for p in found}

    assert (
        files(ROOT / "python" / "sglang_aiter_moe") - files(installed / "sglang_aiter_moe") == set()
    )


def test_doctor_names_the_contradiction_and_the_line_to_type(walk):
    done = walk[1]["contradictory"]
    assert done.returncode == 1, done.stderr
    assert "[bad]" in done.stdout and "AITER_SITUV2_A8W4='true'" in done.stdout


def test_what_doctor_said_to_type_was_enough(walk):
    done = walk[1]["fixed"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mode A8W4, w13 laid out gu_interleaved" in done.stdout
    assert re.search(r"\d+ in force: ", done.stdout)
    assert "SGLang 0.5.23" in done.stdout


def test_plan_and_verify_agree_with_it(walk):
    plan = json.loads(walk[1]["plan"].stdout)
    assert (plan["modes"], plan["w13_layout"]) == (["A8W4"], "gu_interleaved")
    report = json.loads(walk[1]["verify"].stdout)
    assert (report["passed"], report["failed"]) == (1, 0)


def test_the_server_answers_the_question_right(walk):
    model, _, server = walk
    reference = CarrierReference(model, "A8W4")
    (prompt,) = clear_prompts(reference, 1, STEPS)
    assert ask(server, prompt, STEPS).tokens == reference.generate(prompt, STEPS).tokens
    assert "sglang-aiter-moe:" in server.log_text()


def test_gsm8k_is_asked_and_scored(walk, installed, tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"w{n} w{n + 1}", "answer": f"w5 #### {n}"} for n in range(10, 15)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "eval",
        "--task",
        "gsm8k",
        "--num",
        str(QUESTIONS),
        "--shots",
        "2",
        "--data",
        str(data),
    ]
    words += ["--base-url", walk[2].url, "--max-tokens", "8", "--parallel", "2", "--json", "-"]
    done = run(words, environment_of(installed), tmp_path)
    assert done.returncode == 0, done.stderr
    (score,) = json.loads(done.stdout)["scores"]
    assert score["questions"] == QUESTIONS
    assert all(re.search(r"w\d+", reply["text"]) for reply in score["replies"])  # it has generated


def test_two_sides_are_measured_with_sglangs_own_client(tmp_path):
    words = ["bench", "serving", "--miniature", "--rounds", "1", "--concurrency", "1"]
    words += [
        "--a",
        "AITER_SITUV2_A8W4=1",
        "--b",
        "AITER_SITUV2_A4W4=1",
        "--out",
        str(tmp_path / "out"),
    ]
    command = [sys.executable, "-m", "sglang_aiter_moe", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(run["side"], run["concurrency"]) for run in result["runs"]] == [("A", 1), ("B", 1)]
    assert all("in force" in server["plugin"][0] for server in result["servers"])
    assert result["summary"][0]["delta"].keys() >= {"total_tok_s", "ttft_ms"}
    header, _, *lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert "total tok/s | tok/s/GPU | E2EL ms | TTFT ms" in header
    assert [line.split(" | ")[1] for line in lines] == ["A", "B", "B/A"]
    assert (tmp_path / "out" / "throughput.svg").exists()


def test_sglangs_parser_takes_the_server_commands_of_the_documentation():
    from sglang_aiter_moe.docsite.commands import commands

    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [
        list(c.words[2:]) for p in pages for c in commands(p) if c.words[:2] == ("sglang", "serve")
    ]
    lines = [words for words in lines if words]
    assert len(lines) >= 3
    code = (
        "import argparse, json, sys\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "ServerArgs.add_cli_args(parser)\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    parser.parse_args(words)\n"
    )
    command = [sys.executable, "-c", code]
    good = subprocess.run(
        [*command, json.dumps(lines)], env=environment(), capture_output=True, text=True
    )
    assert good.returncode == 0, good.stderr[-2000:]
    bad = json.dumps([["--model-path", "m", "--no-such-flag"]])
    assert subprocess.run([*command, bad], env=environment(), capture_output=True).returncode != 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
