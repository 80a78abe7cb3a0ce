"""`layout --check`: the verdicts on a file, for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table

from sglang_aiter_moe.cli.output import console, write_json
from sglang_aiter_moe.errors import ContractError

TOLD, CONTRADICTED, UNKNOWN = 0, 1, 2


def run(
    file: Path,
    config: Path | None,
    against: Path | None,
    tp: tuple[int, int],
    ep: tuple[int, int],
    *,
    json_target: str | None,
) -> int:
    """Prints the verdict on each layer; returns the exit status.

    Args:
        file, config, against: as the options say.
        tp, ep: number of ranks, and which.
    """
    if config is None:
        raise typer.BadParameter("--check needs --config CONFIG")
    from sglang_aiter_moe.checkpoint.check import check_file
    from sglang_aiter_moe.contract.model_config import spec_from_config

    spec = spec_from_config(read_config(config), tp=tp[0], ep=ep[0])
    verdicts = check_file(file, spec, against=against, tp_rank=tp[1], ep_rank=ep[1])
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


def read_config(path: Path) -> dict:
    """A model's config: the file, or ``config.json`` in a directory.

    Raises:
        ContractError: it cannot be read.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(
            f"{path} cannot be read: {error}",
            allowed="a model's config.json",
            fix="pass the file, or the model's directory",
        ) from error
    if not isinstance(data, dict):
        raise ContractError(
            f"{path} holds a {type(data).__name__}",
            allowed="a JSON object",
            fix="pass the model's config.json",
        )
    return data
