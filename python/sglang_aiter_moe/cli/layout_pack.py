"""`layout --pack`: writes a pre-laid-out checkpoint, with progress."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_aiter_moe.cli.output import console, write_json
from sglang_aiter_moe.contract.moe_plan import MoePlan
from sglang_aiter_moe.errors import ContractError


def read_plan(
    plan: Path | None,
    config: str | None,
    arch: str,
    aiter: str | None,
    tp: tuple[int, int],
    ep: tuple[int, int],
) -> MoePlan:
    """The plan of a file, or the one for a model's config under this environment.

    Args:
        plan, config, arch, aiter: as the options say.
        tp, ep: number of ranks, and which: of those that share columns, and that share experts.

    Raises:
        ContractError: the file is no plan, or the config cannot be planned.
        typer.BadParameter: neither of the two, or a file and what it decides.
    """
    if plan is not None:
        beside = {"--config": config, "--aiter": aiter, "--tp": tp[0] > 1, "--ep": ep[0] > 1}
        given = [option for option, value in beside.items() if value]
        if given:
            raise typer.BadParameter(
                f"--plan says all of {', '.join(given)}: give one or the other"
            )
        return _read(plan)
    if config is None:
        raise typer.BadParameter("--pack needs --plan PLAN or --config CONFIG")
    from sglang_aiter_moe.contract.capabilities import Capabilities
    from sglang_aiter_moe.contract.plan import plan_moe
    from sglang_aiter_moe.contract.spec import Target
    from sglang_aiter_moe.model_config import rank_spec, read_config

    known = Capabilities.for_release
    capabilities = known(aiter) if aiter else Capabilities.newest("--aiter was not given")
    spec = rank_spec(read_config(config), tp=tp[0], ep=ep[0], tp_rank=tp[1], ep_rank=ep[1])
    return plan_moe(spec, Target.current(arch, capabilities))


def _read(file: Path) -> MoePlan:
    """The plan in what `plan --json` or :meth:`.MoePlan.to_json` wrote."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text)
        if isinstance(found, dict):
            text = json.dumps(found.get("plan", found))
        return MoePlan.from_json(text)
    except (OSError, ValueError) as error:
        reason = error.what if isinstance(error, ContractError) else str(error)
        raise ContractError(
            f"--plan {file}: {reason}",
            allowed="a plan of this release as JSON",
            fix="write one: sglang-aiter-moe plan CONFIG --tp N --ep N --json FILE",
        ) from error


def run(
    source: Path,
    out: Path | None,
    plan: MoePlan,
    tp_rank: int,
    ep_rank: int,
    *,
    json_target: str | None,
) -> None:
    """Packs, and says what was written."""
    if out is None:
        raise typer.BadParameter("--pack needs --out OUT")
    from sglang_aiter_moe.checkpoint.offline import pack_checkpoint

    shown = console(json_target)
    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown) as progress:
        task = progress.add_task("layers", total=None)
        files = pack_checkpoint(
            source,
            out,
            plan,
            tp_rank=tp_rank,
            ep_rank=ep_rank,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    shown.print(
        f"{len(files)} files in {out}: w13 {plan.w13_layout}, gate_mode {plan.gate_mode.value}"
    )
    write_json(
        {"out": str(out), "files": [file.name for file in files], "w13_layout": plan.w13_layout},
        json_target,
    )
