"""A lock whose process is gone is stale, and one whose process is there is not."""

import fcntl
import os
import socket
import subprocess
import sys
import time

import pytest

from sglang_aiter_moe.aiter_files import locks
from sglang_aiter_moe.aiter_files.locks import LockState
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

HOST = socket.gethostname()
NAMESPACE = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""


@pytest.fixture
def ended():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def write(tmp_path, *lines):
    path = tmp_path / "lock_module_moe"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def state(path, later=0.0):
    return locks.look_at(path, time.time() + later).state


def test_owner_by_process_id(tmp_path, ended):
    assert state(write(tmp_path, ended, HOST)) is LockState.STALE
    assert state(write(tmp_path, os.getpid(), HOST)) is LockState.HELD


def test_a_lock_of_another_form_names_nobody(tmp_path):
    for first in ("²", "-1", "99x"):
        assert state(write(tmp_path, first, HOST)) is LockState.UNKNOWN, first


def test_another_machine_or_container_cannot_be_judged(tmp_path, ended):
    assert state(write(tmp_path, ended, "elsewhere")) is LockState.HELD
    assert state(write(tmp_path, ended, HOST, "pid:[1]", "5")) is LockState.HELD


def test_a_reused_process_id_is_another_process(tmp_path):
    assert state(write(tmp_path, os.getpid(), HOST, NAMESPACE, "1")) is LockState.STALE


def test_the_kernels_lock_decides_where_aiter_takes_one(tmp_path, ended):
    path = write(tmp_path, ended, HOST, NAMESPACE, "1", "flock")
    assert state(path) is LockState.STALE
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert state(path) is LockState.HELD


def test_a_lock_that_names_nobody_is_stale_when_no_build_takes_that_long(tmp_path):
    path = write(tmp_path)
    assert state(path) is LockState.UNKNOWN
    assert state(path, later=locks.LONGEST_BUILD_S + 1) is LockState.STALE
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert state(path, later=locks.LONGEST_BUILD_S + 1) is LockState.HELD


def test_locks_are_found_below_the_build_folders(tmp_path, monkeypatch, ended):
    package, other = tmp_path / "aiter", tmp_path / "elsewhere"
    (package / "jit" / "build").mkdir(parents=True)
    other.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    (package / "jit" / "build" / "lock_a").write_text(f"{ended}\n{HOST}\n")
    (package / "jit" / "build" / "lock_a.steal").write_text("")
    (other / "lock_b").write_text("")
    folders = locks.build_folders(package, {"AITER_JIT_DIR": str(other)})
    assert {lock.path.name for lock in locks.find_locks(folders)} == {"lock_a", "lock_b"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
