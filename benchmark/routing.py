"""Biased top-k routing on a GPU, by graph replay: the fused kernel against the eager cast + top-k and SGLang's routers.

    python benchmark/routing.py --json FILE [--sglang-source DIR] [--peer-build DIR]   # a missing peer is named

For each shape and number of tokens, ``SETS`` independent inputs go into one CUDA graph per router, one call each; the
time is the median of the replays over ``SETS``. Every router is compared with float64 first. The launch floor is an
empty kernel of the same grid, timed the same way; the copy bandwidth is a device-to-device copy, read + written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
import routing_peers

from sglang_aiter_moe.portable.routing import biased_topk
from sglang_aiter_moe.portable.triton.biased_topk import THRESHOLDS, biased_topk_triton

SHAPES = {"kimi-k3": (896, 16, 1, 1, 2.827), "deepseek-v3": (256, 8, 8, 4, 2.5)}
"""Experts, top-k, groups, groups kept, routed scaling factor."""
DTYPES = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
]
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192]
REPLAYS = 40


@triton.jit
def _empty(pointer):
    pass


def eager(logits, bias, topk, groups, kept, scale):
    """Cast, sigmoid, bias, groups, top-k, gather, normalise: one launch each."""
    scores = logits.to(torch.float32).sigmoid()
    choice = scores + bias.to(torch.float32)
    if groups > 1:
        best = choice.view(len(choice), groups, -1).topk(2, dim=2).values.sum(dim=2)
        kept_groups = best.topk(kept, dim=1, sorted=False).indices
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept_groups, True)
        mask = mask.repeat_interleave(choice.shape[1] // groups, dim=1, output_size=choice.shape[1])
        choice = choice.masked_fill(~mask, -torch.inf)
    ids = choice.topk(topk, dim=1, sorted=False).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(dim=1, keepdim=True) * scale
    return weights, ids.to(torch.int32)


def fused(num_warps: int | None = None, threshold: str | None = None) -> routing_peers.Router:
    """The kernel; with ``num_warps`` or ``threshold`` a variant of it."""

    def route(logits, bias, topk, groups, kept, scale):
        options = {
            "num_expert_group": groups,
            "topk_group": kept,
            "renormalize": True,
            "routed_scaling_factor": scale,
        }
        if num_warps is None and threshold is None:
            return biased_topk(logits, bias, topk, **options)
        out = (
            torch.empty(len(logits), topk, device=logits.device),
            torch.empty(len(logits), topk, dtype=torch.int32, device=logits.device),
        )
        options |= {"num_tokens": None, "padded_id": 0, "shared_weight": 1.0}
        biased_topk_triton(
            logits, bias, topk, out, num_warps=num_warps, threshold=threshold, **options
        )
        return out

    return route


def compare(router, logits, bias, topk, groups, kept, scale) -> dict:
    """Rows whose chosen float64 choices are not the largest, and the largest relative error of the weights."""
    weights, ids = router(logits, bias, topk, groups, kept, scale)
    ids = ids.long()
    scores = logits.double().sigmoid()
    choice = scores + bias.double()
    if groups > 1:
        best = choice.view(len(choice), groups, -1).topk(2, dim=2).values.sum(dim=2)
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, best.topk(kept, dim=1).indices, True
        )
        choice = choice.masked_fill(
            ~mask.repeat_interleave(choice.shape[1] // groups, dim=1), -torch.inf
        )
    # By value: experts that tie exactly may stand for each other.
    found = choice.gather(1, ids).sort(dim=1, descending=True).values
    differ = (found != choice.topk(topk, dim=1).values).any(dim=1)
    expected = scores.gather(1, ids)
    expected = expected / expected.sum(dim=1, keepdim=True) * scale
    return {
        "rows": len(ids),
        "rows_that_differ": int(differ.sum()),
        "weight_error": float(f"{((weights.double() - expected) / expected).abs().max():.2e}"),
    }


def graph_us(call: Callable, sets: list[tuple]) -> dict:
    """Microseconds a call: median and quartiles over the replays of one graph with a call for each set."""
    for inputs in sets[:2]:
        call(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*inputs) for inputs in sets]  # noqa: F841 - outputs of all sets, so that none is reused
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(sets))
    quartiles = statistics.quantiles(times, n=4)
    return {
        name: round(value, 3) for name, value in zip(("q1", "us", "q3"), quartiles, strict=True)
    }


def copy_bandwidth() -> float:
    """Device-to-device copy of 4 GB, TB/s read + written."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times[2:]) / 1e9


