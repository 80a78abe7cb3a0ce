import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import Activation, apply_gate_up
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

ALL = tuple(Activation)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def by_hand(activation, g, u, alpha=1.702, beta=4.0, linear_beta=25.0):
    """One number, no limit."""
    if activation == "silu":
        return g * sigmoid(g) * u
    if activation == "gelu":
        return g * 0.5 * math.erfc(-g / math.sqrt(2)) * u
    if activation == "swiglu":
        return g * sigmoid(alpha * g) * (u + 1)
    return beta * math.tanh(g / beta) * sigmoid(g) * linear_beta * math.tanh(u / linear_beta)


def close(got: float, expected: float) -> bool:
    return math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-300)


@pytest.mark.parametrize("activation", ALL)
@settings(max_examples=100, deadline=None)
@given(gate=st.floats(-30, 6.9), up=st.floats(-6.9, 6.9))
def test_formula(activation, gate, up):
    g, u = torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64)
    assert close(apply_gate_up(activation, g, u).item(), by_hand(activation, gate, up))


@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("swiglu", {"alpha": 1.0}),
        ("situv2", {"beta": 1.0, "linear_beta": 1.0}),
        ("situv2", {"beta": 2.0, "linear_beta": 1.5}),
        ("situv2", {"beta": 25.0, "linear_beta": 4.0}),
    ],
)
def test_parameters_count(activation, options):
    g, u = torch.tensor(1.25, dtype=torch.float64), torch.tensor(-2.5, dtype=torch.float64)
    got = apply_gate_up(activation, g, u, **options).item()
    assert close(got, by_hand(activation, 1.25, -2.5, **options))
    assert not close(got, by_hand(activation, 1.25, -2.5))


def test_parameters_of_one_activation_do_not_touch_another():
    g, u = torch.linspace(-3, 3, 13), torch.linspace(2, -2, 13)
    for activation, foreign in (
        ("silu", {"alpha": 9.0, "beta": 9.0, "linear_beta": 9.0}),
        ("gelu", {"alpha": 9.0, "beta": 9.0, "linear_beta": 9.0}),
        ("swiglu", {"beta": 9.0, "linear_beta": 9.0}),
        ("situv2", {"alpha": 9.0}),
    ):
        assert torch.equal(
            apply_gate_up(activation, g, u, **foreign), apply_gate_up(activation, g, u)
        )


@pytest.mark.parametrize(
    ("activation", "limit", "bound"),
    [
        ("silu", None, None),
        ("silu", 0, None),
        ("silu", 2.0, 2.0),
        ("gelu", None, None),
        ("gelu", 2.0, 2.0),
        ("situv2", None, None),
        ("situv2", 0.0, None),
        ("situv2", 2.0, 2.0),  # the kernels do, though AITER's torch reference does not
        ("swiglu", None, 7.0),
        ("swiglu", 0, 7.0),
        ("swiglu", 2.0, 2.0),
        ("swiglu", 20.0, 20.0),
        ("swiglu", math.inf, None),
    ],
)
def test_limit(activation, limit, bound):
    """The gate is bounded above only, the up projection on both sides, before the activation."""
    points = (-30.0, -9.0, -2.5, 1.0, 2.5, 9.0, 30.0)
    for gate in points:
        for up in points:
            g, u = torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64)
            got = apply_gate_up(activation, g, u, limit=limit).item()
            if bound is not None:
                gate_in, up_in = min(gate, bound), max(-bound, min(up, bound))
            else:
                gate_in, up_in = gate, up
            assert close(got, by_hand(activation, gate_in, up_in)), (gate, up)


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("limit", [None, 2.0])
def test_nan_is_never_hidden(activation, limit):
    nan, one = torch.tensor(math.nan), torch.tensor(1.0)
    assert apply_gate_up(activation, nan, one, limit=limit).isnan()
    assert apply_gate_up(activation, one, nan, limit=limit).isnan()


def test_infinite_gate():
    inf, one = torch.tensor(math.inf), torch.tensor(1.0)
    for activation in ("silu", "gelu"):
        assert apply_gate_up(activation, inf, one) == math.inf
        assert apply_gate_up(activation, -inf, one).isnan()
    assert apply_gate_up("swiglu", -inf, one).isnan()
    assert close(
        apply_gate_up("swiglu", inf.double(), one.double()).item(), by_hand("swiglu", 7.0, 1.0)
    )
    assert apply_gate_up("situv2", -inf, one) == 0
    assert close(
        apply_gate_up("situv2", inf.double(), one.double()).item(), 4 * 25 * math.tanh(1 / 25)
    )


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtype_shape_and_input_are_kept(activation, dtype):
    g, u = (
        torch.linspace(-9, 9, 12, dtype=dtype).view(3, 4),
        torch.linspace(9, -9, 12, dtype=dtype).view(3, 4),
    )
    before = g.clone(), u.clone()
    out = apply_gate_up(activation, g, u, limit=3.0)
    assert out.dtype == dtype and out.shape == (3, 4)
    assert torch.equal(g, before[0]) and torch.equal(u, before[1])
    torch.testing.assert_close(apply_gate_up(activation, g.t(), u.t(), limit=3.0), out.t())
    assert apply_gate_up(activation, g[:0], u[:0]).shape == (0, 4)


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply_gate_up("relu", ONE, ONE), "activation is 'relu'"),
        (lambda: apply_gate_up("silu", ONE, ONE, limit=-1.0), "limit is -1.0"),
        (lambda: apply_gate_up("silu", ONE, ONE, limit=math.nan), "limit is nan"),
        (lambda: apply_gate_up("situv2", ONE, ONE, beta=0.0), "beta is 0.0"),
        (lambda: apply_gate_up("situv2", ONE, ONE, beta=None), "beta is None"),
        (lambda: apply_gate_up("situv2", ONE, ONE, linear_beta=-25.0), "linear_beta is -25.0"),
        (lambda: apply_gate_up("situv2", ONE, ONE, linear_beta=math.inf), "linear_beta is inf"),
        (lambda: apply_gate_up("silu", ONE, torch.ones(1)), r"gate has shape \[2\] and up \[1\]"),
        (lambda: apply_gate_up("silu", ONE.int(), ONE), "gate has dtype torch.int32"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ContractError, match=message):
        call()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
