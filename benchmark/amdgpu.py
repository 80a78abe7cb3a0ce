#!/usr/bin/env python3
"""How fast the AMD interpreter is: one Kimi-K3 layer per rank (H 3584, I 384, SiTUv2, top-16) at one token, with the 16
experts that it is routed to.

    python benchmark/amdgpu.py [--arch gfx950] [--modes A4W4,A8W4,A16W4] [--lockstep 64] [--json FILE]

Prints wave-instructions a second of each kernel, by processor time and by the clock; the aim for stage 1 is 300,000 on
one core. Threads of numpy's and torch's libraries are switched off: the figures are for one core.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

from sglang_aiter_moe.evaluation import provenance  # noqa: E402
from sglang_aiter_moe.testing.amd_cases import execute  # noqa: E402
from sglang_aiter_moe.testing.triton_cases import Case  # noqa: E402
from sglang_aiter_moe.testing.triton_compile import LAYOUTS  # noqa: E402

AIM = 300_000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="gfx950")
    parser.add_argument("--modes", default="A4W4,A8W4,A16W4")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--lockstep", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    provenance.may_keep(arguments.json)
    rows, slow = [], False
    print(
        "| mode | kernel | workgroups | wave-instructions | processor s | a second | by the clock |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for mode in arguments.modes.split(","):
        w13, w13_scale, w2_scale = LAYOUTS.get((arguments.arch, mode), ("separated",) * 3)
        case = Case(
            "k3", mode, tokens=arguments.tokens, experts=16, topk=16, hidden=3584, inter=384, w13=w13,
            w13_scale=w13_scale, w2_scale=w2_scale,
        )  # fmt: skip
        row = execute(arguments.arch, case, 1, lockstep=arguments.lockstep)
        print(f"{mode}: relative error {row['rel_err']:.2e} against the oracle", file=sys.stderr)
        for launch in row["launches"]:
            rate = launch["instructions"] / launch["processor_seconds"]
            slow |= launch["kernel"] == "stage1_kernel" and rate < AIM
            print(
                f"| {mode} | {launch['kernel']} | {launch['workgroups']} | {launch['instructions']} | "
                f"{launch['processor_seconds']:.2f} | {rate:,.0f} | "
                f"{launch['instructions'] / launch['seconds']:,.0f} |",
                flush=True,
            )
        rows.append(row)
    if arguments.json:
        provenance.write(arguments.json, rows)
    return int(slow)


if __name__ == "__main__":
    raise SystemExit(main())
