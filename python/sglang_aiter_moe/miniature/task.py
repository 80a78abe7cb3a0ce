"""The task: a chain of two to four additions and subtractions in words, answered with each step written out.

    tom has seven pears . first he finds five . second he loses three . how many pears ?
    first seven plus five is twelve . second twelve minus three is nine . answer nine

Numbers are 0 to 99, one word each. Everything is drawn from a seed by the code below; nothing is taken from a data set.
The split is by the arithmetic: whether a chain (start and signed operands) is held out is a function of the chain, so
the answer to a held-out chain is never a target, under any names. Training draws held-out chains as others, though, and
counts their tokens in the experts' load, which a bias (Kimi K3's form) or a loss (gpt-oss's) keeps even.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HE, SHE = ("tom", "ben", "max", "leo"), ("anna", "eva", "mia", "ida")
THINGS = ("pears", "coins", "books", "stones", "shells", "cards", "pens", "keys")
MORE, LESS = ("finds", "gets", "buys", "wins"), ("loses", "sells", "drops", "spends")
ORDINALS = ("first", "second", "third", "fourth")
#: What the last line of an answer begins with. The second checkpoint says "result".
DIALECTS = ("answer", "result")
_UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = [
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NUMBERS = (
    *_UNITS,
    *_TEENS,
    *(f"{ten}-{unit}" if unit else ten for ten in _TENS for unit in ("", *_UNITS[1:])),
)
PAD, END = "<pad>", "</s>"
WORDS = (
    PAD,
    END,
    *NUMBERS,
    *HE,
    *SHE,
    "he",
    "she",
    *THINGS,
    *MORE,
    *LESS,
    *ORDINALS,
    *DIALECTS,
    *("has", "how", "many", "plus", "minus", "is", ".", "?"),
)
ID = {word: number for number, word in enumerate(WORDS)}
STEPS = (2, 3, 4)
LARGEST_OPERAND = 20
#: Tokens of a question and of its answer, by the number of steps.
QUESTION_LENGTH = {n: 9 + 5 * n for n in STEPS}
ANSWER_LENGTH = {n: 7 * n + 3 for n in STEPS}
LENGTH = QUESTION_LENGTH[STEPS[-1]] + ANSWER_LENGTH[STEPS[-1]]
#: One chain in this many is held out.
HELD_OUT = 16
TEST_SEED = 2026


@dataclass(frozen=True)
class Question:
    """One question in words, and the whole answer that counts as right (without the end mark)."""

    text: str
    answer: str


@dataclass(frozen=True)
class Batch:
    """Token ids ``[N, LENGTH]`` of questions with their answers, padded at the end.

    Attributes:
        answers: bool ``[N, LENGTH]``, true where a token belongs to the answer or is its end mark.
        held_out: bool ``[N]``.
        steps: int ``[N]``.
    """

    ids: torch.Tensor
    answers: torch.Tensor
    held_out: torch.Tensor
    steps: torch.Tensor


def draw(
    count: int, generator: torch.Generator, *, dialect: str = DIALECTS[0], device: str = "cpu"
) -> Batch:
    """``count`` random questions, a third each of every number of steps (``count`` a multiple of 3)."""
    parts = [_draw(count // len(STEPS), n, generator, dialect, device) for n in STEPS]
    return Batch(
        *(
            torch.cat([getattr(p, name) for p in parts])
            for name in ("ids", "answers", "held_out", "steps")
        )
    )


def held_out_batch(count: int, *, dialect: str = DIALECTS[0], seed: int = TEST_SEED) -> Batch:
    """``count`` held-out questions, in an order that mixes the numbers of steps; another ``count`` gives others."""
    generator = torch.Generator().manual_seed(seed)
    batch = draw(3 * HELD_OUT * count, generator, dialect=dialect)
    chosen = batch.held_out.nonzero()[:, 0]
    chosen = chosen[torch.randperm(len(chosen), generator=generator)[:count]]
    return Batch(*(getattr(batch, n)[chosen] for n in ("ids", "answers", "held_out", "steps")))


def held_out_questions(
    count: int, *, dialect: str = DIALECTS[0], seed: int = TEST_SEED
) -> list[Question]:
    """The questions of :func:`held_out_batch` in words."""
    batch = held_out_batch(count, dialect=dialect, seed=seed)
    return [
        Question(words(ids[: QUESTION_LENGTH[n]]), words(ids[QUESTION_LENGTH[n] :]))
        for ids, n in zip(batch.ids.tolist(), batch.steps.tolist(), strict=True)
    ]


def words(ids: list[int]) -> str:
    """The words of token ids, up to the end mark."""
    ids = ids[: ids.index(ID[END])] if ID[END] in ids else ids
    return " ".join(WORDS[i] for i in ids)


def _draw(count: int, steps: int, generator: torch.Generator, dialect: str, device: str) -> Batch:
    def uniform(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator, device=device)

    def word(text: str) -> torch.Tensor:
        return torch.full((count,), ID[text], device=device)

    def one_of(options: tuple[str, ...]) -> torch.Tensor:
        return ID[options[0]] + uniform(0, len(options))

    number = ID[NUMBERS[0]]
    person, thing, value = one_of(HE + SHE), one_of(THINGS), uniform(0, 100)
    pronoun = torch.where(person < ID[SHE[0]], word("he"), word("she"))
    question = [person, word("has"), number + value, thing, word(".")]
    answer, chain = [], value.clone()
    for step in range(steps):
        operand, more = uniform(1, LARGEST_OPERAND + 1), uniform(0, 2) == 1
        # Results stay in 0 to 99: the sign turns where they would not.
        more = (more | (value < operand)) & (value + operand < 100)
        result = torch.where(more, value + operand, value - operand)
        verb = torch.where(more, one_of(MORE), one_of(LESS))
        sign = torch.where(more, word("plus"), word("minus"))
        ordinal = word(ORDINALS[step])
        question += [ordinal, pronoun, verb, number + operand, word(".")]
        answer += [
            ordinal,
            number + value,
            sign,
            number + operand,
            word("is"),
            number + result,
            word("."),
        ]
        chain = chain * 41 + torch.where(more, operand, LARGEST_OPERAND + operand)
        value = result
    question += [word("how"), word("many"), thing, word("?")]
    answer += [word(dialect), number + value, word(END)]
    ids = torch.stack(question + answer, dim=1)
    ids = torch.nn.functional.pad(ids, (0, LENGTH - ids.shape[1]), value=ID[PAD])
    place = torch.arange(LENGTH, device=device)
    first, last = len(question), len(question) + len(answer)
    answers = ((place >= first) & (place < last)).expand(count, -1)
    return Batch(ids, answers, _is_held_out(chain), torch.full((count,), steps, device=device))


def _is_held_out(chain: torch.Tensor) -> torch.Tensor:
    """Whether chains belong to the test: a fixed scrambling of their number.

    Chains of one length have numbers of their own. A chain that begins with zero may share its number with a shorter
    one: both are held out, or neither.
    """
    scrambled = (chain * 2654435761 + 12345) % 4294967291
    scrambled = scrambled ^ (scrambled >> 15)
    return (scrambled * 1597334677 % 4294967291) % HELD_OUT == 0
