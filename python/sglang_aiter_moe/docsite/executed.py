"""Tables of docs/amd-execution.md from the results beside it: which kernels were executed, what mutants did."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
LAYERS, MUTANTS = DOCS / "amd-layers.json", DOCS / "amd-mutants.json"


def layer_rows() -> list[dict]:
    """What ``testing/amd_cases.py`` kept of each layer."""
    kept = json.loads(LAYERS.read_text(encoding="utf-8"))
    return kept if isinstance(kept, list) else kept["rows"]


def layers() -> str:
    """A line for each layer that ``testing/amd_cases.py`` executed."""
    from sglang_aiter_moe.portable.triton import table
    from sglang_aiter_moe.testing.amd_cases import LIMIT

    lines = [
        "| target | mode | shape | rows a tile | stage 1 n x k | stage 2 n x k | wave-instructions | relative error "
        "| result |",
        "|---|---|---|---:|---|---|---:|---|---|",
    ]
    for row in layer_rows():
        config = table.choose(row["arch"], row["mode"], row["rows"])
        tiles = " | ".join(f"{t.n} x {t.k}" for t in (config.stage1, config.stage2))
        shape = row["case"].removeprefix(f"{row['arch']}-{row['mode']}-").rpartition("-")[0]
        done = sum(launch["instructions"] for launch in row["launches"])
        lines.append(
            f"| {row['arch']} | {row['mode']} | {shape} | {row['rows']} | {tiles} | {done:,} | "
            f"{row['rel_err']:.1e} (at most {LIMIT[row['mode']]:.1e}) | {'right' if row['right'] else 'WRONG'} |"
        )
    return "\n".join(lines) + "\n"


def mutants() -> str:
    """A line for each kernel that was mutated, and the mutants that nothing noticed."""
    lines = ["| mode | kernel | mutants | changed what it writes | raised | neither |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    survivors, total = [], Counter()
    for report in json.loads(MUTANTS.read_text(encoding="utf-8")):
        rows = report["mutants"]
        found = Counter((row["outcome"] or "neither").split(":")[0] for row in rows)
        total += found
        counts = " | ".join(str(found[k]) for k in ("changed", "raised", "neither"))
        lines.append(f"| {report['mode']} | `{report['kernel']}` | {len(rows)} | {counts} |")
        survivors += [
            f"- {report['mode']} `{report['kernel']}` line {row['line']}: `{row['before']}` to `{row['after']}`"
            for row in rows
            if row["outcome"] is None
        ]
    caught = total["changed"] + total["raised"]
    lines += [
        "",
        f"{caught} of {total.total()} caught ({caught / total.total():.1%}). Not noticed:",
        "",
    ]
    return "\n".join(lines + survivors) + "\n"


def opcodes() -> str:
    """Every opcode that is modelled, by what the first word of its name says."""
    from sglang_aiter_moe.amdgpu.semantics import OPCODES

    groups: dict[str, list[str]] = {}
    for opcode in sorted(OPCODES):
        prefix, _, rest = opcode.partition("_")
        groups.setdefault(prefix, []).append(rest)
    lines = [f"{len(OPCODES)} opcodes:", ""]
    lines += [f"- `{prefix}_`: " + ", ".join(names) for prefix, names in groups.items()]
    return "\n".join(lines) + "\n"
