"""Finding the places to edit by name and structure, and refusing those that mean something else.

What an edit takes over or relies on is compared with what the tested releases have: signatures by name,
code by a digest of its syntax tree, which neither comments nor formatting nor the line change.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Callable, Iterable, Sequence

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from sglang_aiter_moe.errors import ContractError


class ChangedCode(ContractError):
    """The code at an edit's place is not what the edit was written for."""


class Source:
    """One file that is edited.

    Attributes:
        path: as people write it.
        module: its syntax tree; edits replace it.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        try:
            self.module = cst.parse_module(data)
        except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
            raise ChangedCode(
                f"{path} does not parse: {error}",
                allowed="Python that LibCST reads",
                fix="restore the file, then apply again",
            ) from None

    # --- finding ---------------------------------------------------------------------------------

    def find(self, qualname: str) -> cst.FunctionDef | cst.ClassDef | None:
        """The function or class of this name at module level, or in a class; None without one."""
        body: Sequence[cst.CSTNode] = self.module.body
        node = None
        for name in qualname.split("."):
            found = [
                item
                for item in body
                if isinstance(item, cst.FunctionDef | cst.ClassDef) and item.name.value == name
            ]
            if not found:
                return None
            node = found[-1]  # what Python keeps of several
            body = node.body.body
        return node

    def function(
        self, qualname: str, parameters: Sequence[str], *, exact: bool = True
    ) -> cst.FunctionDef:
        """A function with these parameters.

        Args:
            qualname: ``name`` or ``Class.name``.
            parameters: in order, with ``*`` and ``**`` before the names that have them, and ``=`` after
                those with a default.
            exact: no further ones behind them.

        Raises:
            ChangedCode: it is missing, or takes something else.
        """
        node = self.find(qualname)
        if not isinstance(node, cst.FunctionDef):
            raise self.changed(
                None, f"there is no function {qualname}", "the function of the tested releases"
            )
        given = signature(node.params)
        seen = given if exact else given[: len(parameters)]
        if seen != list(parameters):
            different = next(
                (pair for pair in zip(seen, parameters, strict=False) if pair[0] != pair[1]), None
            )
            odd = (
                f"`{different[0]}` for `{different[1]}`" if different else "another number of them"
            )
            raise self.changed(
                node, f"{qualname} takes ({', '.join(given)}): {odd}", f"({', '.join(parameters)})"
            )
        return node

    def known(
        self, node: cst.CSTNode | Sequence[cst.CSTNode], what: str, digests: Iterable[str]
    ) -> None:
        """Refuses code that none of the tested releases has.

        Raises:
            ChangedCode: naming ``what``.
        """
        first = node if isinstance(node, cst.CSTNode) else node[0]
        found = digest(code_of(node))
        if found not in digests:
            raise self.changed(
                first,
                f"{what} is not the code that the patch set was written for (digest {found})",
                "the code of a tested release: the patch set takes its place, and would drop what is new in it",
            )

    # --- refusing --------------------------------------------------------------------------------

    def changed(self, node: cst.CSTNode | None, what: str, allowed: str) -> ChangedCode:
        """The refusal of an edit, with the place."""
        return ChangedCode(
            f"{self.path}{self._line(node)}: {what}",
            allowed=allowed,
            fix="apply to a released SGLang, or use the plugin, which says the same at run time",
        )

    def _line(self, node: cst.CSTNode | None) -> str:
        if node is None:
            return ""
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        position = wrapper.resolve(PositionProvider).get(node)
        return "" if position is None else f":{position.start.line}"

    # --- editing ---------------------------------------------------------------------------------

    def replace(self, qualname: str, change: Callable[[cst.CSTNode], cst.CSTNode]) -> None:
        """Puts ``change(node)`` in the place of a function or class that :meth:`find` finds."""
        self.module = self.module.visit(_Replace(self.find(qualname), change))

    def add_import(self, module: str, name: str, alias: str) -> None:
        """``from module import name as alias`` among SGLang's own imports, where sorting puts it."""
        line = f"from {module} import {name} as {alias}"
        if len(line) > 88:
            line = f"from {module} import (\n    {name} as {alias},\n)"
        statement = cst.parse_statement(line, config=self.module.config_for_parsing)
        body = list(self.module.body)
        own = [(i, _sglang_import(item)) for i, item in enumerate(body)]
        own = [(i, name) for i, name in own if name is not None]
        if not own:
            raise self.changed(None, "nothing is imported from sglang", "a module of SGLang")
        later = [i for i, other in own if other > module]
        body.insert(later[0] if later else own[-1][0] + 1, statement)
        self.module = self.module.with_changes(body=body)

    def statements(self, text: str) -> list[cst.BaseStatement]:
        """Parses statements in the file's own indentation and line ends."""
        parsed = cst.parse_module(
            textwrap.dedent(text).strip() + "\n", config=self.module.config_for_parsing
        )
        first, *rest = parsed.body
        comments = [line for line in parsed.header if line.comment is not None]
        return [first.with_changes(leading_lines=[*comments, *first.leading_lines]), *rest]


