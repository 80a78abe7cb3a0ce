"""`prebuild`: build the kernels that a plan dispatches before the server starts."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_aiter_moe.cli.output import (
    JsonOption,
    console,
    end_children_on_sigterm,
    write_json,
)

if TYPE_CHECKING:
    from sglang_aiter_moe.prebuild.driver import Build, Outcome
    from sglang_aiter_moe.prebuild.steps import Step


def prebuild(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="config.json, model directory or example.")
    ],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size, a divisor of --tp.")] = 1,
    arch: Annotated[
        str | None, typer.Option(help="Default: this machine's GPU, else gfx950.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Largest batch; the server's --chunked-prefill-size.")
    ] = 16384,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for everything.")] = 3600,
    step_timeout: Annotated[float, typer.Option(min=1, help="Seconds for one build.")] = 1200,
    remove_stale_locks: Annotated[
        bool, typer.Option("--remove-stale-locks", help="Remove locks whose process has ended.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be built.")
    ] = False,
    json_target: JsonOption = None,
) -> None:
    """Build exactly the kernels that the plan dispatches, with progress and a time limit.

    Without AITER, or with --dry-run, it says what it would build. Exits with 1 when a build fails, hangs
    or runs out of time, with 2 when the plan refuses or a stale lock is in the way.
    """
    # torch takes seconds to import, and --help should not wait for it.
    from sglang_aiter_moe.aiter_files import locks, tables
    from sglang_aiter_moe.cli import doctor_checks
    from sglang_aiter_moe.cli.plan_report import Setting
    from sglang_aiter_moe.contract.capabilities import NEWEST_RELEASE
    from sglang_aiter_moe.model_config import moe_layers, read_config
    from sglang_aiter_moe.prebuild import driver, steps

    out = console(json_target)
    package, gpu = doctor_checks.aiter_package(), doctor_checks.gpu_arch()
    arch = arch or gpu or "gfx950"
    capabilities = doctor_checks.aiter_capabilities(package)
    release = capabilities.name.removeprefix("release ") if capabilities.identified else None
    setting = Setting(arch, release or NEWEST_RELEASE, os.environ)
    plan = setting.plan(moe_layers(read_config(config), tp=tp, ep=ep).spec)
    counts = steps.token_counts(plan, max_tokens)
    covered = None
    if package is not None:
        covered = tables.coverage(plan, tables.read_rows(tables.table_files(package)), counts)
    ahead = steps.compile_step(covered or ())
    calls = steps.call_steps(plan, counts, covered)
    wanted = [*([ahead] if ahead else []), *calls]
    _show(out, wanted, package, gpu)
    report: dict[str, Any] = {
        "aiter": None if package is None else str(package),
        "gpu": gpu,
        "arch": arch,
        "steps": [step.to_json() for step in wanted],
        "outcomes": [],
    }
    if package is None or dry_run:
        if package is None:
            out.print("AITER is not installed: nothing was built.")
        write_json(report, json_target)
        return
    folders = locks.build_folders(package)
    found = driver.clear_stale(folders, remove_stale_locks)
    report["locks"] = [
        {"path": str(x.path), "state": str(x.state), "reason": x.reason} for x in found
    ]
    for lock in found:
        out.print(f"lock {lock.path}: {lock.state}, {lock.reason}", markup=False, soft_wrap=True)
    end_children_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="aiter-moe-prebuild-") as name:
        folder = Path(name)
        builds = []
        if ahead is not None and covered is not None:
            rows = [c.row for c in covered if c.row is not None and c.tokens in ahead.tokens]
            tables.write_table(rows, folder / "rows.csv")
            env = steps.aot_environment(arch)
            for command in steps.aot_commands(package, sys.executable, folder / "rows.csv"):
                builds.append(driver.Build(f"compile by {command[2]}", tuple(command), env))
        if gpu is None:
            out.print("no ROCm GPU: kernels without a tuned row are built at their first call")
        else:
            (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
            worker = (sys.executable, "-m", "sglang_aiter_moe.prebuild.worker")
            for count in counts:
                command = (*worker, str(folder / "plan.json"), str(count))
                builds.append(driver.Build(f"call with {count} tokens", command, {}))
        log = Path("prebuild.log").absolute()
        outcomes = _run(out, builds, log, timeout, step_timeout, folders)
    report["outcomes"] = [vars(outcome) for outcome in outcomes]
    failed = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in failed:
        out.print(f"[red]failed[/] {escape(outcome.name)}: {escape(outcome.why)}", soft_wrap=True)
    done = sum(outcome.ok for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    out.print(
        f"{done} of {len(builds)} builds in {seconds:.0f} s; their output: {log}", markup=False
    )
    write_json(report, json_target)
    raise typer.Exit(1 if failed or not builds else 0)


def _run(
    out: Console, builds: list[Build], log: Path, total_s: float, step_s: float, folders: list[Path]
) -> list[Outcome]:
    from sglang_aiter_moe.prebuild import driver

    outcomes = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=len(builds))
        for outcome in driver.run(
            builds,
            log=log,
            total_s=total_s,
            step_s=step_s,
            folders=folders,
            progress=lambda build, seconds: bar.update(task, description=build.name),
        ):
            bar.advance(task)
            state = "built" if outcome.ok else "failed"
            out.print(f"{state} {outcome.name} ({outcome.seconds:.0f} s)", markup=False)
            outcomes.append(outcome)
    return outcomes


def _show(out: Console, wanted: list[Step], package: Path | None, gpu: str | None) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("build", "tokens", "mode", "kernels", "tuned row", "how"):
        table.add_column(title, overflow="fold")
    tuned = {True: "yes", False: "no", None: "not known"}
    for step in wanted:
        tokens = str(step.tokens[0])
        if len(step.tokens) > 1:
            tokens = f"{tokens} to {step.tokens[-1]}"
        kernels = f"{step.family}, {len(step.kernels)} by name" if step.kernels else step.family
        table.add_row(step.kind, tokens, step.mode, kernels, tuned[step.tuned], escape(step.how))
    out.print(table)
    # What is compiled ahead is found by the calls.
    seconds = sum(s.seconds for s in wanted if s.kind == "compile" or not s.kernels)
    watchdog = "longer than" if seconds > 300 else "within"
    out.print(
        f"at most {seconds} s where nothing is built yet, {watchdog} SGLang's watchdog of 300 s",
        highlight=False,
    )
