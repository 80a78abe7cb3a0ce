"""The gated activations of AITER's fused MoE, with the clamping rule of its kernels.

``limit`` (AITER's ``swiglu_limit``) bounds the gate from above and the up projection on both sides. Without one,
or with 0, SwiGLU-OAI clamps at 7 and the others not at all. With one, every activation clamps, SiTUv2 included: that
is what the kernels do, while AITER's torch reference never clamps SiTUv2 (docs/contract.md section c).
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.e8m0 import check_float

SWIGLU_ALPHA = 1.702
SWIGLU_DEFAULT_LIMIT = 7.0
"""Both are SwiGLU-OAI's, built into AITER's kernels (docs/contract.md section c)."""
SITUV2_BETA = 4.0
SITUV2_LINEAR_BETA = 25.0
"""Kimi K3's. AITER's own defaults differ by kernel family: 1/1 or 4/25 (docs/contract.md section c)."""


class Activation(StrEnum):
    """Gated activations of a gate ``g`` and an up projection ``u``."""

    SILU = "silu"
    """``g * sigmoid(g) * u``"""
    GELU = "gelu"
    """``g * Phi(g) * u``, the exact GELU"""
    SWIGLU = "swiglu"
    """SwiGLU-OAI (gpt-oss): ``g * sigmoid(alpha * g) * (u + 1)``"""
    SITUV2 = "situv2"
    """SiTUv2 (Kimi K3): ``beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)``"""


def effective_limit(activation: Activation, limit: float | None) -> float:
    """The bound that the kernels clamp with, ``math.inf`` for none."""
    if limit is not None and not limit >= 0:
        raise ContractError(
            f"limit is {limit}",
            allowed="a positive number, or None or 0 for the activation's default",
            fix="pass the model's swiglu_limit",
        )
    if limit:
        return float(limit)
    return SWIGLU_DEFAULT_LIMIT if activation == Activation.SWIGLU else math.inf


def _check(activation: Activation | str, beta: float, linear_beta: float) -> Activation:
    try:
        activation = Activation(activation)
    except ValueError:
        raise ContractError(
            f"activation is {activation!r}",
            allowed=", ".join(Activation),
            fix="pass an Activation",
        ) from None
    if activation is Activation.SITUV2:
        for name, value in (("beta", beta), ("linear_beta", linear_beta)):
            if value is None or not 0 < value < math.inf:
                raise ContractError(
                    f"{name} is {value}",
                    allowed="a finite number above 0",
                    fix=f"pass the model's {name}: AITER's default depends on the kernel family",
                )
    return activation


def apply_gate_up(
    activation: Activation | str,
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    limit: float | None = None,
    alpha: float = SWIGLU_ALPHA,
    beta: float = SITUV2_BETA,
    linear_beta: float = SITUV2_LINEAR_BETA,
) -> torch.Tensor:
    """The activation of ``gate`` and ``up``, computed in their dtype. Same shape.

    NaN passes through the clamp. A gate of -Inf gives NaN (``-Inf * 0``) except under SiTUv2, as in the kernels.

    Args:
        gate, up: floating point, equal shapes.
        limit: see the module's text.
        alpha: SwiGLU-OAI's slope.
        beta, linear_beta: SiTUv2's bounds.

    Raises:
        ContractError: unknown activation, negative limit, beta or linear_beta not above 0, unequal shapes.
    """
    activation = _check(activation, beta, linear_beta)
    check_float(gate, "gate")
    check_float(up, "up")
    if gate.shape != up.shape:
        raise ContractError(
            f"gate has shape {list(gate.shape)} and up {list(up.shape)}",
            allowed="equal shapes",
            fix="split w13's output into two halves of the intermediate size",
        )
    bound = effective_limit(activation, limit)
    if bound != math.inf:
        gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
    if activation is Activation.SILU:
        return gate * torch.sigmoid(gate) * up
    if activation is Activation.GELU:
        # erfc keeps the negative tail, where torch's own gelu subtracts it away.
        return gate * torch.special.erfc(-gate * math.sqrt(0.5)) * 0.5 * up
    if activation is Activation.SWIGLU:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    situ_gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return situ_gate * (linear_beta * torch.tanh(up / linear_beta))
