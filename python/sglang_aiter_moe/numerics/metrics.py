"""How far two tensors are apart, in float64.

A NaN or Inf in either gives NaN (or Inf, where small is good), which passes no threshold as long as the question is
"is it good enough?": ``not cosine > 0.99`` is true of NaN, ``cosine < 0.99`` is not.
"""

from __future__ import annotations

import math

import torch

from sglang_aiter_moe.errors import ContractError


def _sums(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float, float]:
    """sum(a*a), sum(b*b), sum(a*b) and sum((a-b)**2)."""
    if a.shape != b.shape:
        raise ContractError(
            f"a has shape {list(a.shape)} and b {list(b.shape)}",
            allowed="equal shapes",
            fix="compare outputs for the same tokens and width",
        )
    a, b = (t.detach().to(torch.float64).reshape(-1) for t in (a, b))
    difference = a - b
    return float(a @ a), float(b @ b), float(a @ b), float(difference @ difference)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """``sum(a*b) / sqrt(sum(a*a) * sum(b*b))``. It does not see a common factor.

    Two tensors that are zero (or empty) give 1, one gives 0.
    """
    aa, bb, ab, _ = _sums(a, b)
    if not math.isfinite(aa + bb):
        return math.nan
    if aa == 0 or bb == 0:
        return 1.0 if aa == bb else 0.0
    return ab / (math.sqrt(aa) * math.sqrt(bb))


def logits_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    """``1 - 2*sum(a*b) / sum(a*a + b*b)``, the accuracy gate of AITER's tests (docs/contract.md section d).

    0 for equal tensors, also for zero and empty ones; 1 for orthogonal, 2 for opposite ones. It sees a factor.
    """
    aa, bb, _, dd = _sums(a, b)
    # The same number as sum((a-b)**2) / sum(a*a + b*b), which does not cancel when it is small.
    return 0.0 if aa + bb == 0 else dd / (aa + bb)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """``sqrt(sum((a-b)**2) / sum(b*b))`` with ``b`` the reference.

    For a zero reference it is 0 if ``a`` is zero too, else Inf.
    """
    aa, bb, _, dd = _sums(a, b)
    if bb == 0 and not math.isnan(aa):
        return 0.0 if aa == 0 else math.inf
    return math.sqrt(dd / bb) if bb != 0 else math.nan
