"""How many right answers a server has to give before it may be called right, and what it gave.

The gate of a checkpoint and a mode is made from the share that the oracle answers right, outside of SGLang, over
thousands of questions (``score.json`` beside the weights). A server with that share falls below the gate with at most
the stated probability, even if every run asked new questions; ours are always the same ones.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation.interval import binomial_interval
from sglang_aiter_moe.miniature import task

#: How often a right server may fail.
FALSE_ALARM = 1e-4
#: What a server with a wrong layout stays below: guessing among 100 numbers is right once in a hundred.
NOISE = 0.2
REQUESTS_AT_A_TIME = 100


@dataclass(frozen=True)
class Gate:
    """Right answers that are needed.

    Attributes:
        required: at least so many ...
        questions: ... of so many.
        false_alarm: how often, at most, a server that is as good as the oracle has fewer.
        misses_broken: how often, at most, a server that answers a share of 0.9 right is let through.
    """

    required: int
    questions: int
    false_alarm: float
    misses_broken: float


def gate(right: int, many: int, questions: int, *, false_alarm: float = FALSE_ALARM) -> Gate:
    """The gate for a model that answered ``right`` of ``many`` questions.

    Half of ``false_alarm`` is spent on the true share being below what ``many`` questions show, half on the
    ``questions`` of a run being harder than that share.

    Raises:
        ContractError: nothing was answered right, there are no questions, or so few that noise would pass.
    """
    if right < 1 or questions < 1:
        raise ContractError(
            f"{right} of {many} right, {questions} questions",
            allowed="a model that answers something, and at least one question",
            fix="score the checkpoint first: python -m sglang_aiter_moe.miniature.score",
        )
    # The interval is two-sided: its lower end alone is missed with half of 1 - confidence.
    share = binomial_interval(right, many, confidence=1 - false_alarm).low
    required, below = 0, 0.0
    while required < questions:
        below += _exactly(required, questions, share)
        if below > false_alarm / 2:
            break
        required += 1
    if required <= NOISE * questions:
        raise ContractError(
            f"{questions} questions need {required} right answers",
            allowed=f"so many that more than {NOISE:g} of them are needed: noise passes otherwise",
            fix="ask 200",
        )
    broken = math.fsum(_exactly(k, questions, 0.9) for k in range(required, questions + 1))
    return Gate(required, questions, false_alarm, broken)


def _exactly(count: int, total: int, share: float) -> float:
    if share >= 1.0:
        return float(count == total)
    log = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    return math.exp(log + count * math.log(share) + (total - count) * math.log1p(-share))


def gate_of(checkpoint: Path, mode: str, questions: int) -> Gate:
    """The gate of a shipped checkpoint in a mode."""
    scores = json.loads((checkpoint / "score.json").read_text())
    return gate(scores["oracle"][mode]["right_of_many"], scores["many"], questions)


def ask(url: str, question: task.Question, *, timeout: float = 600) -> str:
    """What a server answers, greedily, through ``/v1/completions``; without the spaces around it.

    Raises:
        ContractError: the server refused the question, or did not answer.
    """
    body = {
        "model": "miniature",
        "prompt": question.text,
        "max_tokens": task.LENGTH - len(question.text.split()),
        "temperature": 0,
    }
    answer = _post(f"{url}/v1/completions", body, timeout, "serve the miniature")
    return json.loads(answer)["choices"][0]["text"].strip()


def answers(url: str, questions: Sequence[task.Question]) -> list[str]:
    """The answers to many questions, asked at the same time."""
    with ThreadPoolExecutor(REQUESTS_AT_A_TIME) as pool:
        return list(pool.map(lambda question: ask(url, question), questions))


def count_right(given: Sequence[str], questions: Sequence[task.Question]) -> int:
    """How many answers are exactly the right one, every step included."""
    return sum(text == question.answer for text, question in zip(given, questions, strict=True))


def update_weights(url: str, checkpoint: Path, *, timeout: float = 600) -> None:
    """Replaces the server's weights in place, by ``/update_weights_from_disk``.

    Raises:
        ContractError: the server says that it failed, or did not answer.
    """
    body = {"model_path": str(checkpoint)}
    _post(f"{url}/update_weights_from_disk", body, timeout, "see the server's log")


def _post(url: str, body: dict[str, Any], timeout: float, fix: str) -> bytes:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        said = f"{error.code} {error.read().decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        said = f"no answer: {error or type(error).__name__}"
    raise ContractError(f"{url}: {said}", allowed="a server that answers", fix=fix)
