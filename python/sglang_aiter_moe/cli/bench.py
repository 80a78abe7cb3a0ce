"""`bench`: runs one of the benchmarks of a checkout; their figures are those of docs/performance.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from sglang_aiter_moe.cli.output import JsonOption
from sglang_aiter_moe.errors import ContractError

#: Name of a benchmark, its script under `benchmark/`, what it measures.
BENCHMARKS = {
    "kernels": (
        "kernels.py",
        "a whole MoE layer on the GPU, against the roofline and other kernels",
    ),
    "layouts": ("layouts.py", "packing on the CPU, against plain torch"),
    "layouts-gpu": ("layouts_gpu.py", "packing on the GPU, against the copy bandwidth"),
    "routing": ("routing.py", "biased grouped top-k on the GPU, against SGLang's routers"),
    "host": ("host_overhead.py", "the runner's Python, against the released SGLang's"),
    "cpu": ("cpu_fused_moe.py", "portable fused_moe on the CPU: time and memory"),
    "amd": ("amd_compile.py", "registers, spills and matrix instructions of the AMD builds"),
}


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=", ".join(BENCHMARKS))],
    json_target: JsonOption = None,
) -> None:
    """Run a benchmark of this checkout; further options are the benchmark's own (`bench kernels -- --help`)."""
    command = [sys.executable, str(script(name)), *context.args]
    if json_target != "-":
        extra = [] if json_target is None else ["--json", json_target]
        raise typer.Exit(subprocess.run(command + extra, check=False).returncode)
    # Some scripts print while they run; their figures alone belong on standard output.
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        done = subprocess.run([*command, "--json", str(figures)], check=False, stdout=sys.stderr)
        if figures.exists():
            sys.stdout.write(figures.read_text(encoding="utf-8"))
    raise typer.Exit(done.returncode)


def script(name: str, root: Path | None = None) -> Path:
    """The path of a benchmark.

    Args:
        name: of :data:`BENCHMARKS`.
        root: the checkout; the one that this package is imported from by default.

    Raises:
        ContractError: no such benchmark, or the package was installed without a checkout.
    """
    if name not in BENCHMARKS:
        raise ContractError(
            f"benchmark {name!r}",
            allowed="; ".join(f"{key} ({what})" for key, (_, what) in BENCHMARKS.items()),
            fix="name one of these, for instance `sglang-aiter-moe bench kernels`",
        )
    root = Path(__file__).resolve().parents[3] if root is None else root
    path = root / "benchmark" / BENCHMARKS[name][0]
    if not path.exists():
        raise ContractError(
            f"{path} does not exist",
            allowed="a checkout, where the benchmarks are",
            fix="clone the repository and `pip install -e .` there",
        )
    return path
