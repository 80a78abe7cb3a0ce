"""`eval`: does a served model answer right?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sglang_aiter_moe.cli.output import JsonOption, console, write_json

TASKS = ("miniature", "gsm8k")


class Model(StrEnum):
    """The shipped miniatures."""

    KIMI = "kimi"
    GPT_OSS = "gpt_oss"


class Mode(StrEnum):
    """Activation modes."""

    A16W4 = "A16W4"
    A8W4 = "A8W4"
    A4W4 = "A4W4"


def evaluate(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "miniature",
    mode: Annotated[
        list[Mode] | None,
        typer.Option(
            help="miniature: activation mode, repeatable; default: all. gpt_oss has A16W4 alone."
        ),
    ] = None,
    model: Annotated[Model, typer.Option(help="miniature: which one.")] = Model.KIMI,
    release: Annotated[
        list[str] | None,
        typer.Option(help="miniature: SGLang release, repeatable; default: the installed, 0.5.23."),
    ] = None,
    wrong_layout: Annotated[
        bool, typer.Option(help="miniature: serve the other w13 layout too, which must be noise.")
    ] = True,
    without_plugin: Annotated[
        bool, typer.Option("--without-plugin", help="miniature: serve SGLang as released, too.")
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="miniature: ask again after in-place updates, there and back."
        ),
    ] = False,
    tp: Annotated[int, typer.Option(min=1, help="miniature: tensor-parallel size.")] = 1,
    questions: Annotated[
        int, typer.Option(min=1, max=10_000, help="miniature: to each server.")
    ] = 200,
    sglang_python: Annotated[
        Path | None, typer.Option(help="miniature: a Python with SGLang; default: this, or cached.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="miniature: keep the servers' logs in this folder.")
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="gsm8k: a running server; twice to compare two."),
    ] = None,
    num: Annotated[int, typer.Option(help="gsm8k: questions, 50 or 200 as in #33838.")] = 200,
    data: Annotated[
        Path | None, typer.Option(help="gsm8k: JSONL file; default: the one SGLang downloads.")
    ] = None,
    shots: Annotated[int, typer.Option(help="gsm8k: worked examples before a question.")] = 5,
    parallel: Annotated[int, typer.Option(min=1, max=1024, help="gsm8k: requests at a time.")] = 32,
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
    """Ask a served model questions with known answers; say how sure the result is.

    `--task miniature` serves a small trained model on this machine, in each mode and with a wrong layout.
    `--task gsm8k` asks a server that is running. Exits with 1 when a server with the plugin misses its gate, a
    wrong layout is no noise, or --least is out of reach; with 2 when a request fails: that is no wrong answer.
    """
    if task not in TASKS:
        raise typer.BadParameter(f"--task {task}: one of {', '.join(TASKS)}")
    out = console(json_target)
    # Not at the top: torch takes seconds to import, and --help should not wait for it.
    if task == "miniature":
        if base_url:
            raise typer.BadParameter("--base-url: miniature starts its own servers; --task gsm8k")
        from sglang_aiter_moe.cli.eval_miniature import run_miniature

        report, holds = run_miniature(
            model.value,
            [m.value for m in mode or ()],
            release or [],
            wrong_layout=wrong_layout,
            without_plugin=without_plugin,
            update=update,
            ranks=tp,
            questions=questions,
            python=sglang_python,
            logs=logs,
            out=out,
        )
        write_json(report, json_target)
        raise typer.Exit(0 if holds else 1)
    from sglang_aiter_moe.cli.eval_gsm8k import run_gsm8k

    report, holds = run_gsm8k(
        base_url or [],
        num=num,
        data=data,
        shots=shots,
        parallel=parallel,
        max_tokens=max_tokens,
        against=against,
        least=least,
        out=out,
    )
    write_json(report, json_target)
    raise typer.Exit(0 if holds else 1)
