"""The gated activations of AITER's fused MoE, with the clamping rule of its kernels.

``limit`` (AITER's ``swiglu_limit``) clamps the gate from above and the up projection on both sides. Without
one, or with 0, SwiGLU-OAI clamps at 7 and the others do not clamp; with one, all clamp, SiTUv2 too, as
the kernels do (docs/contract.md section c; AITER's torch reference does not clamp SiTUv2).
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch

from sglang_aiter_moe.errors import ContractError

SWIGLU_ALPHA = 1.702
SWIGLU_DEFAULT_LIMIT = 7.0
SITUV2_BETA = 4.0
SITUV2_LINEAR_BETA = 25.0


class Activation(StrEnum):
    """Gated activations, named as a model's config names them."""

    SILU = "silu"
    GELU = "gelu"
    SWIGLU = "swiglu"
    """SwiGLU-OAI (gpt-oss): ``g * sigmoid(alpha * g) * (u + 1)``."""
    SITUV2 = "situv2"
    """SiTUv2 (Kimi K3): ``beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)``."""


def effective_limit(activation: Activation, limit: float | None) -> float:
    """The bound that the kernels clamp with: ``math.inf`` for none."""
    if limit is not None and not limit >= 0:
        raise ContractError(
            f"limit is {limit}",
            allowed="None, 0 (both: the default) or a positive number",
            fix="pass the model's swiglu_limit",
        )
    if limit:
        return float(limit)
    return SWIGLU_DEFAULT_LIMIT if activation is Activation.SWIGLU else math.inf


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
    """``activation(gate) * f(up)`` in the dtype of the inputs. NaN propagates, also through the clamp.

    Args:
        gate, up: floating point, same shape.
        limit: see the module's text.
        alpha: SwiGLU-OAI's slope.
        beta, linear_beta: SiTUv2's, both > 0.
    """
    try:
        activation = Activation(activation)
    except ValueError:
        raise ContractError(
            f"activation is {activation!r}",
            allowed=", ".join(a.value for a in Activation),
            fix="pass an Activation",
        ) from None
    if activation is Activation.SITUV2:
        for name, value in (("beta", beta), ("linear_beta", linear_beta)):
            if value is None or not value > 0:
                raise ContractError(
                    f"{name} is {value}", allowed="a number above 0", fix=f"pass the model's {name}"
                )
    bound = effective_limit(activation, limit)
    if bound != math.inf:
        gate = gate.clamp(max=bound)
        up = up.clamp(-bound, bound)
    if activation is Activation.SILU:
        return gate * torch.sigmoid(gate) * up
    if activation is Activation.GELU:
        return torch.nn.functional.gelu(gate) * up
    if activation is Activation.SWIGLU:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    situ_gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return situ_gate * (linear_beta * torch.tanh(up / linear_beta))
