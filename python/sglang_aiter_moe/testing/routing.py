"""A reference for biased grouped top-k in plain Python floats, and how results are compared with it.

Independent of ``portable.routing``: loops over rows, no tensor operation takes part in the choice.
"""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference_routing(
    logits: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    *,
    num_expert_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> list[tuple[list[int], list[float]]]:
    """``(expert ids, weights)`` of each row of ``logits`` ``[M, E]``, best choice first."""
    per_expert = [float(value) for value in bias.tolist()]
    size = len(per_expert) // num_expert_group
    routed = []
    for row in logits.tolist():
        scores = [_sigmoid(float(value)) for value in row]
        choice = [_rank(s + b) for s, b in zip(scores, per_expert, strict=True)]
        groups = range(num_expert_group)
        best_two = [
            _rank(sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:2])) for g in groups
        ]
        kept = sorted(groups, key=lambda g: (-best_two[g], g))[:topk_group]
        order = sorted(range(len(scores)), key=lambda e: (e // size not in kept, -choice[e], e))
        ids = order[:topk]
        weights = [scores[e] for e in ids]
        if renormalize:
            total = math.fsum(weights)
            weights = [w / total if total > 0 else w * 0.0 for w in weights]
        routed.append((ids, [w * routed_scaling_factor for w in weights]))
    return routed


def assert_routing(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    *,
    ordered: bool = True,
    rtol: float = 1e-6,
    **options,
) -> None:
    """Same experts as the reference, weights within ``rtol`` (relative, fp32).

    ``ordered``: in the same order, best choice first; else in ascending order of expert.
    """
    expected = reference_routing(logits, bias, topk, **options)
    if not ordered:
        expected = [tuple(zip(*sorted(zip(*row, strict=True)), strict=True)) for row in expected]
    assert ids.tolist() == [list(row) for row, _ in expected]
    reference = torch.tensor([row for _, row in expected], dtype=torch.float64)
    reference = reference.reshape(weights.shape)
    torch.testing.assert_close(
        weights.double().cpu(), reference, rtol=rtol, atol=1e-37, equal_nan=True
    )


def rows_that_differ(ids: torch.Tensor, expected: list[list[int]]) -> int:
    """How many rows choose another *set* of experts."""
    return sum(set(a) != set(b) for a, b in zip(ids.tolist(), expected, strict=True))


def offset_bias_case(
    tokens: int = 64, experts: int = 256, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 logits with an fp32 bias in [6.8, 7.06], 2^-5 apart in bf16: rounding it reorders."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator).bfloat16()
    bias = 6.8 + 0.26 * torch.rand(experts, generator=generator)
    return logits.to(device), bias.to(device)


def special_rows() -> torch.Tensor:
    """``[8, 8]`` logits: NaN, Inf and scores that vanish, a kind in each row."""
    nan, inf = math.nan, math.inf
    rows = torch.zeros(8, 8)
    rows[0] = nan
    rows[1, :6] = nan  # fewer numbers than a top-4 needs
    rows[2, 3] = nan
    rows[3] = -inf
    rows[4] = inf
    rows[5, 2], rows[5, 5] = inf, -inf
    rows[6] = torch.arange(8.0) - 95  # deep, but a float64 sigmoid still tells them apart
    rows[7] = -1000.0  # every score is 0
    return rows


def _copy(config, values: torch.Tensor) -> None:
    with torch.no_grad():
        config.correction_bias.copy_(values)


def _copy_without_version(config, values: torch.Tensor) -> None:
    version = config.correction_bias._version
    config.correction_bias.data.copy_(values)
    assert config.correction_bias._version == version, "the case must not bump the version"


def _copy_under_inference_mode(config, values: torch.Tensor) -> None:
    with torch.inference_mode():
        config.correction_bias.data.copy_(values)


def _swap_data(config, values: torch.Tensor) -> None:
    config.correction_bias.data = values.to(config.correction_bias)


def _new_parameter(config, values: torch.Tensor) -> None:
    config.correction_bias = torch.nn.Parameter(values.to(config.correction_bias), False)


IN_PLACE = {
    "copy": _copy,
    "copy_without_version": _copy_without_version,
    "copy_under_inference_mode": _copy_under_inference_mode,
}
REPLACED = {"swap_data": _swap_data, "new_parameter": _new_parameter}
BIAS_CHANGES = IN_PLACE | REPLACED
"""Ways to change ``config.correction_bias``. A graph whose kernel reads the parameter sees the first kind by
itself; what the owner hands out follows every kind at the next ``refresh_correction_biases``."""


def _sigmoid(x: float) -> float:
    if math.isnan(x):
        return x
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def _rank(x: float) -> float:
    return -math.inf if math.isnan(x) else x
