"""PTX text to instructions: one function a kernel, scopes and inline assembly flattened.

Registers become numbers (slots) with a class, labels become positions. What a scope ``{ }`` declares is its own, so
each inline assembly block has registers and labels of its own. Source: PTX ISA 8.7, "Syntax" and "Abstracting the ABI".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from sglang_aiter_moe.nvptx import operands
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.nvptx.operands import Operand
from sglang_aiter_moe.nvptx.shared import BASE

CLASSES = {
    "pred": "pred", "b8": "b8", "u8": "b8", "s8": "b8", "b16": "b16", "u16": "b16", "s16": "b16", "f16": "b16",
    "bf16": "b16", "b32": "b32", "u32": "b32", "s32": "b32", "f32": "b32", "f16x2": "b32", "bf16x2": "b32",
    "b64": "b64", "u64": "b64", "s64": "b64", "f64": "b64",
}  # fmt: skip
"""Type -> class of the register that holds it."""
_SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: the full dotted name; ``opcode`` the part that a table knows, ``modifiers`` the parts behind it.
        guard: (slot, negated) of ``@%p``, or None.
        line: line of the text, from 1; ``source``: what the compiler says it comes from ("ring.py:132:22"), or "".
    """

    name: str
    operands: tuple[Operand, ...]
    guard: tuple[int, bool] | None
    line: int
    text: str
    source: str = ""
    opcode: str = ""
    modifiers: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, str]:
        """What tells it from others: several may stand in one line."""
        return self.line, self.text


@dataclass(frozen=True)
class Param:
    """``offset`` in the bytes that hold all parameters."""

    name: str
    size: int
    align: int
    offset: int


@dataclass
class Kernel:
    """A function: its parameters, registers (name, class) by slot, instructions, and where labels point."""

    name: str
    params: list[Param] = field(default_factory=list)
    registers: list[tuple[str, str]] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    threads: tuple[int, int, int] | None = None
    static_shared: int = 0
    """Bytes of shared variables with a size; the extern array follows them."""

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Program:
    """``target`` as the text names it ("sm_90a")."""

    kernels: dict[str, Kernel]
    target: str
    version: str


def parse(text: str) -> Program:
    """Reads a PTX module.

    Raises:
        PtxError: syntax or a directive that is not modelled; names the line.
    """
    return _Parser(text).program


_STATEMENT_END = re.compile(r"[;{}]|//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"|\n", re.S)
_LINE_DIRECTIVES = (".version", ".target", ".address_size", ".file", ".loc")
_LOC = re.compile(r"\.loc\s+\d+\s+\d+\s+\d+[^/]*(?://\s*(\S+).*)?$")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)?\.(shared|global|const|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?$"
)
_DATA = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.(?:global|const)\s")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+)?(?:\.(?:global|shared|const)\s+)?(?:\.align\s+\d+\s+)?([\w$]+)\s*(?:\[(\d+)\])?$"
)
_SKIPPED = (".extern .func", ".section", ".pragma", ".maxnreg", ".minnctapersm")


