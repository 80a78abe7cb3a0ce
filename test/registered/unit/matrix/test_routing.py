"""What a cell's routing has to choose, and that the two mistakes of a correction bias change it."""

import sys

import pytest
import torch

from sglang_aiter_moe.matrix import layer, routing
from sglang_aiter_moe.matrix.cells import BIAS_UPDATE, ROUTINGS, Cell
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.routing import assert_routing

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

BIASED = [name for name in ROUTINGS if "bias" in name]


def chosen(cell):
    return routing.expected(cell.routing, routing.bias_seed(cell), cell.rows, cell.tokens)


def test_given_experts_are_those_of_the_batch():
    ids, weights = chosen(Cell())
    _, want_ids, want = layer.batch("halves", 257)
    assert torch.equal(ids, want_ids) and torch.equal(weights, want)


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("change", ["nothing", BIAS_UPDATE])
def test_choices_are_those_of_plain_float_arithmetic(name, change):
    cell = Cell(routing=name, change=change)
    ids, weights = chosen(cell)
    bias = routing.correction_bias(name, routing.bias_seed(cell))
    logits = routing.router_logits(name, 257)
    assert (logits.dtype, bias.dtype) == (
        routing.ROUTINGS[name].logits,
        routing.ROUTINGS[name].bias,
    )
    assert_routing(weights, ids, logits, bias, layer.TOPK)


def test_softmax_takes_the_largest_logits():
    ids, weights = chosen(Cell(routing="softmax"))
    logits = routing.router_logits("softmax", 257).double()
    first, second = logits.topk(2, dim=1).values.T
    torch.testing.assert_close(weights[:, 0], 1 / (1 + (second - first).exp()))
    assert torch.equal(logits.gather(1, ids.long())[:, 0], first)


def rows_that_differ(one, other):
    return int((one.sort(dim=1).values != other.sort(dim=1).values).any(dim=1).sum())


@pytest.mark.parametrize("name", ["fp32 bias", "fp32 bias and logits"])
def test_a_rounded_bias_chooses_others(name):
    want, _ = routing.expected(name, 5, "halves", 257)
    choice = routing.router_logits(name, 257).double().sigmoid()
    choice = choice + routing.correction_bias(name).bfloat16().double()
    got = choice.sort(dim=1, descending=True, stable=True).indices[:, : layer.TOPK]
    assert rows_that_differ(got.int(), want) > 5
    assert routing.difference(Cell(routing=name), got.int()) == "routing"
    assert routing.difference(Cell(routing=name), want.flip(1)) == ""  # the order of slots is free


@pytest.mark.parametrize("name", BIASED)
def test_an_old_bias_chooses_others(name):
    old, _ = routing.expected(name, 5, "halves", 257)
    for change in (BIAS_UPDATE, "update from disk", "update from tensors"):
        cell = Cell(routing=name, change=change)
        assert routing.bias_seed(cell) != 5 and routing.difference(cell, old) == "old routing"
    assert routing.bias_seed(Cell(change="broken update from disk")) == 5


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
