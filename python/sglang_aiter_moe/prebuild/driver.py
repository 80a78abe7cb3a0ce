"""Runs builds one after another, each in a process of its own: progress, time limits, locks.

A build that hangs or dies takes its own process along and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_aiter_moe.aiter_files.locks import Lock, LockState, find_locks
from sglang_aiter_moe.errors import ContractError

_POLL_S = 0.1
_LOCK_POLL_S = 5.0


@dataclass(frozen=True)
class Build:
    """One command to run.

    Attributes:
        name: for people.
        command: command line.
        env: on top of this process's environment.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a build.

    Attributes:
        name: of the build.
        ok: whether it ended with exit status 0.
        seconds: that it took.
        why: what went wrong, "" if nothing did.
    """

    name: str
    ok: bool
    seconds: float
    why: str = ""


def clear_stale(folders: Sequence[Path], remove: bool) -> list[Lock]:
    """The locks below AITER's build folders, stale ones removed if that was asked for.

    Raises:
        ContractError: there are stale locks and ``remove`` is False; a build would wait for them forever.
    """
    locks = find_locks(folders)
    stale = [lock for lock in locks if lock.state is LockState.STALE]
    if stale and not remove:
        raise ContractError(
            "; ".join(f"{lock.path} is a stale lock: {lock.reason}" for lock in stale),
            allowed="no lock, or one whose process is still building",
            fix=f"add --remove-stale-locks, or type `rm {' '.join(str(x.path) for x in stale)}`",
        )
    for lock in stale:
        lock.path.unlink(missing_ok=True)
    return locks


def run(
    builds: Sequence[Build],
    *,
    log: Path,
    total_s: float,
    step_s: float,
    folders: Sequence[Path] = (),
    progress: Callable[[Build, float], None] = lambda build, seconds: None,
) -> Iterator[Outcome]:
    """Runs builds in order and yields what became of each; stops at the end of the time.

    Args:
        builds: what to run.
        log: file that their output goes to.
        total_s: seconds for all of them.
        step_s: seconds for one.
        folders: AITER's build folders, looked at for locks while a build waits.
        progress: told a few times a second which build runs, and for how long.

    Raises:
        ContractError: the log cannot be written.
    """
    end = time.monotonic() + total_s
    try:
        opened = log.open("a", encoding="utf-8")
    except OSError as error:
        raise ContractError(
            f"{log}: {error.strerror}",
            allowed="a log in the current directory",
            fix="type the command in a directory that you may write to",
        ) from error
    with opened as out:
        for build in builds:
            left = end - time.monotonic()
            if left <= 0:
                yield Outcome(build.name, False, 0.0, f"not begun: {total_s:.0f} s were over")
                continue
            out.write(f"== {build.name}: {' '.join(build.command)}\n")
            out.flush()
            yield _run_one(build, out, min(step_s, left), folders, progress)


def _run_one(build: Build, out, limit_s: float, folders, progress) -> Outcome:
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            build.command,
            env={**os.environ, **build.env},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(build.name, False, 0.0, str(error))
    looked = start
    try:
        while True:
            seconds = time.monotonic() - start
            progress(build, seconds)
            try:
                status = process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                status = None
            if status is not None:
                why = "" if status == 0 else f"exit status {status}"
                return Outcome(build.name, status == 0, time.monotonic() - start, why)
            if seconds > limit_s:
                return Outcome(build.name, False, seconds, f"no end within {limit_s:.0f} s")
            if folders and time.monotonic() - looked > _LOCK_POLL_S:
                looked = time.monotonic()
                # One that went stale meanwhile: this build itself waits for it without end.
                stale = [x for x in find_locks(folders) if x.state is LockState.STALE]
                if stale:
                    why = f"it waits for {stale[0].path}, a stale lock: {stale[0].reason}"
                    return Outcome(build.name, False, seconds, why)
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """Ends a build with everything that it started: compilers outlive a parent that is killed alone."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
