"""What the commands share: the `--json` option, and a console that leaves its output clean."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_aiter_moe.errors import ContractError

#: Where the running command's result goes, until it is written: a refusal has to go there as well.
_pending: str | None = None


def _check_target(target: str | None) -> str | None:
    """Refuses a file that cannot be written before the work, which may take minutes, and not after it."""
    global _pending
    _pending = None
    if target in (None, "-"):
        _pending = target
        return target
    path = Path(target)
    place = path if path.exists() else path.parent
    if not target or path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise typer.BadParameter(
            f"{target!r} cannot be written; give a file in a directory that is there and open to "
            "you, or `-` for standard output"
        )
    _pending = target
    return target


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON to FILE, `-`: standard output.",
        callback=_check_target,
    ),
]


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """Lets SIGTERM unwind, so that neither weight files of GBs nor servers stay behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def console(json_target: str | None = None) -> Console:
    """The console for people: standard error when JSON takes standard output."""
    out = Console(stderr=json_target == "-", highlight=False)
    if not out.is_terminal:
        out = Console(stderr=json_target == "-", highlight=False, width=140)  # tables in logs
    return out


def end_children_on_sigterm() -> None:
    """Lets SIGTERM (``timeout``, a job scheduler) unwind the process as Ctrl-C does.

    By default it ends Python without a ``finally``, and servers and builds, which run in process groups of
    their own, go on without anybody to end them.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def write_json(data: Any, json_target: str | None) -> None:
    """Writes `data` where `--json` asked for it; does nothing when it was not given.

    Raises:
        typer.BadParameter: the file cannot be written.
    """
    global _pending
    if json_target is None:
        return
    _pending = None
    # NaN is no JSON: a failed comparison must stay readable for strict parsers.
    text = json.dumps(_without_nan(data), indent=2, allow_nan=False) + "\n"
    if json_target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(json_target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"--json {json_target}: {error.strerror}") from error


def write_refusal(error: ContractError) -> None:
    """Writes a refusal where ``--json`` asked for a result, unless the command has written something there.

    Without it a script finds nothing on standard output, or the file of an earlier run.
    """
    if _pending is not None:
        what = {"what": error.what, "allowed": error.allowed, "fix": error.fix}
        write_json({"refused": what}, _pending)


def _without_nan(data: Any) -> Any:
    if isinstance(data, float) and data != data:
        return None
    if isinstance(data, float) and data in (float("inf"), float("-inf")):
        return None
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_nan(value) for value in data]
    return data