def routers_for(shape: str, peers: dict, variants: list[str]) -> dict:
    routers = {"fused": fused(), "eager": eager} | peers
    if SHAPES[shape][2] == 1:
        routers.pop("flashinfer", None)  # takes at most 384 experts in one group
        routers.pop("sglang-compiled", None)  # SGLang takes its fused routers for this shape
    else:
        routers.pop("sglang-triton", None)  # the same as "sglang" here
    for variant in variants:
        threshold, _, warps = variant.partition("-")
        routers[f"fused, {variant}"] = fused(int(warps), threshold)
    return routers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--sglang-source", type=Path, help="folder that holds an unpacked sglang release"
    )
    parser.add_argument(
        "--peer-build", type=Path, help="folder with route_radix.so and dsv3_routing.so"
    )
    parser.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=TOKENS)
    parser.add_argument("--dtypes", type=int, default=len(DTYPES), help="the first so many pairs")
    parser.add_argument(
        "--variants",
        type=lambda s: s.split(","),
        default=[],
        help=f"also time these forms of the kernel: one of {', '.join(THRESHOLDS)}, '-', warps",
    )
    parser.add_argument(
        "--compile-only", metavar="I/N", help="only compile the I-th of N parts, to fill the cache"
    )
    parser.add_argument("--commit", help="where the code is no git checkout")
    args = parser.parse_args()

    peers, missing = routing_peers.load(args.sglang_source, args.peer_build)
    part, parts = (int(n) for n in args.compile_only.split("/")) if args.compile_only else (0, 1)
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit or commit(),
        "peers_missing": missing,
        "copy_tb_s": None if args.compile_only else copy_bandwidth(),
        "results": [],
    }
    work = [(s, d, n) for s in SHAPES for d in DTYPES[: args.dtypes] for n in args.tokens]
    seen = 0
    for shape, (logits_dtype, bias_dtype), tokens in work:
        experts, topk, groups, kept, scale = SHAPES[shape]
        count = max(4, min(32, 64 * 1024 * 1024 // (tokens * experts * 4)))
        sets = [
            (
                (torch.randn(tokens, experts, device="cuda") * 2).to(getattr(torch, logits_dtype)),
                (torch.randn(experts, device="cuda") * 0.1 + 7).to(getattr(torch, bias_dtype)),
                topk,
                groups,
                kept,
                scale,
            )
            for _ in range(count)
        ]
        row = {
            "shape": shape,
            "logits": logits_dtype,
            "bias": bias_dtype,
            "tokens": tokens,
            "routers": {},
        }
        for name, router in routers_for(shape, peers, args.variants).items():
            seen += 1
            if args.compile_only:
                if seen % parts == part:
                    router(*sets[0])
                continue
            try:
                row["routers"][name] = compare(router, *sets[0]) | graph_us(router, sets)
            except Exception as error:
                row["routers"][name] = {"error": f"{type(error).__name__}: {error}"}
        if args.compile_only:
            continue
        row["floor"] = graph_us(lambda logits, *_: _empty[(len(logits),)](logits), sets)
        bytes_moved = sum(t.nbytes for t in sets[0][:2]) + tokens * topk * 8
        row["bytes"] = bytes_moved
        report["results"].append(row)
        print(line(row), flush=True)
        if args.json:  # as far as it has come, should the device be taken away
            args.json.write_text(json.dumps(report) + "\n")


def line(row: dict) -> str:
    cells = [
        f"{row['shape']} {row['logits']}/{row['bias']} M={row['tokens']} floor {row['floor']['us']:.2f}"
    ]
    for name, r in row["routers"].items():
        if "error" in r:
            cells.append(f"{name} failed: {r['error'][:200]}")
        else:
            differ = f" ({r['rows_that_differ']} rows differ)" if r["rows_that_differ"] else ""
            cells.append(f"{name} {r['us']:.2f}{differ}")
    return " | ".join(cells)


def commit() -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
