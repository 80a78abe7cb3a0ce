"""Layers of every Hopper form: what a GPU runs (``test_gpu.py``), and the PTX interpreter on a CPU.

``python -m sglang_aiter_moe.testing.hopper_cases [--json FILE] [PATTERN ...]`` (others: ``--help``) interprets the
layers whose names (form/mode/case) match, spoilt ones where a pattern says "hostile", and prints one JSON object a
layer. Must run in a process without TRITON_INTERPRET. The forms are written for Triton 3.6; a later one compiles others
(docs/kernel-notes.md, "Cautions"), which must be right as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
import time
from pathlib import Path

import triton

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import Fp8Config, Ring, run_fp8
from sglang_aiter_moe.portable.triton.hopper.launch import (
    ListConfig,
    TokenConfig,
    run_list,
    run_tokens,
)
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_launch import (
    MxPrefillConfig,
    run_mx_prefill,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_launch import PrefillConfig, run_prefill
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_launch import (
    Rings,
    SharedPrefillConfig,
    run_shared_prefill,
)
from sglang_aiter_moe.portable.triton.hopper.whole_launch import WholeConfig, run_whole
from sglang_aiter_moe.portable.triton.hopper.wide_launch import WideConfig, run_wide
from sglang_aiter_moe.testing import hostile
from sglang_aiter_moe.testing.triton_cases import Case, run_case

LIMIT = {"A16W4": 4e-3, "A8W4": 6e-3, "A4W4": 1.5e-2}
"""Relative error against the oracle."""
FP8_SUMS = ("mx_", "fp8", "shared_", "wide")
"""How names of forms begin that add fp8 products; ties count for them."""
ROUNDS_ELSEWHERE = ("mx_", "shared_", "wide")
ROUNDED_ELSEWHERE = 1.5e-2
"""A8W4 of the fp8 prefill forms: fp8 products are added with about 13 bits, so that now and then ``a`` is rounded to
E4M3's other neighbour, which a layer of a few tokens shows (up to 9.9e-3; K3 and gpt-oss at full size 3.4e-3)."""
FORMS = {
    "tokens": (run_tokens, TokenConfig(32, 4, 2, 16, 1, 2, 4)),
    "tokens-ragged": (run_tokens, TokenConfig(16, 2, 2, 16, 2, 3, 8)),
    "list": (run_list, ListConfig(32, 1, 2, 32, 2, 2)),
    "fp8": (run_fp8, Fp8Config(8, Ring(4, 16, 3, 2), Ring(4, 16, 2, 3))),
    "fp8-8-warps": (run_fp8, Fp8Config(16, Ring(8, 8, 3, 2), Ring(8, 16, 2, 1))),
    "prefill": (run_prefill, PrefillConfig(32, tiles=2)),
    "prefill-4-warps": (run_prefill, PrefillConfig(64, 64, 4, 64, 4)),
    "prefill-256-rows": (run_prefill, PrefillConfig(16, 256, 8, 256, 8)),
    "whole": (run_whole, WholeConfig(5)),
    "whole-2-slots": (run_whole, WholeConfig(2)),
    "whole-halves": (run_whole, WholeConfig(3, halves=True)),
    "whole-narrow": (run_whole, WholeConfig(3, halves=True, narrow=True)),
    "whole-narrow-2-slots": (run_whole, WholeConfig(2, narrow=True)),
    "fp8-row": (run_fp8, Fp8Config(16, Ring(4, 16, 3, 2), Ring(4, 16, 3, 2), by_row=True)),
    "fp8-queue": (run_fp8, Fp8Config(8, Ring(4, 16, 3, 2, 3), Ring(4, 16, 2, 3, 4, 2))),
    "fp8-queue-row": (run_fp8, Fp8Config(16, Ring(4, 16, 3, 2, 2, 2), Ring(4, 16, 3, 3, 8, 4), by_row=True)),
    "fp8-row-8": (run_fp8, Fp8Config(8, Ring(4, 16, 4, 2), Ring(8, 8, 2, 2), by_row=True)),
    "wide": (run_wide, WideConfig(32, 0, Ring(8, 16, 3, 1), Ring(8, 16, 2, 2))),
    "wide-two": (run_wide, WideConfig(32, 16, Ring(8, 16, 2, 1), Ring(8, 16, 2, 1))),
    "wide-4-warps": (run_wide, WideConfig(16, 8, Ring(4, 16, 2, 2), Ring(4, 16, 3, 2))),
    "mx_prefill": (run_mx_prefill, MxPrefillConfig(32, tiles=2, regs1=96, regs2=128)),
    "mx_prefill-wide": (run_mx_prefill, MxPrefillConfig(160)),
    "mx_prefill-4-warps": (run_mx_prefill, MxPrefillConfig(64, 64, 4, 64, 4)),
    "shared_prefill": (
        run_shared_prefill, SharedPrefillConfig(32, Rings(3, 2), Rings(4, 2), tiles=2, kept=True),
    ),
    "shared_prefill-wide": (
        run_shared_prefill, SharedPrefillConfig(160, Rings(3, 2, steps=2), Rings(3, 3, steps=1)),
    ),
    "shared_prefill-4-loaders": (
        run_shared_prefill, SharedPrefillConfig(32, Rings(5, 3, 4, steps=2), Rings(5, 3)),
    ),
    "shared_prefill-3-groups": (
        run_shared_prefill,
        SharedPrefillConfig(
            96, Rings(4, 3, 2, 56, 2, 3), Rings(4, 2, 2, 56, 4, 3, True), tiles=2, kept=True
        ),
    ),
    "shared_prefill-4-groups": (
        run_shared_prefill,
        SharedPrefillConfig(
            48, Rings(3, 3, 2, 64, 2, 4), Rings(6, 3, 2, 64, 4, 4, True), tiles=2, kept=True
        ),
    ),
}  # fmt: skip
"""Name -> (launch function, configuration)."""
MODES = {
    "fp8": ("A16W4", "A8W4"),
    "fp8-8-warps": ("A16W4", "A8W4"),
    "fp8-queue": ("A16W4", "A8W4"),
    "fp8-queue-row": ("A8W4",),
    "fp8-row": ("A8W4",),
    "fp8-row-8": ("A8W4",),
    "prefill": ("A16W4", "A8W4", "A4W4"),
    "prefill-4-warps": ("A16W4", "A8W4", "A4W4"),
    "prefill-256-rows": ("A16W4", "A8W4", "A4W4"),
    "wide": ("A8W4", "A4W4"),
    "wide-two": ("A8W4", "A4W4"),
    "wide-4-warps": ("A8W4", "A4W4"),
    "mx_prefill": ("A8W4", "A4W4"),
    "mx_prefill-wide": ("A8W4", "A4W4"),
    "mx_prefill-4-warps": ("A8W4", "A4W4"),
    "shared_prefill": ("A8W4", "A4W4"),
    "shared_prefill-wide": ("A8W4", "A4W4"),
    "shared_prefill-4-loaders": ("A8W4", "A4W4"),
    "shared_prefill-3-groups": ("A8W4", "A4W4"),
    "shared_prefill-4-groups": ("A8W4", "A4W4"),
}
"""Modes of a form; of others A16W4."""
SHAPES = [
    Case("small", tokens=5, twice=True),
    Case("k3-like", hidden=512, inter=128, experts=9, topk=4, tokens=23, twice=True),
    Case("oss-like", activation="swiglu", hidden=672, inter=416, bias=True, tokens=7, request={"limit": 7.0},
    twice=True),
    Case("gui", w13="gu_interleaved", w13_scale="gu_interleaved", hidden=256, inter=192, tokens=9, twice=True),
    Case("silu", activation="silu", hidden=256, inter=64, tokens=3),
    Case("one-expert", routing="one", tokens=37, hidden=256, inter=64, twice=True),
    Case("holes", routing="holes", tokens=11, hidden=256, inter=64),
    Case("mask", mask=(0, 1, 1, 0, 1), topk=3, tokens=13, hidden=256, inter=64),
    Case("one-token", hidden=1024, inter=384, experts=20, topk=16, tokens=1, twice=True),
    Case("oss-gui", activation="swiglu", w13="gu_interleaved", w13_scale="gu_interleaved", hidden=768, inter=416,
    bias=True, tokens=2, request={"limit": 7.0}, twice=True),
]  # fmt: skip


