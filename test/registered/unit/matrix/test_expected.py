"""What counts as right: the right mode is recognised, and every known kind of mistake is not taken for it."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.matrix import layer
from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.expected import CLOSE, closest
from sglang_aiter_moe.numerics.oracle import RawExperts, routed_moe
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

CELLS = {
    name: Cell(activation=name, rows="interleaved", tokens=33, bias=True)
    for name in layer.ACTIVATIONS
}


def computed(cell, raw=None, **changed):
    """bf16 output of the oracle in float32, as a kernel would give it."""
    raw = raw or layer.whole(cell.rows, cell.bias)
    x, ids, weights = layer.batch(cell.rows, cell.tokens)
    arguments = dict(layer.ACTIVATIONS[cell.activation].oracle) | changed
    return routed_moe(x, raw, ids, weights, dtype=torch.float32, **arguments).bfloat16()


def is_right(cell, got):
    mode, diff = closest(cell, got)
    return bool(mode) and diff < CLOSE


@pytest.mark.parametrize("activation", layer.ACTIVATIONS)
@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
@pytest.mark.parametrize("rule", ["epilogue", "roundup"])
def test_each_mode_is_recognised(activation, mode, rule):
    cell = CELLS[activation]
    got = computed(cell, mode=mode, requantization=rule)
    assert is_right(cell, got)
    assert closest(cell, got)[0] == mode


def test_the_hint_changes_the_order_only():
    cell = CELLS["situv2"]
    got = computed(cell, mode="A4W4", requantization="roundup")
    assert closest(cell, got, "A8W4") == closest(cell, got) == closest(cell, got, "A4W4")


@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
@pytest.mark.parametrize(
    "activation,changed",
    [
        ("silu", {"activation": "gelu"}),
        ("silu", {"activation": "swiglu"}),
        ("gelu", {"activation": "silu"}),
        ("swiglu_limit3", {"limit": 7.0}),
        ("swiglu", {"limit": 100.0}),
        ("silu_limit2", {"limit": None}),
        ("situv2", {"beta": 1.0, "linear_beta": 1.0}),
        ("situv2", {"linear_beta": 4.0}),
    ],
)
def test_another_activation_or_constant_is_not_right(activation, changed, mode):
    cell = CELLS[activation]
    assert not is_right(cell, computed(cell, mode=mode, **changed))


def exchanged(raw: RawExperts) -> RawExperts:
    """Gate rows and up rows swapped."""

    def swap(tensor):
        gate, up = tensor.chunk(2, dim=1)
        return torch.cat((up, gate), dim=1)

    return replace(raw, w13=swap(raw.w13), w13_scale=swap(raw.w13_scale), b13=swap(raw.b13))


@pytest.mark.parametrize("activation", layer.ACTIVATIONS)
def test_exchanged_gate_and_up_are_not_right(activation):
    cell = CELLS[activation]
    assert not is_right(cell, computed(cell, exchanged(layer.whole(cell.rows, True))))


@pytest.mark.parametrize("name", ["b13", "b2"])
def test_a_dropped_bias_is_not_right(name):
    cell = CELLS["swiglu"]
    raw = replace(layer.whole(cell.rows, True), **{name: None})
    assert not is_right(cell, computed(cell, raw))


@pytest.mark.parametrize("columns", [8, 32])
def test_columns_that_count_as_padding_are_not_right(columns):
    cell = replace(CELLS["swiglu"], parallel="tp4r0")
    rank = layer.Rank.of(cell.parallel)
    own = layer.share(layer.whole(cell.rows, True), cell.rows, rank)
    assert is_right(cell, computed(cell, own))
    assert not is_right(cell, computed(cell, own, intermediate_pad=columns))


@pytest.mark.parametrize("where", [0, 7])
def test_a_result_that_is_not_finite_is_not_right(where):
    cell = CELLS["situv2"]
    got = computed(cell)
    got[where, 3] = float("nan")
    assert closest(cell, got) == ("", float("inf"))


def test_scales_rounded_to_even_are_right_before_aiter_rounded_up():
    from sglang_aiter_moe.numerics.e8m0 import ScaleRounding
    from sglang_aiter_moe.numerics.mxfp4 import dequantize_mxfp4, quantize_mxfp4

    # One expert a token, written out here.
    cell = Cell(activation="silu", rows="halves", tokens=2, aiter="0.1.14")
    raw = layer.whole("halves", False)
    x, ids, weights = layer.batch("halves", 2)

    def even(values):
        return dequantize_mxfp4(*quantize_mxfp4(values, ScaleRounding.EVEN), torch.float64)

    out = torch.zeros(2, 256, dtype=torch.float64)
    for token in range(2):
        for slot in range(2):
            e = int(ids[token, slot])
            gate, up = raw.gate_up_weights(e, torch.float64)
            row = even(x[token : token + 1])
            g, u = row @ gate.T, row @ up.T
            y = even((g * torch.sigmoid(g) * u).bfloat16())
            out[token] += (
                weights[token, slot].double() * (y @ raw.down_weights(e, torch.float64).T)[0]
            )
    assert is_right(cell, out.bfloat16())
    assert not is_right(replace(cell, aiter="0.1.20"), out.bfloat16())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
