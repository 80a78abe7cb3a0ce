"""The miniatures behind the real ``sglang serve`` on this machine: one server a run, asked the held-out questions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.plan import plan_moe
from sglang_aiter_moe.contract.spec import Target
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import exact_match
from sglang_aiter_moe.evaluation.exact_match import Gate
from sglang_aiter_moe.evaluation.provenance import provenance
from sglang_aiter_moe.miniature import CHECKPOINTS, WEIGHTS, task
from sglang_aiter_moe.miniature.experts import OTHER_LAYOUT, layer_spec
from sglang_aiter_moe.miniature.model import SHAPES
from sglang_aiter_moe.miniature.score import FLAGS
from sglang_aiter_moe.serving.sglang_python import SGLang, find, installed
from sglang_aiter_moe.testing.sglang_releases import search_path
from sglang_aiter_moe.testing.sglang_server import ServerDied, environment, serving

MODELS = ("kimi", "gpt_oss")
SECOND = "kimi_second"
SERVER_ARGUMENTS = ("--max-total-tokens=16384", "--max-running-requests=200")
UP_WITHIN = 900.0


@dataclass(frozen=True)
class Setting:
    """What is served, and how.

    Attributes:
        model: of :data:`MODELS`.
        mode: "A16W4", "A8W4" or "A4W4". gpt-oss has no choice: A16W4 below 256 tokens, A8W4 from there on.
        ranks: tensor-parallel size.
        plugin: False runs SGLang's own AITER branch, as released, on the portable AITER.
        wrong_layout: w13 is laid out as the plan did not say, everything else follows the plan.
        update: ask again after an in-place update to the second checkpoint, and after one back.
    """

    model: str = "kimi"
    mode: str = "A16W4"
    ranks: int = 1
    plugin: bool = True
    wrong_layout: bool = False
    update: bool = False

    @property
    def flags(self) -> dict[str, str]:
        """The variables that a user sets for the mode."""
        return FLAGS[self.mode] if self.model == "kimi" else {}

    @property
    def layout(self) -> str:
        """w13's layout: the plan's, the other one, or whatever the release chooses without the plugin."""
        if not self.plugin:
            return "as released"
        target = Target("gfx950", Capabilities.for_release("0.1.20"), self.flags)
        layout = plan_moe(layer_spec(SHAPES[self.model], self.ranks), target).w13_layout
        return OTHER_LAYOUT[layout][0] if self.wrong_layout else layout

    def __str__(self) -> str:
        parts = [self.model, self.mode]
        parts += [f"{self.ranks} ranks"] if self.ranks > 1 else []
        parts += ["without the plugin"] if not self.plugin else []
        parts += ["wrong layout"] if self.wrong_layout else []
        return ", ".join(parts)


@dataclass
class Asked:
    """Right answers of one checkpoint on a running server."""

    checkpoint: str
    right: int
    gate: Gate
    example: tuple[str, str]
    #: Answers that say the word of the other checkpoint: weights that were not, or not all, replaced.
    other_dialect: int = 0
    #: Answers without a word: a server that says nothing is no noise, and is wrong in another way.
    empty: int = 0

    @property
    def accuracy(self) -> float:
        return self.right / self.gate.questions

    @property
    def passes(self) -> bool:
        return self.right >= self.gate.required and not self.other_dialect


@dataclass
class Run:
    """One server: what it was and what it answered, in the order of the updates."""

    setting: Setting
    release: str
    asked: list[Asked] = field(default_factory=list)
    seconds_up: float = 0.0
    seconds_asking: float = 0.0

    @property
    def accuracy(self) -> float:
        """Of the first checkpoint, before any update."""
        return self.asked[0].accuracy

    @property
    def holds(self) -> bool:
        """With the plugin and the right layout every gate, with a wrong layout noise; else nothing is claimed.

        Noise is words: a control whose server mostly says nothing has shown no layout.
        """
        if self.setting.wrong_layout:
            first = self.asked[0]
            return self.accuracy < exact_match.NOISE and 2 * first.empty < first.gate.questions
        return not self.setting.plugin or all(a.passes for a in self.asked)

    def to_json(self) -> dict:
        first = self.asked[0]
        return {
            "model": self.setting.model,
            "mode": self.setting.mode,
            "release": self.release,
            "accuracy": self.accuracy,
            "questions": first.gate.questions,
            "layout": self.setting.layout,
            "ranks": self.setting.ranks,
            "right": first.right,
            "required": first.gate.required,
            "false_alarm": first.gate.false_alarm,
            "empty": first.empty,
            "updates": [
                {
                    "checkpoint": a.checkpoint,
                    "accuracy": a.accuracy,
                    "required": a.gate.required,
                    "other_dialect": a.other_dialect,
                }
                for a in self.asked[1:]
            ],
            "holds": self.holds,
            "example": {"expected": first.example[0], "answered": first.example[1]},
            "seconds": {"up": round(self.seconds_up, 1), "asking": round(self.seconds_asking, 1)},
        }


def sglang_for(release: str | None, python: Path | None) -> SGLang:
    """The SGLang to serve with; a release beside this environment's own (``make test-sglang``) goes first."""
    beside = release is not None and (Path(sys.prefix) / "releases" / release).is_dir()
    if python is None and beside and installed() not in (None, release):
        return SGLang(Path(sys.executable), release, (search_path(release) or "",))
    return find(python, release)


