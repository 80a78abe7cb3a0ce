"""`prebuild` without AITER explains; with one it compiles the plan's rows and nothing else.

The AITER here is a directory that looks like one (testing/fake_aiter_checkout.py): what it is asked to
compile is checked, not what real AITER makes of it, which has not been run.
"""

import json
import os
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe import environ
from sglang_aiter_moe.cli import app, doctor_checks
from sglang_aiter_moe.testing import fake_aiter_checkout as fake
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

K3 = (3584, 384, 896, 16)


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    for name in environ.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor_checks, "aiter_package", lambda: None)
    monkeypatch.setattr(doctor_checks, "gpu_arch", lambda: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    result = CliRunner().invoke(app, ["prebuild", *arguments, "--json", "-"])
    return result, json.loads(result.stdout) if result.stdout else None


def test_without_aiter_it_says_what_it_would_build():
    result, report = run("kimi-k3", "--tp", "8", "--max-tokens", "512")
    assert result.exit_code == 0
    assert "AITER is not installed: nothing was built" in result.stderr
    assert [s["tokens"] for s in report["steps"]] == [[1 << n] for n in range(10)]
    assert {s["family"] for s in report["steps"]} == {"flydsl_a16w4"}
    assert report["outcomes"] == []


def test_both_modes_of_a_layer_are_built():
    _, report = run("gpt-oss-120b", "--max-tokens", "1024")
    modes = {tuple(s["tokens"]): s["mode"] for s in report["steps"]}
    assert modes[(128,)] == "A16W4" and modes[(256,)] == "A8W4"


@pytest.mark.parametrize("option", ["--timeout", "--step-timeout"])
def test_a_time_limit_of_nothing_is_refused(option):
    result, _ = run("kimi-k3", "--tp", "8", option, "-1")
    assert result.exit_code == 2 and option in result.stderr


def test_what_the_plan_refuses_is_not_built():
    result, _ = run("kimi-k3", "--tp", "8", "--ep", "8")
    assert result.exit_code == 2 and "expert mask" in result.stderr


@pytest.mark.parametrize("count", ["0", "99999999"])
def test_batches_that_cannot_be_are_refused(count):
    assert run("kimi-k3", "--tp", "8", "--max-tokens", count)[0].exit_code == 2


@pytest.fixture
def aiter(tmp_path, monkeypatch):
    package = fake.write_package(tmp_path)
    rows = [
        fake.tuned_row(t, "A4W4", K3, kernels=(f"flydsl_moe1_t{t}", "flydsl_moe2_same"))
        for t in (1, 2, 4, 1024)
    ]
    rows += [fake.tuned_row(1, "A8W4", K3), fake.tuned_row(1, "A4W4", (7168, 384, 384, 6), "Silu")]
    fake.write_table(package / "configs" / "model_configs" / "x_tuned_fmoe.csv", rows)
    monkeypatch.setattr(doctor_checks, "aiter_package", lambda: package)
    monkeypatch.setattr(doctor_checks, "_version", lambda name: {"amd-aiter": "0.1.20"}.get(name))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_AITER_RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("AITER_SITUV2_A4W4", "1")
    monkeypatch.setenv("SGLANG_AITER_K3_OPT", "1")
    return package


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]


K3_OPTIONS = ("kimi-k3", "--tp", "8", "--max-tokens", "16")


def test_the_plans_rows_and_no_others_are_compiled(aiter, tmp_path):
    result, report = run(*K3_OPTIONS)
    assert result.exit_code == 0, result.stderr
    (record,) = records(tmp_path)
    kernels = [line.split(",")[16] for line in record["rows"].splitlines()[1:]]
    assert kernels == ["flydsl_moe1_t1", "flydsl_moe1_t2", "flydsl_moe1_t4"]
    assert record["env"] == {"AITER_AOT_IMPORT": "1", "ARCH": "gfx950", "COMPILE_ONLY": "1"}
    assert report["steps"][0]["kernels"] == [*kernels[:1], "flydsl_moe2_same", *kernels[1:]]
    assert [o["ok"] for o in report["outcomes"]] == [True]
    assert "built at their first call" in result.stderr  # no GPU here


def test_a_build_that_fails_fails_the_command(aiter, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_AITER_DOES", "print('no such kernel'); sys.exit(1)")
    result, report = run(*K3_OPTIONS)
    assert result.exit_code == 1
    assert report["outcomes"][0]["why"] == "exit status 1"
    assert "no such kernel" in (tmp_path / "prebuild.log").read_text()


def test_a_build_that_hangs_ends_with_its_time(aiter, monkeypatch):
    monkeypatch.setenv("FAKE_AITER_DOES", "import time; time.sleep(600)")
    result, report = run(*K3_OPTIONS, "--step-timeout", "2")
    assert result.exit_code == 1 and report["outcomes"][0]["why"] == "no end within 2 s"


def test_a_stale_lock_is_refused_with_the_line_to_type_or_removed(aiter, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock = aiter / "jit" / "build" / "lock_module_moe"
    lock.write_text(f"{ended.pid}\n{socket.gethostname()}\n")
    result, _ = run(*K3_OPTIONS)
    assert result.exit_code == 2 and f"rm {lock}" in result.stderr
    result, report = run(*K3_OPTIONS, "--remove-stale-locks")
    assert result.exit_code == 0 and not lock.exists()
    assert report["locks"][0]["state"] == "stale"


def test_a_dry_run_builds_nothing(aiter, tmp_path):
    result, report = run(*K3_OPTIONS, "--dry-run")
    assert result.exit_code == 0 and report["outcomes"] == []
    assert not (tmp_path / "record").exists()
    tuned = {s["tokens"][0]: s["tuned"] for s in report["steps"] if s["kind"] == "call"}
    assert tuned == {1: True, 2: True, 4: True, 8: False, 16: False}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
