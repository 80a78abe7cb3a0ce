"""`eval --task miniature`: a small trained model behind the real `sglang serve`, scored by exact match."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_aiter_moe.cli.output import termination_as_exit
from sglang_aiter_moe.evaluation.exact_match import gate_of
from sglang_aiter_moe.evaluation.miniature_runs import Run, Setting, run, sglang_for, to_json
from sglang_aiter_moe.miniature import WEIGHTS

MODES = ("A16W4", "A8W4", "A4W4")


def run_miniature(
    model: str,
    modes: Sequence[str],
    releases: Sequence[str],
    *,
    wrong_layout: bool,
    without_plugin: bool,
    update: bool,
    ranks: int,
    questions: int,
    python: Path | None,
    logs: Path | None,
    out: Console,
) -> tuple[dict, bool]:
    """Serves and asks; see the options of `eval`. Returns the JSON, and whether all gates hold."""
    settings: list[Setting] = []
    for mode in _modes(model, modes, update):
        base = {"model": model, "mode": mode, "ranks": ranks}
        settings.append(Setting(**base, update=update))
        if wrong_layout:
            settings.append(Setting(**base, wrong_layout=True))
        if without_plugin:
            settings.append(Setting(**base, plugin=False))
    # Before the first server: what cannot be served is refused at once, and not after minutes of other servers.
    for setting in settings:
        _ = setting.layout
        gate_of(WEIGHTS / model, setting.mode, questions)
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"--logs {logs}: {error.strerror}") from error
    served_by = [sglang_for(release, python) for release in releases or [None]]
    runs: list[Run] = []
    with (
        termination_as_exit(),
        tempfile.TemporaryDirectory(prefix="sglang-aiter-moe-") as scratch,
    ):
        folder = (logs or Path(scratch)).absolute()
        try:
            for sglang in served_by:
                for setting in settings:
                    runs.append(
                        run(
                            setting,
                            sglang,
                            folder,
                            questions=questions,
                            say=lambda text: out.print(escape(text)),
                        )
                    )
        finally:  # a server that fails takes minutes of others' answers with it otherwise
            if runs:
                _show(runs, out)
    report = to_json(runs)
    return report, report["holds"]


def _modes(model: str, modes: Sequence[str], update: bool) -> Sequence[str]:
    if model == "kimi":
        return modes or MODES
    if update:
        raise typer.BadParameter("--update: only kimi has a second checkpoint")
    if modes and list(modes) != ["A16W4"]:
        raise typer.BadParameter("--mode: gpt_oss is A16W4 below 256 tokens, A8W4 from there on")
    return ["A16W4"]


def _show(runs: list[Run], out: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in (
        "model",
        "mode",
        "SGLang",
        "ranks",
        "w13 layout",
        "weights",
        "right",
        "needed",
        "",
    ):
        table.add_column(title)
    for one in runs:
        setting = one.setting
        for asked in one.asked:
            if setting.wrong_layout:
                needed, verdict = "noise", one.holds
            elif setting.plugin:
                needed, verdict = str(asked.gate.required), asked.passes
            else:
                needed, verdict = "", None
            words = f", {asked.other_dialect} in the other's words" if asked.other_dialect else ""
            words += f", {asked.empty} empty" if asked.empty else ""
            table.add_row(
                setting.model,
                setting.mode,
                one.release + ("" if setting.plugin else " alone"),
                str(setting.ranks),
                setting.layout + (" (wrong)" if setting.wrong_layout else ""),
                asked.checkpoint,
                f"{asked.right} of {asked.gate.questions}{words}",
                needed,
                "" if verdict is None else "[green]ok[/]" if verdict else "[bold red]FAILED[/]",
            )
    out.print(table)
    chance = runs[0].asked[0].gate.false_alarm
    out.print(f"a gate fails a right server at most {chance:g} of the time")
