"""`eval --task gsm8k`: A4W4 against A8W4 on the operator's own server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import gsm8k

#: How many servers one call compares.
_MOST = 2


def run_gsm8k(
    base_urls: list[str],
    *,
    num: int,
    data: Path | None,
    shots: int,
    parallel: int,
    max_tokens: int,
    against: Path | None,
    least: float | None,
    out: Console,
) -> tuple[dict[str, Any], bool]:
    """Asks each server, compares two, and prints what was found.

    Args:
        base_urls: one or two servers.
        num: questions.
        data: the data set; None downloads the one that SGLang uses.
        shots, parallel, max_tokens: see :func:`.gsm8k.score`.
        against: an earlier result to compare with, in place of a second server.
        least: the accuracy that every server has to be able to have; None asks for nothing.
        out: for people.

    Returns:
        What ``--json`` writes, and whether the check holds.

    Raises:
        ContractError: a server fails a request, or there is no data.
    """
    from sglang_aiter_moe.serving.sglang_python import cache_folder
    from sglang_aiter_moe.serving.side import check_url

    if not 1 <= len(base_urls) <= (1 if against else _MOST):
        raise typer.BadParameter("give --base-url once, or twice, or once with --against FILE")
    for url in base_urls:
        check_url("--base-url", url)
    if least is not None and not 0 <= least <= 1:
        raise ContractError(
            f"--least {least}", allowed="a share, 0 to 1", fix="write for instance --least 0.95"
        )
    scores = [] if against is None else [gsm8k.read_score(against)]
    questions = gsm8k.read_questions(data or gsm8k.fetch_questions(cache_folder()))
    # Too many questions, or others than before, are refused before the first is asked.
    asked = gsm8k.digest(gsm8k.prompts(questions, num, shots))
    for earlier in scores:
        if earlier.asked != asked:
            raise ContractError(
                f"--against {against} is about {len(earlier.replies)} other questions",
                allowed="a score over the same questions",
                fix="use the --num, --shots and --data of that run",
            )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out, transient=True) as bar:
        for url in base_urls:
            task = bar.add_task(url, total=num)
            score = gsm8k.score(
                url,
                questions,
                num,
                shots=shots,
                parallel=parallel,
                max_tokens=max_tokens,
                progress=lambda done, task=task: bar.update(task, completed=done),
            )
            scores.append(score)
    holds = True
    for score in scores:
        _show(score, out)
        if least is not None and score.interval.high < least:
            out.print(
                f"  [red]below {least}[/]: even the upper end of its interval", highlight=False
            )
            holds = False
    report: dict[str, Any] = {
        "task": "gsm8k",
        "shots": shots,
        # This run first: it is what a later --against reads.
        "scores": [score.to_json() for score in (scores if against is None else scores[::-1])],
    }
    if len(scores) == _MOST:
        found = gsm8k.compare(*scores)
        labels = {"first": scores[0].label, "second": scores[1].label}
        report["comparison"] = labels | vars(found)
        out.print(
            f"{found.only_first} questions only the first has right, {found.only_second} only the "
            f"second: p = {found.p_value:.3f} that they do not differ",
            highlight=False,
        )
    return report, holds


def _show(score: gsm8k.Score, out: Console) -> None:
    out.print(
        f"{score.label} ({score.model}): {score.right} of {len(score.replies)} right, "
        f"{score.accuracy:.3f}, 95% interval {score.interval}; {score.without_number} answers "
        "without a number",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
