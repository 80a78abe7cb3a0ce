"""The results that are kept: one letter for each cell, release and side, in ``docs/matrix.json``."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_aiter_moe.matrix.cells import SETS, Cell
from sglang_aiter_moe.matrix.classes import Class, classify, in_another_mode
from sglang_aiter_moe.matrix.kinds import KINDS, kind_of
from sglang_aiter_moe.matrix.one_cell import Outcome
from sglang_aiter_moe.matrix.refusals import OTHER, REFUSALS, reason_of
from sglang_aiter_moe.matrix.run import Results

_LETTERS = {
    Class.RIGHT: ".",
    Class.REFUSED_LATE: "l",
    Class.CRASHED: "c",
}
_OTHER_MODE = ":"
NOT_RUN = " "
#: A silently wrong cell has the letter of its kind.
_KINDS = {kind.key: letter for kind, letter in zip(KINDS, "COABDEFGHIJKLMPN", strict=True)}
#: A refused cell has that of its reason.
_REASONS = {r.key: letter for r, letter in zip((*REFUSALS, OTHER), "0123456789abdr", strict=True)}
_CLASS_OF = {letter: kind for kind, letter in _LETTERS.items()} | {_OTHER_MODE: Class.RIGHT}
_CLASS_OF |= dict.fromkeys(_REASONS.values(), Class.REFUSED)
_REASON_OF = {letter: key for key, letter in _REASONS.items()}
_KIND_OF = {letter: key for key, letter in _KINDS.items()}


def letter(cell: Cell, outcome: Outcome) -> str:
    """A cell's class, the kind of a silent failure, and the reason of a refusal."""
    kind = classify(cell, outcome)
    if kind is Class.SILENT_WRONG:
        return _KINDS[kind_of(cell, outcome).key]
    if kind is Class.REFUSED:
        return _REASONS[reason_of(outcome).key]
    return _OTHER_MODE if in_another_mode(cell, outcome) else _LETTERS[kind]


def class_of(letter: str) -> Class:
    return _CLASS_OF.get(letter, Class.SILENT_WRONG)


def reason_for(letter: str) -> str | None:
    """The key of the reason of a refusal."""
    return _REASON_OF.get(letter)


@dataclass(frozen=True)
class Stored:
    """The results of one set of cells.

    Attributes:
        cells: name of the set.
        letters: by release and side ("unpatched", "patched"), one letter for each cell, NOT_RUN where it was
            not run.
    """

    cells: str
    letters: Mapping[str, Mapping[str, str]]

    @property
    def names(self) -> list[str]:
        return [cell.name for cell in SETS[self.cells]()]

    def positions(self, wanted: Callable[[Cell], bool]) -> list[int]:
        """Of the cells that are asked for."""
        return [index for index, cell in enumerate(SETS[self.cells]()) if wanted(cell)]

    def row(self, release: str, side: str, only: Collection[int] | None = None) -> str:
        """The letters of the cells that were run; ``only``: of these positions."""
        row = self.letters[release][side]
        chosen = row if only is None else "".join(row[index] for index in only)
        return chosen.replace(NOT_RUN, "")

    def counts(
        self, release: str, side: str, only: Collection[int] | None = None
    ) -> Counter[Class]:
        """How many cells of each class."""
        return Counter(class_of(found) for found in self.row(release, side, only))

    def kinds(self, release: str, side: str, only: Collection[int] | None = None) -> Counter[str]:
        """How many silently wrong cells of each kind."""
        found = Counter(self.row(release, side, only))
        return Counter({key: found[own] for own, key in _KIND_OF.items() if found[own]})

    def in_another_mode(self, release: str, side: str, only: Collection[int] | None = None) -> int:
        return self.row(release, side, only).count(_OTHER_MODE)

    def run_everywhere(self) -> list[int]:
        """Positions of the cells that every release and side has."""
        rows = [row for sides in self.letters.values() for row in sides.values()]
        return [i for i, column in enumerate(zip(*rows, strict=True)) if NOT_RUN not in column]

    def to_json(self) -> dict[str, Any]:
        names = self.names
        return {
            "set": self.cells,
            "cells": len(names),
            "names_sha256": _digest(names),
            "letters": {
                "classes": {v: k.value for k, v in _LETTERS.items()},
                "kinds": _KIND_OF,
                "refused": _REASON_OF,
            },
            "releases": {r: dict(sides) for r, sides in self.letters.items()},
        }


def store(path: Path, cells: str, results: Iterable[Results]) -> Stored:
    """Writes results into ``path``, in place of those that it has for the same cells, release and side.

    Args:
        path: of a file that this function made before, or of none.
        cells: name of the set; a file of a larger set takes the results of a part of it.
    """
    letters: dict[str, dict[str, str]] = {}
    if path.exists():
        before = load(path)
        if set(SETS[cells]()) <= set(SETS[before.cells]()):
            cells = before.cells
            letters = {r: dict(sides) for r, sides in before.letters.items()}
    position = {cell: index for index, cell in enumerate(SETS[cells]())}
    for one in results:
        sides = letters.setdefault(one.side.release, {})
        row = list(sides.get(one.side.name, NOT_RUN * len(position)))
        for cell, outcome in one.outcomes.items():
            row[position[cell]] = letter(cell, outcome)
        sides[one.side.name] = "".join(row)
    stored = Stored(cells, dict(sorted(letters.items())))
    path.write_text(json.dumps(stored.to_json(), indent=1) + "\n")
    return stored


def load(path: Path) -> Stored:
    """Reads what :func:`store` wrote.

    Raises:
        ValueError: it is about other cells than the package has now.
    """
    data = json.loads(path.read_text())
    stored = Stored(data["set"], data["releases"])
    if data["names_sha256"] != _digest(stored.names):
        raise ValueError(f"{path} holds other cells than `{data['set']}` has now: run the matrix")
    return stored


def _digest(names: list[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
