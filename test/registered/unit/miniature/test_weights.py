"""The shipped miniatures, without SGLang: they answer, in every mode, and answer nothing when bytes are misplaced."""

import functools
import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from sglang_aiter_moe import portable
from sglang_aiter_moe.environ import exactly
from sglang_aiter_moe.miniature import CHECKPOINTS, WEIGHTS, score, task
from sglang_aiter_moe.miniature.experts import OracleExperts, SummedRanks
from sglang_aiter_moe.portable import backends
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

COUNT = 24
WAYS = [("kimi", m) for m in score.FLAGS] + [
    ("kimi_second", "A16W4"),
    ("gpt_oss", "A16W4"),
    ("gpt_oss", "A8W4"),
]


@functools.cache
def loaded(name, dtype=torch.bfloat16):
    return score.load(WEIGHTS / name, dtype)


def accuracy(name, experts, dtype=torch.bfloat16, dialect=None, at_once=COUNT):
    batch = task.held_out_batch(COUNT, dialect=dialect or CHECKPOINTS[name])
    return score.exact(loaded(name, dtype)[0], experts, batch, at_once=at_once)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_size_licence_and_log(name):
    file = WEIGHTS / name / "model.safetensors"
    assert file.stat().st_size <= 5_000_000
    with safe_open(file, "pt") as tensors:
        metadata = tensors.metadata()
    assert "nothing external" in metadata["licence"]
    training = json.loads((WEIGHTS / name / "training.json").read_text())
    assert training["seed"] == 9 and training["log"][-1]["held_out"] > 0.97


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_float32_answers_everything(name):
    model, raw = loaded(name, torch.float32)
    assert accuracy(name, OracleExperts(model.shape, raw), torch.float32) == 1.0


def planned(name, mode, wrong):
    model, raw = loaded(name)
    flags = score.FLAGS[mode] if model.shape.kimi else {}
    with exactly(flags), portable.installed(), backends.forced("cpu"):
        experts = score.planned(model.shape, raw, "cpu", wrong_layout=wrong)
        # gpt-oss is A16W4 below 256 tokens, which 4 questions are, and A8W4 from there on
        at_once = 4 if mode == "A16W4" else COUNT
        tokens = at_once * (task.LENGTH - 1)
        return accuracy(name, experts, at_once=at_once), experts.plan.mode_for(tokens)


@pytest.mark.parametrize("name, mode", WAYS)
def test_planned_layouts_answer_and_the_other_layout_does_not(name, mode):
    right, planned_mode = planned(name, mode, False)
    assert planned_mode == mode
    assert right >= (COUNT - 2) / COUNT
    assert planned(name, mode, True)[0] == 0.0


@pytest.mark.parametrize("name, mode", [*WAYS[:3], ("gpt_oss", "A8W4")])
def test_two_ranks_answer_and_one_of_them_alone_does_not(name, mode):
    model, _ = loaded(name)
    flags = score.FLAGS[mode] if model.shape.kimi else {}
    with exactly(flags), portable.installed(), backends.forced("cpu"):
        ranks = [
            score.planned(model.shape, score.load_rank(WEIGHTS / name, rank, 2), "cpu", ranks=2)
            for rank in (0, 1)
        ]
        assert ranks[0].plan.spec.intermediate_size * 2 == model.shape.inter
        assert accuracy(name, SummedRanks(ranks)) >= (COUNT - 2) / COUNT
        assert accuracy(name, ranks[0]) < 0.2


def test_the_second_checkpoint_speaks_otherwise():
    model, raw = loaded("kimi_second")
    assert accuracy("kimi_second", OracleExperts(model.shape, raw), dialect="answer") == 0.0


def test_a_mixture_of_both_checkpoints_answers_nothing():
    """An update that replaces the experts alone, or all but the experts, is noticed."""
    (first, raw), (second, other) = loaded("kimi"), loaded("kimi_second")
    for model, experts in ((first, other), (second, raw)):
        for dialect in task.DIALECTS:
            batch = task.held_out_batch(COUNT, dialect=dialect)
            assert score.exact(model, OracleExperts(model.shape, experts), batch) == 0.0


def test_one_wrong_scale_byte_per_row_is_noticed():
    model, raw = loaded("kimi")
    broken = []
    for experts in raw:
        scale = experts.w2_scale.clone()
        scale[..., 0] += 3
        broken.append(replace(experts, w2_scale=scale))
    assert accuracy("kimi", OracleExperts(model.shape, broken)) < 0.5


def test_the_bias_decides_and_bfloat16_cannot_hold_it():
    """The stored biases differ by less than bfloat16's spacing near 7."""
    for block in loaded("kimi")[0].blocks():
        bias = block.gate.e_score_correction_bias
        assert len(bias.unique()) > 8 and len(bias.bfloat16().unique()) < len(bias.unique()) / 2


def test_a_score_names_the_layout_that_was_laid_out():
    *_, found = score.score(WEIGHTS / "kimi", dialect="answer", count=10, many=10)
    layouts = {
        name: [row["layout"] for row in found[name].values()]
        for name in ("planned", "wrong_layout")
    }
    assert layouts["planned"] == ["separated", "gu_interleaved", "separated"]
    assert layouts["wrong_layout"] == ["gu_interleaved", "separated", "gu_interleaved"]
    assert found["oracle"]["float32"] == {"right": 10, "right_of_many": 10}
    assert [row["accuracy"] for row in found["wrong_layout"].values()] == [0.0] * 3
    stored = json.loads((WEIGHTS / "kimi" / "score.json").read_text())
    assert [row["layout"] for row in stored["wrong_layout"].values()] == layouts["wrong_layout"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
