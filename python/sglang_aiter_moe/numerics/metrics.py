"""How far two tensors are apart, in float64. NaN anywhere gives NaN, which passes no threshold."""

from __future__ import annotations

import math

import torch

from sglang_aiter_moe.errors import ContractError


def _pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.shape != b.shape:
        raise ContractError(
            f"a has shape {list(a.shape)} and b {list(b.shape)}",
            allowed="equal shapes",
            fix="compare outputs of the same tokens and width",
        )
    return a.detach().double().flatten(), b.detach().double().flatten()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """``sum(a*b) / sqrt(sum(a*a) * sum(b*b))``. Two zero (or empty) tensors give 1, one gives 0."""
    a, b = _pair(a, b)
    product = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    if product == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(a @ b) / product


def logits_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    """``1 - 2*sum(a*b) / sum(a*a + b*b)``: the accuracy gate of AITER's tests (docs/contract.md section d).

    Unlike the cosine it sees a wrong scale. Two zero (or empty) tensors give 0.
    """
    a, b = _pair(a, b)
    norm = float(a @ a) + float(b @ b)
    if norm == 0:
        return 0.0
    return 1.0 - 2.0 * float(a @ b) / norm


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """``sqrt(sum((a-b)**2) / sum(b**2))`` with ``b`` the reference. Inf for a zero reference, 0 if both are."""
    a, b = _pair(a, b)
    difference = a - b
    error, reference = float(difference @ difference), float(b @ b)
    if reference == 0:
        return error if error == 0 or math.isnan(error) else math.inf
    return math.sqrt(error / reference)
