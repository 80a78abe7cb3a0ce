"""Routing cases for the Triton kernel, each compared with the reference; run on a CPU or a GPU.

``python -m sglang_aiter_moe.testing.routing_cases [PATTERN ...]`` prints one JSON object a line. With
``TRITON_INTERPRET=1`` in the environment it runs on CPU tensors, else on the GPU. Triton reads that variable when a
kernel is defined, so interpreted cases need a process of their own.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import sys
from dataclasses import dataclass

import torch

from sglang_aiter_moe.portable.routing import biased_topk
from sglang_aiter_moe.testing.routing import assert_routing, offset_bias_case, special_rows


@dataclass(frozen=True)
class Case:
    """A call of ``biased_topk``.

    ``rows``: "random", "special" (NaN and Inf), "wild" (these in logits and bias, at random), "ties" (all equal),
    "offset" (fp32 bias around 7); ``inputs`` explains "saturated", "near-ties", "balanced", "cancelling", "deep" and
    "masked".
    ``layout``: "dense", "front" (a slice of a wider matrix, as K3's fused front makes), "transposed".
    """

    name: str
    experts: int
    topk: int
    tokens: int = 3
    groups: int = 1
    kept: int = 1
    logits: str = "float32"
    bias: str = "float32"
    renormalize: bool = True
    scale: float = 1.0
    rows: str = "random"
    layout: str = "dense"
    real: int | None = None
    counted_on_device: bool = False
    padded_id: int = 0
    shared: int = 0
    per_token_bias: bool = False


_DTYPES = ("float32", "bfloat16", "float16")
CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case("k3", 896, 16, tokens=2, scale=2.827),
        Case("k3-bf16-logits", 896, 16, tokens=2, logits="bfloat16"),
        Case("k3-front-slice", 896, 16, tokens=2, layout="front"),
        Case("deepseek-v3", 256, 8, groups=8, kept=4, scale=2.5),
        Case("deepseek-v3-bf16", 256, 8, groups=8, kept=4, logits="bfloat16", bias="bfloat16"),
        Case("kimi-k2", 384, 8, tokens=2, renormalize=False, scale=2.827),
        *(Case(f"{a}-logits-{b}-bias", 64, 6, logits=a, bias=b) for a in _DTYPES for b in _DTYPES),
        Case("one-expert", 1, 1),
        Case("one-of-two", 2, 1),
        Case("k-is-all-of-7", 7, 7),
        Case("k-is-all-of-128", 128, 128, tokens=1),
        Case("groups-of-20", 160, 6, groups=8, kept=3),
        Case("one-expert-a-group", 8, 4, groups=8, kept=4),
        Case("k-is-all-of-the-kept", 12, 4, groups=3, kept=1),
        Case("every-group-kept", 8, 3, groups=4, kept=4),
        Case("five-groups", 20, 3, groups=5, kept=2, renormalize=False),
        Case("offset-bias", 256, 8, tokens=8, rows="offset"),
        Case("ties", 40, 5, rows="ties"),
        Case("ties-in-groups", 40, 5, groups=4, kept=2, rows="ties"),
        Case("transposed", 48, 5, layout="transposed"),
        Case("saturated", 896, 16, tokens=3, rows="saturated"),
        Case("saturated-in-groups", 256, 8, tokens=3, groups=8, kept=4, rows="saturated"),
        Case("saturated-groups-tie", 64, 6, tokens=3, groups=16, kept=5, rows="saturated"),
        Case("near-ties", 384, 8, tokens=4, rows="near-ties"),
        Case("near-ties-in-groups", 256, 8, tokens=4, groups=8, kept=4, rows="near-ties"),
        Case("balanced", 96, 8, tokens=8, rows="balanced", per_token_bias=True),
        Case(
            "balanced-in-groups",
            *(64, 8),
            tokens=8,
            groups=8,
            kept=4,
            rows="balanced",
            per_token_bias=True,
        ),
        Case("cancelling-groups", 32, 6, tokens=4, groups=8, kept=4, rows="cancelling"),
        Case("float64", 64, 6, logits="float64", bias="float64", rows="near-ties"),
        Case("float64-bias", 64, 6, bias="float64", rows="near-ties"),
        Case("deep", 64, 6, rows="deep"),
        Case("deep-unnormalised", 64, 6, rows="deep", renormalize=False, scale=2.5),
        Case("deep-bf16", 64, 6, rows="deep", logits="bfloat16"),
        Case("masked-experts", 64, 6, rows="masked"),
        Case("masked-experts-in-groups", 64, 6, groups=8, kept=2, rows="masked"),
        Case("k-is-all-of-896", 896, 896, tokens=1),
        Case("special", 8, 4, tokens=8, rows="special"),
        Case("special-unnormalised", 8, 4, tokens=8, rows="special", renormalize=False),
        Case("special-in-groups", 8, 4, tokens=8, rows="special", groups=4, kept=2),
        Case("wild", 24, 5, tokens=6, rows="wild"),
        Case("wild-in-groups", 24, 5, tokens=8, groups=4, kept=2, rows="wild"),
        Case("padded", 32, 4, tokens=5, real=3),
        Case("padded-on-device", 32, 4, tokens=5, real=3, counted_on_device=True),
        Case("padded-minus-one", 32, 4, tokens=5, real=0, counted_on_device=True, padded_id=-1),
        Case("shared-slots", 32, 4, shared=2, scale=2.5),
        Case("shared-and-padded", 32, 3, tokens=4, shared=1, real=2),
        Case("bias-for-each-token", 32, 4, per_token_bias=True),
        Case("no-tokens", 32, 4, tokens=0),
    ]
}


def inputs(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[M, E]`` (strided as the case asks) and bias, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    if case.rows == "offset":
        return offset_bias_case(case.tokens, case.experts, seed=seed)
    shape = (case.tokens, case.experts)
    bias_shape = shape if case.per_token_bias else shape[1:]
    if case.rows == "special":
        logits = special_rows()
    elif case.rows == "ties":
        logits = torch.zeros(shape)
    else:
        logits = torch.randn(shape, generator=generator) * 2
    bias = (
        torch.zeros(bias_shape)
        if case.rows == "ties"
        else torch.randn(bias_shape, generator=generator) * 0.1
    )
    if (
        case.rows == "saturated"
    ):  # float64 tells 30 from 32, float32 does not, and nothing tells 38 from 40
        logits = torch.randint(28, 41, shape, generator=generator).float()
        bias = torch.zeros(bias_shape)
    elif case.rows == "near-ties":  # apart by less than float32 resolves around 7
        logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 1e-7
        bias = 7 + torch.randint(0, 3, bias_shape, generator=generator).double() * 2.0**-30
    elif (
        case.rows == "balanced"
    ):  # every choice is 0.3 but for the last bits, which float32 gets wrong
        logits = torch.randn(shape, generator=generator) * 2
        bias = (0.3 - logits.double().sigmoid()).float()
    elif case.rows == "cancelling":
        logits, bias = _cancelling(case, generator)
    elif case.rows == "deep":  # scores that vanish in float32
        logits = -60 - 60 * torch.rand(shape, generator=generator)
        bias = torch.zeros(bias_shape)
    elif case.rows == "masked":  # an expert that is out of service
        bias[..., ::3] = -math.inf
        bias[..., 1::3] = -1e30
    if case.rows == "wild":
        values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
        for tensor in (logits, bias):
            pick = torch.randint(0, 5, tensor.shape, generator=generator)
            tensor.copy_(
                torch.where(
                    torch.rand(tensor.shape, generator=generator) < 0.5, values[pick], tensor
                )
            )
    logits = logits.to(getattr(torch, case.logits))
    if case.layout == "front":
        wide = torch.full((case.tokens, case.experts + 48), math.nan, dtype=logits.dtype)
        wide[:, 16 : 16 + case.experts] = logits
        logits = wide[:, 16 : 16 + case.experts]
    elif case.layout == "transposed":
        logits = logits.t().contiguous().t()
    return logits, bias.to(getattr(torch, case.bias))


def _cancelling(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The best choices of a group are 1000.5 and -999.5, and two groups compete for the last place.

    The first is ahead by 0.35 of a float32 step; its two sigmoids are rounded down and one of the other's up, so that
    float32 puts it a whole step behind. Their sums are near 1, where a step is a thousand times smaller.
    """
    step, size = 2.0**-14, case.experts // case.groups
    scores = torch.full((case.tokens, case.groups, size), 0.01, dtype=torch.float64)
    for row in scores:
        order = torch.randperm(case.groups, generator=generator)
        row[order[: case.kept - 1], :2] = 0.9
        row[order[case.kept - 1], :2] = 0.5 + 0.45 * step
        row[order[case.kept], :2] = torch.tensor([0.5 + 0.55 * step, 0.5]).double()
    bias = torch.full((case.groups, size), -1000.0)
    bias[:, 0] = 1000.0
    return scores.logit().flatten(1), bias.flatten()


def _to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    # .to() would make a slice dense.
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def run_case(case: Case, device: str, seed: int, backend: str = "triton") -> dict:
    """Runs one case; ``error`` is empty when all rows, the padding and the untouched columns agree."""
    logits, bias = inputs(case, seed)
    width = case.topk + case.shared
    # The outputs are slices, too; what lies beside them must stay.
    weights = torch.full((case.tokens, width + 5), math.nan, device=device)
    ids = torch.full((case.tokens, width + 5), -77, dtype=torch.int32, device=device)
    real = case.tokens if case.real is None else case.real
    count = case.real
    if case.counted_on_device:
        count = torch.tensor([real], dtype=torch.int32, device=device)
    options = {
        "num_expert_group": case.groups,
        "topk_group": case.kept,
        "renormalize": case.renormalize,
        "routed_scaling_factor": case.scale,
    }
    biased_topk(
        _to(logits, device),
        bias.to(device),
        case.topk,
        num_tokens=count,
        padded_id=case.padded_id,
        num_shared_slots=case.shared,
        shared_weight=0.4,
        out=(weights[:, 2 : 2 + width], ids[:, 2 : 2 + width]),
        backend=backend,
        **options,
    )
    weights, ids = weights.cpu(), ids.cpu()
    error = ""
    try:
        for beside in (slice(0, 2), slice(2 + width, None)):
            assert weights[:, beside].isnan().all() and (ids[:, beside] == -77).all(), (
                "written beside the output"
            )
        weights, ids = weights[:, 2 : 2 + width], ids[:, 2 : 2 + width]
        assert not weights[real:].any() and (ids[real:] == case.padded_id).all(), "padded rows"
        weights, ids = weights[:real], ids[:real]
        shared = torch.arange(case.experts, case.experts + case.shared).expand(real, -1)
        assert torch.equal(ids[:, case.topk :].long(), shared), "ids of the shared slots"
        assert (weights[:, case.topk :] == torch.tensor(0.4)).all(), "weights of the shared slots"
        # The interpreter adds the scores one by one, a GPU in a tree: over hundreds, float32 shows it.
        one_by_one = backend == "triton" and device == "cpu" and case.topk > 128
        for row in range(real):
            one = slice(row, row + 1)
            row_bias = bias[row] if case.per_token_bias else bias
            assert_routing(
                weights[one, : case.topk],
                ids[one, : case.topk],
                logits[one],
                row_bias,
                case.topk,
                ordered=backend == "torch",
                rtol=5e-6 if one_by_one else 1e-6,
                **options,
            )
    except AssertionError as failure:
        error = str(failure) or repr(failure)
    return {"case": case.name, "seed": seed, "device": device, "error": error}


def main(patterns: list[str]) -> None:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    seed = int(os.environ.get("CASE_SEED", "0")) or int.from_bytes(os.urandom(3), "big")
    for name, case in CASES.items():
        if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns):
            print(json.dumps(run_case(case, device, seed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
