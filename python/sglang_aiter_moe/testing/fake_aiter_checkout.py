"""A directory that looks like AITER's package to whoever reads its files. It has no kernels.

For tests of what reads AITER's files and starts AITER's commands. Its ahead-of-time compiler writes down how
it was started and does what the test tells it to.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

_KEY = "gfx cu_num token model_dim inter_dim expert topk act_type dtype q_dtype_a q_dtype_w q_type"
_REST = "use_g1u1 doweight_stage1 block_m ksplit kernelName1 kernelName2 run_1stage _tag"
COLUMNS = (*_KEY.split(), *_REST.split())
#: AITER's names of activation dtypes.
A_DTYPES = {"A16W4": "bfloat16", "A8W4": "float8_e4m3fn", "A4W4": "float4_e2m1fn_x2"}

_COMPILER = """import json, os, sys
names = ("AITER_AOT_IMPORT", "ARCH", "COMPILE_ONLY")
record = {"argv": sys.argv[1:], "env": {n: os.environ.get(n) for n in names}}
record["rows"] = open(sys.argv[2]).read()
with open(os.environ["FAKE_AITER_RECORD"], "a") as file:
    file.write(json.dumps(record) + "\\n")
exec(os.environ.get("FAKE_AITER_DOES", ""))
"""


def write_package(folder: Path) -> Path:
    """Writes ``folder/aiter``, with the files by which this package recognises an AITER; returns it."""
    package = folder / "aiter"
    for name in ("ops", "jit/build", "configs/model_configs", "aot/flydsl"):
        (package / name).mkdir(parents=True)
    for name in ("__init__.py", "ops/shuffle.py", "aot/__init__.py", "aot/flydsl/__init__.py"):
        (package / name).write_text("")
    (package / "aot" / "flydsl" / "moe.py").write_text(_COMPILER)
    return package


def tuned_row(
    tokens: int,
    mode: str,
    shape: Sequence[int],
    activation: str = "Situv2",
    kernels: tuple[str, str] = ("flydsl_moe1_x", "flydsl_moe2_x"),
    **more: object,
) -> dict[str, object]:
    """One row of a tuned table: ``shape`` is (H, I, E, top-k)."""
    hidden, inter, experts, topk = shape
    row = dict.fromkeys(COLUMNS, "")
    row |= {
        "gfx": "gfx950",
        "cu_num": 256,
        "token": tokens,
        "model_dim": hidden,
        "inter_dim": inter,
        "expert": experts,
        "topk": topk,
        "act_type": f"ActivationType.{activation}",
        "dtype": "torch.bfloat16",
        "q_dtype_a": f"torch.{A_DTYPES[mode]}",
        "q_dtype_w": "torch.float4_e2m1fn_x2",
        "q_type": "QuantType.per_1x32",
        "use_g1u1": 1,
        "doweight_stage1": 0,
        "kernelName1": kernels[0],
        "kernelName2": kernels[1],
    }
    return row | more


def write_table(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    """Writes a tuned table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path
