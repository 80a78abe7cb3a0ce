"""`verify`: load, plan, prepare and run MXFP4 layers, and compare them with the oracle."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_aiter_moe.cli.output import JsonOption, console, termination_as_exit, write_json


class Backend(StrEnum):
    """Who executes `fused_moe`."""

    AUTO = "auto"
    CPU = "cpu"
    TRITON = "triton"
    AITER = "aiter"


def verify(
    backend: Annotated[
        Backend,
        typer.Option(
            help="auto: the real AITER on ROCm, else the executable contract (Triton on a GPU, "
            "torch on a CPU)."
        ),
    ] = Backend.AUTO,
    case: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Only cases and controls whose name matches."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="All cases: every K3 token count, no reduced layers only."),
    ] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Only show the names.")] = False,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Directory for the weight files, up to 2 GB each. Default: temporary."),
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Check that plan, layouts, gate_mode and kernels agree, against an independent oracle.

    Exits with 0 when every case agrees and every control (a deliberate mistake) collapses.
    """
    # Before torch is imported: threads that wait in a loop make a busy machine many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # And not at the top: torch takes seconds to import, and --help should not wait for it.
    from sglang_aiter_moe.verify import cases, controls
    from sglang_aiter_moe.verify.run import run

    chosen = cases.select(case, full=full)
    chosen_controls = controls.select(case)
    if not chosen and not chosen_controls:
        raise typer.BadParameter(f"--case {case}: no name matches; --list shows them")
    out = console(json_target)
    if list_only:
        for name in [c.name for c in chosen] + [c.name for c in chosen_controls]:
            out.print(name, markup=False)
        write_json(
            {"cases": [c.name for c in chosen], "controls": [c.name for c in chosen_controls]},
            json_target,
        )
        return
    with (
        termination_as_exit(),
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=out,
            transient=out.is_terminal,
            disable=not out.is_terminal,
        ) as progress,
    ):
        report = run(
            chosen,
            chosen_controls,
            backend=backend.value,
            scratch=scratch,
            progress=progress,
            say=None if out.is_terminal else lambda text: out.print(escape(text)),
        )
    _show(report, out)
    write_json(report.to_json(), json_target)
    raise typer.Exit(0 if report.holds else 1)


def _show(report, out: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("case", overflow="fold")
    for title in ("mode", "layout", "gate_mode", "cosine", "logits_diff", "unquantised", "s", ""):
        table.add_column(title)
    for case in report.cases:
        table.add_row(
            case.name,
            case.mode,
            case.layout,
            case.gate_mode,
            f"{case.cosine:.7f}",
            f"{case.logits_diff:.1e}",
            f"{case.unquantised_logits_diff:.1e}",
            f"{case.seconds:.1f}",
            "[green]ok[/]" if case.passed else "[bold red]FAILED[/]",
        )
    out.print(table)
    for case in report.cases:
        if case.error:
            out.print(f"[bold red]{case.name}[/]: {escape(case.error)}")
    table = Table(box=None, pad_edge=False)
    for title in ("control: a deliberate mistake", "cosine", "logits_diff", "runner", ""):
        table.add_column(title, overflow="fold")
    for control in report.controls:
        table.add_row(
            control.name,
            f"{control.cosine:.4f}",
            f"{control.logits_diff:.2f}",
            "refuses" if control.refused else "cannot know",
            "[green]collapsed[/]" if control.collapsed else "[bold red]DID NOT COLLAPSE[/]",
        )
    if report.controls:
        out.print(table)
    for control in report.controls:
        if control.error:
            out.print(f"[bold red]{control.name}[/]: {escape(control.error)}")
    if report.not_run:
        out.print(f"not run on backend {report.backend}: {', '.join(report.not_run)}", markup=False)
    collapsed = sum(control.collapsed for control in report.controls)
    out.print(
        f"backend {report.backend}: {report.passed} cases passed, {report.failed} failed; "
        f"{collapsed} of {len(report.controls)} controls collapsed"
    )
