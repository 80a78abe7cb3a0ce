"""`doctor`: what is installed, which mode one is really in, and what contradicts what."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sglang_aiter_moe.cli.finding import Finding
from sglang_aiter_moe.cli.output import JsonOption, console, write_json

_MARKS = {
    "ok": r"[green]\[ok]  [/]",
    "warn": r"[yellow]\[warn][/]",
    "bad": r"[bold red]\[bad] [/]",
}


def doctor(
    config: Annotated[
        str,
        typer.Option(help="config.json, model directory or example that is to be served."),
    ] = "kimi-k3",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 8,
    ep: Annotated[int, typer.Option(help="Expert-parallel size.")] = 1,
    arch: Annotated[
        str | None, typer.Option(help="GPU architecture. Default: this machine's, else gfx950.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="A line for each patch.")] = False,
    json_target: JsonOption = None,
) -> None:
    """Show versions, variables, the resolved mode, patches and contradictions, each with what to do.

    Exits with 1 when something is [bad]; what is merely missing on this machine is a [warn].
    """
    # torch takes seconds to import, and --help should not wait for it.
    from sglang_aiter_moe.cli import doctor_checks

    findings = doctor_checks.examine(config, tp=tp, ep=ep, arch=arch)
    count = show(findings, console(json_target), full=full)
    write_json({**count, "findings": [finding.to_json() for finding in findings]}, json_target)
    raise typer.Exit(1 if count["bad"] else 0)


def show(findings: list[Finding], out: Console, *, full: bool = False) -> dict[str, int]:
    """Prints findings by section; returns how many there are of each level.

    Args:
        findings: of ``doctor_checks.examine``.
        out: where to.
        full: a line for each patch, in place of one for those in one state.
    """
    section = ""
    for finding in findings if full else grouped(findings):
        if finding.section != section:
            section = finding.section
            out.print(f"[bold]{escape(section)}[/]")
        out.print(f"  {_MARKS[finding.level]} {escape(finding.text)}", soft_wrap=True)
        if finding.fix:
            out.print(f"         {escape(finding.fix)}", soft_wrap=True)
    count = {level: sum(f.level == level for f in findings) for level in _MARKS}
    out.print(", ".join(f"{number} {level}" for level, number in count.items()))
    return count


def grouped(findings: list[Finding]) -> list[Finding]:
    """The findings with those of one group in one line, at the place of the first."""
    members: dict[str, list[str]] = {}
    for finding in findings:
        members.setdefault(finding.group, []).append(finding.name)
    shown = []
    for finding in findings:
        names = members[finding.group]
        if finding.group and len(names) > 1:
            if finding.name != names[0]:
                continue
            text = f"{len(names)} {finding.group}: {', '.join(names)}"
            finding = replace(finding, text=text)
        shown.append(finding)
    return shown
