"""Tile choices: (arch, mode, average rows an expert) -> tiles. One table, one lookup.

``tables/<arch>.json`` holds, per mode, rows of [most rows an expert, tile choice]; ``tune.py`` regenerates the
file of an arch that it runs on. The tables of gfx942, gfx950 and gfx1250 were chosen by what compiles without
spills within their occupancy (``benchmark/amd_compile.py``), not by timing: no such GPU was at hand.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Tile:
    """One kernel's tile: ``n`` output columns, ``k`` elements a step, warps, software pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """``m`` rows a block (shared by both stages) and the two stages' tiles."""

    m: int
    stage1: Tile
    stage2: Tile

    @staticmethod
    def from_json(row: dict) -> Config:
        return Config(row["m"], Tile(**row["stage1"]), Tile(**row["stage2"]))

    def to_json(self) -> dict:
        return asdict(self)


@functools.cache
def load(arch: str) -> dict[str, list[tuple[float, Config]]]:
    """The table of ``arch``, or the generic one. Mode -> rows in ascending order of rows an expert."""
    path = TABLES / f"{arch}.json"
    if not path.exists():
        path = TABLES / "generic.json"
    table = json.loads(path.read_text())
    return {
        mode: [(row["rows"] or float("inf"), Config.from_json(row["config"])) for row in rows]
        for mode, rows in table["modes"].items()
    }


def choose(arch: str, mode: str, rows_per_expert: float) -> Config:
    """The first configuration whose bound is at least ``rows_per_expert``; a last bound of null is no bound."""
    rows = load(arch)[mode]
    for bound, config in rows:
        if rows_per_expert <= bound:
            return config
    return rows[-1][1]
