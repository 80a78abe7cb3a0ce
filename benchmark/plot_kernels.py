#!/usr/bin/env python3
"""Draws results of benchmark/kernels.py: latency against tokens, with the roofline and the other kernels, as SVG.

    python benchmark/plot_kernels.py benchmark/results/kernels_h200.json benchmark/results/kernels_h200_prefill.json \
        benchmark/results/kernels_h200_decode.json benchmark/results/kernels_h200_whole.json \
        benchmark/results/kernels_h200_decode_peers.json benchmark/results/kernels_h200_prefill_peers.json docs/images

Of several results the last one counts, at each shape and token count that it has ours for.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 440, 70, 40, 150, 50
TITLES = {"k3": "Kimi K3, TP8", "oss": "gpt-oss-120b, TP1, unpadded"}
COLOURS = {
    "A16W4": "#c0392b", "A8W4": "#e67e22", "roofline": "#222222", "tkbest": "#2980b9", "marlin": "#27ae60",
    "marlinbest": "#16a085", "hum": "#8e44ad",
}  # fmt: skip


def series(rows: list[dict], shape: str) -> dict[str, dict[int, float]]:
    """who -> tokens -> microseconds (the best variant), and the roofline."""
    found: dict[str, dict[int, float]] = {}
    for row in (r for r in rows if r["shape"] == shape):
        line = found.setdefault(row["who"], {})
        line[row["tokens"]] = min(row["us"], line.get(row["tokens"], math.inf))
        found.setdefault("roofline", {})[row["tokens"]] = row["roof_us"]
    return found


def draw(lines: dict[str, dict[int, float]], title: str) -> str:
    xs = sorted(next(iter(lines.values())))
    values = [v for line in lines.values() for v in line.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(tokens) / math.log2(xs[-1])

    def y(us: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(us) - low) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}: microseconds a layer against tokens (NVIDIA H200)</text>',
    ]
    for tokens in xs:
        out.append(
            f'<text x="{x(tokens):.0f}" y="{HEIGHT - 28}" text-anchor="middle">{tokens}</text>'
        )
    for power in range(low, high + 1):
        at = y(10**power)
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.0f}" y2="{at:.0f}" stroke="#dddddd"/>'
        )
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.0f}" text-anchor="end">{10**power}</text>')
    for i, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in sorted(line.items()))
        dash = ' stroke-dasharray="5 4"' if name == "roofline" else ""
        colour, wide = COLOURS.get(name, "#777777"), 3 if name == "A16W4" else 1.6
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"{dash}/>'
        )
        at = TOP + 20 + 18 * i
        out.append(f'<text x="{WIDTH - RIGHT + 14}" y="{at}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


OURS = ("A16W4", "A8W4", "A4W4")


def latest(files: list[Path]) -> list[dict]:
    """Rows of each shape and token count from the last file with a row "A16W4" for it, and those of other kernels that
    were measured in an earlier file only; candidates are left out."""
    chosen: dict[tuple[str, int], list[dict]] = {}
    for file in files:
        rows = [r for r in json.loads(file.read_text())["rows"] if r["who"] in COLOURS]
        for at in {(r["shape"], r["tokens"]) for r in rows if r["who"] == "A16W4"}:
            mine = [r for r in rows if (r["shape"], r["tokens"]) == at]
            seen = {r["who"] for r in mine} | set(OURS)
            chosen[at] = mine + [r for r in chosen.get(at, []) if r["who"] not in seen]
    return [row for at in sorted(chosen) for row in chosen[at]]


def main() -> int:
    *files, folder = map(Path, sys.argv[1:])
    rows = latest(files)
    folder.mkdir(parents=True, exist_ok=True)
    for shape in sorted({r["shape"] for r in rows}):
        (folder / f"kernels_{shape}.svg").write_text(
            draw(series(rows, shape), TITLES.get(shape, shape))
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
