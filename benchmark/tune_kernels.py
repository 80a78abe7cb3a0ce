#!/usr/bin/env python3
"""Regenerates tables/hopper.json: times every candidate of every form at each token count and keeps the fastest.

    python benchmark/tune_kernels.py [--out FILE] [--shapes k3,oss] [--modes A16W4,A8W4,A4W4]

A candidate that does not build or is not right (relative error against float32 above the mode's limit) is left out.
The bound of a row lies between two token counts (geometric mean) where the winner changes.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import triton
from kernels import rounding
from moe_layers import Layer, number_of_sets, time_graph

from sglang_aiter_moe.numerics.metrics import relative_error
from sglang_aiter_moe.portable.triton import workspace
from sglang_aiter_moe.portable.triton.hopper import table
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import Fp8Config, Ring
from sglang_aiter_moe.portable.triton.hopper.launch import ListConfig, TokenConfig
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_launch import MxPrefillConfig
from sglang_aiter_moe.portable.triton.hopper.prefill_launch import PrefillConfig
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_launch import Rings, SharedPrefillConfig
from sglang_aiter_moe.portable.triton.hopper.whole_launch import WholeConfig
from sglang_aiter_moe.portable.triton.hopper.wide_launch import WideConfig

LIMIT = {"A16W4": 4e-3, "A8W4": 1e-2, "A4W4": 4e-2}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
R = Ring
S = SharedPrefillConfig
KEPT = {"tiles": 7, "kept": True}
ONE, TWO = (3, 1), (12, 4)
"""Tail and unit of the stages."""
CANDIDATES = {
    "short": [
        WholeConfig(3, most_tokens=1), WholeConfig(3, halves=True), WholeConfig(4, halves=True),
        TokenConfig(32, 4, 7, 16, 1, 2, 8), TokenConfig(16, 4, 7, 16, 1, 2, 8), TokenConfig(32, 2, 2, 16, 1, 2, 4),
        TokenConfig(32, 1, 4, 16, 1, 2, 4), ListConfig(32, 1, 4, 32, 4, 3), ListConfig(32, 1, 1, 32, 4, 3),
        Fp8Config(8, R(4, 16, 4, 2), R(4, 16, 4, 3)), Fp8Config(8, R(4, 16, 2, 3), R(4, 16, 4, 3)),
        Fp8Config(16, R(4, 16, 3, 2), R(4, 16, 3, 3), 1024), Fp8Config(16, R(4, 16, 3, 2), R(4, 16, 5, 2)),
        Fp8Config(16, R(8, 8, 3, 2), R(4, 16, 3, 3)),
        Fp8Config(8, R(4, 16, 4, 2), R(4, 16, 4, 3), 1024, by_row=True),
        Fp8Config(16, R(4, 16, 3, 2), R(4, 16, 3, 3), 1024, by_row=True),
        Fp8Config(16, R(4, 16, 3, 2, *ONE), R(4, 16, 3, 3, *TWO), 1024),
        Fp8Config(8, R(4, 16, 4, 2, *ONE), R(4, 16, 4, 3, *TWO), 1024, by_row=True),
        Fp8Config(16, R(4, 16, 3, 2, *ONE), R(4, 16, 3, 3, *TWO), 1024, by_row=True),
        PrefillConfig(8, tiles=4, regs1=64, regs2=64), PrefillConfig(16, tiles=4, regs1=64, regs2=64),
        PrefillConfig(32, tiles=7, regs1=80, regs2=80), PrefillConfig(64, tiles=7, regs1=128, regs2=128),
        PrefillConfig(96, tiles=7, regs1=128, regs2=128), PrefillConfig(160, tiles=7),
        MxPrefillConfig(32, 64, 4, 64, 4, 7, 96, 128), MxPrefillConfig(96, 64, 4, 64, 4, 7, 168, 168),
        MxPrefillConfig(160, tiles=7),
        WideConfig(32, 0, R(8, 16, 3, 1), R(8, 16, 2, 2)), WideConfig(32, 0, R(8, 16, 3, 1), R(8, 16, 3, 1)),
        S(96, Rings(8, 6), Rings(6, 8), **KEPT), S(96, Rings(8, 6), Rings(6, 6, groups=4, looped=True), **KEPT),
        S(160, Rings(8, steps=2), Rings(6, 8), **KEPT),
    ],
    "long": [
        WholeConfig(3, most_tokens=1), WholeConfig(3, halves=True), WholeConfig(4, halves=True),
        WholeConfig(3, most_tokens=3, halves=True, narrow=True),
        TokenConfig(32, 4, 6, 16, 4, 5, 16), TokenConfig(16, 4, 6, 16, 4, 5, 16), TokenConfig(32, 2, 2, 32, 2, 2, 8),
        ListConfig(32, 1, 1, 32, 1, 2), ListConfig(32, 1, 2, 32, 1, 2),
        Fp8Config(8, R(4, 16, 2, 3), R(4, 16, 2, 3)), Fp8Config(8, R(4, 16, 5, 2), R(4, 16, 2, 3)),
        Fp8Config(16, R(4, 16, 3, 2), R(4, 16, 3, 2), 1024), Fp8Config(16, R(8, 8, 3, 2), R(8, 8, 3, 2)),
        Fp8Config(8, R(4, 16, 4, 2), R(4, 16, 4, 2), 1024, by_row=True),
        Fp8Config(8, R(4, 16, 4, 2), R(8, 16, 4, 1), 1024, by_row=True),
        Fp8Config(16, R(4, 16, 3, 2), R(4, 16, 3, 2), 1024, by_row=True),
        PrefillConfig(16, regs1=64, regs2=64), PrefillConfig(32, regs1=80, regs2=80),
        PrefillConfig(64, regs1=128, regs2=128), PrefillConfig(96, regs1=128, regs2=128), PrefillConfig(160),
        PrefillConfig(128, r1=256, r2=256),
        MxPrefillConfig(48, regs1=128, regs2=128), MxPrefillConfig(48, 64, 4, 64, 4, 0, 128, 128), MxPrefillConfig(160),
        WideConfig(32, 0, R(8, 16, 3, 1), R(8, 16, 3, 1)), WideConfig(32, 16, R(8, 16, 2, 1), R(8, 16, 2, 1)),
        S(160, Rings(8, steps=2), Rings(6, 8), 7, True), S(160, Rings(7, 6, steps=2), Rings(7, 6, steps=2)),
    ],
}  # fmt: skip


def form_of(config) -> str:
    return next(name for name, (kind, _, _) in table.FORMS.items() if type(config) is kind)


PLAUSIBLE = {
    "whole": (1, 4),
    "tokens": (1, 8),
    "list": (8, 512),
    "fp8": (2, 256),
    "prefill": (64, 1 << 30),
    "mx_prefill": (64, 1 << 30),
    "wide": (64, 8192),
    "shared_prefill": (64, 1 << 30),
}
"""Token counts at which a form is timed; outside it was never within 1.5 of the best."""


def reaches_words(config) -> bool:
    """Whether its form reads weights at any multiple of 4 bytes: the last row is for those that the best one cannot."""
    return table.ALIGNMENT.get(form_of(config), table.WORDS)[0] <= table.WORDS[0]


def right(layer: Layer, mode: str) -> list:
    """The candidates that support the mode, build, and agree with float32 on 3 and on 40 tokens."""
    request = layer.request(mode)
    found = CANDIDATES[table.group(request).split()[1]]
    found = [
        c
        for c in found
        if table.FORMS[form_of(c)][1](request, layer.packed[2], layer.packed[3])
        and (mode == "A8W4" or not getattr(c, "by_row", False))
    ]
    for tokens in (3, 40):
        inputs = layer.inputs(tokens, 11)
        reference = layer.reference(*inputs, rounding(mode))
        kept = []
        for config in found:
            x, ids, weights = inputs
            out = torch.full_like(x, float("nan"))
            try:
                workspace.poison(x.device)
                table.FORMS[form_of(config)][2](
                    request, x, *layer.packed, weights, ids, out, config
                )
                error = relative_error(out.float(), reference)
            except Exception as problem:
                print("left out", mode, config, repr(problem)[:200], flush=True)
                continue
            if error < LIMIT[mode]:
                kept.append(config)
            else:
                print("left out", mode, config, f"rel err {error:.2e}", flush=True)
        found = kept
    return found


def tune(layer: Layer, mode: str, tokens: tuple[int, ...]) -> list[dict]:
    request = layer.request(mode)
    candidates = right(layer, mode)
    winners, fallback = [], None
    for count in tokens:
        sets = [layer.inputs(count, 1 + s) for s in range(number_of_sets(count))]
        out = torch.empty_like(sets[0][0])
        timed = []
        for config in candidates:
            least, most = PLAUSIBLE[form_of(config)]
            if mode == "A16W4" and not least <= count <= most:
                continue
            if count > getattr(config, "most_tokens", count):
                continue
            runner = table.FORMS[form_of(config)][2]
            calls = [
                lambda s=s: runner(request, s[0], *layer.packed, s[2], s[1], out, config)  # noqa: B023
                for s in sets
            ]
            timed.append((time_graph(calls, 0.05)["us"], config))
        timed.sort(key=lambda pair: pair[0])
        print(layer.name, mode, count, [(round(us, 1), str(c)) for us, c in timed[:5]], flush=True)
        if timed:
            winners.append((count * layer.shape.topk, timed[0][1]))
            fallback = next((c for _, c in timed if reaches_words(c)), None)
    rows = []
    for (pairs, config), following in zip(winners, [*winners[1:], (None, None)], strict=True):
        if following[1] != config:
            bound = None if following[0] is None else round(math.sqrt(pairs * following[0]))
            rows.append(table.row_json(bound, form_of(config), config))
    if fallback and not reaches_words(winners[-1][1]):
        rows.append(table.row_json(None, form_of(fallback), fallback))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=table.TABLES / "hopper.json")
    parser.add_argument("--shapes", default="k3,oss")
    parser.add_argument("--modes", default="A16W4,A8W4,A4W4")
    arguments = parser.parse_args()
    groups = json.loads((table.TABLES / "hopper.json").read_text())["groups"]  # the others stay
    for shape in arguments.shapes.split(","):
        layer = Layer(shape)
        for mode in arguments.modes.split(","):
            groups[table.group(layer.request(mode))] = tune(layer, mode, TOKENS)
        del layer
        torch.cuda.empty_cache()
    note = f"{torch.cuda.get_device_name()}, Triton {triton.__version__}"
    arguments.out.write_text(json.dumps({"note": note, "groups": groups}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
