"""Which mutants of a module are run: the sample of a draw, what other results have already, a later look."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from sglang_aiter_moe.testing.mutation import Mutant, mutants, sample
from sglang_aiter_moe.testing.mutation_targets import PACKAGE


def distinct(name: str) -> list[Mutant]:
    """A module's mutants; of equal ones on one line, the first."""
    found: dict[str, Mutant] = {}
    for mutant in mutants((PACKAGE / name).read_text()):
        found.setdefault(mutant.name, mutant)
    return list(found.values())


def chosen(
    name: str,
    share: float,
    draw: str = "",
    least: int = 3,
    known: Collection[str] = (),
    *,
    apart: bool = False,
) -> list[Mutant]:
    """The sample of a module: this share of its mutants, and ``least`` of them at least.

    Args:
        name: of the module.
        share: of all its mutants.
        draw: any text; another sample for another one.
        least: how many at least, where there are so many.
        known: names of mutants that are not drawn.
        apart: see ``sample``.
    """
    found = distinct(name)
    count = max(least, round(share * len(found)))
    rest = [mutant for mutant in found if mutant.name not in known]
    return sample(rest, count, draw + name, apart=apart)


def without_line(change: str) -> str:
    """A mutant's name without the number of its line, which edits elsewhere move."""
    return change.partition(": ")[2]


def beside(others: Sequence[dict[str, Any]], name: str, source: str) -> set[str]:
    """The names of a module's mutants that other results have.

    Of results of another source: every mutant with the text of one of theirs, on whichever line.

    Args:
        others: each as a run keeps it.
        name: of the module.
        source: of the module, as :func:`sources` says it.
    """
    entries = [results[name] for results in others if name in results]
    exact = {change for e in entries if e["source"] == source for change in e["ran"]}
    moved = {without_line(c) for e in entries if e["source"] != source for c in e["ran"]}
    return exact | {m.name for m in distinct(name) if without_line(m.name) in moved}


def later_look(
    entry: dict[str, Any], name: str, source: str
) -> tuple[list[Mutant], dict[str, str]]:
    """What ``--again`` has to run of a module, and where its verdicts go.

    Its survivors; where the source is another one by now, every mutant with the text of one that was drawn.
    """
    if entry["source"] == source:
        kept = entry.get("again", {})
        left = {change for change, v in (entry["ran"] | kept).items() if v == "survived"}
        if left:
            entry["again"] = kept
        return [mutant for mutant in distinct(name) if mutant.name in left], kept
    if entry.get("now", {}).get("source") != source:
        entry["now"] = {"source": source, "ran": {}}
    kept = entry["now"]["ran"]
    drawn = set(map(without_line, entry["ran"]))
    found = [mutant for mutant in distinct(name) if without_line(mutant.name) in drawn]
    return [mutant for mutant in found if kept.get(mutant.name, "survived") == "survived"], kept


def sources(names: Sequence[str]) -> dict[str, str]:
    """What tells a module's source from another one, by module."""
    return {n: hashlib.sha256((PACKAGE / n).read_bytes()).hexdigest()[:16] for n in names}
