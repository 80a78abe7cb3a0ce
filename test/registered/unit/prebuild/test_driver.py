"""The driver of builds: what fails, hangs, waits for a dead lock or runs out of time is said, and ended.

Builds here are small scripts; no AITER is involved.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.prebuild import driver
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


def build(name, code, **env):
    return driver.Build(name, (sys.executable, "-c", code), env)


def run(builds, tmp_path, total_s=60.0, step_s=30.0, **more):
    return list(driver.run(builds, log=tmp_path / "log", total_s=total_s, step_s=step_s, **more))


def test_a_log_that_cannot_be_written_is_refused_before_a_build(tmp_path):
    (tmp_path / "log").mkdir()
    marker = tmp_path / "built"
    with pytest.raises(ContractError, match="log: Is a directory"):
        run([build("a", f"open({str(marker)!r}, 'w')")], tmp_path)
    assert not marker.exists()


def test_builds_run_in_order_with_their_variables(tmp_path):
    code = "import os; print('building', os.environ['WHAT'])"
    seen = []
    found = run(
        [build("a", code, WHAT="one"), build("b", code, WHAT="two")],
        tmp_path,
        progress=lambda b, seconds: seen.append(b.name),
    )
    assert [(o.name, o.ok, o.why) for o in found] == [("a", True, ""), ("b", True, "")]
    log = (tmp_path / "log").read_text()
    assert log.index("building one") < log.index("== b") < log.index("building two")
    assert list(dict.fromkeys(seen)) == ["a", "b"]


def test_a_failure_is_said_and_the_next_build_runs(tmp_path):
    found = run([build("a", "raise SystemExit(3)"), build("b", "")], tmp_path)
    assert [(o.ok, o.why) for o in found] == [(False, "exit status 3"), (True, "")]


def test_a_build_that_hangs_is_ended_with_what_it_started(tmp_path):
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    (found,) = run([build("a", code)], tmp_path, step_s=3)
    assert not found.ok and found.why == "no end within 3 s"
    deadline = time.monotonic() + 10
    while _alive(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(int(pid.read_text()))


def test_sigterm_ends_a_build_too(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from sglang_aiter_moe.cli.output import end_children_on_sigterm\n"
        "from sglang_aiter_moe.prebuild import driver\n"
        "end_children_on_sigterm()\n"
        'slow = \'import os, time; open("pid", "w").write(str(os.getpid())); time.sleep(600)\'\n'
        "build = driver.Build('a', (sys.executable, '-c', slow), {})\n"
        "list(driver.run([build], log=Path('log'), total_s=600, step_s=600))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    while _alive(int(pid.read_text())) and time.monotonic() < deadline + 60:  # it was told to end
        time.sleep(0.1)
    assert not _alive(int(pid.read_text()))


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_time_for_everything_ends_it(tmp_path):
    slow = "import time; time.sleep(600)"
    found = run([build("a", slow), build("b", "")], tmp_path, total_s=2)
    assert [o.ok for o in found] == [False, False]
    assert found[1].why.startswith("not begun")


def test_a_build_that_waits_for_a_dead_lock_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "_LOCK_POLL_S", 0.2)
    folder = tmp_path / "build"
    folder.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (folder / "lock_m").write_text(f"{ended.pid}\n{socket.gethostname()}\n")
    (found,) = run([build("a", "import time; time.sleep(600)")], tmp_path, folders=[folder])
    assert not found.ok and "lock_m, a stale lock" in found.why


def test_stale_locks_stop_before_the_first_build_or_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale, held = tmp_path / "lock_stale", tmp_path / "lock_held"
    stale.write_text(f"{ended.pid}\n{socket.gethostname()}\n")
    held.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
    with pytest.raises(ContractError, match="lock_stale is a stale lock") as error:
        driver.clear_stale([tmp_path], remove=False)
    assert f"rm {stale}" in error.value.fix
    assert len(driver.clear_stale([tmp_path], remove=True)) == 2
    assert held.exists() and not stale.exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
