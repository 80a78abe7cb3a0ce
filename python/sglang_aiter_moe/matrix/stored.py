"""The results that are kept: one letter for each cell, release and side, in ``docs/matrix.json``."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_aiter_moe.matrix.cells import SETS, Cell
from sglang_aiter_moe.matrix.classes import Class, classify, in_another_mode
from sglang_aiter_moe.matrix.kinds import KINDS, kind_of
from sglang_aiter_moe.matrix.one_cell import Outcome
from sglang_aiter_moe.matrix.run import Results

_LETTERS = {
    Class.RIGHT: ".",
    Class.REFUSED: "r",
    Class.REFUSED_LATE: "l",
    Class.CRASHED: "c",
}
_OTHER_MODE = ":"
#: A silently wrong cell has the letter of its kind.
_KINDS = {kind.key: letter for kind, letter in zip(KINDS, "ABDEFGHIJKLMN", strict=True)}
_CLASS_OF = {letter: kind for kind, letter in _LETTERS.items()} | {_OTHER_MODE: Class.RIGHT}
_KIND_OF = {letter: key for key, letter in _KINDS.items()}


def letter(cell: Cell, outcome: Outcome) -> str:
    """A cell's class, and the kind of a silent failure."""
    kind = classify(cell, outcome)
    if kind is Class.SILENT_WRONG:
        return _KINDS[kind_of(cell, outcome).key]
    return _OTHER_MODE if in_another_mode(cell, outcome) else _LETTERS[kind]


def class_of(letter: str) -> Class:
    return _CLASS_OF.get(letter, Class.SILENT_WRONG)


@dataclass(frozen=True)
class Stored:
    """The results of one set of cells.

    Attributes:
        cells: name of the set.
        letters: by release and side ("unpatched", "patched"), one letter for each cell.
    """

    cells: str
    letters: Mapping[str, Mapping[str, str]]

    @property
    def names(self) -> list[str]:
        return [cell.name for cell in SETS[self.cells]()]

    def counts(self, release: str, side: str) -> Counter[Class]:
        """How many cells of each class."""
        return Counter(class_of(found) for found in self.letters[release][side])

    def kinds(self, release: str, side: str) -> Counter[str]:
        """How many silently wrong cells of each kind."""
        found = Counter(self.letters[release][side])
        return Counter({key: found[own] for own, key in _KIND_OF.items() if found[own]})

    def in_another_mode(self, release: str, side: str) -> int:
        return self.letters[release][side].count(_OTHER_MODE)

    def to_json(self) -> dict[str, Any]:
        names = self.names
        return {
            "set": self.cells,
            "cells": len(names),
            "names_sha256": _digest(names),
            "letters": {"classes": {v: k.value for k, v in _LETTERS.items()}, "kinds": _KIND_OF},
            "releases": {r: dict(sides) for r, sides in self.letters.items()},
        }


def store(path: Path, cells: str, results: Iterable[Results]) -> Stored:
    """Writes results, beside those of other releases that are there for the same cells."""
    letters: dict[str, dict[str, str]] = {}
    if path.exists():
        before = load(path)
        if before.cells == cells:
            letters = {r: dict(sides) for r, sides in before.letters.items()}
    for one in results:
        row = "".join(letter(cell, outcome) for cell, outcome in one.outcomes.items())
        letters.setdefault(one.side.release, {})[one.side.name] = row
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