FEW_TOKENS = [
    Case("many-slots", experts=48, topk=40, hidden=256, inter=64, tokens=1),
    Case("wide", experts=9, topk=8, hidden=256, inter=2112, tokens=1),
    Case("steps", w13="gu_interleaved", w13_scale="gu_interleaved", experts=6, topk=3, hidden=1088, inter=2112,
    tokens=2),
]  # fmt: skip
"""Of the one-launch form: more than it keeps in registers while it converts what stage 1 gave; several slots for a
half of K in both stages, the last one half full, scale rows with padding."""
SPOILT = {"hidden": 288, "inter": 544, "tokens": 6, "experts": 6, "bias": True}
HOSTILE = [
    Case(f"hostile-{name}", **SPOILT | hostile.needs(spoil) | {"spoil": spoil})
    for name, spoil in (hostile.TOGETHER | {spoil: spoil for spoil in hostile.SPOILS}).items()
]  # fmt: skip
"""9 and 17 K blocks: scale rows are padded in the only step of a ring, and in its second. SiTUv2, which makes numbers
of Inf."""


def modes(form: str) -> tuple[str, ...]:
    return MODES.get(form, ("A16W4",))


def takes(form: str, case: Case) -> bool:
    """The forms for a few tokens take no mask and no ``num_local_tokens``; columns of padding only bf16 fragments."""
    few = form.startswith(("tokens", "whole"))
    if few and (case.mask or "local_tokens" in case.spoil):
        return False
    if form.startswith("whole-narrow") and case.topk > 4:
        return False
    return not case.pad or form.startswith(("tokens", "list"))


