"""`bench serving`: the sweep of SGLang #33838 against one server, or two in alternated order."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_aiter_moe.cli.output import (
    JsonOption,
    console,
    end_children_on_sigterm,
    write_json,
)
from sglang_aiter_moe.serving import sweep

_SIDE_HELP = "NAME=VALUE, unset=NAME, plugin=on|off, python=PATH, url=http://HOST:PORT or label=TEXT; repeat."


def serving(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="[MODEL]", help="Path or name; -- SERVER ARGUMENTS follow."),
    ] = "",
    a: Annotated[list[str] | None, typer.Option("--a", help=f"Side A: {_SIDE_HELP}")] = None,
    b: Annotated[
        list[str] | None, typer.Option("--b", help="Side B, as --a. Without it one is measured.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each side is measured: A B, B A, ...")
    ] = 2,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Requests at a time, separated by commas. Default: 2,4,8,16,32."),
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = sweep.INPUT_LEN,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = sweep.OUTPUT_LEN,
    prompts_per: Annotated[
        int, typer.Option(help="Prompts, as a multiple of the concurrency.")
    ] = sweep.PROMPTS_PER,
    warmup_per: Annotated[
        int, typer.Option(help="Prompts to warm up with, as a multiple of the concurrency.")
    ] = sweep.WARMUP_PER,
    dataset: Annotated[str, typer.Option(help="random, or random-ids.")] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="ShareGPT JSON for random; SGLang downloads one else.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Default: the model's.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="Of a server. Default (0): its --tp.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for logs and results.")] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until a server answers.")
    ] = 3600,
    point_timeout: Annotated[float, typer.Option(min=1, help="Seconds for one point.")] = 7200,
    miniature: Annotated[
        bool,
        typer.Option(
            "--miniature", help="A tiny random model on this CPU, to try the command itself."
        ),
    ] = False,
    release: Annotated[str | None, typer.Option(help="SGLang release.")] = None,
    sglang_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with SGLang.")
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Measure a server with SGLang's own client; two sides are alternated and compared.

    Writes results.json, table.md, throughput.svg and all logs to --out. Exits with 2 when a server or a
    request fails: what fails early would make the rest look fast.
    """
    from sglang_aiter_moe.serving import report, session
    from sglang_aiter_moe.serving import sglang_python as pythons
    from sglang_aiter_moe.serving.side import parse_side

    show = console(json_target)
    sides = {"A": parse_side("A", a or [])}
    if b:
        sides["B"] = parse_side("B", b)
    arguments = tuple(context.args)
    if not model and not miniature and any(side.url is None for side in sides.values()):
        raise typer.BadParameter("name a model, or give each side a url=, or --miniature")
    if miniature and (model or arguments):
        raise typer.BadParameter("--miniature comes with its own model and server arguments")
    folder = out or Path(time.strftime("bench-serving-%Y%m%d-%H%M%S"))
    concurrencies = _numbers(concurrency) if concurrency is not None else None
    # Everything is looked at before the first thing that takes minutes: making an environment.
    load = sweep.Load(
        concurrencies or sweep.CONCURRENCIES,
        input_len,
        output_len,
        prompts_per,
        warmup_per,
        dataset,
        dataset_path,
        tokenizer,
    )
    gpus = gpus or session.gpus_of(arguments)
    _make(folder)
    sglang = pythons.find(sglang_python, release)
    env = dict(os.environ)
    client_env = pythons.client_environment(sglang, env)
    if miniature:
        from sglang_aiter_moe.serving import miniature as tiny

        sides = {name: tiny.adapt(side) for name, side in sides.items()}
        model, arguments, env = tiny.write_miniature(folder)
        client_env = pythons.client_environment(sglang, env)
        load = tiny.tiny_load(folder, concurrencies or tiny.CONCURRENCIES)
    setup = session.Setup(
        model,
        arguments,
        load,
        rounds,
        sglang,
        env,
        client_env,
        folder.absolute(),
        gpus,
        start_timeout,
        point_timeout,
        progress=lambda line: show.print(escape(line), soft_wrap=True),
    )
    end_children_on_sigterm()
    result = session.compare(setup, sides)
    rows = report.summarise(result["runs"], setup.gpus)
    _show(show, rows, sides)
    show.print(f"results.json, table.md, throughput.svg and logs: {folder}", markup=False)
    write_json(result, json_target)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"--out {folder}: {error.strerror}; give a directory that can be made and written"
        ) from error


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--concurrency {text}: numbers separated by commas") from error


def _show(show: Console, rows: list[dict[str, Any]], sides: dict[str, Any]) -> None:
    from sglang_aiter_moe.serving import report

    for name, side in sides.items():
        show.print(f"{name}: {side.label}", markup=False)
    header, *lines = report.table(rows)
    grid = Table(box=None, pad_edge=False)
    for title in header:
        grid.add_column(title, justify="right" if title not in ("side",) else "left")
    for line in lines:
        grid.add_row(*line)
    show.print(grid)
    if any(cell.spread is None for row in rows for s in "AB" for cell in row[s].values()):
        show.print("? one round: no spread is known, so no delta means anything; --rounds 2")
    elif any("~" in cell for line in lines for cell in line):
        show.print("~ the rounds of both sides overlap")
