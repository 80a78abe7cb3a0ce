"""``portable`` is what the plan is checked against: it must not share a rule with it."""

import ast
import sys
from pathlib import Path

import pytest

import sglang_aiter_moe
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PACKAGE = Path(sglang_aiter_moe.__file__).parent
ALLOWED = {"errors", "numerics", "portable"}


def imported_modules(tree: ast.AST, package: str) -> list[str]:
    """Full names of everything imported anywhere in a module of ``package``."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def violations(source: str, package: str = "sglang_aiter_moe.portable") -> list[str]:
    """Imports of our own parts that are not allowed, and names of SGLang's variables."""
    tree = ast.parse(source)
    found = []
    for name in imported_modules(tree, package):
        own = name.split(".")
        if own[0] == "sglang" or (own[0] == "sglang_aiter_moe" and own[1] not in ALLOWED):
            found.append(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [w for w in node.value.split() if w.strip("`'\"").startswith("SGLANG_")]
            found += [w for w in words if "*" not in w]
    return found


FILES = sorted((PACKAGE / "portable").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_nothing_of_plan_or_sglang(path):
    package = ".".join(["sglang_aiter_moe", *path.relative_to(PACKAGE).parts[:-1]])
    assert violations(path.read_text(), package) == []


def test_all_files_are_looked_at():
    names = {p.name for p in FILES}
    assert {"dispatch.py", "resolution.py", "tuned.py", "entry.py", "cpu.py"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "from sglang_aiter_moe.contract.modes import GateMode",
        "from sglang_aiter_moe import contract",
        "import sglang_aiter_moe.environ",
        "def f():\n    from sglang_aiter_moe.environ import VARIABLES",
        "from .. import contract",
        "from ..contract import plan",
        "import sglang",
        "import os\nos.environ.get('SGLANG_USE_AITER')",
    ],
)
def test_the_check_bites(source):
    assert violations(source)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
