#!/usr/bin/env python3
"""What a layer of many tokens needs at least, counted: microseconds of each resource of an H200, by stage. No GPU.

    python benchmark/prefill_counts.py

A program takes 128 rows of one expert and a block of up to T of its tokens, fp8 by fp8. Counted are the products of the
columns that a block computes ("matrix"), the bytes that programs ask of L2, those that memory must move once, and
shared memory's bytes if both operands of ``wgmma`` come from there and a step's weights are decoded into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import column_choices

CLOCK = 1.755e9
SMS = 132
DRAM = 4.26e12
"""Bytes a second that a copy moves (docs/performance.md)."""
L2 = 5.9e12
"""Bytes a second, the most that was seen between L2 and the SMs (docs/kernel-notes.md, version 9)."""
SHARED = 128 * CLOCK * SMS
STEP = 128
"""Columns of K a step, and rows of a program."""
WORDS = STEP * STEP // 2 + STEP * STEP // 32


@dataclass(frozen=True)
class Layer:
    hidden: int
    inter: int
    experts: int
    topk: int


LAYERS = {"K3": Layer(3584, 384, 896, 16), "gpt-oss": Layer(2880, 2880, 128, 4)}
SIZES = (("K3", 1024, 32), ("K3", 4096, 96), ("K3", 8192, 160), ("gpt-oss", 1024, 48), ("gpt-oss", 4096, 160),
         ("gpt-oss", 8192, 160))  # fmt: skip


def blocks(pairs: float, most: int) -> dict[tuple[int, ...], tuple[float, float]]:
    """Columns of the parts -> (blocks, tokens in them) expected of an expert with about ``pairs`` tokens."""
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    choices = [tuple(n for n in c if n) for c in column_choices(most)]
    spread = math.sqrt(pairs)
    for count in range(max(0, int(pairs - 5 * spread)), int(pairs + 5 * spread) + 1):
        chance = math.exp(-((count - pairs) ** 2) / (2 * pairs)) / (spread * math.sqrt(2 * math.pi))
        while count > 0:
            tokens = min(count, most)
            parts = next(c for c in choices if sum(c) >= tokens)
            number, held = found.get(parts, (0.0, 0.0))
            found[parts] = number + chance, held + chance * tokens
            count -= tokens
    return found


def stage(layer: Layer, tokens: int, most: int, which: int) -> dict[str, float]:
    """Microseconds of "matrix", "shared", "L2" and "DRAM", each as if it were alone."""
    pairs = tokens * layer.topk
    columns, rows = (layer.hidden, 2 * layer.inter) if which == 1 else (layer.inter, layer.hidden)
    steps, tiles = math.ceil(columns / STEP), math.ceil(rows / STEP)
    again = 1 if columns > 512 else 1 / 7  # stage 2 may keep a block's tokens for seven tiles
    matrix = shared = l2 = 0.0
    for parts, (number, held) in blocks(pairs / layer.experts, most).items():
        here = layer.experts * tiles * steps
        asked = number * WORDS + held * STEP * again
        matrix += here * number * sum(8 * n / 2 for n in parts)
        reads = number * sum(8 * (64 + n) * 32 for n in parts)
        shared += here * (reads + number * (WORDS + STEP * STEP) + asked)
        l2 += here * asked + (layer.experts * tiles * held * 2 * STEP if which == 2 else 0)
    moved = layer.experts * rows * columns * 17 / 32
    moved += (
        tokens * layer.hidden + pairs * layer.inter
        if which == 1
        else pairs * (layer.inter + 2 * layer.hidden)
    )
    return {
        "matrix": matrix / SMS / CLOCK * 1e6, "shared": shared / SHARED * 1e6, "L2": l2 / L2 * 1e6,
        "DRAM": moved / DRAM * 1e6,
    }  # fmt: skip


def main() -> int:
    for name, tokens, most in SIZES:
        for which in (1, 2):
            counts = stage(LAYERS[name], tokens, most, which)
            shown = ", ".join(f"{what} {us:.0f}" for what, us in counts.items())
            print(f"{name}, {tokens} tokens, blocks of {most}, stage {which}: {shown} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
