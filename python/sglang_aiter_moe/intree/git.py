"""Whether a git tree has changes of its own in the files that would be edited."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from sglang_aiter_moe.errors import ContractError


def uncommitted(root: Path, paths: Sequence[Path]) -> list[str]:
    """Those of ``paths`` that differ from the last commit, or are new to git; empty outside a git tree.

    Raises:
        ContractError: git does not say.
    """
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return []
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=all"]
    try:
        done = subprocess.run(
            [*command, "--", *map(str, paths)], capture_output=True, text=True, check=False
        )
        problem = done.stderr.strip() if done.returncode else None
    except FileNotFoundError:
        problem = "git is not installed"
    if problem:
        raise ContractError(
            f"git does not say whether {root} has uncommitted changes: {problem}",
            allowed="a git tree that git can read",
            fix="fix that, or use --allow-uncommitted",
        )
    return [line[3:] for line in done.stdout.splitlines()]
