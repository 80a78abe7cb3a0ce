"""GSM8K questions put to a running server through its OpenAI-compatible API, and how its answers are scored.

The questions are those of SGLang's own few-shot evaluation (``sglang.test.few_shot_gsm8k`` in 0.5.23: the
file below, 5 worked examples, plain completions, temperature 0). Two things differ from it: the worked
examples are not asked again as questions, and a number may have a sign and decimals.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation.interval import Interval, binomial_interval, paired_p_value

#: The file that SGLang's evaluation downloads: 1,319 lines of ``{"question", "answer"}``.
DATA_URL = (
    "https://raw.githubusercontent.com/openai/grade-school-math/master/"
    "grade_school_math/data/test.jsonl"
)
SHOTS = 5
MAX_TOKENS = 512
#: Where an answer ends: models go on with a question of their own. A server takes up to four.
STOPS = ("\nQuestion:", "\n\nQuestion", "<|separator|>")
_FINAL = "####"  # the data set writes its result after these
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """One line of the data set.

    Attributes:
        text: the question.
        solution: the worked answer, which ends with ``#### NUMBER``.
        value: that number.
    """

    text: str
    solution: str
    value: Decimal


@dataclass(frozen=True)
class Reply:
    """What a server said to one question; ``value`` is None where it named no number."""

    text: str
    value: Decimal | None
    right: bool


@dataclass(frozen=True)
class Score:
    """The answers of one server.

    Attributes:
        label: what was asked, for people.
        model: the name that the server gives its model.
        replies: one for each question, in their order.
        asked: the beginning of the SHA-256 of everything that was asked.
    """

    label: str
    model: str
    replies: tuple[Reply, ...]
    asked: str

    @property
    def right(self) -> int:
        return sum(reply.right for reply in self.replies)

    @property
    def accuracy(self) -> float:
        return self.right / len(self.replies)

    @property
    def without_number(self) -> int:
        return sum(reply.value is None for reply in self.replies)

    @property
    def interval(self) -> Interval:
        """95% Clopper-Pearson interval of the accuracy."""
        return binomial_interval(self.right, len(self.replies))

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "model": self.model,
            "asked": self.asked,
            "questions": len(self.replies),
            "right": self.right,
            "without_number": self.without_number,
            "accuracy": self.accuracy,
            "interval": [self.interval.low, self.interval.high],
            "replies": [
                {
                    "right": reply.right,
                    "value": None if reply.value is None else str(reply.value),
                    "text": reply.text,
                }
                for reply in self.replies
            ],
        }


@dataclass(frozen=True)
class Comparison:
    """Two scores over the same questions.

    Attributes:
        only_first, only_second: questions that one of the two alone has right.
        p_value: of a split at least as uneven if the two do not differ (exact McNemar test).
    """

    only_first: int
    only_second: int
    p_value: float


def final_number(text: str) -> Decimal | None:
    """The number that an answer ends with: the first one after ``####``, else its last one."""
    _, mark, rest = text.partition(_FINAL)
    found = _NUMBER.findall(rest) if mark else []
    if found:
        return _decimal(found[0])
    found = _NUMBER.findall(text)
    return _decimal(found[-1]) if found else None


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file.

    Raises:
        ContractError: no such file, or a line without question, answer and number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is no text: {error}"
        raise ContractError(
            f"{path}: {reason}",
            allowed='a JSONL file of {"question": ..., "answer": ...}',
            fix=f"fetch {DATA_URL} and give its path",
        ) from error
    return [_question(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]


def fetch_questions(folder: Path, url: str = DATA_URL) -> Path:
    """Downloads the data set once; returns the file.

    Raises:
        ContractError: it cannot be downloaded.
    """
    target = folder / "gsm8k-test.jsonl"
    if target.exists():
        return target
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            data = answer.read()
    except OSError as error:
        raise ContractError(
            f"{url} cannot be fetched: {error}",
            allowed="the data set from there, or from a local file",
            fix="copy the file to this machine and give --data FILE",
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(target)
    return target


def prompts(questions: Sequence[Question], num: int, shots: int = SHOTS) -> list[str]:
    """The text of each of the first ``num`` questions after the worked examples.

    Raises:
        ContractError: the file has not as many.
    """
    if num < 1 or shots < 0 or len(questions) < num + shots:
        raise ContractError(
            f"{num} questions and {shots} worked examples of {len(questions)} lines",
            allowed="at least one question, and a line for each and for each example",
            fix=_sizes_that_fit(len(questions), shots),
        )
    head = "".join(f"Question: {q.text}\nAnswer: {q.solution}\n\n" for q in questions[:shots])
    return [f"{head}Question: {q.text}\nAnswer:" for q in questions[shots : shots + num]]


def score(
    base_url: str,
    questions: Sequence[Question],
    num: int,
    *,
    label: str | None = None,
    shots: int = SHOTS,
    parallel: int = 32,
    max_tokens: int = MAX_TOKENS,
    timeout_s: float = 600,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """Asks a server ``num`` questions.

    Args:
        base_url: of the server, with or without ``/v1``.
        questions: the data set; its first ``shots`` lines are the worked examples.
        label: what to call this score, the URL if None.
        parallel: requests under way at a time.
        max_tokens: longest answer.
        timeout_s: for one request.
        progress: told after each answer how many there are.

    Raises:
        ContractError: the server is not there, or fails a request. A failed request is no wrong answer.
    """
    texts = prompts(questions, num, shots)
    root = base_url.rstrip("/").removesuffix("/v1")
    model = _model(root, timeout_s)
    done = 0

    def ask(text: str) -> str:
        request = {
            "model": model,
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stop": list(STOPS),
        }
        url = f"{root}/v1/completions"
        return _text(url, _call(url, request, timeout_s), ("choices", 0, "text"))

    replies = []
    with ThreadPoolExecutor(parallel) as pool:
        asked = questions[shots : shots + num]
        try:
            for question, text in zip(asked, pool.map(ask, texts), strict=True):
                replies.append(judge(question, text))
                done += 1
                progress(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Score(label or root, model, tuple(replies), digest(texts))


def digest(texts: Sequence[str]) -> str:
    """What tells whether two scores are about the same prompts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def judge(question: Question, text: str) -> Reply:
    """Whether an answer's final number is the question's; what follows a stop is not looked at."""
    for stop in STOPS:
        text = text.partition(stop)[0]
    value = final_number(text)
    return Reply(text, value, value == question.value)


def read_score(path: Path) -> Score:
    """A score as :meth:`Score.to_json` wrote it, for a comparison after the server was restarted.

    Raises:
        ContractError: the file holds no score.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        data = data["scores"][0] if "scores" in data else data
        replies = tuple(
            Reply(r["text"], None if r["value"] is None else Decimal(r["value"]), bool(r["right"]))
            for r in data["replies"]
        )
        return Score(data["label"], data["model"], replies, data["asked"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, ArithmeticError) as error:
        raise ContractError(
            f"{path} holds no score: {error}",
            allowed="the file that `eval --task gsm8k --json FILE` writes",
            fix="run it against the first server with --json FILE",
        ) from error


def compare(first: Score, second: Score) -> Comparison:
    """Compares two scores question by question.

    Raises:
        ContractError: they are about other questions.
    """
    if first.asked != second.asked:
        raise ContractError(
            f"{first.label} answered {len(first.replies)} questions ({first.asked}), {second.label} "
            f"{len(second.replies)} ({second.asked})",
            allowed="two scores over the same questions",
            fix="use the same --num, --shots and --data for both",
        )
    pairs = list(zip(first.replies, second.replies, strict=True))
    only_first = sum(a.right and not b.right for a, b in pairs)
    only_second = sum(b.right and not a.right for a, b in pairs)
    return Comparison(only_first, only_second, paired_p_value(only_first, only_second))


def _question(line: str, path: Path, number: int) -> Question:
    try:
        data = json.loads(line)
        text, solution = data["question"], data["answer"]
        value = final_number(solution)
        if value is None:
            raise ValueError("the answer has no number")
    except (ValueError, KeyError, TypeError) as error:
        raise ContractError(
            f"{path}, line {number}: {error}",
            allowed='{"question": ..., "answer": ... that ends with #### NUMBER}',
            fix=f"fetch {DATA_URL} again",
        ) from error
    return Question(text, solution, value)


def _sizes_that_fit(lines: int, shots: int) -> str:
    most = lines - max(shots, 0)
    if most < 1:
        return f"lower --shots to at most {max(lines - 1, 0)}, or give a longer --data FILE"
    return f"give --num 1 to {most}" + (" and --shots 0 or more" if shots < 0 else "")


def _model(root: str, timeout_s: float) -> str:
    url = f"{root}/v1/models"
    return _text(url, _call(url, None, timeout_s), ("data", 0, "id"))


def _text(url: str, answer: Any, keys: Sequence[str | int]) -> str:
    """The text at ``keys`` of an answer; an answer of another form is no server of this API."""
    found = answer
    try:
        for key in keys:
            found = found[key]
    except (KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, str):
        raise ContractError(
            f"{url} answered {json.dumps(answer)[:200]}",
            allowed=f"a JSON object with text at {'.'.join(map(str, keys))}",
            fix="give the address of a server with an OpenAI-compatible API as --base-url",
        )
    return found


def _call(url: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        what = f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        what = f"{url}: {error}"
    raise ContractError(
        what,
        allowed="a server with an OpenAI-compatible /v1/completions",
        fix="look at the server's log, and give its address as --base-url http://HOST:PORT",
    )


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
