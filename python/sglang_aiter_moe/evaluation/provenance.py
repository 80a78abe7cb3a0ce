"""Where and when figures were made: what a kept result has to say about itself."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]


def provenance(project: Path = PROJECT) -> dict[str, Any]:
    """Date (UTC), commit, machine and command of this process.

    Args:
        project: the checkout whose commit is named.

    Returns:
        ``commit`` ends with ``+`` where the checkout has changes, and is None without a checkout of its own.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(project),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "command": " ".join(["sglang-aiter-moe", *sys.argv[1:]]),
    }


def commit(project: Path) -> str | None:
    """The commit of a checkout; None for anything else, also inside somebody else's repository."""
    if not (project / ".git").exists():
        return None
    try:
        head = _git(project, "rev-parse", "HEAD")
        changed = _git(project, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _git(project: Path, *words: str) -> str:
    command = ["git", "-C", str(project), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
