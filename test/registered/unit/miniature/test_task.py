"""The generated sums: right by an independent evaluation of the words, split without overlap."""

import re
import sys

import pytest
import torch

from sglang_aiter_moe.miniature import task
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
UNITS = BELOW_TWENTY.split(" ")
TENS = dict(
    zip(
        ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"],
        range(20, 100, 10),
        strict=True,
    )
)


def number(word):
    """A number word read by a hand-written rule."""
    if word in UNITS:
        return UNITS.index(word)
    ten, _, unit = word.partition("-")
    return TENS[ten] + (UNITS.index(unit) if unit else 0)


def chain(question):
    """Start and signed operands, read from the question's words alone."""
    start = number(question.split()[2])
    operands = []
    for verb, word in re.findall(r"(?:he|she) (\S+) (\S+) \.", question):
        operands.append(number(word) * (1 if verb in ("finds", "gets", "buys", "wins") else -1))
    return (start, *operands)


def test_every_number_word_is_its_place():
    assert [number(word) for word in task.NUMBERS] == list(range(100))


def test_answers_are_right_by_the_words_of_the_question():
    for question in task.held_out_questions(300):
        value, *operands = chain(question.text)
        lines = question.answer.split(" . ")
        assert len(lines) == len(operands) + 1
        for line, operand in zip(lines, operands, strict=False):
            _, a, sign, b, _, c = line.split()
            assert number(a) == value and number(b) == abs(operand)
            assert sign == ("plus" if operand > 0 else "minus")
            value += operand
            assert 0 <= value <= 99 and number(c) == value
        assert lines[-1].split() == ["answer", task.NUMBERS[value]]


def test_no_held_out_chain_is_trained_on():
    held_out = {chain(q.text) for q in task.held_out_questions(1000)}
    batch = task.draw(30000, torch.Generator().manual_seed(9))
    questions = [
        chain(task.words(ids[: task.QUESTION_LENGTH[n]]))
        for ids, n in zip(batch.ids.tolist(), batch.steps.tolist(), strict=True)
    ]
    trained = {c for c, out in zip(questions, batch.held_out.tolist(), strict=True) if not out}
    drawn_again = {c for c, out in zip(questions, batch.held_out.tolist(), strict=True) if out}
    assert not held_out & trained
    assert (
        held_out & drawn_again
    )  # the same chains do come up in training's stream, and weigh nothing there


def test_about_one_chain_in_sixteen_is_held_out_at_every_length():
    batch = task.draw(30000, torch.Generator().manual_seed(1))
    for steps in task.STEPS:
        share = batch.held_out[batch.steps == steps].double().mean().item()
        assert share == pytest.approx(1 / task.HELD_OUT, abs=0.015)


def test_the_same_seed_asks_the_same_and_another_asks_others():
    first = task.held_out_questions(50)
    assert first == task.held_out_questions(50)
    assert len(set(first) & set(task.held_out_questions(50, seed=1))) < 5


def test_the_second_dialect_differs_in_one_word_alone():
    for a, b in zip(
        task.held_out_questions(20), task.held_out_questions(20, dialect="result"), strict=True
    ):
        assert a.text == b.text and b.answer == a.answer.replace("answer", "result") != a.answer


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
