"""`bench`: the benchmarks of a checkout, whose figures are those of docs/performance.md, and `bench serving`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from sglang_aiter_moe.cli.bench_serving import serving
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
#: Benchmark -> what it needs of this machine.
NEEDS = {"kernels": "gpu", "layouts-gpu": "gpu", "routing": "gpu", "host": "sglang"}


class BenchGroup(TyperGroup):
    """Refuses an unknown benchmark with the known ones."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None:
            script(cmd_name)
        return command


app = typer.Typer(cls=BenchGroup, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Run a benchmark: of this checkout, or of a server (`bench serving`)."""


def _runner(name: str, what: str) -> Callable[..., None]:
    def run(context: typer.Context, json_target: JsonOption = None) -> None:
        command = [sys.executable, str(script(name)), *context.args]
        check_needs(name, context.args)
        if json_target != "-":
            extra = [] if json_target is None else ["--json", json_target]
            raise typer.Exit(subprocess.run(command + extra, check=False).returncode)
        # Some scripts print while they run; their figures alone belong on standard output.
        with tempfile.TemporaryDirectory() as folder:
            figures = Path(folder) / "figures.json"
            command += ["--json", str(figures)]
            done = subprocess.run(command, check=False, stdout=sys.stderr)
            if figures.exists():
                sys.stdout.write(figures.read_text(encoding="utf-8"))
        raise typer.Exit(done.returncode)

    run.__doc__ = (
        f"Measure {what}.\n\nFurther options are the script's own: `bench {name} -- --help`."
    )
    return run


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
for _name, (_, _what) in BENCHMARKS.items():
    app.command(_name, context_settings=_PASS_ON)(_runner(_name, _what))
app.command("serving", context_settings={"allow_extra_args": True})(serving)


def check_needs(name: str, arguments: list[str]) -> None:
    """Refuses a benchmark that this machine cannot run.

    Raises:
        ContractError: it needs a GPU, and torch sees none; or SGLang, which is not installed.
    """
    if {"--help", "-h"} & set(arguments):
        return
    if NEEDS.get(name) == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise ContractError(
                f"bench {name} measures a GPU, and torch {torch.__version__} sees none",
                allowed="a GPU, and a build of torch for it",
                fix="run it on a machine with a GPU; `bench cpu`, `layouts` and `amd` need none",
            )
    given = any(a.split("=")[0] == "--sglang-path" for a in arguments)
    if NEEDS.get(name) == "sglang" and not given and importlib.util.find_spec("sglang") is None:
        raise ContractError(
            f"bench {name} compares with SGLang's own code, and SGLang is not installed here",
            allowed="an environment with SGLang, or --sglang-path",
            fix=f"`sglang-aiter-moe bench {name} -- --sglang-path DIR`, where DIR holds an unpacked release",
        )


def script(name: str, root: Path | None = None) -> Path:
    """The path of a benchmark.

    Args:
        name: of :data:`BENCHMARKS`.
        root: the checkout; the one that this package is imported from by default.

    Raises:
        ContractError: no such benchmark, or the package was installed without a checkout.
    """
    if name not in BENCHMARKS:
        known = "; ".join(f"{key} ({what})" for key, (_, what) in BENCHMARKS.items())
        raise ContractError(
            f"benchmark {name!r}",
            allowed=f"{known}; serving (a server, with SGLang's own client)",
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