class _Scope:
    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, int] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}

    def find(self, kind: str, name: str):
        scope: _Scope | None = self
        while scope is not None:
            found = getattr(scope, kind).get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._line = text, 0, 1
        self._source = ""
        self.program = Program({}, "", "")
        self._symbols: dict[str, int] = {}
        self._static = 0
        self._extern: list[str] = []
        self._module()

    # Tokens: a statement's text up to ; { or }, without comments.

    def _next(self) -> tuple[str, str, int]:
        """(statement, what ends it: ";", "{", "}", "line" or "", line where it begins)."""
        parts: list[str] = []
        line = self._line
        depth = 0
        while True:
            found = _STATEMENT_END.search(self._text, self._at)
            if found is None:
                return "".join(parts).strip(), "", line
            piece = self._text[self._at : found.start()]
            if not "".join(parts).strip():
                parts.clear()
                if piece.strip():
                    line = self._line
            parts.append(piece)
            self._at = found.end()
            token = found.group()
            if token[0] in "/\n":
                so_far = "".join(parts).strip()
                comment = token if token[0] == "/" else ""
                if _LABEL.fullmatch(so_far):
                    self._at -= len(token)
                    return so_far, "line", line
                if so_far.startswith(_LINE_DIRECTIVES):
                    self._line += token.count("\n")
                    if comment.startswith("//"):
                        so_far += " " + comment
                    return so_far, "line", line
                self._line += token.count("\n")
                parts.append(" ")
            elif token[0] == '"':
                parts.append(token)
            elif (
                token == "{" and "".join(parts).strip() and not self._opens("".join(parts).strip())
            ):
                depth += 1
                parts.append(token)
            elif token == "}" and depth:
                depth -= 1
                parts.append(token)
            else:
                return "".join(parts).strip(), token, line

    @staticmethod
    def _opens(before: str) -> bool:
        """Whether a brace behind this text begins a block and not a vector."""
        return before.startswith((".section", ".visible", ".entry", ".func", ".weak", ".extern"))

    def _refuse(self, line: int, what: str) -> PtxError:
        return PtxError(
            f"line {line}: {what} is not modelled",
            allowed="PTX as LLVM prints it for one kernel without calls",
            fix="see docs/hopper-execution.md, or add it to sglang_aiter_moe/nvptx/text.py",
        )

    def _module(self) -> None:
        while True:
            statement, end, line = self._next()
            if end == "line":
                word, _, rest = statement.partition(" ")
                rest = rest.split("//")[0].strip()
                if word == ".version":
                    self.program.version = rest
                elif word == ".target":
                    self.program.target = rest.split(",")[0].strip()
                continue
            if not statement and end == "":
                return
            if ".entry" in statement.split("(")[0]:
                self._kernel(statement, end, line)
            elif statement.startswith(".section"):
                self._skip_block()
            elif end == ";" and _DATA.match(statement):
                continue  # an operand that names it is refused
            elif end == ";" and (match := _VARIABLE.match(" ".join(statement.split()))):
                self._variable(match, line)
            elif statement.startswith(".extern .func"):
                continue  # calls of it are refused
            elif statement or end == "{":
                raise self._refuse(line, repr(statement[:60]))

    def _skip_block(self) -> None:
        depth = 1
        while depth:
            _, end, line = self._next()
            depth += {"{": 1, "}": -1}.get(end, 0)
            if end == "":
                raise self._refuse(line, "a block that does not end")

    def _variable(self, match: re.Match, line: int) -> None:
        space, align, kind, name, count = match.groups()
        if space != "shared":
            raise self._refuse(line, f"the variable {name} in .{space}")
        if count == "":
            self._extern.append(name)
            return
        align = int(align or _SIZES[CLASSES[kind]])
        at = -(-self._static // align) * align
        self._symbols[name] = BASE + at
        self._static = at + _SIZES[CLASSES[kind]] * int(count or 1)

    def _kernel(self, statement: str, end: str, line: int) -> None:
        head, _, rest = " ".join(statement.split()).partition("(")
        name = head.split()[-1]
        arguments, _, directives = rest.rpartition(")")
        kernel = Kernel(name)
        at = 0
        for text in filter(None, (a.strip() for a in arguments.split(","))):
            match = _PARAM.match(text)
            if match is None:
                raise self._refuse(line, f"the parameter {text!r}")
            align, kind, param, count = match.groups()
            size = _SIZES[CLASSES[kind]]
            align = int(align or size)
            at = -(-at // align) * align
            kernel.params.append(Param(param, size * int(count or 1), align, at))
            at += size * int(count or 1)
        match = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        if match:
            kernel.threads = tuple(int(x or 1) for x in match.groups())  # type: ignore[assignment]
        kernel.static_shared = self._static
        symbols = dict(self._symbols)
        for extern in self._extern:
            symbols[extern] = BASE + -(-self._static // 1024) * 1024
        if end != "{":
            raise self._refuse(line, f"{name} without a body")
        self.program.kernels[name] = kernel
        self._body(kernel, symbols)

    def _body(self, kernel: Kernel, symbols: dict[str, int]) -> None:
        scope = _Scope(None)
        pending: list[tuple[str, int, str, _Scope]] = []
        found_in: list[_Scope] = [scope]
        label = ""
        while found_in:
            scope = found_in[-1]
            statement, end, line = self._next()
            while match := _LABEL.match(statement):
                label, statement = match.group(1), statement[match.end() :].strip()
                scope.labels[label] = len(pending)
            if statement.startswith(".branchtargets") and label in scope.labels:
                # A table of labels; its own may stand in a line before it.
                del scope.labels[label]
                labels = statement[len(".branchtargets") :].split(",")
                scope.tables[label] = [x.strip() for x in labels]
                statement = ""
            if end == "line":
                if match := _LOC.match(statement):
                    self._source = match.group(1) or self._source
                continue
            label = ""
            if end == "":
                raise self._refuse(line, f"{kernel.name} without an end")
            if statement.startswith(".reg"):
                self._registers(kernel, scope, statement, line)
            elif statement.startswith(_SKIPPED):
                pass
            elif statement and statement[0] != ".":
                pending.append((" ".join(statement.split()), line, self._source, scope))
            elif statement:
                raise self._refuse(line, f"the directive {statement.split()[0]}")
            if end == "{":
                found_in.append(_Scope(scope))
            elif end == "}":
                found_in.pop()
        params = {p.name: p.offset for p in kernel.params}
        for text, line, source, scope in pending:
            kernel.instructions.append(
                _instruction(text, line, source, scope, kernel, symbols, params)
            )

    def _registers(self, kernel: Kernel, scope: _Scope, statement: str, line: int) -> None:
        match = _REG.match(statement)
        kind = CLASSES.get(match.group(1)) if match else None
        if match is None or kind is None:
            raise self._refuse(line, repr(statement))
        for name in (x.strip() for x in match.group(2).split(",")):
            count = re.match(r"([%\w$]+)<(\d+)>$", name)
            names = (
                [f"{count.group(1)}{i}" for i in range(int(count.group(2)))] if count else [name]
            )
            for each in names:
                scope.registers[each] = len(kernel.registers)
                kernel.registers.append((each, kind))


_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")


def _instruction(
    text: str, line: int, source: str, scope: _Scope, kernel: Kernel, symbols: dict, params: dict
) -> Instruction:
    rest, guard = text, None
    if match := _GUARD.match(text):
        slot = scope.find("registers", match.group(2))
        if slot is None:
            raise operands.refuse(line, text, f"the guard {match.group(2)}")
        guard = (slot, bool(match.group(1)))
        rest = text[match.end() :]
    name, _, tail = rest.partition(" ")
    names = operands.Names(
        registers=lambda x: scope.find("registers", x),
        classes=kernel.registers,
        labels=lambda x: scope.find("labels", x),
        tables=lambda x: scope.find("tables", x),
        symbols=symbols,
        params=params,
    )
    try:
        found = operands.parse_all(tail, names)
    except ValueError as error:
        raise operands.refuse(line, text, str(error)) from None
    return Instruction(name, tuple(found), guard, line, text, source, name, ())


def with_opcode(instruction: Instruction, opcode: str) -> Instruction:
    """The instruction with its name divided behind ``opcode``."""
    rest = instruction.name[len(opcode) :].split(".")[1:]
    return replace(instruction, opcode=opcode, modifiers=tuple(rest))
