"""All changes of a run or none: a journal first, then one atomic replacement a file.

The journal is a directory beside the files that holds every new and every old content. It appears in one
step (a rename) when it is complete, and goes when all files are written. A run that ends in between leaves
it, and the next run finishes that one or takes it back, whatever it was interrupted at.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree.manifest import JOURNAL

_PLAN = "journal.json"


@dataclass(frozen=True)
class Change:
    """One file: its content before and after; None: there is none."""

    path: Path
    before: bytes | None
    after: bytes | None


@contextlib.contextmanager
def locked(package: Path) -> Iterator[None]:
    """Keeps a second run away from this tree for the length of a block.

    Raises:
        ContractError: another run is at work.
    """
    handle = os.open(package, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ContractError(
                f"another run is changing {package}",
                allowed="one run at a time",
                fix="wait for it to end",
            ) from None
        yield
    finally:
        os.close(handle)


def check_writable(changes: Sequence[Change]) -> None:
    """Refuses before the first write what could not be written.

    Raises:
        ContractError: a file is read-only or a link, or its directory cannot be written.
    """
    for change in changes:
        path = change.path
        if path.is_symlink():
            raise ContractError(
                f"{path} is a link to {os.readlink(path)}",
                allowed="plain files: a link would be replaced by a file",
                fix="apply to the tree that it points into",
            )
        place = path if path.exists() else next(p for p in path.parents if p.exists())
        folder = path.parent if path.exists() else place
        for item in {place, folder}:
            # The mode as well: what is read-only stays as it is, also for root.
            if not os.access(item, os.W_OK) or not item.stat().st_mode & stat.S_IWUSR:
                raise ContractError(
                    f"{item} is read-only",
                    allowed="files and directories that you can write",
                    fix=f"type `chmod u+w {item}`, or copy the tree",
                )


def carry_out(package: Path, action: str, changes: Sequence[Change]) -> None:
    """Writes the changes, all of them.

    Args:
        package: where the journal goes.
        action: "apply" or "revert", for whoever finds the journal.
        changes: none of them checked here but for being writable.

    Raises:
        ContractError: a file cannot be written; everything is as it was before.
    """
    check_writable(changes)
    try:
        _write_journal(package, action, changes)
    except OSError as error:
        drop_leftovers(package)
        raise _failed(error, "nothing was changed") from error
    try:
        for change in changes:
            _put(change.path, change.after)
    except OSError as error:
        try:
            resume(package, forward=False)
        except (OSError, ContractError):
            raise _failed(
                error, "the tree is half-changed, and its journal says what is missing"
            ) from error
        raise _failed(error, "what had been written is taken back") from error
    _drop_journal(package)


def unfinished(package: Path) -> str | None:
    """The action of a run that did not come to its end; None without one."""
    path = package / JOURNAL / _PLAN
    return json.loads(path.read_text(encoding="utf-8"))["action"] if path.is_file() else None


def drop_leftovers(package: Path) -> None:
    """Removes a journal that was never complete, or whose run had done everything."""
    shutil.rmtree(package / f"{JOURNAL}.tmp", ignore_errors=True)


def resume(package: Path, *, forward: bool) -> None:
    """Finishes an interrupted run, or takes it back.

    Raises:
        ContractError: a file is neither as it was before nor as the run would have left it.
    """
    folder = package / JOURNAL
    entries = json.loads((folder / _PLAN).read_text(encoding="utf-8"))["files"]
    changes = []
    for number, entry in enumerate(entries):
        before, after = (
            (folder / f"{number}.{side}").read_bytes() if entry[side] else None
            for side in ("before", "after")
        )
        path = package / entry["path"]
        now = path.read_bytes() if path.exists() else None
        if now not in (before, after):
            raise ContractError(
                f"{path} was changed after an interrupted run",
                allowed="the content before that run, or the one that it writes",
                fix=f"undo your change, or put the files of {folder} in place by hand and remove it",
            )
        changes.append(Change(path, now, after if forward else before))
    check_writable(changes)
    for change in changes:
        if change.before != change.after:
            _put(change.path, change.after)
    _drop_journal(package)


def _write_journal(package: Path, action: str, changes: Sequence[Change]) -> None:
    drop_leftovers(package)
    new = package / f"{JOURNAL}.tmp"
    new.mkdir()
    files = []
    for number, change in enumerate(changes):
        entry: dict[str, object] = {"path": os.path.relpath(change.path, package)}
        for side in ("before", "after"):
            data = getattr(change, side)
            entry[side] = data is not None
            if data is not None:
                _write(new / f"{number}.{side}", data)
        files.append(entry)
    _write(new / _PLAN, json.dumps({"action": action, "files": files}).encode())
    _sync(new)
    os.replace(new, package / JOURNAL)
    _sync(package)


def _drop_journal(package: Path) -> None:
    gone = package / f"{JOURNAL}.tmp"
    os.replace(package / JOURNAL, gone)
    _sync(package)
    shutil.rmtree(gone, ignore_errors=True)


def _put(path: Path, data: bytes | None) -> None:
    """One file, in one step; directories come and go with their files."""
    if data is None:
        path.unlink(missing_ok=True)
        _remove_empty(path.parent)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.aiter_moe")
    try:
        _write(temporary, data)
        if path.exists():
            shutil.copymode(path, temporary)
            owner = path.stat()
            with contextlib.suppress(PermissionError):  # root may change a user's tree
                os.chown(temporary, owner.st_uid, owner.st_gid)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _remove_empty(folder: Path) -> None:
    """The directory of a file that is gone, if only byte code is left, and those above it likewise."""
    while all(item.name == "__pycache__" for item in folder.iterdir()):
        shutil.rmtree(folder)
        folder = folder.parent


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failed(error: OSError, state: str) -> ContractError:
    return ContractError(
        f"{error.filename or 'a file'} cannot be written: {error.strerror}; {state}",
        allowed="room and the right to write",
        fix="make room, then run the command again",
    )
