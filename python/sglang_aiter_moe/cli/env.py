"""`env`: the environment variables of this path, and what each reader makes of them now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sglang_aiter_moe import environ
from sglang_aiter_moe.cli.output import JsonOption, console, write_json


def env(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The table that the documentation embeds.")
    ] = False,
    json_target: JsonOption = None,
) -> None:
    """Show every environment variable: value, and what SGLang, AITER and this package read in it.

    Exits with 1 when two readers understand one variable differently.
    """
    rows = [describe(variable, os.environ) for variable in environ.VARIABLES.values()]
    out = console(json_target)
    differing = [row for row in rows if row["readers_differ"]]
    if markdown:
        out.print(markdown_table(), markup=False, soft_wrap=True, end="")
        differing = []
    else:
        out.print(_table(rows))
    for row in differing:
        reads = ", ".join(f"{name} reads {value}" for name, value in row["reads"].items())
        value = escape(repr(row["value"]))
        out.print(f"[red]{row['name']}[/]={value}: {escape(reads)}. Use {row['accepted']}.")
    write_json({"variables": rows}, json_target)
    raise typer.Exit(1 if differing else 0)


def describe(variable: environ.Variable, env: Mapping[str, str]) -> dict[str, Any]:
    """One variable as `--json` shows it: raw value, and what each reader understands by it."""
    value = env.get(variable.name)
    parsers = {
        "SGLang": variable.sglang,
        "AITER": variable.aiter,
        "sglang-aiter-moe": variable.ours,
    }
    reads = {name: _read(parser, value) for name, parser in parsers.items() if parser}
    understood = list(reads.values())
    return {
        "name": variable.name,
        "value": value,
        "default": variable.default,
        "accepted": variable.accepted,
        "meaning": variable.meaning,
        "when": variable.when,
        "reads": reads,
        "readers_differ": any(other != understood[0] for other in understood[1:]),
    }


def markdown_table() -> str:
    """The table of docs/reference/environment.md."""
    lines = [
        "| Env var | Default | Accepted | Effect | Read |",
        "|---|---|---|---|---|",
    ]
    for variable in environ.VARIABLES.values():
        cells = (
            f"`{variable.name}`",
            f"unset (= `{variable.default}`)" if variable.default else "unset",
            variable.accepted,
            variable.meaning,
            variable.when if variable.readers else "by nobody",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _read(parser: environ.Parser, value: str | None) -> Any:
    try:
        return parser(value)
    except ValueError as error:  # what the reader itself raises, in every call
        return f"ValueError: {error}"


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("variable", "value", "read as", "when"):
        table.add_column(title, overflow="fold")
    for row in rows:
        reads = "\n".join(f"{name}: {value}" for name, value in row["reads"].items())
        table.add_row(
            f"[red]{row['name']}[/]" if row["readers_differ"] else row["name"],
            "[dim]unset[/]" if row["value"] is None else escape(repr(row["value"])),
            escape(reads) or "[dim]no reader[/]",
            row["when"],
        )
    return table
