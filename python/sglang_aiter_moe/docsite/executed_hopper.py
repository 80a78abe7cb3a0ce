"""Tables of docs/hopper-execution.md from the results beside it, as ``executed.py`` makes amd-execution.md's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
LAYERS, MUTANTS = DOCS / "hopper-layers.json", DOCS / "hopper-mutants.json"


def _rows(path: Path) -> list[dict]:
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept if isinstance(kept, list) else kept["rows"]


def layers() -> str:
    """A line for each form and mode of ``testing/hopper_cases.py``, over its layers."""
    groups: dict[tuple, list[dict]] = {}
    for row in _rows(LAYERS):
        form, mode, _ = row["name"].split("/")
        groups.setdefault((form, mode), []).append(row)
    lines = [
        "| form | mode | kernels | layers | warp-instructions | largest relative error | right |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for (form, mode), rows in groups.items():
        launches = [launch for row in rows for launch in row.get("launches", ())]
        kernels = ", ".join(dict.fromkeys(f"`{launch['kernel']}`" for launch in launches))
        done = sum(launch["instructions"] for launch in launches)
        error = max((row["rel_err"] for row in rows if "rel_err" in row), default=float("nan"))
        right = sum(row["right"] for row in rows)
        lines.append(
            f"| {form} | {mode} | {kernels} | {len(rows)} | {done:,} | {error:.1e} | {right} of {len(rows)} |"
        )
    return "\n".join(lines) + "\n"


def mutants() -> str:
    """A line for each kernel that was mutated, and the mutants that nothing noticed."""
    lines = [
        "| layer | kernel | SMs | mutants | changed what it writes | left it unwritten | raised | not noticed |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    survivors, total = [], Counter()
    for report in json.loads(MUTANTS.read_text(encoding="utf-8")):
        found = Counter((row["outcome"] or "neither").split(":")[0] for row in report["mutants"])
        total += found
        counts = " | ".join(str(found[k]) for k in ("changed", "unwritten", "raised", "neither"))
        where = f"{report['layer']} | `{report['kernel']}` | {report['multiprocessors']}"
        lines.append(f"| {where} | {len(report['mutants'])} | {counts} |")
        survivors += [
            f"- {report['layer']} `{report['kernel']}`, SMs: {report['multiprocessors']}, line {row['line']}: "
            f"`{_flat(row['before'])}` to "
            f"`{_flat(row['after']) or 'nothing'}`"
            for row in report["mutants"]
            if row["outcome"] is None
        ]
    drawn = total.total()
    caught = drawn - total["neither"]
    lines += ["", f"{caught} of {drawn} caught ({caught / drawn:.1%}). Not noticed:", ""]
    return "\n".join(lines + survivors) + "\n"


def _flat(code: str) -> str:
    return " ".join(code.split())


def opcodes() -> str:
    """What the tables have: the longest dotted prefixes of instructions' names."""
    from sglang_aiter_moe.nvptx.semantics import BUILDERS

    names = sorted(BUILDERS)
    return (
        f"{len(names)} names, with the forms that their builders take: " + ", ".join(names) + "\n"
    )
