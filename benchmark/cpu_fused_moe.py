#!/usr/bin/env python3
"""``portable.fused_moe`` on CPU: one Kimi-K3 layer with all experts resident, time of a call and peak memory.

Packed weights are random bytes (every byte is a pair of E2M1 codes), scales 2^-10 to 2^-5. After one warm-up
call, each timed call routes to another random set of experts. Beside it, in the same round, the float32 matrix
products alone are timed, for as many experts and rows on one decoded expert: the ratio says what decoding,
layouts, quantisation and dispatch add. Processor time is given as well, which a busy machine disturbs less.

    python benchmark/cpu_fused_moe.py                      # K3, 1 token, all three modes
    python benchmark/cpu_fused_moe.py --tokens 8 --calls 5 --json result.json

JSON: for each mode the median, least and largest seconds per call, processor seconds and the ratio; for the process
peak and packed bytes. Exits with 1 when a median reaches ``--limit-s`` or the peak exceeds the packed weights by
``--limit-gb``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.evaluation import provenance

MODES = {
    "A16W4": {},
    "A8W4": {"AITER_SITUV2_A8W4": "1"},
    "A4W4": {"AITER_SITUV2_A4W4": "1"},
}
FLAGS = ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4")
GB = 1 << 30


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def packed_weights(experts: int, hidden: int, inter: int) -> dict[str, torch.Tensor]:
    """Random packed weights and scales of one layer, filled in place."""

    def fill(shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8).random_(low, high)

    def columns(k: int) -> int:  # scale columns are padded to 8
        return -(-k // 32 // 8) * 8

    weights = {
        "w1": fill((experts, 2 * inter, hidden // 2), 0, 256).view(torch.float4_e2m1fn_x2),
        "w2": fill((experts, hidden, inter // 2), 0, 256).view(torch.float4_e2m1fn_x2),
        "w1_scale": fill((experts * 2 * inter, columns(hidden)), 117, 123),
        "w2_scale": fill((experts * hidden, columns(inter)), 117, 123),
    }
    for name in ("w1", "w2"):
        weights[name].is_shuffled = True
    return weights


def route(tokens: int, experts: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights ``[M, K]``: distinct random experts, equal weights."""
    ids = torch.rand(tokens, experts).topk(topk, dim=-1).indices.to(torch.int32)
    return ids, torch.full((tokens, topk), 1 / topk)


def seconds(call) -> tuple[float, float]:
    """Wall time and processor time (of all threads) of a call."""
    wall, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - busy


def measure(args: argparse.Namespace) -> dict:
    """The report."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    before = peak_bytes()
    weights = packed_weights(args.experts, args.hidden, args.inter)
    packed = sum(t.numel() * t.element_size() for t in weights.values())
    x = torch.randn(args.tokens, args.hidden).to(torch.bfloat16)
    loaded = peak_bytes()
    x32 = torch.randn(1, args.hidden)
    w13, w2 = torch.randn(2 * args.inter, args.hidden), torch.randn(args.hidden, args.inter)

    def products(ids: torch.Tensor) -> None:
        for rows in torch.bincount(ids.reshape(-1)).tolist():
            if rows:
                (x32.expand(rows, -1) @ w13.T)[:, : args.inter] @ w2.T

    modes = {}
    with portable.installed(arch="gfx950", aiter="0.1.20") as aiter:
        activation = aiter.modules["aiter"].ActivationType.Situv2
        for mode in args.modes:
            for flag in FLAGS:
                os.environ.pop(flag, None)
            os.environ.update(MODES[mode])

            def call(ids, topk_weights):
                out = portable.fused_moe(
                    x,
                    topk_weight=topk_weights,
                    topk_ids=ids,
                    activation=activation,
                    quant_type=portable.QuantType.per_1x32,
                    beta=4.0,
                    linear_beta=25.0,
                    **weights,
                )
                assert not out.isnan().any()

            call(*route(args.tokens, args.experts, args.topk))
            times, busy, ratios = [], [], []
            for _ in range(args.calls):
                ids, topk_weights = route(args.tokens, args.experts, args.topk)
                bare, _ = seconds(lambda i=ids: products(i))
                wall, cpu = seconds(lambda i=ids, w=topk_weights: call(i, w))
                times.append(wall)
                busy.append(cpu)
                ratios.append(wall / bare)
            modes[mode] = {
                "median_s": statistics.median(times),
                "min_s": min(times),
                "max_s": max(times),
                "median_cpu_s": statistics.median(busy),
                "ratio_to_products": statistics.median(ratios),
            }
    peak = peak_bytes()
    return {
        "shape": {k: getattr(args, k) for k in ("experts", "topk", "hidden", "inter", "tokens")},
        "calls": args.calls,
        "modes": modes,
        "packed_bytes": packed,
        "peak_bytes": peak,
        "peak_over_packed_bytes": peak - packed,
        "peak_before_weights_bytes": before,
        "peak_growth_of_calls_bytes": peak - loaded,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "threads": args.threads,
            "load_average": os.getloadavg()[0],
            "torch": torch.__version__,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--topk", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--inter", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; 1 is what a busy machine bears"
    )
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--limit-s", type=float, default=1.0)
    parser.add_argument("--limit-gb", type=float, default=1.0)
    parser.add_argument("--json", default="-", help="where to write the report")
    args = parser.parse_args()
    provenance.may_keep(Path(args.json))
    report = measure(args)
    slow = [m for m, r in report["modes"].items() if r["median_s"] >= args.limit_s]
    large = report["peak_over_packed_bytes"] > args.limit_gb * GB
    report["passed"] = not slow and not large
    text = json.dumps(provenance.provenance() | report, indent=2)
    if args.json == "-":
        print(text)
    else:
        Path(args.json).write_text(text + "\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