class _Replace(cst.CSTTransformer):
    def __init__(self, node: cst.CSTNode, change: Callable[[cst.CSTNode], cst.CSTNode]) -> None:
        super().__init__()
        self.node, self.change = node, change

    def on_visit(self, node: cst.CSTNode) -> bool:
        # Only the way down to a function or method is walked; everything else stays the same object.
        return (
            isinstance(node, cst.Module | cst.ClassDef | cst.IndentedBlock)
            and node is not self.node
        )

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:
        return self.change(original_node) if original_node is self.node else updated_node


def _sglang_import(node: cst.CSTNode) -> str | None:
    """The module of a top-level ``from sglang.x import y``."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return None
    statement = node.body[0]
    if not isinstance(statement, cst.ImportFrom) or statement.module is None or statement.relative:
        return None
    name = dotted(statement.module)
    return name if name.split(".")[0] == "sglang" else None


def dotted(node: cst.BaseExpression | None) -> str:
    """``a.b.c`` of a name or attribute; empty for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr.value}" if head else ""
    return ""


def signature(parameters: cst.Parameters) -> list[str]:
    """``["self", "layer", "with_bias=", "*", "layer_id=", "**extra"]``."""
    found = [*map(_parameter, parameters.posonly_params), *map(_parameter, parameters.params)]
    if isinstance(parameters.star_arg, cst.Param):
        found.append(f"*{parameters.star_arg.name.value}")
    elif isinstance(parameters.star_arg, cst.ParamStar):
        found.append("*")
    found += map(_parameter, parameters.kwonly_params)
    if parameters.star_kwarg is not None:
        found.append(f"**{parameters.star_kwarg.name.value}")
    return found


def _parameter(parameter: cst.Param) -> str:
    return parameter.name.value + ("=" if parameter.default is not None else "")


def is_docstring(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def body_of(node: cst.FunctionDef | cst.ClassDef) -> list[cst.CSTNode]:
    """The statements without the docstring."""
    statements = list(node.body.body)
    return statements[1:] if statements and is_docstring(statements[0]) else statements


def with_first(node: cst.FunctionDef, new: Sequence[cst.BaseStatement]) -> cst.FunctionDef:
    """The function with ``new`` before its first statement, after the docstring."""
    old = list(node.body.body)
    at = len(old) - len(body_of(node))
    return _with_body(node, [*old[:at], *new, *old[at:]])


def with_only(node: cst.FunctionDef, new: Sequence[cst.BaseStatement]) -> cst.FunctionDef:
    """The function with ``new`` in place of all statements but the docstring."""
    old = list(node.body.body)
    return _with_body(node, [*old[: len(old) - len(body_of(node))], *new])


def with_last(
    node: cst.FunctionDef | cst.ClassDef, new: Sequence[cst.BaseStatement]
) -> cst.CSTNode:
    """The function or class with ``new`` behind its last statement."""
    return _with_body(node, [*node.body.body, *new])


def _with_body(node, statements):
    return node.with_changes(body=node.body.with_changes(body=statements))


def with_decorator(node: cst.FunctionDef, source: Source, text: str) -> cst.FunctionDef:
    """The function with one more decorator, outermost but for ``staticmethod`` and its like."""
    decorator = cst.Decorator(cst.parse_expression(text, config=source.module.config_for_parsing))
    if node.decorators:
        return node.with_changes(decorators=[*node.decorators, decorator])
    # The comments above stay above: without decorators they belong to the function's first line.
    return node.with_changes(decorators=[decorator])


def code_of(node: cst.CSTNode | Sequence[cst.CSTNode]) -> str:
    nodes = [node] if isinstance(node, cst.CSTNode) else list(node)
    return cst.Module(body=[]).with_changes(body=nodes).code


def digest(code: str) -> str:
    """Of the syntax tree: positions, comments, formatting and docstrings do not count."""
    text = _canonical(ast.parse(textwrap.dedent(code)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(node: object) -> str:
    """As ``ast.dump``, but the same in every Python: what is empty is left out."""
    if isinstance(node, list):
        return "[" + ",".join(map(_canonical, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and _has_docstring(node):
            value = value[1:]
        if value not in (None, []) and name not in ("kind", "type_comment"):
            fields.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _has_docstring(node: ast.AST) -> bool:
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return isinstance(node, scopes) and ast.get_docstring(node, clean=False) is not None
