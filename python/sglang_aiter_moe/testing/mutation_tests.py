"""Which unit tests execute which modules of ``contract/`` and ``srt/``: what ``mutation_targets.TESTS`` is made from.

``python -m sglang_aiter_moe.testing.mutation_tests FOUND [--minutes M]``, from the checkout's root. Each test file runs
in a fork, with a tracer that counts the executed lines of each module's functions; lines that run at import count for
nothing. What is found is kept in FOUND and gone on with. Prints the test files of each module, those with most lines
first, each with its lines and its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from sglang_aiter_moe.testing.mutation_run import preload
from sglang_aiter_moe.testing.mutation_targets import PACKAGE, UNIT

_PREFIXES = tuple(str(PACKAGE / part) + os.sep for part in ("contract", "srt"))


class Lines:
    """A tracer that notes the executed lines of functions below ``contract/`` and ``srt/``."""

    def __init__(self) -> None:
        self.seen: dict[CodeType, set[int]] = {}

    def start(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def by_module(self) -> dict[str, int]:
        """How many lines of each module."""
        found: dict[str, set[int]] = {}
        for code, lines in self.seen.items():
            name = str(Path(code.co_filename).relative_to(PACKAGE))
            found.setdefault(name, set()).update(lines)
        return {name: len(lines) for name, lines in sorted(found.items())}

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_name == "<module>" or not code.co_filename.startswith(_PREFIXES):
            return None
        lines = self.seen.setdefault(code, set())

        def executed(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return executed

        return executed


def executed_by(test: str, limit: float) -> dict[str, Any] | None:
    """``{"seconds": s, "lines": {module: count}}`` of a test file; None if it fails or takes too long.

    Args:
        test: below UNIT.
        limit: seconds.
    """
    start = time.monotonic()
    with tempfile.NamedTemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            _trace(test, file.name)
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() - start > limit:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(0.05)
        text = file.read()
    if not text:
        return None
    return {"seconds": round(time.monotonic() - start, 1), "lines": json.loads(text)}


def _trace(test: str, answer: str) -> None:
    """In the fork: never returns."""
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        import pytest

        lines = Lines()
        lines.start()
        options = ["-x", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
        if not pytest.main([*options, UNIT + test]):
            sys.settrace(None)
            Path(answer).write_text(json.dumps(lines.by_module()))
    finally:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--limit", type=float, default=90, help="seconds for one test file")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    found = json.loads(options.found.read_text()) if options.found.exists() else {}
    preload()
    tests = [str(file.relative_to(UNIT)) for file in sorted(Path(UNIT).rglob("test_*.py"))]
    for test in tests:
        if test in found or time.monotonic() > end:
            continue
        found[test] = executed_by(test, options.limit)
        options.found.write_text(json.dumps(found, indent=1) + "\n")
    modules: dict[str, list[tuple[int, float, str]]] = {}
    for test, result in found.items():
        for module, count in (result or {"lines": {}})["lines"].items():
            modules.setdefault(module, []).append((count, result["seconds"], test))
    for module, entries in sorted(modules.items()):
        print(module)
        for count, seconds, test in sorted(entries, reverse=True):
            print(f"  {count:4} lines {seconds:6.1f} s  {test}")
    print("failed or took too long:", *(test for test, result in found.items() if result is None))
    print(f"{len(tests) - len(found)} test files left")


if __name__ == "__main__":
    main()
