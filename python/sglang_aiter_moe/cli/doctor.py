"""`doctor`: what is installed, which mode one is really in, and what contradicts what."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.markup import escape

from sglang_aiter_moe.cli.finding import Finding
from sglang_aiter_moe.cli.output import JsonOption, console, write_json

_MARKS = {"ok": "[green][ok]  [/]", "warn": "[yellow][warn][/]", "bad": "[bold red][bad] [/]"}


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
    out = console(json_target)
    section = ""
    for finding in findings if full else grouped(findings):
        if finding.section != section:
            section = finding.section
            out.print(f"[bold]{section}[/]")
        mark = _MARKS[finding.level].replace("[ok]", r"\[ok]").replace("[warn]", r"\[warn]")
        mark = mark.replace("[bad]", r"\[bad]")
        out.print(f"  {mark} {escape(finding.text)}", soft_wrap=True)
        if finding.fix:
            out.print(f"         {escape(finding.fix)}", soft_wrap=True)
    count = {level: sum(f.level == level for f in findings) for level in _MARKS}
    out.print(", ".join(f"{number} {level}" for level, number in count.items()))
    write_json({**count, "findings": [finding.to_json() for finding in findings]}, json_target)
    raise typer.Exit(1 if count["bad"] else 0)


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
