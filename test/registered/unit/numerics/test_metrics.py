import math
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import cosine, logits_diff, relative_error
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

METRICS = (cosine, logits_diff, relative_error)


def tensor(*values):
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [  # cosine, logits_diff, relative_error
        ((3.0, 4.0), (3.0, 4.0), (1.0, 0.0, 0.0)),
        ((3.0, 4.0), (6.0, 8.0), (1.0, 0.2, 0.5)),  # only the cosine is blind to a factor
        ((3.0, 4.0), (-3.0, -4.0), (-1.0, 2.0, 2.0)),
        ((1.0, 0.0), (0.0, 1.0), (0.0, 1.0, math.sqrt(2))),
        ((1.0, 1.0), (1.0, 0.0), (math.sqrt(0.5), 1 / 3, 1.0)),
        ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0, 1.0)),
        ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0, math.inf)),
        ((0.0, -0.0), (0.0, 0.0), (1.0, 0.0, 0.0)),
        ((), (), (1.0, 0.0, 0.0)),
    ],
)
def test_by_hand(a, b, expected):
    got = [metric(tensor(*a), tensor(*b)) for metric in METRICS]
    assert got == pytest.approx(expected, abs=1e-15)
    assert all(type(value) is float for value in got)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("other", [0.0, 1.0])
def test_nan_and_inf_pass_no_threshold(metric, bad, other):
    for a, b in (
        ((1.0, bad), (other, other)),
        ((other, other), (1.0, bad)),
        ((1.0, bad), (1.0, bad)),
    ):
        value = metric(tensor(*a), tensor(*b))
        assert math.isnan(value) or value == math.inf
        if metric is cosine:
            assert math.isnan(value)


def test_computed_in_float64():
    a = torch.full((4,), 1e30)  # the squares overflow float32
    assert cosine(a, a) == pytest.approx(1.0)
    assert relative_error(a * 2, a) == pytest.approx(1.0)
    b = torch.full((4,), 1e-30)
    assert logits_diff(b, b * 3) == pytest.approx(0.4)


def test_small_differences_do_not_cancel():
    a = torch.ones(1000, dtype=torch.float64)
    assert relative_error(a + 1e-12, a) == pytest.approx(1e-12, rel=1e-3)
    assert logits_diff(a + 1e-12, a) == pytest.approx(5e-25, rel=1e-3)


def test_published_form_of_logits_diff():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    assert logits_diff(x, y) == pytest.approx(float(1 - 2 * (x * y).sum() / (x * x + y * y).sum()))


def test_dtypes_and_strides():
    a = torch.arange(12.0).view(3, 4)
    for metric, expected in zip(METRICS, (1.0, 0.0, 0.0), strict=True):
        assert metric(a.t(), a.t().bfloat16()) == pytest.approx(expected)
        assert metric(a[:, ::2].requires_grad_(), a[:, ::2].clone()) == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
def test_unequal_shapes_are_refused(metric):
    with pytest.raises(ContractError, match=r"a has shape \[2\] and b \[2, 1\]"):
        metric(torch.ones(2), torch.ones(2, 1))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
