#!/usr/bin/env python3
"""The registration rule of SGLang's test collection, read from a file's syntax tree.

SGLang's CI finds out where a test runs from literal top-level calls ``register_*_ci(...)`` and
then executes the file (``python3 file.py``). A file under ``test/registered`` without one of the
two stops the collection on every platform, so both are checked before a commit.

Only the standard library is used: the pre-commit hook runs this file by its path.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Required arguments in the order in which they may be given by position.
REQUIRED_ARGUMENTS = {
    "register_cpu_ci": ("est_time", "suite"),
    "register_cuda_ci": ("est_time", "stage", "runner_config"),
    "register_amd_ci": ("est_time", "stage", "runner_config"),
}
NOT_TESTS = ("__init__.py", "conftest.py")

ADD_REGISTRATION = (
    "add at the top level, after the imports: "
    '`register_cpu_ci(est_time=5, suite="base-a-test-cpu")` '
    "(from sglang_aiter_moe.testing.registration import register_cpu_ci; register_cuda_ci and "
    "register_amd_ci take est_time, stage and runner_config)"
)
ADD_MAIN = (
    'add at the end: `if __name__ == "__main__":` with the body '
    '`sys.exit(pytest.main([__file__, "-v"]))`'
)


@dataclass(frozen=True)
class Violation:
    """One broken rule of one file, with what to add."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_paths(paths: Iterable[str | Path]) -> tuple[list[Path], list[Violation]]:
    """Checks files, and of directories all Python files but ``__init__.py`` and ``conftest.py``.

    Returns:
        The files looked at, and what is wrong with them. A path that does not exist is a violation.
    """
    files: list[Path] = []
    violations: list[Violation] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(f for f in path.rglob("*.py") if f.name not in NOT_TESTS)
            if not found:
                violations.append(Violation(str(path), 0, "holds no Python test file"))
            files.extend(found)
        elif path.is_file():
            files.append(path)
        else:
            violations.append(Violation(str(path), 0, "no such file or directory"))
    for file in files:
        violations.extend(check_source(file.read_text(encoding="utf-8"), str(file)))
    return files, violations


def check_source(source: str, path: str) -> list[Violation]:
    """Checks one file's text: a literal top-level registration, and a ``__main__`` that calls."""
    try:
        tree = ast.parse(source, filename=path)
    except SyntaxError as error:
        return [Violation(path, error.lineno or 0, f"does not parse: {error.msg}")]
    return [*_check_registration(tree, path), *_check_main(tree, path)]


def _check_registration(tree: ast.Module, path: str) -> Iterator[Violation]:
    top_level = [
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Expr) and _register_name(statement.value)
    ]
    hidden = [
        node
        for node in ast.walk(tree)
        if _register_name(node) and all(node is not call for call in top_level)
    ]
    for call in hidden:
        yield Violation(
            path,
            call.lineno,
            f"{_register_name(call)}() is not a top-level statement, where CI does not see it: "
            "move it to the top level of the module",
        )
    if not top_level and not hidden:
        yield Violation(path, 1, f"no register_*_ci() call: {ADD_REGISTRATION}")
    for call in top_level:
        yield from _check_arguments(call, path)


def _check_arguments(call: ast.Call, path: str) -> Iterator[Violation]:
    name = _register_name(call)
    if name not in REQUIRED_ARGUMENTS:
        yield Violation(
            path, call.lineno, f"{name}() is unknown: use one of {', '.join(REQUIRED_ARGUMENTS)}"
        )
        return
    required = REQUIRED_ARGUMENTS[name]
    given: dict[str, ast.expr] = dict(zip(required, call.args, strict=False))
    given.update({keyword.arg or "**": keyword.value for keyword in call.keywords})
    for argument, value in given.items():
        if argument == "**" or not isinstance(value, ast.Constant):
            yield Violation(
                path,
                call.lineno,
                f"{name}({argument}={ast.unparse(value)}) is no literal, but CI reads the source: "
                "write the number or string itself",
            )
    for argument in required:
        if argument not in given:
            yield Violation(
                path, call.lineno, f"{name}() lacks {argument}=: give {', '.join(required)}"
            )
    est_time = given.get("est_time")
    if isinstance(est_time, ast.Constant) and not _is_positive_number(est_time.value):
        yield Violation(
            path,
            call.lineno,
            f"{name}(est_time={est_time.value!r}) must be the expected seconds, a number above 0",
        )


def _check_main(tree: ast.Module, path: str) -> Iterator[Violation]:
    blocks = [s for s in tree.body if isinstance(s, ast.If) and _is_main_test(s.test)]
    if not blocks:
        yield Violation(
            path, 1, f'no `if __name__ == "__main__":` entry, CI runs the file: {ADD_MAIN}'
        )
    elif not any(
        isinstance(node, ast.Call) for block in blocks for s in block.body for node in ast.walk(s)
    ):
        yield Violation(
            path,
            blocks[0].lineno,
            "the `__main__` body calls nothing, so CI would pass without running a test: "
            'its body must be `sys.exit(pytest.main([__file__, "-v"]))`',
        )


def _register_name(node: ast.AST) -> str | None:
    """The name of a called ``register_..._ci`` function, also behind a module name, else None."""
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return name if name.startswith("register_") and name.endswith("_ci") else None


def _is_main_test(test: ast.expr) -> bool:
    if not (
        isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
    ):
        return False
    sides = {ast.unparse(test.left), ast.unparse(test.comparators[0])}
    return sides == {"__name__", "'__main__'"}


def _is_positive_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


if __name__ == "__main__":
    _, found = check_paths(sys.argv[1:] or ["test/registered"])
    for violation in found:
        print(violation)
    sys.exit(1 if found else 0)
