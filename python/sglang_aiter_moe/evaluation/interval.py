"""How sure one can be of a share of right answers, and whether two runs over the same questions differ.

Exact tests, because the counts are small and often at the edge (50 of 50 right). Sources: Clopper and
Pearson, Biometrika 26 (1934); McNemar, Psychometrika 12 (1947), with the exact binomial tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_aiter_moe.errors import ContractError

_STEPS = 60  # bisection: 2^-60 is below a float64's resolution near 1


@dataclass(frozen=True)
class Interval:
    """A range that covers the true share with at least this confidence.

    Attributes:
        low, high: shares in [0, 1].
        confidence: in (0, 1).
    """

    low: float
    high: float
    confidence: float

    def __contains__(self, share: float) -> bool:
        return self.low <= share <= self.high

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


def binomial_interval(right: int, total: int, confidence: float = 0.95) -> Interval:
    """The Clopper-Pearson interval of a share.

    Args:
        right: number of right answers.
        total: number of questions.
        confidence: at least this often such an interval covers the truth.

    Raises:
        ContractError: no questions, more right answers than questions, or a confidence outside (0, 1).
    """
    if total < 1 or not 0 <= right <= total:
        raise ContractError(
            f"{right} right answers to {total} questions",
            allowed="at least one question, and between none and all of them right",
            fix="count the right answers among the questions that were asked",
        )
    if not 0 < confidence < 1:
        raise ContractError(
            f"confidence is {confidence}", allowed="between 0 and 1", fix="use for instance 0.95"
        )
    tail = (1 - confidence) / 2
    # P(X >= right | p) grows with p and equals the tail at the lower end; P(X <= right | p) falls.
    low = 0.0 if right == 0 else _root(lambda p: _at_least(right, total, p) - tail)
    high = 1.0 if right == total else _root(lambda p: tail - _at_most(right, total, p))
    return Interval(low, high, confidence)


def paired_p_value(only_first: int, only_second: int) -> float:
    """The exact two-sided McNemar test of two runs over the same questions.

    Args:
        only_first: questions that the first run alone answered right.
        only_second: questions that the second run alone answered right.

    Returns:
        How likely a split at least as uneven is when the runs do not differ.
    """
    if only_first < 0 or only_second < 0:
        raise ContractError(
            f"{only_first} and {only_second} questions",
            allowed="counts of at least 0",
            fix="count the questions that one of the two runs alone answered right",
        )
    total = only_first + only_second
    if total == 0:
        return 1.0
    return min(1.0, 2 * _at_most(min(only_first, only_second), total, 0.5))


def _at_most(count: int, total: int, share: float) -> float:
    if share <= 0.0:
        return 1.0
    if share >= 1.0:
        return float(count >= total)
    logs = (math.log(share), math.log1p(-share))
    return math.fsum(
        math.exp(_log_choose(total, k) + k * logs[0] + (total - k) * logs[1])
        for k in range(count + 1)
    )


def _at_least(count: int, total: int, share: float) -> float:
    return _at_most(total - count, total, 1.0 - share)


def _log_choose(total: int, count: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)


def _root(function) -> float:
    """Where a growing function crosses zero in [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
