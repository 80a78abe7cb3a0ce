"""Runs mutants of ``contract/`` and ``srt/`` against the tests of their module.

``python -m sglang_aiter_moe.testing.mutation_run RESULTS [--share S] [--minutes M] [--only GLOB]``, from the
checkout's root. Results are kept in RESULTS (docs/mutation.json) and gone on with; a mutant is always the same one for
the same source. Each runs in a fork of a process that has torch and pytest loaded already, so that a mutant costs its
tests alone. Python processes that the tests start import the mutant too.

A draw (``--draw``) is a sample whose first verdicts count: what its modules became later changes nothing in it. What
``--again`` finds is kept beside them.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from sglang_aiter_moe.testing.mutation_draw import beside, chosen, distinct, later_look, sources
from sglang_aiter_moe.testing.mutation_targets import PACKAGE, TESTS, UNIT

#: What a Python process that a test starts runs first (the module ``site`` imports it).
_IN_CHILDREN = """
import sys
from pathlib import Path
from sglang_aiter_moe.testing.mutation_run import Finder
sys.meta_path.insert(0, Finder({module!r}, Path({file!r}), {source!r}))
"""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source."""

    def __init__(self, module: str, file: Path, source: str) -> None:
        self.module, self.file, self.source = module, file, source

    def in_children_too(self, folder: str) -> None:
        """Python processes that this one starts import the changed source as well.

        Args:
            folder: an empty one, which has to outlive them.
        """
        code = _IN_CHILDREN.format(module=self.module, file=str(self.file), source=self.source)
        Path(folder, "sitecustomize.py").write_text(code)
        paths = (folder, str(PACKAGE.parent), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        exec(compile(self.source, str(self.file), "exec"), vars(module))


def passes(name: str, source: str | None, tests: Sequence[str], limit: float) -> tuple[str, float]:
    """("survived" | "killed" | "timeout", processor seconds) of a module's tests with another source of the module.

    Args:
        name: of the module, a key of TESTS.
        source: in place of the file's; None for the file itself.
        tests: below UNIT.
        limit: processor seconds after which it counts as killed by an endless loop; twenty times as many by the clock
            (a busy machine), for one that waits for ever.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            _become_test_run(name, source, tests, limit, folder)
        while True:
            done, status, used = os.wait4(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                found = {0: "survived", -signal.SIGXCPU: "timeout"}.get(code, "killed")
                return found, used.ru_utime + used.ru_stime
            if time.monotonic() - start > 20 * limit:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timeout", limit
            time.sleep(0.02)


def _become_test_run(
    name: str, source: str | None, tests: Sequence[str], limit: float, folder: str
) -> None:
    """In the fork: never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if source is not None:
            module = "sglang_aiter_moe." + name.removesuffix(".py").replace("/", ".")
            finder = Finder(module, PACKAGE / name, source)
            finder.in_children_too(folder)
            sys.meta_path.insert(0, finder)
        import pytest

        files = [UNIT + test for test in tests]
        options = ["-x", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
        code = int(pytest.main([*options, *files]))
    finally:
        os._exit(code)


def preload() -> None:
    """What every test imports and no mutant changes."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--share", type=float, default=0.1, help="of each module's mutants")
    parser.add_argument(
        "--minutes", type=float, default=7, help="stop after so long; run again to go on"
    )
    parser.add_argument("--only", default="*", help="glob of modules")
    parser.add_argument("--draw", default="", help="any text: another sample")
    parser.add_argument("--least", type=int, default=3, help="so many of each module at least")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], help="other results: none of their mutants"
    )
    parser.add_argument(
        "--apart", action="store_true", help="draw equal changes on several lines one by one"
    )
    parser.add_argument("--survivors", action="store_true", help="run those again")
    parser.add_argument(
        "--again",
        action="store_true",
        help="the same, with the verdicts kept beside the first ones; of a changed source all of the draw",
    )
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    preload()
    names = [name for name in TESTS if fnmatch(name, options.only)]
    hashes = sources(names)
    others = [json.loads(file.read_text()) for file in options.beside]
    drawn = {
        name: chosen(
            name,
            options.share,
            options.draw,
            options.least,
            beside(others, name, hashes[name]),
            apart=options.apart,
        )
        for name in names
    }
    unchanged: dict[tuple[str, ...], tuple[str, float]] = {}
    for name in names:
        entry = results.get(name, {})
        if entry.get("source") != hashes[name]:
            if entry and options.draw:
                print(f"{name}: another source since it was drawn; its first verdicts stay")
                drawn[name] = []
            else:
                entry = {"source": hashes[name], "mutants": 0, "ran": {}}
        if entry["source"] == hashes[name]:
            entry["mutants"] = len(distinct(name))
        results[name] = entry
        if options.survivors:
            entry["ran"] = {m: v for m, v in entry["ran"].items() if v != "survived"}
        kept = entry["ran"]
        todo = [mutant for mutant in drawn[name] if mutant.name not in kept]
        if time.monotonic() > end:
            continue
        if options.again:
            todo, kept = later_look(entry, name, hashes[name])
        if not todo:
            continue
        if TESTS[name] not in unchanged:
            unchanged[TESTS[name]] = passes(name, None, TESTS[name], 600)
        verdict, seconds = unchanged[TESTS[name]]
        if verdict != "survived":
            print(f"{name}: its tests fail without any change", flush=True)
            continue
        for mutant in todo:
            if time.monotonic() > end:
                break
            verdict, _ = passes(name, mutant.source, TESTS[name], 20 + 5 * seconds)
            kept[mutant.name] = verdict
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{verdict:9} {name} {mutant.name}", flush=True)
    options.results.write_text(json.dumps(results, indent=1) + "\n")
    ran = [verdict for entry in results.values() for verdict in entry["ran"].values()]
    killed = sum(verdict != "survived" for verdict in ran)
    left = sum(m.name not in results[n]["ran"] for n in names for m in drawn[n])
    print(f"{killed} of {len(ran)} killed; {left} of the chosen ones not run yet")


if __name__ == "__main__":
    main()
