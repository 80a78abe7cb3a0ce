"""A cell's layer: what the ranks hold adds up to the whole, and the checkpoint formats hold the same weights."""

import sys

import pytest
import torch

from sglang_aiter_moe.matrix import layer
from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.layer import PREFIX, Rank
from sglang_aiter_moe.numerics.metrics import logits_diff
from sglang_aiter_moe.numerics.oracle import routed_moe
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


@pytest.mark.parametrize("rows", ["halves", "interleaved"])
@pytest.mark.parametrize("kind,size", [("tp", 2), ("tp", 4), ("tp", 8), ("ep", 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_ranks_add_up(rows, kind, size, bias):
    raw = layer.whole(rows, bias)
    x, ids, weights = layer.batch(rows, 5)
    whole = routed_moe(x, raw, ids, weights, activation="silu")
    parts = []
    for number in range(size):
        rank = Rank(kind, size, number)
        own = layer.share(raw, rows, rank)
        mask = layer.expert_mask(rank)
        parts.append(routed_moe(x, own, ids, weights, activation="silu", expert_mask=mask))
    assert logits_diff(sum(parts), whole) < 1e-12
    assert all(float(part.abs().max()) > 0 for part in parts)


def test_gpt_oss_ranks_divide_whole_blocks():
    # As 2880 columns on 8 ranks are 384 each and 192 on the last (sglang#27201).
    held = [layer.columns("interleaved", Rank("tp", 8, r)) for r in range(8)]
    assert [part.stop - part.start for part in held] == [64] * 7 + [32]


def test_a_rank_is_read_from_its_name():
    assert Rank.of("tp1") == Rank("tp", 1, 0)
    assert Rank.of("tp8r7") == Rank("tp", 8, 7)
    assert Rank.of("ep2r1").overrides == {
        "moe_tp_size": 1,
        "moe_tp_rank": 0,
        "moe_ep_size": 2,
        "moe_ep_rank": 1,
    }


def test_interleaved_rows_are_gate_and_up_in_turn():
    raw = layer.whole("interleaved", True)
    tensors = dict(layer.checkpoint(raw, "interleaved"))
    inter = raw.intermediate_size
    blocks = tensors[f"{PREFIX}.gate_up_proj_blocks"].flatten(2)
    assert torch.equal(blocks[:, 0::2], raw.w13[:, :inter])
    assert torch.equal(blocks[:, 1::2], raw.w13[:, inter:])
    assert torch.equal(tensors[f"{PREFIX}.gate_up_proj_bias"][:, 1::2], raw.b13[:, inter:])
    assert torch.equal(tensors[f"{PREFIX}.down_proj_scales"], raw.w2_scale)


def test_halves_are_one_tensor_for_each_expert_and_projection():
    raw = layer.whole("halves", False)
    tensors = dict(layer.checkpoint(raw, "halves"))
    inter = raw.intermediate_size
    assert len(tensors) == layer.EXPERTS * 6
    assert torch.equal(tensors[f"{PREFIX}.2.w3.weight"], raw.w13[2, inter:])
    assert torch.equal(tensors[f"{PREFIX}.1.w1.weight_scale"], raw.w13_scale[1, :inter])


def test_an_update_brings_other_weights():
    assert layer.weights_seed(Cell(change="process again")) == layer.weights_seed(Cell())
    new = layer.weights_seed(Cell(change="update from disk"))
    assert not torch.equal(layer.whole("halves", False, new).w13, layer.whole("halves", False).w13)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
