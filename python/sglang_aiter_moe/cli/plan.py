"""`plan`: how a model's experts are laid out and called, with the reasons."""

from __future__ import annotations

import os
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_aiter_moe.cli.output import JsonOption, console, write_json
from sglang_aiter_moe.environ import VARIABLES
from sglang_aiter_moe.errors import ContractError


def plan(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="config.json, model directory, or the name of an example (plan --examples).",
        ),
    ] = "",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size, a divisor of --tp.")] = 1,
    arch: Annotated[str, typer.Option(help="gfx942, gfx950 or gfx1250.")] = "gfx950",
    aiter: Annotated[
        str, typer.Option(metavar="RELEASE", help="AITER's release, or a commit of its main.")
    ] = "0.1.20",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="K=V", help="Set on top of this process's environment."),
    ] = None,
    fuse_shared: Annotated[
        bool, typer.Option(help="Shared experts run as further routed ones.")
    ] = False,
    examples: Annotated[bool, typer.Option("--examples", help="Only name the examples.")] = False,
    json_target: JsonOption = None,
) -> None:
    """Show mode, layout, gate_mode, padding, size and kernels of a model's experts, with reasons.

    Exits with 2 when the plan refuses; what would give a plan is then listed.
    """
    # torch takes seconds to import, and --help should not wait for it.
    from sglang_aiter_moe.cli import plan_report
    from sglang_aiter_moe.model_config import example_names, moe_layers, read_config

    out = console(json_target)
    if examples:
        out.print("\n".join(example_names()), markup=False)
        write_json({"examples": example_names()}, json_target)
        return
    if not config:
        raise typer.BadParameter("name a config.json, a model directory or an example")
    layers = moe_layers(read_config(config), tp=tp, ep=ep, fuse_shared=fuse_shared)
    setting = plan_report.Setting(arch, aiter, {**os.environ, **_assignments(env or [])})
    try:
        report = plan_report.describe(layers, setting)
    except ContractError as error:
        changes = plan_report.what_would_plan(layers.spec, setting)
        refusal = {"what": error.what, "allowed": error.allowed, "fix": error.fix}
        write_json({"config": config, "refused": refusal, "would_plan": changes}, json_target)
        for change in changes:
            out.print(f"would give a plan: {change['change']}: {change['result']}", markup=False)
        raise
    report = {"config": config, "arch": arch, "aiter": aiter, "tp": tp, "ep": ep, **report}
    show(report, out)
    write_json(report, json_target)


def _assignments(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"--env {text}: write NAME=VALUE")
        if name not in VARIABLES:
            near = get_close_matches(name, VARIABLES, n=1)
            hint = f"; {near[0]}?" if near else ""
            raise typer.BadParameter(f"--env {text}: nothing here reads {name} (see `env`){hint}")
        pairs[name] = value
    return pairs


def show(report: dict[str, Any], out: Console) -> None:
    """Prints a report."""
    out.print(
        f"[bold]{escape(report['model'])}[/] on {report['arch']}, AITER {report['aiter']}, "
        f"tp {report['tp']}, ep {report['ep']}: {report['experts']} experts, top-{report['topk']}, "
        f"hidden {report['hidden_size']}, intermediate {report['intermediate_size']} a rank, "
        f"{report['activation']}"
    )
    size = f"{report['bytes_per_layer'] / 2**30:.3f} GiB a layer"
    if report["layers"] is not None:
        size += f", {report['bytes_per_rank'] / 2**30:.1f} GiB in {report['layers']} layers"
    out.print(
        f"w13 {report['w13_layout']} (scales {report['w13_scale_layout']}), w2 "
        f"{report['w2_layout']} (scales {report['w2_scale_layout']}), gate_mode "
        f"{report['gate_mode']}; {size}"
    )
    table = Table(box=None, pad_edge=False)
    for title in ("tokens", "mode", "kernels", "tuned row"):
        table.add_column(title)
    tuned = {True: "yes", False: "no", None: "not known"}
    for part in report["ranges"]:
        tokens = f"{part['first']} to {part['last']}"
        table.add_row(tokens, part["mode"], part["family"], tuned[part["tuned"]])
    out.print(table)
    table = Table(box=None, pad_edge=False)
    for title in ("decision", "value", "because"):
        table.add_column(title, overflow="fold")
    for decision in report["decisions"]:
        table.add_row(
            decision["subject"],
            escape(decision["value"]),
            escape(f"{decision['reason']} ({decision['source']})"),
        )
    out.print(table)
    table = Table(box=None, pad_edge=False)
    for title in ("with", "would be"):
        table.add_column(title, overflow="fold")
    for change in report["changes"]:
        table.add_row(escape(change["change"]), escape(change["result"]))
    out.print(table)
