"""What a sweep says: medians over the rounds, how far the rounds are apart, B against A, table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# Column, metric, decimals; the order of the table in SGLang #33838.
COLUMNS = (
    ("total tok/s", "total_tok_s", 1),
    ("tok/s/GPU", "tok_s_gpu", 1),
    ("E2EL ms", "e2el_ms", 1),
    ("TTFT ms", "ttft_ms", 1),
    ("TPOT ms", "tpot_ms", 2),
    ("ITL ms", "itl_ms", 2),
)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 70, 20, 50, 50
_COLOURS = {"A": "#2980b9", "B": "#c0392b"}


@dataclass(frozen=True)
class Cell:
    """One metric of one side at one concurrency.

    Attributes:
        median, low, high: over the rounds.
        rounds: how many.
    """

    median: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float | None:
        """(high - low) / median; None for one round, which has none to show."""
        return None if self.rounds < 2 else (self.high - self.low) / self.median


def summarise(runs: Sequence[dict[str, Any]], gpus: int) -> list[dict[str, Any]]:
    """One row for each concurrency: the cells of A and B, and B / A - 1.

    Args:
        runs: ``{"side", "round", "concurrency", metric: value, ...}`` of each point.
        gpus: that each server runs on.
    """
    rows = []
    for concurrency in sorted({run["concurrency"] for run in runs}):
        row: dict[str, Any] = {"concurrency": concurrency, "A": {}, "B": {}, "delta": {}}
        for side in "AB":
            here = [r for r in runs if r["side"] == side and r["concurrency"] == concurrency]
            for _, metric, _ in COLUMNS if here else ():
                values = [_value(run, metric, gpus) for run in here]
                row[side][metric] = Cell(
                    statistics.median(values), min(values), max(values), len(values)
                )
        for metric in row["A"].keys() & row["B"].keys():
            row["delta"][metric] = row["B"][metric].median / row["A"][metric].median - 1
        rows.append(row)
    return rows


def to_json(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """:func:`summarise`'s rows as plain data."""
    return [
        {
            "concurrency": row["concurrency"],
            "delta": row["delta"],
            **{
                side: {
                    metric: {
                        "median": cell.median,
                        "low": cell.low,
                        "high": cell.high,
                        "rounds": cell.rounds,
                        "spread": cell.spread,
                    }
                    for metric, cell in row[side].items()
                }
                for side in "AB"
            },
        }
        for row in rows
    ]


def clear(row: dict[str, Any], metric: str) -> bool | None:
    """Whether B's and A's rounds do not overlap; None where one round is all there is."""
    a, b = row["A"].get(metric), row["B"].get(metric)
    if a is None or b is None or min(a.rounds, b.rounds) < 2:
        return None
    return a.high < b.low or b.high < a.low


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table as text: a header, then three lines for each concurrency (A, B, B against A).

    A value is followed by the spread of its rounds; a delta by ``~`` where the rounds of both sides overlap,
    by ``?`` where there was one round.
    """
    lines = [["concurrency", "side", *(title for title, _, _ in COLUMNS)]]
    for row in rows:
        for side in "AB":
            if not row[side]:
                continue
            cells = [_cell(row[side][metric], digits) for _, metric, digits in COLUMNS]
            lines.append([str(row["concurrency"]), side, *cells])
        if row["delta"]:
            marks = {True: "", False: " ~", None: " ?"}
            deltas = [
                f"{row['delta'][metric]:+.1%}{marks[clear(row, metric)]}"
                for _, metric, _ in COLUMNS
            ]
            lines.append([str(row["concurrency"]), "B/A", *deltas])
    return lines


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table for a pull request."""
    lines = table(rows)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], labels: dict[str, str]) -> str:
    """Total tokens a second against concurrency, with the range of the rounds, as SVG."""
    top = max(row[s]["total_tok_s"].high for row in rows for s in "AB" if row[s]) * 1.1
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(rows) - 1, 1)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">requests at a time</text>',
    ]
    for tick in range(5):
        value = top * tick / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#dddddd"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>'
        )
    for number, row in enumerate(rows):
        parts.append(
            f'<text x="{_LEFT + number * step:.1f}" y="{_HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{row["concurrency"]}</text>'
        )
    for place, side in enumerate("AB"):
        colour = _COLOURS[side]
        points = [(n, row[side]["total_tok_s"]) for n, row in enumerate(rows) if row[side]]
        path = " ".join(f"{_LEFT + n * step:.1f},{y(cell.median):.1f}" for n, cell in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for n, cell in points:
            x = _LEFT + n * step
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(cell.low):.1f}" y2="{y(cell.high):.1f}" '
                f'stroke="{colour}" stroke-width="5" stroke-opacity="0.35"/>'
                f'<circle cx="{x:.1f}" cy="{y(cell.median):.1f}" r="3" fill="{colour}"/>'
            )
        text = f"{side}: {escape(labels[side])}, total tok/s"
        parts.append(f'<text x="{_LEFT}" y="{16 + 16 * place}" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _value(run: dict[str, Any], metric: str, gpus: int) -> float:
    return run["total_tok_s"] / gpus if metric == "tok_s_gpu" else run[metric]


def _cell(cell: Cell, digits: int) -> str:
    text = f"{cell.median:.{digits}f}"
    return text if cell.spread is None else f"{text} (±{cell.spread / 2:.1%})"
