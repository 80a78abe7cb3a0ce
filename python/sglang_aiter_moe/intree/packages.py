"""What is placed in SGLang's tree: the modules that the call sites need, and the tests with theirs.

Which modules, is read from their imports. Each file stays as it is but for the names that it imports:
``sglang_aiter_moe.x`` becomes ``sglang.srt.layers.moe.aiter_moe.x``, or ``sglang.test.aiter_moe.x`` for
what only tests need.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import libcst as cst

import sglang_aiter_moe
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree.anchors import dotted
from sglang_aiter_moe.intree.edits import PACKAGE
from sglang_aiter_moe.intree.manifest import FOLDER

OURS = "sglang_aiter_moe"
SOURCE = Path(sglang_aiter_moe.__file__).parent
TEST_FOLDER, TEST_PACKAGE = "test/aiter_moe", "sglang.test.aiter_moe"
#: Tests of these stay here: in an applied tree there is no plugin.
_PLUGIN = ("plugin", "patches", "intree", "cli")
_REGISTRATION = f"{OURS}.testing.registration"
_SGLANGS_REGISTRATION = "sglang.test.ci.ci_register"


@cache
def runtime_modules() -> list[str]:
    """The modules that an applied SGLang imports, without the name of the distribution's package.

    Raises:
        ContractError: they reach into a part that has no place in SGLang.
    """
    found = _closure(_name(path) for path in sorted((SOURCE / "srt").rglob("*.py")))
    foreign = [
        name
        for name in found
        if name.split(".")[1:2] in ([p] for p in (*_PLUGIN, "portable", "testing"))
    ]
    if foreign:
        raise ContractError(
            f"the call sites need {foreign[0]}",
            allowed="srt, contract, checkpoint, numerics and what they share",
            fix="move what is needed into srt",
        )
    return found


@cache
def placed_files() -> dict[str, bytes]:
    """Path in SGLang's package -> content, of all that runs."""
    homes = dict.fromkeys(runtime_modules(), PACKAGE)
    return {
        f"{FOLDER}/{_path(name)}": rewritten(_file(name).read_bytes(), name, homes)
        for name in homes
    }


def placed_tests(tests: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The layer tests, and what only they need.

    Args:
        tests: our ``test/registered``.

    Returns:
        Path under SGLang's ``test/registered`` -> content; path in SGLang's package -> content.
    """
    runtime = runtime_modules()
    sources = {path: path.read_bytes() for path in sorted(tests.glob("unit/layers/*/test_*.py"))}
    needed: set[str] = set()
    chosen = {}
    for path, data in sources.items():
        wanted = _closure(_imports(data, "test", package=False))
        if not any(_part(name) in _PLUGIN for name in wanted):
            chosen[path] = data
            needed |= set(wanted)
    helpers = sorted(needed - set(runtime) - {OURS, _REGISTRATION})
    homes = dict.fromkeys(runtime, PACKAGE) | dict.fromkeys(helpers, TEST_PACKAGE)
    homes[OURS] = PACKAGE
    out = {}
    for path, data in chosen.items():
        folder = Path(path.relative_to(tests)).parent / "aiter_moe"
        out[f"{folder}/{path.name}"] = rewritten(data, "test", homes)
        for name in _golden_names(data):
            golden = tests.parent / "golden" / name
            out[f"{folder}/golden/{name}"] = golden.read_bytes()
    support = {f"{TEST_FOLDER}/__init__.py": b""}
    for name in helpers:
        support[f"{TEST_FOLDER}/{_path(name)}"] = rewritten(_file(name).read_bytes(), name, homes)
        if _file(name).name == "__init__.py":
            folder = _file(name).parent
            for extra in sorted(folder.glob("*.json")) + sorted(folder.glob("tables/*.json")):
                support[f"{TEST_FOLDER}/{extra.relative_to(SOURCE)}"] = extra.read_bytes()
    return out, support


def rewritten(data: bytes, module: str, homes: dict[str, str]) -> bytes:
    """A file with its imports of our modules pointing to where they are placed."""
    tree = cst.parse_module(data)
    return tree.visit(_Imports(module, _is_package(module), homes)).bytes


class _Imports(cst.CSTTransformer):
    def __init__(self, module: str, package: bool, homes: dict[str, str]) -> None:
        super().__init__()
        self.module, self.package, self.homes = module, package, homes

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom):
        source = _absolute(
            dotted(updated_node.module), len(updated_node.relative), self.module, self.package
        )
        if source.split(".")[0] != OURS:
            return updated_node
        if source == _REGISTRATION:
            return _from(updated_node, _SGLANGS_REGISTRATION)
        names = [alias.evaluated_name for alias in updated_node.names]
        homes = {self._home(source, name) for name in names}
        if len(homes) != 1:
            raise ContractError(
                f"{self.module} imports {', '.join(names)} from {source} in one statement",
                allowed="names that are placed in one package",
                fix="import them in two statements",
            )
        return _from(updated_node, homes.pop() + source.removeprefix(OURS))

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import):
        if any(dotted(alias.name).split(".")[0] == OURS for alias in updated_node.names):
            raise ContractError(
                f"{self.module} says `{cst.Module([]).code_for_node(updated_node)}`",
                allowed="from sglang_aiter_moe... import ...",
                fix="import the name from its module",
            )
        return updated_node

    def _home(self, source: str, name: str) -> str:
        for module in (f"{source}.{name}", source):
            if module in self.homes:
                return self.homes[module]
        raise ContractError(
            f"{self.module} needs {source}.{name}, which is not placed",
            allowed="modules that imports lead to",
            fix="import it by `from ... import ...`",
        )


def _from(node: cst.ImportFrom, module: str) -> cst.ImportFrom:
    return node.with_changes(module=cst.parse_expression(module), relative=[])


def _absolute(name: str, level: int, module: str, package: bool) -> str:
    if not level:
        return name
    parts = module.split(".") if package else module.split(".")[:-1]
    base = parts[: len(parts) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def _closure(entries: Iterable[str]) -> list[str]:
    """The modules of ours that ``entries`` import, directly or not, with the packages around them."""
    pending, found = list(entries), set()
    while pending:
        name = pending.pop()
        if name in found or name.split(".")[0] != OURS or not _exists(name):
            continue
        found.add(name)
        pending += _imports(_file(name).read_bytes(), name, _is_package(name))
        if "." in name:
            pending.append(name.rpartition(".")[0])
    return sorted(found)


def _imports(data: bytes, module: str, package: bool) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(data)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(node.module or "", node.level, module, package)
            found += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return found


def _golden_names(data: bytes) -> list[str]:
    return sorted(
        {
            node.value
            for node in ast.walk(ast.parse(data))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.endswith(".npz")
        }
    )


@cache
def _exists(module: str) -> bool:
    return _file(module).is_file()


def _is_package(module: str) -> bool:
    return module.split(".")[0] == OURS and _file(module).name == "__init__.py"


def _file(module: str) -> Path:
    folder = SOURCE.joinpath(*module.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _part(module: str) -> str:
    """``contract`` of ``sglang_aiter_moe.contract.plan``."""
    return [*module.split("."), ""][1]


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join([OURS, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _path(module: str) -> str:
    return str(_file(module).relative_to(SOURCE))
