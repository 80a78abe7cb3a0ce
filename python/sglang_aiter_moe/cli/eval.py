"""`eval`: does a served model answer right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_aiter_moe.cli.output import JsonOption, console, write_json

TASKS = ("gsm8k",)


def evaluate(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "gsm8k",
    base_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="gsm8k: a running server; twice to compare two."),
    ] = None,
    num: Annotated[int, typer.Option(help="gsm8k: questions, 50 or 200 as in #33838.")] = 200,
    data: Annotated[
        Path | None, typer.Option(help="gsm8k: JSONL file; default: the one SGLang downloads.")
    ] = None,
    shots: Annotated[int, typer.Option(help="gsm8k: worked examples before a question.")] = 5,
    parallel: Annotated[int, typer.Option(min=1, help="gsm8k: requests at a time.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="gsm8k: longest answer.")] = 512,
    against: Annotated[
        Path | None,
        typer.Option(help="gsm8k: --json file of an earlier run, to compare with."),
    ] = None,
    least: Annotated[
        float | None,
        typer.Option(help="gsm8k: fail if even the interval's upper end is below this accuracy."),
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Ask a running server questions with known answers; say how sure the result is.

    Exits with 1 when --least is out of reach, with 2 when a request fails: that is no wrong answer.
    """
    from sglang_aiter_moe.cli.eval_gsm8k import run_gsm8k

    if task not in TASKS:
        raise typer.BadParameter(f"--task {task}: one of {', '.join(TASKS)}")
    report, holds = run_gsm8k(
        base_url or [],
        num=num,
        data=data,
        shots=shots,
        parallel=parallel,
        max_tokens=max_tokens,
        against=against,
        least=least,
        out=console(json_target),
    )
    write_json(report, json_target)
    raise typer.Exit(0 if holds else 1)
