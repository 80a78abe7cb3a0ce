"""Where and when figures were made: what a kept result has to say about itself."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_aiter_moe.errors import ContractError

PROJECT = Path(__file__).resolve().parents[3]
RESULTS = ("docs", "benchmark/results")
"""Folders of results that are kept with the sources."""


def provenance(project: Path = PROJECT) -> dict[str, Any]:
    """Date (UTC), commit, machine (with the GPU that torch has found) and command of this process.

    Args:
        project: the checkout whose commit is named.

    Returns:
        ``commit`` ends with ``+`` where the checkout has changes, and is None without a checkout of its own
        (``without_commit`` says so then).
    """
    machine = {"processor": platform.machine(), "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    named = commit(project)
    reason = {} if named else {"without_commit": "the sources are no git checkout with a commit"}
    return reason | {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": named,
        "machine": machine,
        "command": " ".join([_program(), *sys.argv[1:]]),
    }


def may_keep(path: Path | None, project: Path = PROJECT) -> None:
    """Asks, before the work and again before it is written, whether a result may be written to ``path``; None: no file.

    Raises:
        ContractError: it would stand among the project's kept results, and no commit can be named.
    """
    if path is None or not any(
        path.resolve().is_relative_to(project.resolve() / folder) for folder in RESULTS
    ):
        return
    if commit(project) is None:
        raise ContractError(
            f"a result for {path} from sources that are no git checkout with a commit",
            allowed="kept results whose commit can be named",
            fix="run in a git checkout, or write to a file outside " + " and ".join(RESULTS),
        )


def write(path: Path, result: dict[str, Any] | list) -> None:
    """Keeps a result with its provenance: a list as ``rows``.

    Raises:
        ContractError: as :func:`may_keep`.
    """
    may_keep(path)
    facts = result if isinstance(result, dict) else {"rows": result}
    path.write_text(json.dumps(provenance() | facts, indent=1) + "\n", encoding="utf-8")


def missing(data: Any) -> set[str]:
    """What a result, read back from its file, does not say of "date", "commit" and "machine".

    Each may stand in the result itself or in every row of it; a machine is also named by its "gpu" or "card".
    """
    parts = data if isinstance(data, list) else [data]
    rows = [row for part in parts if isinstance(part, dict) for row in _rows(part)]
    names = {"date": ("date",), "commit": ("commit",), "machine": ("machine", "gpu", "card")}

    def said(group: list, keys: tuple[str, ...]) -> bool:
        return bool(group) and all(any(part.get(key) for key in keys) for part in group)

    parts = [part for part in parts if isinstance(part, dict)]
    return {name for name, keys in names.items() if not (said(parts, keys) or said(rows, keys))}


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    lists = [value for value in result.values() if isinstance(value, list)]
    return [row for rows in lists for row in rows if isinstance(row, dict)]


def _program() -> str:
    """How this process was started: a module of the package, a file of the checkout, or the command."""
    program = Path(sys.argv[0])
    try:
        inside = program.resolve().relative_to(PROJECT)
    except ValueError:
        return "sglang-aiter-moe"
    if inside.parts[0] != "python":
        return f"python {inside.as_posix()}"
    if inside.name == "__main__.py":
        return "sglang-aiter-moe"
    return "python -m " + ".".join(inside.with_suffix("").parts[1:])


def commit(project: Path) -> str | None:
    """The commit of a checkout; None for anything else, also inside somebody else's repository.

    Kept results that have changed make no other code: what is written first does not mark what is written next.
    """
    if not (project / ".git").exists():
        return None
    try:
        head = _git(project, "rev-parse", "HEAD")
        besides = [f":(exclude,glob){folder}/*.json*" for folder in RESULTS]
        changed = _git(
            project, "status", "--porcelain", "--untracked-files=no", "--", ".", *besides
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _git(project: Path, *words: str) -> str:
    command = ["git", "-C", str(project), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
