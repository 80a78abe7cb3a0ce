"""The gated activations in float32 (docs/contract.md section c)."""

import triton
import triton.language as tl


@triton.jit
def tanh(v):
    """tanh by exp(-2|v|): no cancellation for large |v|, odd by construction.

    Near 0 ``1 - e`` loses digits, so a polynomial takes over below 0.1 (its first dropped term is 2e-9 relative).
    """
    a = tl.abs(v)
    e = tl.exp(-2.0 * a)
    large = (1.0 - e) / (1.0 + e)
    s = a * a
    small = a * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315))))
    r = tl.where(a < 0.1, small, large)
    return tl.where(v < 0, -r, r)


@triton.jit
def sigmoid(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def clamp_gate_up(g, u, limit):
    """Gate from above, up on both sides; NaN stays NaN."""
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g, u


@triton.jit
def gate_up(
    g,
    u,
    limit,
    alpha,
    beta,
    linear_beta,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):
    if HAS_LIMIT:
        g, u = clamp_gate_up(g, u, limit)
    if ACTIVATION == "situv2":
        return (beta * tanh(g / beta) * sigmoid(g)) * (linear_beta * tanh(u / linear_beta))
    elif ACTIVATION == "swiglu":
        return g * sigmoid(alpha * g) * (u + 1.0)
    elif ACTIVATION == "gelu":
        return 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    else:
        tl.static_assert(ACTIVATION == "silu")
        return g * sigmoid(g) * u
