"""When SGLang reads each variable, by its installed source: the claims of docs/reference/environment.md."""

import ast
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

from sglang_aiter_moe.environ import VARIABLES
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

pytestmark = pytest.mark.sglang

#: Declares variables with their types; reads none.
DECLARATIONS = "environ.py"
#: Read by SGLang's plugin loader and CPU engine, in ways of their own.
ELSEWHERE = {"SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"}
READ = {name: v for name, v in VARIABLES.items() if v.sglang and name not in ELSEWHERE}


@pytest.fixture(scope="module")
def readers():
    """Variable -> {"import", "call"}: whether a module's own statements or a function read it."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
    found = {name: set() for name in VARIABLES}
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.name == DECLARATIONS or not any(name in text for name in VARIABLES):
            continue
        look(ast.parse(text), "import", found)
    return found


def look(node, when, found):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        name = getattr(child, "value", None) if isinstance(child, ast.Constant) else None
        name = child.attr if isinstance(child, ast.Attribute) else name
        if name in found:
            found[name].add(when)
        look(child, "call" if inside else when, found)


@pytest.mark.parametrize("name", READ)
def test_sglang_reads_it_when_the_table_says(readers, name):
    claim = READ[name].when.partition("AITER:")[0]
    assert ("import" in readers[name]) == ("at import" in claim), (claim, readers[name])
    later = "at weight load" in claim or "call" in claim
    if later:
        assert "call" in readers[name]


@pytest.mark.parametrize(
    "value", [None, "", "0", "1", "True", "false", "yes", "Y", "no", "n", "on", "off", " 1", "junk"]
)
def test_the_table_parses_the_gate_up_flag_as_sglangs_loaders_do(monkeypatch, value):
    from sglang.srt.environ import envs

    name = "SGLANG_USE_AITER_MOE_GU_ITLV"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of junk
        assert envs.SGLANG_USE_AITER_MOE_GU_ITLV.get() is VARIABLES[name].sglang_reads(value)


@pytest.mark.parametrize("name", [n for n, v in VARIABLES.items() if not v.readers])
def test_nobody_reads_what_has_no_reader(readers, name):
    assert readers[name] == set()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
