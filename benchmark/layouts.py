"""Packing a layer's weights and scales, against one torch permute().contiguous() over the whole tensor.

    python benchmark/layouts.py --json benchmark/results/layouts_cpu.json

Each round runs the plain form, ``pack`` into a new tensor, into a given one and in place, ``touch``, which only
writes new memory once (page faults, which every form that returns a new tensor pays), and ``plain_given``, the plain
permutation copied into a given tensor, one after another on the same bytes; a figure is the median over the rounds, a
ratio that of the medians. Peak memory is the growth of the process's
resident set over one call (Linux), beside what the call returns.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_aiter_moe.contract import SCALE_LAYOUTS, WEIGHT_LAYOUTS
from sglang_aiter_moe.evaluation import provenance

# name: (tensor, layout, rows, K): Kimi K3 at TP8 (H 3584, I 384); rows and K as in the checkpoint.
CASES = {
    "w13": ("weight", "separated", 768, 3584),
    "w13 interleaved": ("weight", "gu_interleaved", 768, 3584),
    "w13 gfx1250": ("weight", "gu_interleaved_gfx1250", 768, 3584),
    "w2": ("weight", "separated", 3584, 384),
    "w13 scale": ("scale", "separated", 768, 3584),
    "w13 scale interleaved": ("scale", "a16w4_gate_up", 768, 3584),
    "w13 scale gfx1250": ("scale", "n32k4_gate_up", 768, 3584),
    "w2 scale": ("scale", "separated", 3584, 384),
}


def permuted_weight(raw: torch.Tensor, layout: str) -> torch.Tensor:
    """The permutation as a view."""
    experts, rows, k_bytes = raw.shape
    if layout == "separated":
        tiles = raw.view(experts, rows // 16, 16, k_bytes // 16, 16)
        return tiles.permute(0, 1, 3, 2, 4)
    if layout == "gu_interleaved":
        tiles = raw.view(experts, 2, rows // 32, 16, k_bytes // 16, 16)
        return tiles.permute(0, 2, 1, 4, 3, 5)
    tiles = raw.view(experts, 2, rows // 16, 8, k_bytes // 16, 16)
    return tiles.permute(0, 2, 4, 3, 1, 5)


def permuted_scale(raw: torch.Tensor, layout: str) -> torch.Tensor:
    """The same for scales, their columns padded first."""
    experts, rows, k = raw.shape
    if layout == "n32k4_gate_up":
        split = raw.view(experts, 2, rows // 32, 16, k // 4, 4)
        return split.permute(0, 2, 4, 3, 1, 5)
    raw = torch.nn.functional.pad(raw, (0, -k % 8), value=0x7F)
    k = raw.shape[2]
    if layout == "separated":
        split = raw.view(experts, rows // 32, 2, 16, k // 8, 2, 4)
        return split.permute(0, 1, 4, 6, 3, 5, 2)
    split = raw.view(experts, 2, rows // 32, 16, k // 8, 2, 4)
    return split.permute(0, 2, 4, 6, 3, 5, 1)


def plain_weight(raw: torch.Tensor, layout: str) -> torch.Tensor:
    """The permutation as one torch expression over the whole tensor."""
    return permuted_weight(raw, layout).contiguous().view(raw.shape)


def plain_scale(raw: torch.Tensor, layout: str) -> torch.Tensor:
    """The same for scales."""
    return permuted_scale(raw, layout).contiguous()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_growth(call: Callable[[], object]) -> int | None:
    """Bytes by which the resident set grew at most during a call; None where Linux does not tell."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        result = call()
        peak = _status("VmHWM")
    except OSError:
        return None
    del result
    return max(0, peak - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(field)


def run_case(name: str, experts: int, rounds: int) -> dict[str, object]:
    kind, layout_name, rows, width = CASES[name]
    columns = width // 2 if kind == "weight" else width // 32
    layout = (WEIGHT_LAYOUTS if kind == "weight" else SCALE_LAYOUTS)[layout_name]
    plain = plain_weight if kind == "weight" else plain_scale
    raw = torch.randint(0, 255, (experts, rows, columns), dtype=torch.uint8)
    permuted = permuted_weight if kind == "weight" else permuted_scale
    given = torch.zeros(layout.packed_shape(raw.shape), dtype=torch.uint8)
    other = torch.zeros_like(permuted(raw, layout_name), memory_format=torch.contiguous_format)
    in_place = given.numel() == raw.numel() and given.shape == raw.shape
    forms: dict[str, Callable[[], object]] = {
        "plain": lambda: plain(raw, layout_name),
        "new": lambda: layout.pack(raw),
        "touch": lambda: torch.empty(given.shape, dtype=torch.uint8).fill_(0),
        "given": lambda: layout.pack(raw, out=given),
        "plain_given": lambda: other.copy_(permuted(raw, layout_name)),
    }
    expected = plain(raw, layout_name).reshape(-1)
    if not torch.equal(layout.pack(raw).reshape(-1)[: expected.numel()], expected):
        raise AssertionError(f"{name}: pack differs from the plain form")
    del expected
    growth = {form: peak_growth(call) for form, call in forms.items()}
    if in_place:
        growth["in_place"] = peak_growth(lambda: layout.pack(raw, out=raw))
        forms["in_place"] = lambda: layout.pack(raw, out=raw)
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form, call in forms.items():
            seconds[form].append(timed(call))
    medians = {form: statistics.median(values) for form, values in seconds.items()}
    return {
        "case": name,
        "layout": layout_name,
        "shape": list(raw.shape),
        "bytes": raw.numel(),
        "ms": {form: round(value * 1e3, 3) for form, value in medians.items()},
        "spread": {form: round(max(v) / min(v), 2) for form, v in seconds.items()},
        "speedup": {f: round(medians["plain"] / v, 2) for f, v in medians.items() if f != "plain"},
        "given_of_plain_given": round(medians["plain_given"] / medians["given"], 2),
        "peak_growth_bytes": growth,
        "two_experts_bytes": 2 * rows * columns,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--experts", type=int, default=896, help="K3 has 896; fewer need less memory"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--json", metavar="FILE", help="where to write the figures, - for stdout")
    options = parser.parse_args(argv)
    provenance.may_keep(Path(options.json) if options.json else None)
    torch.set_num_threads(options.threads)
    result = {
        "benchmark": "layouts",
        "machine": f"{platform.machine()}, {platform.processor() or 'CPU'}",
        "torch": torch.__version__,
        "threads": options.threads,
        "experts": options.experts,
        "rounds": options.rounds,
        "cases": [],
    }
    to_stdout = options.json == "-"
    for name in options.case or CASES:
        case = run_case(name, options.experts, options.rounds)
        result["cases"].append(case)
        print(
            f"{name:24s} plain {case['ms']['plain']:9.1f} ms  "
            + "  ".join(f"{form} {value:.2f}x" for form, value in case["speedup"].items()),
            file=sys.stderr if to_stdout else sys.stdout,
        )
    text = json.dumps(provenance.provenance() | result, indent=1) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    elif options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(text)
    packs = ("new", "given", "in_place")
    slow = [
        case["case"]
        for case in result["cases"]
        if min(value for form, value in case["speedup"].items() if form in packs) < 1
    ]
    if slow:
        print(f"slower than the plain form: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
