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
    """A line for each kernel that was mutated, and the mutants that nothing noticed, with why where that is known."""
    from sglang_aiter_moe.testing.amd_survivors import why

    lines = [
        "| mode | kernel | mutants | changed what it writes | raised | without effect | not noticed |"
    ]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    survivors, total = [], Counter()
    for report in json.loads(MUTANTS.read_text(encoding="utf-8")):
        mode, kernel = report["mode"], report["kernel"]
        found = Counter()
        for row in report["mutants"]:
            reason = why(mode, kernel, row["before"], row["after"])
            outcome = row["outcome"] or ("effect" if reason else "neither")
            found[outcome.split(":")[0]] += 1
            if row["outcome"] is None:
                survivors.append(
                    f"- {mode} `{kernel}` line {row['line']}: `{row['before']}` to `{row['after']}`"
                    + (f": {reason}" if reason else "")
                )
        total += found
        counts = " | ".join(str(found[k]) for k in ("changed", "raised", "effect", "neither"))
        lines.append(f"| {mode} | `{kernel}` | {len(report['mutants'])} | {counts} |")
    caught, drawn = total["changed"] + total["raised"], total.total()
    effective = drawn - total["effect"]
    lines += [
        "",
        f"{caught} of {drawn} caught ({caught / drawn:.1%}); of the {effective} that are not known to be without "
        f"effect, {caught / effective:.1%}. Not caught, with the reason where there is no effect:",
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
