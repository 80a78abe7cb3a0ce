"""A model of a few thousand weights: training moves it, holds out what is held out, and exports what it computed."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.miniature import score, task, train
from sglang_aiter_moe.miniature.experts import OracleExperts
from sglang_aiter_moe.miniature.export import write_checkpoint
from sglang_aiter_moe.miniature.model import BIAS_CENTRE, SHAPES
from sglang_aiter_moe.testing.carrier_reference import CarrierReference
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")


@pytest.fixture(params=SHAPES)
def trainer(request):
    shape = replace(SHAPES[request.param], hidden=64, latent=64, inter=64, experts=4, topk=2)
    settings = train.Settings(request.param, seed=3, batch=6, rate=3e-3, device="cpu")
    return train.Trainer(settings, shape)


def test_the_loss_falls_in_each_stretch(trainer):
    trainer.train(24, every=1)
    losses = [entry["loss"] for entry in trainer.log]
    modes = [entry["mode"] for entry in trainer.log]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert modes[0] is None and modes[13] == "A16W4"
    assert set(modes[16:]) <= set(train.MODES[trainer.settings.name])


def test_held_out_answers_are_no_target(trainer, monkeypatch):
    batch = task.draw(6, torch.Generator().manual_seed(0))
    batch.held_out[:] = True
    batch.held_out[0] = False
    monkeypatch.setattr(train.task, "draw", lambda *_, **__: batch)
    first = trainer.step(0.0, None)
    batch.ids[1:] = 5  # nonsense where it is held out
    assert trainer.step(0.0, None) == first
    batch.held_out[:] = False
    assert trainer.step(0.0, None) != first


def test_the_correction_bias_follows_the_load_and_stays_distinct_in_float32(trainer):
    if not trainer.model.shape.kimi:
        pytest.skip("gpt-oss has no correction bias")
    trainer.train(6)
    bias = trainer.model.blocks()[0].gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and len(bias.unique()) > 1
    assert (bias - BIAS_CENTRE).abs().max() <= 6.1 * train.BIAS_STEP


def test_an_exported_checkpoint_computes_what_training_computed(trainer, tmp_path, monkeypatch):
    for parameter in trainer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases too, which begin at 0
    path = write_checkpoint(tmp_path, trainer.model, trainer.experts, seed=3)
    shape = trainer.model.shape
    monkeypatch.setitem(SHAPES, trainer.settings.name, shape)
    monkeypatch.setattr(score, "KIMI" if shape.kimi else "GPT_OSS", shape)
    model, raw = score.load(path)
    trainer.model.load_state_dict(model.state_dict())  # rounded to bfloat16, as stored
    trainer.experts.mode = "A16W4"
    for group in ("gate_bias", "up_bias", "down_bias"):
        for bias in getattr(trainer.experts, group):
            bias.data = bias.data.bfloat16().float()
    ids = task.held_out_batch(2).ids
    with torch.no_grad():
        got = trainer.model(ids, trainer.experts)
        want = model(ids, OracleExperts(shape, raw))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    # and what the tests' own float32 reading of the file computes, which shares no line with either
    reference = CarrierReference(path)
    for row, logits in zip(ids.tolist(), want, strict=True):
        torch.testing.assert_close(reference.logits(row), logits, rtol=1e-3, atol=1e-3)


def test_reversed_experts_are_the_same_function_and_other_bytes(trainer):
    ids = task.held_out_batch(2).ids
    trainer.experts.mode = "A16W4"
    with torch.no_grad():
        before, raw = trainer.model(ids, trainer.experts), trainer.experts.raw(0)
        trainer.reverse_experts()
        after = trainer.model(ids, trainer.experts)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    assert not torch.equal(trainer.experts.raw(0).w13, raw.w13)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