def right(form: str, row: dict) -> bool:
    """Whether a row of ``run_case`` is within the form's bound; ties count where fp8 products are added."""
    limit = LIMIT[row["mode"]]
    if form.startswith(FP8_SUMS):
        limit += row["ties"]
    if form.startswith(ROUNDS_ELSEWHERE):
        limit = max(limit, ROUNDED_ELSEWHERE)
    return bool(row["finite"] and row["guards"] and row["same_bits"] and row["rel_err"] < limit)


def layers() -> dict[str, tuple[str, Case]]:
    """form/mode/case -> (form, layer)."""
    return {
        f"{form}/{mode}/{case.name}": (form, dataclasses.replace(case, mode=mode))
        for form in FORMS
        for mode in modes(form)
        for case in (*SHAPES, *HOSTILE, *(FEW_TOKENS if form.startswith("whole") else ()))
        if takes(form, case)
    }


def chosen(patterns: list[str]) -> dict[str, tuple[str, Case]]:
    """The layers whose names match one of ``patterns``; spoilt ones where the pattern says "hostile".

    Raises:
        ContractError: a pattern matches none.
    """
    everything, names = layers(), set()
    for pattern in patterns:
        found = {
            name
            for name, (_, case) in everything.items()
            if fnmatch.fnmatch(name, pattern) and ("hostile" in pattern or not case.spoil)
        }
        if not found:
            raise ContractError(
                f"pattern {pattern!r} matches no layer",
                allowed=", ".join(everything),
                fix="name layers as form/mode/case, with * where anything may stand",
            )
        names |= found
    return {name: layer for name, layer in everything.items() if name in names}


def execute(form: str, case: Case, seed: int, **options) -> dict:
    """``run_case`` of a form on an interpreted GPU; ``options`` of ``nvptx.launch.Device``."""
    from sglang_aiter_moe.nvptx.launch import Device
    from sglang_aiter_moe.nvptx.layer import run_layer
    from sglang_aiter_moe.portable.triton import workspace

    launches = []
    if case.spoil:
        # Lists are read past their end, and slots without an expert, both dropped: what is there is NaN (``run_case``).
        options.setdefault("device", lambda scratch, **rest: Device(**rest))
        workspace.clear()

    def runner(request, *operands):
        done = run_layer(
            request, *operands, form=FORMS[form], keep_state=bool(launches or case.spoil), **options
        )
        launches.extend(done)

    start, processor = time.perf_counter(), time.process_time()
    row = run_case(case, "cpu", seed, runner) | {"form": form, "mode": case.mode}
    return row | {
        "right": right(form, row),
        "triton": triton.__version__,
        "launches": [
            {
                "kernel": launch.kernel,
                "ctas": launch.grid[0],
                "threads": launch.threads,
                "instructions": launch.statistics.warp_instructions,
                "processor_seconds": launch.statistics.processor_seconds,
            }
            for launch in launches
        ],
        "processor_seconds": time.process_time() - processor,
        "seconds": time.perf_counter() - start,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--fp8-bits", type=int)
    parser.add_argument("--multiprocessors", type=int, default=132)
    options = parser.parse_args(arguments)
    provenance.may_keep(options.json)
    rows = []
    for name, (form, case) in chosen(options.patterns).items():
        row = {"name": name}
        try:
            row |= execute(
                form, case, options.seed, late=not options.early, multiprocessors=options.multiprocessors,
                fp8_bits=options.fp8_bits,
            )  # fmt: skip
        except Exception as error:  # a layer that fails is a row, and the others run
            row |= {"right": False, "error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        provenance.write(options.json, rows)
    return int(not rows or not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
