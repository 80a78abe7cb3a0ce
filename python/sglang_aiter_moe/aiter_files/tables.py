"""AITER's tuned tables as they are on disk, and which of a plan's calls they have a row for.

Columns and file names: AITER's ``configs/tuned_fmoe.csv`` and ``configs/model_configs/*tuned_fmoe*.csv``;
the key: docs/contract.md section b.2.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_aiter_moe.contract.modes import ActivationMode
from sglang_aiter_moe.contract.plan import MoePlan
from sglang_aiter_moe.contract.tuned import padded_tokens
from sglang_aiter_moe.errors import ContractError

CONFIG_VARIABLE = "AITER_CONFIG_FMOE"
#: Compute units of an MI350 or MI355 (gfx950), part of the key; other parts need rows of their own.
CU_NUM = 256
_MODES = {
    "bfloat16": ActivationMode.A16W4,
    "float8_e4m3fn": ActivationMode.A8W4,
    "float4_e2m1fn_x2": ActivationMode.A4W4,
}
_DROPPED_TAG = "flydsl_fallback"


@dataclass(frozen=True)
class TunedRow:
    """One MXFP4 row.

    Attributes:
        table: the file.
        line: its line there, the header being 1.
        gfx: architecture, "" in tables from before that column.
        cu_num: compute units.
        tokens: padded M.
        shape: (H, I, E, top-k).
        activation: lower case, as in ``Activation``.
        mode: by the activation dtype.
        kernels: names of stage 1 and stage 2.
        text: the row's cells by column, for writing it to another table.
    """

    table: Path
    line: int
    gfx: str
    cu_num: int
    tokens: int
    shape: tuple[int, int, int, int]
    activation: str
    mode: ActivationMode
    kernels: tuple[str, str]
    text: Mapping[str, str]


@dataclass(frozen=True)
class Coverage:
    """What the tables have for one token count of a plan.

    Attributes:
        tokens: padded M.
        mode: that AITER runs there.
        row: the row that it finds, None for a miss.
        other: a row of another activation that its second lookup finds, None without.
    """

    tokens: int
    mode: ActivationMode
    row: TunedRow | None
    other: TunedRow | None = None


def table_files(package: Path, env: Mapping[str, str] | None = None) -> list[Path]:
    """The tables that AITER merges: those of AITER_CONFIG_FMOE, else its own."""
    env = os.environ if env is None else env
    given = env.get(CONFIG_VARIABLE)
    if given:
        return [Path(part) for part in given.split(os.pathsep) if part]
    configs = package / "configs"
    own = [configs / "tuned_fmoe.csv"] if (configs / "tuned_fmoe.csv").is_file() else []
    models = (configs / "model_configs").glob("*tuned_fmoe*.csv")
    return own + sorted(path for path in models if "untuned" not in path.name)


def read_rows(files: Iterable[Path]) -> list[TunedRow]:
    """The MXFP4 rows of tables; rows of other quantisations are left out.

    Raises:
        ContractError: a table cannot be read, or is none.
    """
    rows: list[TunedRow] = []
    for path in files:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                for line, cells in enumerate(csv.DictReader(file), 2):
                    row = _row(path, line, cells)
                    if row is not None:
                        rows.append(row)
        except OSError as error:
            raise ContractError(
                f"{path}: {error.strerror}",
                allowed="AITER's tuned tables",
                fix=f"look at {CONFIG_VARIABLE}, or unset it",
            ) from error
        except (KeyError, ValueError, csv.Error) as error:
            raise ContractError(
                f"{path} is no tuned table: {error!r}",
                allowed="a CSV with AITER's columns (token, model_dim, inter_dim, expert, topk, ...)",
                fix=f"look at {CONFIG_VARIABLE}, or unset it",
            ) from error
    return rows


def coverage(
    plan: MoePlan, rows: Sequence[TunedRow], tokens: Iterable[int], cu_num: int = CU_NUM
) -> list[Coverage]:
    """Which row AITER finds for each padded token count of a plan.

    Args:
        plan: of one layer.
        rows: of :func:`read_rows`.
        tokens: token counts; those with the same key are looked up once.
        cu_num: of the GPU.
    """
    spec = plan.spec
    topk = spec.topk - 1 if spec.expert_parallel else spec.topk
    shape = (plan.padded_hidden_size, plan.padded_intermediate_size, spec.num_experts, topk)
    fitting = [
        row
        for row in rows
        if row.shape == shape and row.cu_num == cu_num and row.gfx in ("", plan.target.arch)
    ]
    found = []
    for key in dict.fromkeys(padded_tokens(count) for count in tokens):
        mode = plan.mode_for(key)
        here = [row for row in fitting if row.tokens == key and row.mode is mode]
        own = [row for row in here if row.activation == spec.activation.value]
        others = [row for row in here if row.activation != spec.activation.value]
        # Of two rows with one key the later file wins, as in a merge.
        row = own[-1] if own else None
        other = others[-1] if others and row is None else None
        found.append(Coverage(key, mode, row, other))
    return found


def write_table(rows: Sequence[TunedRow], path: Path) -> None:
    """Writes rows as a table of their own, with every column that one of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row.text))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(row.text for row in rows)


def _row(path: Path, line: int, cells: dict[str, str]) -> TunedRow | None:
    cells = {name: value or "" for name, value in cells.items() if name is not None}
    if not cells["q_dtype_w"].endswith("float4_e2m1fn_x2"):
        return None
    mode = _MODES.get(cells["q_dtype_a"].rpartition(".")[2])
    if (
        mode is None
        or not cells["q_type"].endswith("per_1x32")
        or cells.get("doweight_stage1", "0") not in ("", "0")
        or cells.get("_tag", "") == _DROPPED_TAG
    ):
        return None
    return TunedRow(
        path,
        line,
        cells.get("gfx", ""),
        int(cells["cu_num"]),
        int(cells["token"]),
        (
            int(cells["model_dim"]),
            int(cells["inter_dim"]),
            int(cells["expert"]),
            int(cells["topk"]),
        ),
        cells["act_type"].rpartition(".")[2].lower(),
        mode,
        (cells["kernelName1"], cells["kernelName2"]),
        cells,
    )
