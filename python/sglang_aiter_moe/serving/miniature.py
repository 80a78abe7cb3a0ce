"""The small random Kimi-K3-like model on a CPU: the whole of ``bench serving`` without a GPU.

Its times say nothing about AITER; it is there so that the command itself can be tried and tested.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from sglang_aiter_moe.plugin import ENABLE
from sglang_aiter_moe.serving.side import Side
from sglang_aiter_moe.serving.sweep import Load
from sglang_aiter_moe.testing.checkpoints import write_kimi_checkpoint
from sglang_aiter_moe.testing.controls import CONTROL
from sglang_aiter_moe.testing.sglang_server import CPU_ENGINE, environment

#: A sweep that two cores do in a minute or two.
CONCURRENCIES, INPUT_LEN, OUTPUT_LEN, PROMPTS_PER, WARMUP_PER = (1, 2), 16, 4, 4, 1
_CONVERSATIONS, _WORDS = 64, 24
_VOCABULARY = range(3, 120)  # below are special tokens; the words are named after their ids


def write_miniature(folder: Path) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Writes the model; returns its path, the server's arguments and environment."""
    model = write_kimi_checkpoint(folder / "model")
    return str(model), CPU_ENGINE, environment(controls=True)


def adapt(side: Side) -> Side:
    """A side that can be served on a CPU.

    The released MXFP4 path keeps off AITER without ROCm; a side without the patch set gets the second plugin
    of ``testing/controls.py``, which opens that path on the portable AITER and changes nothing else.
    """
    if side.env.get(ENABLE) != "0":
        return side
    return replace(side, env={**side.env, CONTROL: "released"})


def write_conversations(path: Path, seed: int = 0) -> Path:
    """A file in ShareGPT's form, in words that the model's tokenizer has."""
    rand = random.Random(seed)
    turn = lambda: " ".join(f"w{rand.choice(_VOCABULARY)}" for _ in range(_WORDS))  # noqa: E731
    data = [
        {"conversations": [{"from": "human", "value": turn()}, {"from": "gpt", "value": turn()}]}
        for _ in range(_CONVERSATIONS)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def tiny_load(folder: Path, concurrencies: tuple[int, ...] = CONCURRENCIES) -> Load:
    """The load for it, with its conversations in ``folder``."""
    return Load(
        concurrencies,
        INPUT_LEN,
        OUTPUT_LEN,
        PROMPTS_PER,
        WARMUP_PER,
        dataset_path=write_conversations(folder / "conversations.json"),
    )
