"""``python -m sglang_aiter_moe.testing.routing_graphs [I/N]``: captured CUDA graphs under a bias that changes.

The bias changes, only the graph replays, a float64 reference decides. Prints a JSON line for each combination (of
the I-th of N parts, which may run side by side).
"""

from __future__ import annotations

import json
import math
import sys

import torch

from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.patches import glue
from sglang_aiter_moe.portable.routing import biased_grouped_topk, biased_topk
from sglang_aiter_moe.srt.layers.moe.topk import (
    TopKConfig,
    refresh_correction_biases,
    routing_dtype,
)
from sglang_aiter_moe.testing.routing import (
    BIAS_CHANGES,
    IN_PLACE,
    assert_routing,
    reference_routing,
)

SHAPES = {"kimi-k3": (896, 16, 1, 1), "deepseek-v3": (256, 8, 8, 4)}
"""Experts, top-k, groups, groups kept."""

DTYPE_PAIRS = [
    ("bfloat16", "float32"),
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
]
"""Logits, bias."""

ROUTES = ("parameter", "select_experts", "aiter")
"""``parameter``: the kernel reads the parameter itself, so what is written in place needs no refresh.
``select_experts``: SGLang's function with the patches, on a GPU: the fused kernel reads the copy that the owner
keeps. ``aiter``: the same on ROCm: logits widened, AITER's entry point called."""

TOKENS = 32


def replay_after_change(
    shape: str, route: str, logits_dtype: str, bias_dtype: str, change: str
) -> dict:
    """Captures a routing, changes the bias, replays once, compares. Runs on the current CUDA device."""
    experts, topk, groups, kept = SHAPES[shape]
    logits = (torch.randn(TOKENS, experts, device="cuda") * 2).to(getattr(torch, logits_dtype))
    first, second = (
        (torch.randn(experts, device="cuda") + 7).to(getattr(torch, bias_dtype)) for _ in range(2)
    )
    config = TopKConfig(
        top_k=topk,
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=kept,
        correction_bias=torch.nn.Parameter(first.clone(), requires_grad=False),
    )
    weights = torch.empty(TOKENS, topk, device="cuda")
    ids = torch.empty(TOKENS, topk, dtype=torch.int32, device="cuda")
    options = {"num_expert_group": groups, "topk_group": kept}

    def forward() -> None:
        if route == "parameter":
            biased_topk(logits, config.correction_bias, topk, out=(weights, ids), **options)
        else:
            glue.select_experts(route_as_sglang, None, logits, config)

    def route_as_sglang(hidden_states, wide, topk_config) -> None:
        if route == "select_experts":
            biased_topk(wide, topk_config.correction_bias, topk, out=(weights, ids), **options)
        else:
            bias = topk_config.correction_bias_for_dtype(wide.dtype)
            assert wide.dtype == bias.dtype == routing_dtype(logits.dtype, first.dtype)
            biased_grouped_topk(wide, bias, weights, ids, groups, kept, True)

    forward()  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    graph.replay()
    before = [set(row) for row in ids.tolist()]

    BIAS_CHANGES[change](config, second)
    if route != "parameter":
        refresh_correction_biases()  # what the update entry points do
    weights.fill_(math.nan)
    ids.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()

    expected = [row for row, _ in reference_routing(logits.cpu(), second.cpu(), topk, **options)]
    found = ids.tolist()
    agree = True
    try:
        result = weights.cpu(), ids.cpu(), logits.cpu(), second.cpu()
        assert_routing(*result, topk, ordered=False, **options)
    except AssertionError:
        agree = False
    return {
        "shape": shape,
        "route": route,
        "logits": logits_dtype,
        "bias": bias_dtype,
        "change": change,
        "rows": TOKENS,
        "rows_that_differ": sum(set(a) != set(b) for a, b in zip(found, expected, strict=True)),
        "rows_that_the_change_moved": sum(
            a != set(b) for a, b in zip(before, expected, strict=True)
        ),
        "weights_agree": agree,
    }


def combinations() -> list[tuple[str, str, str, str, str]]:
    """Shape, route, dtypes and change. A replaced storage is out of reach of a graph that reads the parameter."""
    return [
        (shape, route, logits, bias, change)
        for shape in SHAPES
        for route in ROUTES
        for logits, bias in DTYPE_PAIRS
        for change in (IN_PLACE if route == "parameter" else BIAS_CHANGES)
    ]


def main(part: int = 0, parts: int = 1) -> None:
    print(json.dumps(provenance.provenance()), flush=True)
    for combination in combinations()[part::parts]:
        print(json.dumps(replay_after_change(*combination)), flush=True)


if __name__ == "__main__":
    main(*(int(n) for n in sys.argv[1].split("/")) if len(sys.argv) > 1 else ())
