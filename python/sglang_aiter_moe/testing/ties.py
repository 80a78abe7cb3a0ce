"""What rounding ties of the requantisation between the stages may do to a layer's output.

A kernel that adds with fewer bits than the oracle may bring an element of stage 1's result that lies in the middle of
two E4M3 or E2M1 numbers to the other one. In a layer of a few tokens one element can be half of its row, and one step
of E4M3 an eighth of the element: an error of a few percent without any fault. Where no element is that near, nothing
is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from sglang_aiter_moe.numerics import oracle
from sglang_aiter_moe.numerics.metrics import relative_error

NEAR = 2.0**-12
"""Relative distance to a tie that counts: fp8 products are added with about 13 bits on Hopper."""


def moved_by_ties(layer: Callable[[], torch.Tensor]) -> float:
    """The relative error that appears in ``layer()``, a call of the oracle, when stage 1's result is larger, or
    smaller, by ``NEAR`` before it is quantised: the larger of the two."""
    expected = layer()
    quantise = oracle.requantize
    errors = []
    for factor in (1 + NEAR, 1 - NEAR):

        def moved(y: torch.Tensor, *rest, factor: float = factor, **options) -> torch.Tensor:
            return quantise(y * factor, *rest, **options)

        with mock.patch.object(oracle, "requantize", moved):
            errors.append(relative_error(layer(), expected))
    return max(errors)
