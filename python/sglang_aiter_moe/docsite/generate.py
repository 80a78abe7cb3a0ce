"""Writes what docs/ has from the code: ``python -m sglang_aiter_moe.docsite.generate``.

A test compares each file with what this would write, so none of them can be out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from sglang_aiter_moe.docsite.blocks import fill
from sglang_aiter_moe.environ import exactly

ROOT = Path(__file__).resolve().parents[3]
#: What is drawn in docs/layouts.md: file, form, whether scales, rows, columns.
LAYOUTS = (
    ("separated", "separated", False, 64, 128),
    ("gu_interleaved", "gu_interleaved", False, 64, 128),
    ("gu_interleaved_gfx1250", "gu_interleaved_gfx1250", False, 64, 128),
    ("scales_separated", "separated", True, 32, 256),
    ("scales_a16w4", "a16w4", True, 32, 256),
    ("scales_a16w4_gate_up", "a16w4_gate_up", True, 32, 256),
    ("scales_n32k4", "n32k4", True, 32, 256),
    ("scales_n32k4_gate_up", "n32k4_gate_up", True, 32, 256),
)
#: Pages with parts that are made from the code (docsite/blocks.py).
PAGES = (
    "cookbook/kimi-k3.md",
    "cookbook/gpt-oss.md",
    "cookbook/deepseek-v4.md",
    "amd-execution.md",
    "hopper-execution.md",
)
#: The contradiction that README.md shows, and how its reader leaves it.
CONTRADICTION = {"AITER_SITUV2_A8W4": "true", "SGLANG_USE_AITER": "1"}


def files() -> dict[str, Callable[[], str]]:
    """Path below the checkout -> what makes its text."""
    made: dict[str, Callable[[], str]] = {
        "docs/reference/cli.md": _cli,
        "docs/reference/environment.md": _environment,
        "docs/images/doctor.svg": doctor_picture,
        "docs/images/plan.svg": plan_picture,
        "docs/matrix.md": lambda: _matrix("markdown"),
        "docs/matrix.svg": lambda: _matrix("svg"),
        "docs/mutation.md": _mutation,
    }
    for name in PAGES:
        made[f"docs/{name}"] = lambda path=ROOT / "docs" / name: fill(path.read_text("utf-8"))
    for name, form, scales, rows, cols in LAYOUTS:
        path = f"docs/images/layouts/{name}.svg"
        made[path] = lambda f=form, s=scales, r=rows, c=cols: layout_picture(f, s, r, c)
    return made


def _matrix(what: str) -> str:
    """The matrix's page or picture, from the results in docs/matrix*.json."""
    from sglang_aiter_moe.matrix import picture, report, stored

    kept = stored.load(ROOT / "docs" / "matrix.json")
    if what == "svg":
        return picture.svg(kept)
    return report.markdown(kept, *report.further(ROOT / "docs"))


def _mutation() -> str:
    """What became of the mutants, from the results in docs/mutation.json."""
    from sglang_aiter_moe.testing import mutation_report

    return mutation_report.markdown(*mutation_report.read(ROOT / "docs"))


def layout_picture(form: str, scales: bool, rows: int, cols: int) -> str:
    """What ``layout FORM --svg`` draws."""
    from sglang_aiter_moe.cli.layout_picture import draw
    from sglang_aiter_moe.cli.layout_runs import resolve

    return draw(resolve(form, rows=rows, cols=cols, scales=scales))


def doctor_picture() -> str:
    """``doctor`` in the contradictory environment: the sections about variables and mode."""
    from sglang_aiter_moe.cli import doctor, doctor_checks
    from sglang_aiter_moe.docsite.terminal import picture, recording

    with exactly(CONTRADICTION), mock.patch.object(doctor_checks, "aiter_package", lambda: None):
        findings = doctor_checks.examine("kimi-k3", tp=8, ep=1, arch="gfx950")
    # Versions and what is installed are those of one machine; the picture is about the rest.
    machine = ("versions", "patches", "kernels and tuned tables")
    out = recording()
    doctor.show([f for f in findings if f.section not in machine], out)
    line = " ".join(f"{name}={value}" for name, value in CONTRADICTION.items())
    return picture(out, f"{line} sglang-aiter-moe doctor")


def plan_picture() -> str:
    """``plan`` for Kimi K3 in A8W4."""
    from sglang_aiter_moe.cli import plan, plan_report
    from sglang_aiter_moe.docsite.terminal import picture, recording
    from sglang_aiter_moe.model_config import moe_layers, read_config

    setting = plan_report.Setting("gfx950", "0.1.20", {"AITER_SITUV2_A8W4": "1"})
    report = plan_report.describe(moe_layers(read_config("kimi-k3"), tp=8), setting)
    out = recording(140)
    plan.show({"arch": setting.arch, "aiter": setting.aiter, "tp": 8, "ep": 1, **report}, out)
    return picture(out, "sglang-aiter-moe plan kimi-k3 --tp 8 --env AITER_SITUV2_A8W4=1")


def _cli() -> str:
    from sglang_aiter_moe.cli.reference import markdown

    return markdown()


def _environment() -> str:
    from sglang_aiter_moe.cli.env import markdown_table

    path = ROOT / "docs" / "reference" / "environment.md"
    text = path.read_text(encoding="utf-8")
    return text[: text.index("| Env var |")] + markdown_table()


def main() -> int:
    for name, make in files().items():
        path, text = ROOT / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
