"""What is right: the float64 oracle on a rank's raw weights, in every mode that a kernel may run in.

A result is compared with the oracle that quantises as the kernels of a mode do, and counts as right if it agrees
with one of them closely. That tells a dropped bound or a neighbouring activation from the noise of a 4-bit
format. Which mode that was is reported beside the class.
"""

from __future__ import annotations

import functools
import math

import torch

from sglang_aiter_moe.matrix import routing
from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.layer import (
    ACTIVATIONS,
    Rank,
    batch,
    expert_mask,
    share,
    weights_seed,
    whole,
)
from sglang_aiter_moe.numerics.e8m0 import ScaleRounding
from sglang_aiter_moe.numerics.metrics import logits_diff
from sglang_aiter_moe.numerics.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from sglang_aiter_moe.numerics.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from sglang_aiter_moe.numerics.oracle import RawExperts, local_expert_ids, routed_moe

#: logits_diff of a right result: float32 sums and a bf16 output leave 2e-6. GELU for SiLU in A8W4 is 2e-4 off.
CLOSE = 2e-5
#: (mode, rule of the requantisation between the stages); "even": AITER before 0.1.16.
VARIANTS = (
    ("A16W4", "epilogue"),
    ("A8W4", "epilogue"),
    ("A8W4", "roundup"),
    ("A4W4", "roundup"),
    ("A4W4", "epilogue"),
    ("A4W4", "roundup_fp32"),
)
EVEN = (("A8W4", "even"), ("A4W4", "even"))
BEFORE_ROUNDUP = ("0.1.12", "0.1.14")
#: Farther from the oracle without any quantisation than this is noise in every mode: MXFP4 activations leave 0.03.
FAR = 0.15


def closest(cell: Cell, got: torch.Tensor, hint: str = "") -> tuple[str, float]:
    """(mode, logits_diff) of the variant that agrees, else of the one that comes closest.

    Args:
        got: ``[M, H]``, the rank's part of the layer's output.
        hint: which mode to try first, to save time.
    """
    got = got.double()
    diff = logits_diff(got, _answer(cell, None, "epilogue"))
    if not math.isfinite(diff):
        return "", math.inf
    best = ("", diff)
    if diff > FAR:
        return best
    variants = VARIANTS + (EVEN if cell.aiter in BEFORE_ROUNDUP else ())
    for mode, rule in sorted(variants, key=lambda variant: variant[0] != hint):
        diff = logits_diff(got, _answer(cell, mode, rule))
        if diff < CLOSE:
            return mode, diff
        best = min(best, (mode, diff), key=lambda pair: pair[1])
    return best


def _answer(cell: Cell, mode: str | None, rule: str) -> torch.Tensor:
    key = (cell.activation, cell.rows, cell.parallel, cell.tokens, cell.bias, weights_seed(cell))
    return _cached(key, (cell.routing, routing.bias_seed(cell)), mode, rule)


@functools.lru_cache(maxsize=4096)
def _cached(key: tuple, routed: tuple, mode: str | None, rule: str) -> torch.Tensor:
    activation, rows, parallel, tokens, bias, seed = key
    rank = Rank.of(parallel)
    experts = share(whole(rows, bias, seed), rows, rank)
    x = batch(rows, tokens)[0]
    ids, weights = routing.expected(*routed, rows, tokens)
    common = ACTIVATIONS[activation].oracle
    mask = expert_mask(rank)
    if rule == "even":
        return _rounding_to_even(x, experts, ids, weights, mode, mask, common)
    return routed_moe(
        x, experts, ids, weights, mode=mode, requantization=rule, expert_mask=mask, **common
    )


def _rounding_to_even(
    x: torch.Tensor,
    experts: RawExperts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    mode: str,
    mask: torch.Tensor | None,
    common: dict,
) -> torch.Tensor:
    """The oracle where both quantisations choose scales by rounding to even."""

    def even(values: torch.Tensor) -> torch.Tensor:
        if mode == "A8W4":
            return dequantize_mxfp8(*quantize_mxfp8(values, ScaleRounding.EVEN), torch.float64)
        return dequantize_mxfp4(*quantize_mxfp4(values, ScaleRounding.EVEN), torch.float64)

    stage1 = torch.zeros(*ids.shape, experts.intermediate_size, dtype=torch.float64)
    routed_moe(even(x), experts, ids, weights, mode=None, expert_mask=mask, stage1=stage1, **common)
    local = local_expert_ids(ids, experts.num_experts, mask)
    out = torch.zeros(len(x), experts.hidden_size, dtype=torch.float64)
    for expert in range(experts.num_experts):
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        y = even(stage1[tokens, slots].to(torch.bfloat16))
        result = y @ experts.down_weights(expert, torch.float64).T
        if experts.b2 is not None:
            result = result + experts.b2[expert].double()
        out.index_add_(0, tokens, result * weights[tokens, slots].double().unsqueeze(-1))
    return out