def run(
    setting: Setting,
    sglang: SGLang,
    folder: Path,
    *,
    questions: int = 200,
    say: Callable[[str], None] = print,
) -> Run:
    """Serves, asks, and takes the server down again.

    Args:
        setting: what to serve.
        sglang: with which SGLang.
        folder: for the server's log.
        questions: how many held-out questions, the same ones each time.
        say: told how far it is.

    Raises:
        ContractError: the server did not come up, or did not answer a question or take an update.
    """
    names = [setting.model, *((SECOND, setting.model) if setting.update else ())]
    control = "wrong_layout" if setting.wrong_layout else None if setting.plugin else "released"
    env = environment(
        release=os.pathsep.join(sglang.paths) or None,
        controls=control is not None,
        ranks=setting.ranks,
        CARRIER_CONTROL=control,
        SGLANG_AITER_MOE_ENABLE=None if setting.plugin else "0",
        **setting.flags,
    )
    log = folder / f"{str(setting).replace(', ', '-').replace(' ', '_')}-{sglang.release}.log"
    arguments = [*SERVER_ARGUMENTS]
    if setting.ranks > 1:
        arguments.append(f"--tensor-parallel-size={setting.ranks}")
    result = Run(setting, sglang.release)
    say(f"{setting}, SGLang {sglang.release}: starting sglang serve, a minute or two")
    start = time.monotonic()
    try:
        with serving(
            WEIGHTS / setting.model, log, *arguments, env=env, python=sglang.python
        ) as server:
            result.seconds_up = time.monotonic() - start
            start = time.monotonic()
            for number, name in enumerate(names):
                if number:
                    exact_match.update_weights(server.url, WEIGHTS / name)
                asked = _ask(server.url, name, setting.mode, questions)
                result.asked.append(asked)
                say(
                    f"  {name}: {asked.right} of {questions} exactly right "
                    f"({result.seconds_up:.0f} s to start, {time.monotonic() - start:.0f} s of answers)"
                )
            result.seconds_asking = time.monotonic() - start
    except ServerDied as error:
        say(str(error))
        raise ContractError(
            f"{setting}, SGLang {sglang.release}: the server did not start: {str(error).splitlines()[0]}",
            allowed="a server that answers /health",
            fix=f"look at the end of {log} (kept with --logs)",
        ) from error
    return result


def _ask(url: str, checkpoint: str, mode: str, count: int) -> Asked:
    dialect = CHECKPOINTS[checkpoint]
    questions = task.held_out_questions(count, dialect=dialect)
    given = exact_match.answers(url, questions)
    others = set(task.DIALECTS) - {dialect}
    return Asked(
        checkpoint,
        exact_match.count_right(given, questions),
        exact_match.gate_of(WEIGHTS / checkpoint, mode, count),
        (questions[0].answer, given[0]),
        sum(bool(others & set(text.split())) for text in given),
        sum(not text for text in given),
    )


def to_json(runs: Sequence[Run]) -> dict:
    """What ``sglang-aiter-moe eval --json`` writes."""
    return provenance() | {
        "modes": [r.to_json() for r in runs if r.setting.plugin and not r.setting.wrong_layout],
        "wrong_layout": [r.to_json() for r in runs if r.setting.wrong_layout],
        "without_plugin": [r.to_json() for r in runs if not r.setting.plugin],
        "holds": all(r.holds for r in runs),
    }
