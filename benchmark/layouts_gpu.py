#!/usr/bin/env python3
"""Packing a layer on a GPU, against one torch permute().contiguous() and against a plain device copy.

    python benchmark/layouts_gpu.py --json benchmark/results/layouts_gpu.json

Each round runs a device copy of the same bytes, the plain form, ``pack`` into a given tensor and in place, by
torch's copies and by the Triton kernels, and ``unpack`` in place, one after another; a figure is the median over
the rounds by CUDA events, behind a kernel that keeps the GPU busy until the call is enqueued, so that it is the
GPU's time. Torch's copies, one launch an expert, take longer to enqueue than that. ``of_copy`` is the copy's time over
the form's; peak is what the allocator held beyond the tensors given. Each ``--together`` is one more form in place,
where programs wait for each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from layouts import CASES, plain_scale, plain_weight

from sglang_aiter_moe.contract import SCALE_LAYOUTS, WEIGHT_LAYOUTS, _bytes, device_moves
from sglang_aiter_moe.contract.device_moves import Limits

#: About 2 ms: longer than the host takes to enqueue a kernel.
BUSY_CYCLES = 4_000_000


def milliseconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def shown(limits: Limits) -> str:
    """As ``--together`` takes it."""
    return f"{limits.held >> 10} {limits.warps} {limits.beside} {limits.ahead:d} {limits.registers or 0}"


def peak(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def with_kernels(call: Callable[[], object], switch: bool) -> Callable[[], object]:
    def run() -> object:
        _bytes.GPU_KERNELS = switch
        return call()

    return run


def with_limits(call: Callable[[], object], unit: int, limits: Limits) -> Callable[[], object]:
    def run() -> object:
        before = device_moves.TOGETHER[unit]
        device_moves.TOGETHER[unit] = limits
        try:
            return call()
        finally:
            device_moves.TOGETHER[unit] = before

    return run


def run_case(
    name: str, experts: int, rounds: int, others: list[tuple[int, Limits]], switches: list[bool]
) -> dict[str, object]:
    kind, layout_name, rows, width = CASES[name]
    columns = width // 2 if kind == "weight" else width // 32
    layout = (WEIGHT_LAYOUTS if kind == "weight" else SCALE_LAYOUTS)[layout_name]
    plain = plain_weight if kind == "weight" else plain_scale
    shape = (experts, rows, columns)
    raw = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(raw)
    given = torch.zeros(layout.packed_shape(shape), dtype=torch.uint8, device="cuda")
    forms = {"copy": lambda: other.copy_(raw), "plain": lambda: plain(raw, layout_name)}
    labels = {False: "torch", True: "triton"}
    for switch in switches:
        forms[f"given, {labels[switch]}"] = with_kernels(
            lambda: layout.pack(raw, out=given), switch
        )
    want = plain(raw, layout_name).reshape(-1)
    for form in [form for form in forms if form.startswith("given")]:
        given.zero_()
        forms[form]()
        if not torch.equal(given.view(-1)[: want.numel()], want):
            raise AssertionError(f"{name}, {form}: differs from the plain form")
    if given.numel() == raw.numel():
        for switch in switches:
            once = raw.clone()
            pack = with_kernels(lambda t=once: layout.pack(t, out=t.view(given.shape)), switch)
            pack()
            if not torch.equal(once.view(-1), want):
                raise AssertionError(f"{name}, in place, {labels[switch]}: not as the plain form")
            forms[f"in place, {labels[switch]}"] = pack
        extra = () if kind == "weight" else (shape,)
        unpack = with_kernels(lambda t=once: layout.unpack(t.view(given.shape), *extra, t), True)
        unpack()
        if not torch.equal(once, raw):
            raise AssertionError(f"{name}: unpack does not restore the raw bytes")
        forms["unpack in place, triton"] = unpack
        unit = 16 if kind == "weight" else 8 if "n32k4" in layout_name else 4
        for limits in [
            limits for its, limits in others if its == unit and "separ" not in layout_name
        ]:
            pair = with_limits(pack, unit, limits), with_limits(unpack, unit, limits)
            for _ in range(3):
                pair[0]()
                right = torch.equal(once.view(-1), want)
                pair[1]()
                if not right or not torch.equal(once, raw):
                    raise AssertionError(f"{name}, in place, {limits}: not as the plain form")
            forms[f"in place, {shown(limits)}"], forms[f"unpack in place, {shown(limits)}"] = pair
    del want
    memory = {form: peak(call) for form, call in forms.items()}
    for call in forms.values():
        milliseconds(call)
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form, call in forms.items():
            times[form].append(milliseconds(call))
    medians = {form: statistics.median(values) for form, values in times.items()}
    return {
        "case": name,
        "layout": layout_name,
        "shape": list(shape),
        "ms": {form: round(value, 4) for form, value in medians.items()},
        "of_copy": {form: round(medians["copy"] / value, 3) for form, value in medians.items()},
        "speedup": {form: round(medians["plain"] / value, 2) for form, value in medians.items()},
        "peak_bytes": memory,
        "two_experts_bytes": 2 * rows * columns,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit", help="what is measured, for the record")
    parser.add_argument("--json", metavar="FILE", required=True)
    parser.add_argument("--kernels-only", action="store_true", help="leave out torch's copies")
    parser.add_argument(
        "--together",
        nargs=6,
        action="append",
        type=int,
        default=[],
        metavar=("UNIT", "KIB", "WARPS", "BESIDE", "AHEAD", "REGISTERS"),
        help="other limits for programs that wait for each other: a key of TOGETHER, ...; 0 registers: any",
    )
    options = parser.parse_args()
    others = [
        (unit, Limits(kib << 10, warps, beside, bool(ahead), registers or None))
        for unit, kib, warps, beside, ahead, registers in options.together
    ]
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 2
    cases = []
    switches = [True] if options.kernels_only else [False, True]
    for name in CASES:
        cases.append(run_case(name, options.experts, options.rounds, others, switches))
        print(name, cases[-1]["of_copy"], cases[-1]["peak_bytes"])
    result = {
        "benchmark": "layouts_gpu",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": options.commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "limits": {
            name: {unit: asdict(value) for unit, value in getattr(device_moves, name).items()}
            for name in ("PACK", "UNPACK", "TOGETHER")
        },
        "experts": options.experts,
        "rounds": options.rounds,
        "cases": cases,
    }
    Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
