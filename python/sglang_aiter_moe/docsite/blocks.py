"""Parts of pages that are made from the code, between two comments.

``<!-- variables: NAME NAME -->`` ... ``<!-- end -->`` becomes a table of these variables;
``<!-- plans: CONFIG; tp=8; tp=8 ep=8 NAME=VALUE -->`` a table with a line for each setting;
``<!-- executed: layers -->``, ``mutants`` or ``opcodes`` what docsite/executed.py says of amdgpu;
``<!-- hopper: layers -->`` and so on what docsite/executed_hopper.py says of nvptx.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sglang_aiter_moe.docsite import executed, executed_hopper
from sglang_aiter_moe.errors import ContractError

#: What follows is about tables, and too long for a cell.
_WHY = re.compile(r" \(no table|: no table")
_BLOCK = re.compile(
    r"(<!-- (variables|plans|executed|hopper): (.*?) -->\n).*?(<!-- end -->)", re.DOTALL
)


def fill(page: str) -> str:
    """The page with every block as the code makes it today."""
    makers: dict[str, Callable[[str], str]] = {
        "variables": _variables,
        "plans": _plans,
        "executed": lambda what: getattr(executed, what)(),
        "hopper": lambda what: getattr(executed_hopper, what)(),
    }
    return _BLOCK.sub(lambda m: m[1] + makers[m[2]](m[3]) + m[4], page)


def _variables(names: str) -> str:
    from sglang_aiter_moe.cli.env import markdown_table

    head, rule, *rows = markdown_table().splitlines()
    by_name = {row.split("`")[1]: row for row in rows}
    return "\n".join([head, rule, *(by_name[name] for name in names.split())]) + "\n"


def _plans(text: str) -> str:
    config, *settings = (part.strip() for part in text.split(";"))
    lines = [
        "| setting | mode | w13 | expert width, padded | GiB a layer | kernels (tuned row) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| `{setting}` | {_plan(config, setting)} |" for setting in settings]
    return "\n".join(lines) + "\n"


def _plan(config: str, setting: str) -> str:
    from sglang_aiter_moe.cli.plan_report import Setting, packed_bytes
    from sglang_aiter_moe.contract.capabilities import NEWEST_RELEASE
    from sglang_aiter_moe.model_config import moe_layers, read_config

    pairs = dict(word.split("=", 1) for word in setting.split())
    sizes = {name: int(pairs.pop(name, "1")) for name in ("tp", "ep")}
    arch = pairs.pop("arch", "gfx950")
    spec = moe_layers(read_config(config), **sizes).spec
    try:
        plan = Setting(arch, pairs.pop("aiter", NEWEST_RELEASE), pairs).plan(spec)
    except ContractError as error:
        return f"refused: {_WHY.split(error.what)[0]} | | | |"
    tuned = {True: "yes", False: "no", None: "not known"}
    kernels = ", ".join(
        f"from {p.first}: {p.family} ({tuned[p.tuned]})" for p in plan.ranges if p.first <= 32768
    )
    cells = (
        " then ".join(str(mode) for mode in plan.modes),
        plan.w13_layout,
        str(plan.padded_intermediate_size),
        f"{packed_bytes(plan) / 2**30:.3f}",
        kernels,
    )
    return " | ".join(cells)
