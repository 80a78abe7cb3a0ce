#!/usr/bin/env python3
"""What the portable kernels need on AMD GPUs: builds every table row for gfx942, gfx950 and gfx1250 and prints a
report.

No GPU is needed and nothing is executed.

    python benchmark/amd_compile.py [--json FILE] [ARCH ...]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.testing.triton_compile import WAVE, reports


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archs", nargs="*", default=list(WAVE))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    provenance.may_keep(arguments.json)
    print(
        "| arch | mode | stage | shape | rows x tile n x k | warps | VGPRs | spills | LDS | matrix instructions |"
    )
    print("|---|---|---|---|---|---:|---:|---:|---:|---|")
    rows, bad = [], 0
    for r in reports(arguments.archs):
        spills = r.vgpr_spills + r.sgpr_spills
        bad += bool(spills or r.scratch)
        matrix = ", ".join(f"{count} {name}" for name, count in r.matrix.items())
        tile = f"{r.block_m} x {r.tile['n']} x {r.tile['k']}"
        print(
            f"| {r.arch} | {r.mode} | {r.stage} | {r.shape} | {tile} | {r.tile['warps']} | {r.vgprs} | {spills} | "
            f"{r.lds} | {matrix} |",
            flush=True,
        )
        rows.append(asdict(r))
    if arguments.json:
        provenance.write(arguments.json, rows)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
