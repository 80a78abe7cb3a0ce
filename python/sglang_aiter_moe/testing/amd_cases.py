"""Layers that cover the tables of AMD targets, executed by the interpreter and compared with the oracle.

``python -m sglang_aiter_moe.testing.amd_cases [--json FILE] [PATTERN ...]`` prints one line a layer.

One layer for each row of a table and each of two shapes: ``k3`` as a rank of Kimi-K3 (SiTUv2, sizes that all tiles
divide) and ``gpt-oss`` (SwiGLU with biases and limit, sizes that end inside a tile in every direction). Every expert
has exactly as many rows as a tile, so that no part of a tile is padding.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from pathlib import Path

from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.portable.triton import table
from sglang_aiter_moe.testing.triton_cases import Case, run_case
from sglang_aiter_moe.testing.triton_compile import LAYOUTS, MODES

ARCHS = ("gfx950", "gfx942")
"""Both in all modes: AITER has A16W4 alone on gfx942 (docs/contract.md section b), but the tables have all."""
SHAPES = {
    "k3": {"hidden": 512, "inter": 128, "activation": "situv2"},
    # 2.5 times 128, as 2880 is 22.5 times: the last step along K and the last tile along N are cut.
    "gpt-oss": {
        "hidden": 320, "inter": 160, "activation": "swiglu", "bias": True, "request": {"limit": 7.0},
    },
}  # fmt: skip
EXPERTS = 2
LIMIT = {"A16W4": 4e-3, "A8W4": 4e-3, "A4W4": 6e-3}
"""Relative error against the oracle: one bf16 rounding of the output is 1.7e-3, one of each part adds as much; a code
of the intermediate that falls to the other side of a tie is the rest."""


def layers() -> dict[str, tuple[str, Case]]:
    """Name -> (arch, layer), for every row of the tables of ``ARCHS``."""
    found = {}
    for arch in ARCHS:
        for mode in MODES:
            w13, w13_scale, w2_scale = LAYOUTS.get((arch, mode), ("separated",) * 3)
            for _, config in table.load(arch)[mode]:
                for shape, sizes in SHAPES.items():
                    name = f"{arch}-{mode}-{shape}-{config.m}"
                    # Each token goes to both experts: as many rows an expert as tokens.
                    found[name] = arch, Case(
                        name, mode, tokens=config.m, experts=EXPERTS, topk=EXPERTS, w13=w13,
                        w13_scale=w13_scale, w2_scale=w2_scale, **sizes,
                    )  # fmt: skip
    return found


def execute(arch: str, case: Case, seed: int, **options) -> dict:
    """``run_case`` on an interpreted GPU of ``arch``, with what was launched."""
    from sglang_aiter_moe.amdgpu.layer import run_layer

    launches = []

    def runner(request, *operands):
        launches.extend(run_layer(arch, request, *operands, **options))

    start = time.perf_counter()
    row = run_case(case, "cpu", seed, runner)
    return row | {
        "arch": arch,
        "mode": case.mode,
        "rows": case.tokens,
        "launches": [
            {
                "kernel": launch.kernel,
                "workgroups": launch.workgroups,
                "instructions": launch.statistics.wave_instructions,
                "seconds": launch.statistics.seconds,
                "processor_seconds": launch.statistics.processor_seconds,
            }
            for launch in launches
        ],
        "seconds": time.perf_counter() - start,
    }


def right(row: dict) -> bool:
    return bool(
        row["finite"]
        and row["guards"]
        and row["rel_err"] < LIMIT[row["mode"]]
        and row["cpu_err"] < LIMIT[row["mode"]]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    provenance.may_keep(options.json)
    rows = []
    for name, (arch, case) in layers().items():
        if any(fnmatch.fnmatch(name, p) for p in options.patterns):
            rows.append(execute(arch, case, options.seed) | {"right": None})
            rows[-1]["right"] = right(rows[-1])
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        provenance.write(options.json, rows)
    return int(not rows or not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
