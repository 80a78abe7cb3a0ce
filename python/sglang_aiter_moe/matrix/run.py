"""Runs cells in processes of their own, one for each SGLang release and side."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.classes import Class, classify, in_another_mode
from sglang_aiter_moe.matrix.kinds import kind_of
from sglang_aiter_moe.matrix.one_cell import Outcome
from sglang_aiter_moe.matrix.worker import CELL
from sglang_aiter_moe.serving import sglang_python
from sglang_aiter_moe.serving.sglang_python import SGLang
from sglang_aiter_moe.testing.sglang_environment import OTHER_RELEASES, TRANSFORMERS
from sglang_aiter_moe.testing.sglang_process import RESULT, printed
from sglang_aiter_moe.testing.sglang_server import environment, free_port

RELEASES = (*OTHER_RELEASES, sglang_python.MAIN)


@dataclass(frozen=True)
class Side:
    """Released SGLang alone, or with the patch set.

    Attributes:
        release: of SGLang.
        patched: with the patch set.
        without: a patch that is left out.
    """

    release: str
    patched: bool
    without: str | None = None

    @property
    def name(self) -> str:
        return "patched" if self.patched else "unpatched"


@dataclass(frozen=True)
class Results:
    """One side's outcome of each cell, in the order of the cells."""

    side: Side
    outcomes: dict[Cell, Outcome]
    seconds: float

    def classes(self) -> dict[Cell, Class]:
        return {cell: classify(cell, outcome) for cell, outcome in self.outcomes.items()}

    def of(self, kind: Class) -> list[tuple[Cell, Outcome]]:
        """The cells of a class."""
        return [(c, o) for c, o in self.outcomes.items() if classify(c, o) is kind]

    def to_json(self) -> dict[str, Any]:
        """Counts, and what happened in each cell that is neither right nor refused in time."""
        counted = Counter(self.classes().values())
        silent = self.of(Class.SILENT_WRONG)
        kinds = Counter(kind_of(cell, outcome).key for cell, outcome in silent)
        other = sum(in_another_mode(c, o) for c, o in self.outcomes.items())
        failed = [
            {"cell": cell.name, "class": kind.value, "stage": o.stage}
            | {"error": f"{o.error_type}: {o.error}"}
            for kind in (Class.REFUSED_LATE, Class.CRASHED)
            for cell, o in self.of(kind)
        ]
        return {
            "cells": len(self.outcomes),
            **{kind.value: counted[kind] for kind in Class},
            "right_in_another_mode": other,
            "kinds": dict(kinds.most_common()),
            "wrong": [
                {"cell": c.name, "kind": kind_of(c, o).key, "logits_diff": o.diff}
                for c, o in silent
            ],
            "failed": failed,
            "seconds": self.seconds,
        }

    @property
    def holds(self) -> bool:
        """Nothing silently wrong, crashed or refused late."""
        return set(self.classes().values()) <= {Class.RIGHT, Class.REFUSED}


def sglang_of(release: str | None, python: Path | None = None) -> SGLang:
    """The SGLang to run: of ``python``, of this environment, beside it in ``releases/X``, or a cached one.

    Raises:
        ContractError: see ``serving.sglang_python.find``.
    """
    if python is None and sglang_python.installed() is None:
        return sglang_python.find(None, release)
    here = sglang_python.find(python)
    if release in (None, here.release):
        return here
    folder = here.python.parent.parent / "releases"
    if not (folder / release).is_dir():
        return sglang_python.find(python, release)
    pinned = TRANSFORMERS.get(release)
    names = [release, *([f"transformers-{pinned}"] if pinned else [])]
    return SGLang(here.python, release, tuple(str(folder / name) for name in names))


def run(
    cells: Sequence[Cell],
    side: Side,
    sglang: SGLang,
    *,
    seed: int | None = None,
    timeout: float = 3600,
    progress: Callable[[int], None] | None = None,
) -> Results:
    """Runs the cells of one side in one process.

    Args:
        cells: what to run.
        side: patched or not.
        sglang: from :func:`sglang_of`.
        seed: shuffle the order by it.
        timeout: seconds for all of it.
        progress: called with 1 after each cell.

    Raises:
        RuntimeError: the process ended without answering for every cell; with the end of its log.
    """
    return run_without(cells, side, sglang, (None,), seed=seed, timeout=timeout, progress=progress)[
        None
    ]


def run_without(
    cells: Sequence[Cell],
    side: Side,
    sglang: SGLang,
    without: Sequence[str | None],
    *,
    seed: int | None = None,
    timeout: float = 3600,
    progress: Callable[[int], None] | None = None,
) -> dict[str | None, Results]:
    """The same with each of some patches left out, one after another in one process.

    Args:
        without: names of patches, several joined by " + "; None leaves out none, and comes first if it comes.
    """
    order = list(cells)
    if seed is not None:
        random.Random(seed).shuffle(order)
    job = {"cells": [asdict(cell) for cell in order], "without": list(without)}
    by_name = {cell.name: cell for cell in cells}
    found: dict[str | None, dict[Cell, Outcome]] = {name: {} for name in without}
    end: dict[str, Any] = {}
    for kind, answer in _answers(job, side, sglang, timeout):
        if kind == RESULT:
            end = answer
            continue
        found[answer["without"]][by_name[answer["cell"]]] = Outcome.from_dict(answer)
        if progress is not None:
            progress(1)
    if end["release"] != side.release or any(bool(n) != side.patched for n in end["in_force"]):
        raise RuntimeError(f"{side} ran as {end}")
    return {
        name: Results(replace(side, without=name), {c: ran[c] for c in cells}, end["seconds"])
        for name, ran in found.items()
    }


def _answers(
    job: dict[str, Any], side: Side, sglang: SGLang, timeout: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines that a worker process prints, as they come."""
    env = environment(
        release=":".join(sglang.paths) or None,
        SGLANG_AITER_MOE_ENABLE=None if side.patched else "0",
        SGLANG_PLUGINS=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        told, log = Path(folder) / "job.json", Path(folder) / "log"
        told.write_text(json.dumps(job))
        command = [str(sglang.python), "-m", "sglang_aiter_moe.matrix.worker", str(told)]
        ended = False
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [*command, str(free_port())],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
                cwd=folder,
            ) as process,
            _ended_after(process, timeout),
        ):
            for line in process.stdout:
                found = printed(line, CELL, RESULT)
                if found is not None:
                    ended = found[0] == RESULT
                    yield found
        if not ended:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"{side} ended before its last cell\n{tail}")


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen, seconds: float) -> Iterator[None]:
    """Kills a process when its time is over, or when nobody reads on."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        timer.cancel()


def run_all(
    cells: Sequence[Cell],
    sides: Iterable[Side],
    *,
    python: Path | None = None,
    jobs: int = 2,
    progress: Callable[[Side, int], None] | None = None,
) -> list[Results]:
    """Several sides, ``jobs`` at a time, in their order."""
    sides = list(sides)
    sglangs = {side.release: sglang_of(side.release, python) for side in sides}

    def one(side: Side) -> Results:
        told = None if progress is None else (lambda done: progress(side, done))
        return run(cells, side, sglangs[side.release], progress=told)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(one, sides))
