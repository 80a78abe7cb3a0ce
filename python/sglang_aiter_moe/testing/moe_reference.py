"""A routed mixture of experts by hand: numbers one at a time, in Python floats, sharing nothing with ``numerics``."""

from __future__ import annotations

import math

import torch

from sglang_aiter_moe.testing import mx_reference


def rows_by_hand(packed: torch.Tensor, scales: torch.Tensor) -> list[list[float]]:
    """Values of packed rows ``[n, K/2]`` with E8M0 scales ``[n, K/32]``."""
    return [
        mx_reference.decode_mxfp4_row(p, s)
        for p, s in zip(packed.tolist(), scales.tolist(), strict=True)
    ]


def quantised_by_hand(row: list[float], mode: str | None, rule: str) -> list[float]:
    """One row as a mode's kernels quantise it: per 32, by a scale rule of ``mx_reference``."""
    if mode in (None, "A16W4"):
        return row
    magnitudes = mx_reference.E2M1 if mode == "A4W4" else mx_reference.E4M3FN
    values = []
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        if not any(block):
            values += block
            continue
        codes, byte = mx_reference.quantize_block(block, magnitudes, rule)
        scale = 2.0 ** (byte - 127)
        values += [
            math.copysign(float(magnitudes[c]) * scale, v)
            for c, v in zip(codes, block, strict=True)
        ]
    return values


def activation_by_hand(g: float, u: float, name: str, limit: float | None) -> float:
    """One gate and one up value; SwiGLU clamps at 7 unless told otherwise, the others do not clamp by themselves."""
    limit = limit or (7.0 if name == "swiglu" else math.inf)
    g, u = min(g, limit), max(-limit, min(u, limit))
    sigmoid = 1 / (1 + math.exp(-(1.702 if name == "swiglu" else 1) * g))
    if name == "silu":
        return g * sigmoid * u
    if name == "swiglu":
        return g * sigmoid * (u + 1)
    return 4 * math.tanh(g / 4) * sigmoid * 25 * math.tanh(u / 25)


def rounded(row: list[float], dtype: torch.dtype) -> list[float]:
    """Each value rounded to ``dtype``."""
    return torch.tensor(row, dtype=torch.float64).to(dtype).tolist()


def moe_by_hand(
    x,
    experts,
    ids,
    weights,
    activation,
    mode=None,
    limit=None,
    rule="epilogue",
    weight_on_input=False,
) -> torch.Tensor:
    """The layer's output, float64 ``[M, H]``, of raw experts.

    ``rule`` requantises the stage-1 output: "epilogue" or "up" from float32, "up_from_bf16".
    """
    inter = experts.intermediate_size
    decoded = {}
    out = []
    for token in range(len(x)):
        row = quantised_by_hand(x[token].double().tolist(), mode, "up")
        total = [0.0] * experts.hidden_size
        for e, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if e not in decoded:
                decoded[e] = (
                    rows_by_hand(experts.w13[e], experts.w13_scale[e]),
                    rows_by_hand(experts.w2[e], experts.w2_scale[e]),
                )
            w13, w2 = decoded[e]
            product = [sum(a * b for a, b in zip(row, w, strict=True)) for w in w13]
            if weight_on_input:
                product = [v * weight for v in product]
            if experts.b13 is not None:
                product = [v + b for v, b in zip(product, experts.b13[e].tolist(), strict=True)]
            pairs = (
                zip(product[0::2], product[1::2], strict=True)
                if experts.gate_up_interleaved
                else zip(product[:inter], product[inter:], strict=True)
            )
            y = [activation_by_hand(g, u, activation, limit) for g, u in pairs]
            if mode == "A16W4" or rule == "up_from_bf16":
                y = rounded(y, torch.bfloat16)
            elif mode is not None:
                y = rounded(y, torch.float32)
            y = quantised_by_hand(y, mode, "epilogue" if rule == "epilogue" else "up")
            bias = [0.0] * len(w2) if experts.b2 is None else experts.b2[e].tolist()
            for h, w in enumerate(w2):
                value = sum(a * b for a, b in zip(y, w, strict=True)) + bias[h]
                total[h] += value if weight_on_input else value * weight
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)
