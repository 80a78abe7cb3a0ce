"""``numerics`` imports nothing of what it checks."""

import ast
import sys
from pathlib import Path

import pytest

from sglang_aiter_moe import numerics
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_numerics_import_nothing_of_what_they_check():
    """Read from the syntax tree: torch, the standard library, errors, and each other."""
    package = Path(numerics.__file__).parent
    for source in sorted(package.glob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"relative import in {source.name}"
                names = [node.module]
            for name in names:
                own = (
                    name.startswith("sglang_aiter_moe.numerics.")
                    or name == "sglang_aiter_moe.errors"
                )
                assert own or name.split(".")[0] in {"torch", *sys.stdlib_module_names}, (
                    source.name,
                    name,
                )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
