"""`matrix`: every combination of flags, layouts, releases and ranks, through SGLang's own code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_aiter_moe.cli.output import JsonOption, console, write_json

if TYPE_CHECKING:
    from sglang_aiter_moe.matrix.run import Results, Side


class Which(StrEnum):
    """Released SGLang alone, with the patch set, or both."""

    INSTALLED = "installed"
    PATCHED = "patched"
    BOTH = "both"


def matrix(
    sglang: Annotated[
        Which, typer.Option(help="The released SGLang alone, with the patch set, or both.")
    ] = Which.BOTH,
    full: Annotated[bool, typer.Option("--full", help="Every cell, not one in several.")] = False,
    covering: Annotated[
        bool, typer.Option("--covering", help="Only as many cells as every pair of values needs.")
    ] = False,
    gpt_oss: Annotated[
        bool,
        typer.Option("--gpt-oss", help="Only the covering cells of gpt-oss, also before 0.5.17."),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only every N-th of the cells, from the I-th on."),
    ] = None,
    case: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only cells whose name matches.")
    ] = None,
    release: Annotated[
        list[str] | None,
        typer.Option(help="SGLang release, again for more; `all`: every supported one."),
    ] = None,
    sglang_python: Annotated[
        Path | None,
        typer.Option(help="A Python that has SGLang. Default: this one, or a cached one."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    store: Annotated[
        Path | None,
        typer.Option(help="Also keep one letter a cell in this file (docs/matrix.json)."),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Only show the cells.")] = False,
    json_target: JsonOption = None,
) -> None:
    """Count what is right, refused, silently wrong or crashed, in SGLang alone and with the patch set.

    Exits with 0 when, with the patch set, every cell is right or refused in time.
    """
    from fnmatch import fnmatchcase

    from sglang_aiter_moe.matrix import cells as matrix_cells

    asked = {"full": full, "covering": covering, "gpt-oss": gpt_oss}
    sets = [name for name, wanted in asked.items() if wanted] or ["default"]
    if len(sets) > 1:
        raise typer.BadParameter(" and ".join(f"--{name}" for name in sets) + " exclude each other")
    chosen = sets[0]
    cells = matrix_cells.SETS[chosen]()
    if part is not None:
        cells = matrix_cells.part(cells, *_part(part))
    if case is not None:
        cells = tuple(cell for cell in cells if fnmatchcase(cell.name, case))
    if not cells:
        raise typer.BadParameter(f"--case {case}: no cell matches; --list shows them")
    if store is not None and case is not None:
        raise typer.BadParameter("--store keeps sets and parts of them: leave --case out")
    out = console(json_target)
    if list_only:
        for cell in cells:
            out.print(cell.name, markup=False)
        write_json([cell.name for cell in cells], json_target)
        return
    results = _run(cells, sglang, _releases(release or [], gpt_oss), sglang_python, jobs, out)
    if store is not None:
        from sglang_aiter_moe.matrix import stored

        stored.store(store, chosen, results)
    _show(results, out)
    write_json(_report(results), json_target)
    holds = all(one.holds for one in results if one.side.patched)
    raise typer.Exit(0 if holds else 1)


def _releases(asked: list[str], gpt_oss: bool) -> list[str]:
    """With "all" resolved."""
    from sglang_aiter_moe.matrix.run import RELEASES
    from sglang_aiter_moe.testing.sglang_environment import GPT_OSS_RELEASES

    if "all" not in asked:
        return asked
    return [*(GPT_OSS_RELEASES if gpt_oss else ()), *RELEASES]


def _part(text: str) -> tuple[int, int]:
    """(number, parts) of "I/N"."""
    number, slash, parts = text.partition("/")
    if slash and number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts):
        return int(number), int(parts)
    raise typer.BadParameter(f"--part {text}: I/N with 1 <= I <= N is needed, as in 2/16")


def _run(
    cells: Sequence[Any],
    which: Which,
    releases: list[str],
    python: Path | None,
    jobs: int,
    out: Console,
) -> list[Results]:
    from sglang_aiter_moe.matrix import run

    names = releases or [run.sglang_of(None, python).release]
    sides = [
        run.Side(release, patched)
        for release in names
        for patched in (False, True)
        if which is Which.BOTH or patched == (which is Which.PATCHED)
    ]
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as progress:
        tasks = {
            side: progress.add_task(f"SGLang {side.release} {side.name}", total=len(cells))
            for side in sides
        }

        def advance(side: Side, done: int) -> None:
            progress.advance(tasks[side], done)

        return run.run_all(cells, sides, python=python, jobs=jobs, progress=advance)


def _report(results: list[Results]) -> dict[str, Any]:
    by_release: dict[str, dict[str, Any]] = {}
    for one in results:
        entry = by_release.setdefault(one.side.release, {"sglang_version": one.side.release})
        entry[one.side.name] = one.to_json()
    found = list(by_release.values())
    return found[0] if len(found) == 1 else {"releases": found}


def _show(results: list[Results], out: Console) -> None:
    from sglang_aiter_moe.matrix.classes import Class
    from sglang_aiter_moe.matrix.kinds import BY_KEY

    table = Table(box=None, pad_edge=False)
    for title in ("SGLang", "", "cells", "right", "refused", "late", "silently wrong", "crashed"):
        table.add_column(title, justify="left" if title in ("SGLang", "") else "right")
    for one in results:
        counts = one.to_json()
        row = [str(counts[kind.value]) for kind in Class]
        table.add_row(one.side.release, one.side.name, str(counts["cells"]), *row)
    out.print(table)
    for one in results:
        for key, count in one.to_json()["kinds"].items():
            kind = BY_KEY[key]
            public = f" ({kind.public})" if kind.public else ""
            out.print(
                f"{one.side.release} {one.side.name}: {count} silently wrong: {kind.title}{public}",
                markup=False,
            )
    for one in results:
        if one.side.patched:
            for cell in one.to_json()["wrong"] + one.to_json()["failed"]:
                out.print(f"{one.side.release} patched: {cell}", markup=False)
