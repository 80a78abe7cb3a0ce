"""`doctor` runs where nothing is installed, and names each contradiction with the line to type."""

import json
import os
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe import environ, plugin
from sglang_aiter_moe.cli import app, doctor_checks
from sglang_aiter_moe.cli.doctor import grouped
from sglang_aiter_moe.cli.finding import Finding
from sglang_aiter_moe.testing import fake_aiter_checkout as fake
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No variable is set, and the packages that this machine may have are not looked at."""
    for name in environ.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor_checks, "aiter_package", lambda: None)
    monkeypatch.setattr(doctor_checks, "gpu_arch", lambda: None)
    monkeypatch.setattr(plugin, "installed_release", lambda: None)


def run(*arguments):
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json", "-"])
    return result, json.loads(result.stdout)


def texts(report, level):
    return [f"{f['text']} | {f['fix']}" for f in report["findings"] if f["level"] == level]


def test_missing_programs_are_warnings():
    result, report = run()
    assert result.exit_code == 0
    assert report["bad"] == 0
    warned = "\n".join(texts(report, "warn"))
    for missing in ("SGLang is not installed", "AITER is not installed", "no ROCm GPU"):
        assert missing in warned
    assert any(
        "from 0.1.14; SiTUv2 from 0.1.19, its A4W4 from 0.1.19.post1" in t
        for t in texts(report, "ok")
    )
    assert "[warn]" in result.stderr
    assert "[ok]" in result.stderr


@pytest.mark.parametrize(
    ("flags", "resolved"),
    [
        ({}, "mode A16W4, w13 laid out separated, gate_mode separated"),
        ({"AITER_SITUV2_A8W4": "1"}, "mode A8W4, w13 laid out gu_interleaved"),
        ({"AITER_SITUV2_A4W4": "1"}, "mode A4W4, w13 laid out separated"),
    ],
)
def test_the_resolved_mode_is_shown(monkeypatch, flags, resolved):
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    result, report = run()
    assert result.exit_code == 0
    assert any(resolved in text for text in texts(report, "ok"))


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("AITER_SITUV2_A8W4", "true", "export AITER_SITUV2_A8W4=1"),
        ("AITER_SITUV2_A8W4", "", "export AITER_SITUV2_A8W4=0"),
        ("AITER_SITUV2_A4W4", " 1", "export AITER_SITUV2_A4W4=1"),
        ("AITER_FORCE_A8W4", "", "export AITER_FORCE_A8W4="),
        ("AITER_BF16_FP8_MOE_BOUND", "many", "unset AITER_BF16_FP8_MOE_BOUND"),
        ("SGLANG_AITER_MOE_BACKEND", "cuda", "use one of auto, aiter, portable"),
        ("SGLANG_AITER_MOE_ENABLE", "false", "unset SGLANG_AITER_MOE_ENABLE, or use one of 0, 1"),
        ("SGLANG_AITER_MOE_ALLOW_UNTESTED", "yes", "use one of 0, 1"),
        ("SGLANG_AITER_MOE_RELOAD_STAGING", "disk", "use one of none, host"),
        ("SGLANG_AITER_MOE_A16W4_KERNEL", "gugu", "use one of separated, gu_interleaved"),
    ],
)
def test_contradictions_fail_with_the_line_to_type(monkeypatch, name, value, fix):
    monkeypatch.setenv(name, value)
    result, report = run()
    assert result.exit_code == 1
    assert any(name in text and fix in text for text in texts(report, "bad")), report["findings"]
    assert "[bad]" in result.stderr


def test_a_gpu_that_sglang_does_not_use_aiter_on_is_a_warning(monkeypatch):
    def lines():
        return [t for t in texts(run()[1], "warn") if "SGLANG_USE_AITER" in t]

    assert lines() == []  # without a GPU nothing is lost
    monkeypatch.setattr(doctor_checks, "gpu_arch", lambda: "gfx950")
    (line,) = lines()
    assert "export SGLANG_USE_AITER=1" in line
    monkeypatch.setenv("SGLANG_USE_AITER", "true")
    assert lines() == []


def test_what_doctor_says_to_type_is_enough(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "true")
    _, report = run()
    line = texts(report, "bad")[0].partition("export ")[2].partition("`")[0]
    name, _, value = line.partition("=")
    monkeypatch.setenv(name, value)
    result, _ = run()
    assert result.exit_code == 0


def test_a_variable_that_is_set_shows_who_reads_what_and_when(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    _, report = run()
    (line,) = [t for t in texts(report, "ok") if t.startswith("AITER_SITUV2_A8W4=")]
    assert "'1': SGLang reads True, AITER reads True" in line
    assert "(SGLang: at weight load. AITER: at every call)" in line


def test_a_variable_without_a_reader_is_a_warning(monkeypatch):
    monkeypatch.setenv("SGLANG_K3_FLYDSL_AR_NORM", "1")
    result, report = run()
    assert result.exit_code == 0
    assert any("nothing reads it" in text for text in texts(report, "warn"))


def test_the_kill_switch_is_shown(monkeypatch):
    monkeypatch.setenv("SGLANG_AITER_MOE_ENABLE", "0")
    _, report = run()
    assert any("switched off" in text for text in texts(report, "warn"))


def test_a_combination_that_the_plan_refuses_is_bad():
    result, report = run("--tp", "8", "--ep", "8")
    assert result.exit_code == 1
    assert any("expert mask" in text for text in texts(report, "bad"))


@pytest.fixture
def aiter(tmp_path, monkeypatch):
    """A directory that looks like an AITER checkout without any kernel built."""
    package = fake.write_package(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (package / "__init__.py").write_text("raise RuntimeError('doctor imports AITER')\n")
    monkeypatch.setattr(doctor_checks, "aiter_package", lambda: package)
    monkeypatch.setattr(doctor_checks, "_version", lambda name: {"amd-aiter": "0.1.20"}.get(name))
    return package


def test_an_old_aiter_is_named_and_its_rules_hold(aiter, monkeypatch):
    monkeypatch.setattr(doctor_checks, "_version", lambda name: {"amd-aiter": "0.1.19"}.get(name))
    monkeypatch.setenv("AITER_SITUV2_A4W4", "1")
    _, report = run()
    ok = texts(report, "ok")
    assert any("release 0.1.19" in text for text in ok)
    assert any("mode A16W4" in text and "ignores AITER_SITUV2_A4W4" in text for text in ok)


def stale_lock(folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = folder / "lock_module_moe"
    path.write_text(f"{ended.pid}\n{socket.gethostname()}\n")
    return path


def test_a_cold_start_is_set_against_the_watchdog(aiter):
    _, report = run()
    (line,) = [t for t in texts(report, "warn") if "a cold start builds" in t]
    # By hand: 15 powers of two up to 16384, two FlyDSL kernels of at most 18 s each.
    assert "15 token counts, at most 540 s" in line and "longer than" in line
    assert "sglang-aiter-moe prebuild kimi-k3 --tp 8 --ep 1 --arch gfx950" in line
    assert any("0 kernel modules are built" in t for t in texts(report, "warn"))
    (aiter / "jit" / "module_moe.so").write_text("")
    _, report = run()
    assert any("1 kernel modules are built" in t for t in texts(report, "ok"))


def test_a_stale_lock_is_bad_and_one_of_a_running_build_is_not(aiter):
    path = stale_lock(aiter / "jit" / "build")
    result, report = run()
    assert result.exit_code == 1
    assert any("is stale" in t and f"rm {path}" in t for t in texts(report, "bad"))
    path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
    result, report = run()
    assert result.exit_code == 0 and any("is held" in t for t in texts(report, "ok"))
    path.write_text("")  # an AITER that writes nothing into it
    result, report = run()
    assert result.exit_code == 0
    assert any("if no build is running" in t for t in texts(report, "warn"))


def test_coverage_by_the_tables_that_are_there(aiter, monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    table = aiter / "configs" / "model_configs" / "k3_tuned_fmoe.csv"
    shape = (3584, 384, 896, 16)
    rows = [fake.tuned_row(1 << n, "A8W4", shape) for n in range(14)]
    fake.write_table(table, rows)
    _, report = run()
    (line,) = [t for t in texts(report, "warn") if "have a tuned row" in t]
    assert "14 of 15 token counts have a tuned row (H 3584, I 384); none: 16384" in line
    fake.write_table(table, [*rows, fake.tuned_row(16384, "A8W4", shape)])
    _, report = run()
    assert any("15 of 15 token counts" in t for t in texts(report, "ok"))
    table.write_text("a,b\n1,2\n")
    result, report = run()
    assert result.exit_code == 1 and any("is no tuned table" in t for t in texts(report, "bad"))


def test_one_line_for_patches_in_the_same_state():
    states = ["in force", "in force", "not needed (old)", "in force", ""]
    findings = [
        Finding("patches", "ok", f"p{n}: {state}", group=state, name=f"p{n}")
        for n, state in enumerate(states)
    ]
    shown = [finding.text for finding in grouped(findings)]
    assert shown == ["3 in force: p0, p1, p3", "p2: not needed (old)", "p4: "]


def test_aiter_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "aiter"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.undo()  # the real aiter_package
    monkeypatch.delitem(sys.modules, "aiter", raising=False)  # which another test may have left
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor_checks.aiter_package() is None  # PyPI's `aiter` has no ops.shuffle
    (package / "ops" / "shuffle.py").write_text("")
    assert doctor_checks.aiter_package() == package


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
