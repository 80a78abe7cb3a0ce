"""Runs a module of cases in a process of its own in which Triton interprets: the switch is read when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def rows(module: str, *, timeout: float = 200) -> dict[str, dict]:
    """What ``python -m sglang_aiter_moe.testing.MODULE`` prints, one JSON object a line, by its "case".

    Raises:
        AssertionError: it failed; with the end of what it said.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
    """
    child = subprocess.run(
        [sys.executable, "-m", f"sglang_aiter_moe.testing.{module}"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if child.returncode != 0:
        raise AssertionError(child.stderr[-3000:])
    found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    return {row["case"]: row for row in found}
