"""Intervals and tests against published values, and against what their definition says."""

import math
import sys
from pathlib import Path

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation.interval import binomial_interval, paired_p_value
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


# Newcombe, Statistics in Medicine 17 (1998), table I, method 5 (Clopper-Pearson), 95%.
@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        (81, 263, 0.2527, 0.3676),
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0000, 0.1684),
        (1, 29, 0.0009, 0.1776),
    ],
)
def test_published_intervals(right, total, low, high):
    interval = binomial_interval(right, total)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@pytest.mark.parametrize("total", [1, 50, 200])
def test_all_right_leaves_the_tail_of_all_right(total):
    # By hand: with all n right the lower end p satisfies p^n = 0.025.
    interval = binomial_interval(total, total)
    assert interval.high == 1.0
    assert interval.low == pytest.approx(0.025 ** (1 / total), abs=1e-12)
    mirrored = binomial_interval(0, total)
    assert mirrored.low == 0.0
    assert mirrored.high == pytest.approx(1 - interval.low, abs=1e-12)


def test_every_interval_covers_as_often_as_it_says():
    total, share = 50, 0.92
    covered = sum(
        math.comb(total, k) * share**k * (1 - share) ** (total - k)
        for k in range(total + 1)
        if share in binomial_interval(k, total)
    )
    assert 0.95 <= covered < 1


def test_the_known_good_run_and_the_known_bad_one_do_not_overlap():
    # SGLang #33838: 200 questions, 0.980 with the right layout and 0.005 without.
    assert binomial_interval(1, 200).high < binomial_interval(196, 200).low
    # And 0.916 against a gate of 0.92 says nothing at 200 questions.
    assert 0.92 in binomial_interval(183, 200)


def test_the_cookbook_quotes_the_intervals():
    page = (Path(__file__).parents[4] / "docs" / "cookbook" / "kimi-k3.md").read_text()
    for right in (196, 183):
        assert str(binomial_interval(right, 200)) in page


def test_wider_confidence_is_a_wider_interval():
    narrow, wide = binomial_interval(45, 50, 0.9), binomial_interval(45, 50, 0.99)
    assert wide.low < narrow.low < 0.9 < narrow.high < wide.high


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (6, 0, 2 / 64),
        (0, 6, 2 / 64),
        (8, 1, 2 * (1 + 9) / 512),
        (1, 2, 1.0),
    ],
)
def test_paired_runs_by_hand(first, second, p):
    assert paired_p_value(first, second) == pytest.approx(p)


@pytest.mark.parametrize(
    "call",
    [
        lambda: binomial_interval(1, 0),
        lambda: binomial_interval(3, 2),
        lambda: binomial_interval(-1, 2),
        lambda: binomial_interval(1, 2, 1.0),
        lambda: paired_p_value(-1, 0),
    ],
)
def test_counts_that_cannot_be_are_refused(call):
    with pytest.raises(ContractError):
        call()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
