"""Lock files of AITER's kernel builds: who holds them, and whether that process is still there.

AITER puts ``lock_NAME`` into its build folder while it builds a module. Older releases write nothing into
it and wait for it without end; newer ones write process id, host, PID namespace and start time, a line each.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

#: A lock without an owner is as old as its build at most; 16 modules took 633 s (sglang#34586).
LONGEST_BUILD_S = 1800


class LockState(StrEnum):
    HELD = "held"  # by a process that is there, or by one that cannot be looked at from here
    STALE = "stale"  # its process has ended
    UNKNOWN = "unknown"  # names nobody, and is younger than the longest build


@dataclass(frozen=True)
class Lock:
    """One lock file.

    Attributes:
        path: of the file.
        state: see :class:`LockState`.
        reason: one sentence.
    """

    path: Path
    state: LockState
    reason: str


def find_locks(folders: Iterable[Path], now: float | None = None) -> list[Lock]:
    """Every lock below some folders, with its state.

    Args:
        folders: build folders (:func:`build_folders`).
        now: seconds since the epoch; the present if None.
    """
    now = time.time() if now is None else now
    paths = {path for folder in folders for path in folder.rglob("lock*") if path.is_file()}
    return [look_at(path, now) for path in sorted(paths) if path.suffix != ".steal"]


def build_folders(package: Path, env: dict[str, str] | None = None) -> list[Path]:
    """Where AITER builds: its own ``jit`` folder, that of AITER_JIT_DIR, and ``~/.aiter/jit``."""
    env = dict(os.environ) if env is None else env
    given = env.get("AITER_JIT_DIR")
    folders = [package / "jit", Path.home() / ".aiter" / "jit"]
    if given:
        folders.insert(0, Path(given))
    return [folder for folder in folders if folder.is_dir()]


def look_at(path: Path, now: float) -> Lock:
    """The state of one lock."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        age = now - path.stat().st_mtime
    except OSError:
        return Lock(path, LockState.UNKNOWN, "gone, or not readable")
    if len(lines) < 2 or not lines[0].strip().isdecimal():
        if _kernel_lock_held(path):
            return Lock(path, LockState.HELD, "a process holds it")
        if age > LONGEST_BUILD_S:
            why = f"names no process and is {age / 60:.0f} minutes old, longer than any build"
            return Lock(path, LockState.STALE, why)
        return Lock(path, LockState.UNKNOWN, f"names no process and is {age:.0f} s old")
    pid, host = int(lines[0]), lines[1].strip()
    if host != socket.gethostname():
        return Lock(path, LockState.HELD, f"by process {pid} on {host}, which is not this machine")
    namespace = lines[2].strip() if len(lines) > 2 else ""
    if len(lines) > 4 and lines[4].strip() == "flock":
        if _kernel_lock_held(path):
            return Lock(path, LockState.HELD, f"by process {pid}")
        return Lock(path, LockState.STALE, f"process {pid} has ended")
    if namespace and namespace != _namespace():
        return Lock(path, LockState.HELD, f"by process {pid} of another container")
    started = lines[3].strip() if len(lines) > 3 else ""
    now_started = _start_time(pid)
    if now_started is None or (started and started != now_started):
        return Lock(path, LockState.STALE, f"process {pid} has ended")
    return Lock(path, LockState.HELD, f"by process {pid}")


def _kernel_lock_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Clock ticks after boot at which a process started, "" if that is hidden, None without the process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :].split()[19].decode()
    except FileNotFoundError:
        return None
    except (OSError, IndexError, ValueError):
        return ""
