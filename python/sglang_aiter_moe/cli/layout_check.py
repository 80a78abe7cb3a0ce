"""`layout --check`: the verdicts on a file, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table

from sglang_aiter_moe.cli.output import console, write_json

TOLD, CONTRADICTED, UNKNOWN = 0, 1, 2


def run(
    file: Path,
    config: str | None,
    against: Path | None,
    tp: tuple[int, int],
    ep: tuple[int, int],
    *,
    json_target: str | None,
) -> int:
    """Prints the verdict on each layer; returns the exit status.

    Args:
        file, config, against: as the options say.
        tp, ep: number of ranks, and which: of those that share columns, and that share experts.

    Raises:
        ContractError: the config or the file cannot be read, or there is no such rank.
    """
    if config is None:
        raise typer.BadParameter("--check needs --config CONFIG")
    from sglang_aiter_moe.checkpoint.check import check_file
    from sglang_aiter_moe.model_config import rank_spec, read_config

    (tp_size, tp_rank), (ep_size, ep_rank) = tp, ep
    spec = rank_spec(read_config(config), tp=tp_size, ep=ep_size, tp_rank=tp_rank, ep_rank=ep_rank)
    verdicts = check_file(file, spec, against=against, tp_rank=tp_rank, ep_rank=ep_rank)
    status = exit_status([v.layout for v in verdicts], [v.agrees for v in verdicts])
    out = console(json_target)
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "layout", "evidence", ""):
        table.add_column(title)
    for verdict in verdicts:
        table.add_row(verdict.layer, verdict.layout, verdict.evidence or "none", verdict.detail)
    out.print(table)
    write_json({"status": status, "layers": [asdict(v) for v in verdicts]}, json_target)
    return status


def exit_status(layouts: list[str], agrees: list[bool | None]) -> int:
    """2 if any layer is unknown, else 1 if one contradicts its file or is mixed, else 0."""
    if "unknown" in layouts:
        return UNKNOWN
    return CONTRADICTED if False in agrees or "mixed" in layouts else TOLD
