"""Mutants of a module's source: one small change each, of the kind that people make by mistake.

What is never changed: docstrings, messages (everything in a ``raise`` but the ``raise`` itself, f-strings, log calls),
annotations, decorators, ``__all__`` and ``if TYPE_CHECKING``. They change no behaviour that a guard depends on.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_COMPARED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.LShift: ast.RShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_LOGS = {"debug", "info", "warning", "error", "warn"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        line: in the source.
        operator: which kind of change.
        before, after: the changed expression or statement, as text.
        tree, path, replacement: the module, where in it, and what comes there.
    """

    line: int
    operator: str
    before: str
    after: str
    tree: ast.Module = field(repr=False, compare=False)
    path: tuple = field(repr=False, compare=False)
    replacement: ast.AST = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"line {self.line}: {self.operator}: {self.before} -> {self.after}"

    @property
    def source(self) -> str:
        """The whole module with the change."""
        changed = copy.deepcopy(self.tree)
        _put(changed, self.path, self.replacement)
        return ast.unparse(ast.fix_missing_locations(changed))


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    found = [
        Mutant(node.lineno, operator, _short(node), _short(changed), tree, path, changed)
        for path, node in _changeable(tree, ())
        for operator, changed in _changes(node)
    ]
    return sorted(found, key=lambda mutant: mutant.line)


def sample(found: list[Mutant], count: int, salt: str = "", *, apart: bool = False) -> list[Mutant]:
    """``count`` of them, always the same ones: those whose text has the smallest hash.

    Args:
        found: a module's mutants.
        count: how many.
        salt: any text; another sample for another one.
        apart: each of several equal changes (``1 -> 2`` on many lines) is drawn for itself; else they come together.
    """
    seen: Counter[str] = Counter()
    digests = {}
    for mutant in sorted(found, key=lambda mutant: mutant.line):
        # Without the line, so that edits elsewhere in the file keep the choice.
        text = f"{salt}{mutant.operator}{mutant.before}{mutant.after}"
        seen[text] += 1
        if apart:
            text += str(seen[text])
        digests[mutant] = hashlib.sha256(text.encode()).hexdigest()
    return sorted(sorted(digests, key=digests.__getitem__)[:count], key=lambda mutant: mutant.line)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


def _changeable(node: ast.AST, path: tuple) -> Iterator[tuple[tuple, ast.AST]]:
    """(where, node) of each node that may be changed; where: field names and indices from the root."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST) or _is_text(child):
                continue
            where = (*path, (name, index))
            if isinstance(child, ast.expr | ast.stmt):
                yield where, child
            if not isinstance(child, ast.Raise):
                yield from _changeable(child, where)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Constant):
            return True
        call = node.value
        return (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in _LOGS
        )
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    if isinstance(node, ast.Call):
        # Decisions and errors carry their reasons as text.
        return isinstance(node.func, ast.Name) and node.func.id in ("ContractError", "TypeVar")
    return False


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield "comparison", _copy(node, ops=[_COMPARED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", _copy(node, op=other)
        yield "condition dropped", node.values[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        if not _has_text(node):
            yield "arithmetic", _copy(node, op=_COMPUTED[type(node.op)]())
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp):
        yield "condition negated", _copy(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Raise):
        yield "raise dropped", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "result dropped", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call dropped", ast.Pass()
    elif isinstance(node, ast.Continue | ast.Break):
        yield "loop control", ast.Break() if isinstance(node, ast.Continue) else ast.Continue()


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _copy(node: ast.AST, **changed: object) -> ast.AST:
    made = copy.copy(node)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def _put(tree: ast.AST, path: tuple, replacement: ast.AST) -> None:
    node = tree
    for name, index in path[:-1]:
        node = getattr(node, name)
        if index is not None:
            node = node[index]
    name, index = path[-1]
    if index is None:
        setattr(node, name, replacement)
    else:
        getattr(node, name)[index] = replacement
