#!/usr/bin/env python3
"""The Triton backend at full size on this GPU against float32: every token count, random routing and all tokens on the
same experts, poisoned outputs and scratch memory, guard bytes around every operand.

    python benchmark/check_kernels.py --json benchmark/results/kernel_checks_h200.json

The reference multiplies dequantised weights in float32 (TF32 off) on the GPU, with the mode's rounding of activations.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch
import triton
from kernels import rounding
from moe_layers import SHAPES, Layer

from sglang_aiter_moe.numerics.metrics import logits_diff, relative_error
from sglang_aiter_moe.portable import triton as backend
from sglang_aiter_moe.portable.triton import workspace
from sglang_aiter_moe.testing.triton_cases import guarded, guards_intact

K3_TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = (1, 4, 8, 16, 64, 128, 255, 256, 257, 1024, 4096)
LIMIT = {"A16W4": 4e-3, "A8W4": 6e-3, "A4W4": 1.5e-2}
LAYERS = {
    "k3": ("separated", False, K3_TOKENS),
    "k3-gui": ("gu_interleaved", False, TOKENS),
    "oss": ("separated", True, TOKENS),
    "oss3072": ("gu_interleaved", True, TOKENS),
    "oss-tp2": ("gu_interleaved", True, TOKENS),
    "oss-tp4": ("gu_interleaved", True, TOKENS),
    "oss-tp8": ("gu_interleaved", True, TOKENS),
    "silu": ("gu_interleaved", False, TOKENS),
}
"""Layout, biases, token counts."""


class Guarded:
    """A layer's operands between guard bytes."""

    def __init__(self, layer: Layer) -> None:
        self.weights, arenas = zip(*(guarded(t, "cuda") for t in layer.packed), strict=True)
        self.arenas = list(arenas)

    def run(self, request, x, ids, weights) -> tuple[torch.Tensor, bool]:
        """The output, and whether all guards held."""
        out = torch.full_like(x, float("nan"))
        (x, ids, weights, out), arenas = zip(
            *(guarded(t, "cuda") for t in (x, ids, weights, out)), strict=True
        )
        workspace.poison(x.device)
        backend.run(request, x, *self.weights, weights, ids, out)
        torch.cuda.synchronize()
        return out, all(guards_intact(a) for a in (*arenas, *self.arenas))


def check(name: str, modes: list[str], most: int) -> list[dict]:
    layout, bias, counts = LAYERS[name]
    counts = tuple(c for c in counts if c <= most)
    layer = Layer(name.removesuffix("-gui"), layout, bias=bias)
    operands = Guarded(layer)
    rows = []
    for routing in ("random", "one"):
        some = counts if routing == "random" else tuple(c for c in counts if c <= 4096)
        x, ids, weights = layer.inputs(max(some), 5)
        if routing == "one":
            ids = ids[:1].expand_as(ids).contiguous()
        for mode in modes:
            reference = layer.reference(x, ids, weights, rounding(mode))
            for tokens in some:
                row = {"shape": name, "mode": mode, "tokens": tokens, "routing": routing}
                part = x[:tokens], ids[:tokens], weights[:tokens]
                out, guards = operands.run(layer.request(mode), *part)
                again, _ = operands.run(layer.request(mode), *part)
                row["rel_err"] = relative_error(out.float(), reference[:tokens])
                row["logits_diff"] = logits_diff(out.float(), reference[:tokens])
                row["guards"] = guards
                row["same_bits"] = bool(torch.equal(out, again))
                row["ok"] = guards and row["same_bits"] and row["rel_err"] < LIMIT[mode]
                rows.append(row)
                if not row["ok"]:
                    print("WRONG", row, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--modes", default="A16W4,A8W4,A4W4")
    parser.add_argument("--most-tokens", type=int, default=1 << 30, help="no larger counts")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    rows = []
    for name in a.layers.split(","):
        mine = check(name, a.modes.split(","), a.most_tokens)
        rows += mine
        worst = max(r["rel_err"] for r in mine)
        print(f"{name}: {sum(r['ok'] for r in mine)} of {len(mine)} right, worst error {worst:.2e}")
    if a.json:
        facts = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": a.commit,
            "command": " ".join(["python", *sys.argv]),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "shapes": {n: vars(SHAPES[n.removesuffix("-gui")]) for n in LAYERS},
        }
        a.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return int(not all(r["ok"] for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
