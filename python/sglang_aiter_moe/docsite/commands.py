"""The commands that the documentation shows, so that a test can try each of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Programs whose lines are commands; what else stands in a code block is output or code.
PROGRAMS = ("sglang-aiter-moe", "sglang", "make", "python", "pip", "pytest", "export", "unset")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
_FENCE = re.compile(r"^```(.*)$")
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: the file.
        line: its line there.
        env: variables set before the command.
        words: program and arguments.
        status: the exit status that a trailing ``# exits with N`` names, else 0.
    """

    page: Path
    line: int
    env: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    status: int = 0

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {shlex.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    """Every command in a page's code blocks (fenced or indented) and in its inline code."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield from _parse(page, number, line.strip())
        else:
            for code in _INLINE.findall(line):
                yield from _parse(page, number, code)


def _parse(page: Path, number: int, text: str) -> Iterator[Command]:
    text, _, comment = text.partition(" # ")
    status = re.search(r"exits with (\d)", comment)
    for part in text.split(" && "):
        try:
            words = shlex.split(part.removeprefix("$ "))
        except ValueError:  # an apostrophe: prose, not a command
            return
        env = []
        while words and _ASSIGNMENT.fullmatch(words[0]):
            env.append(tuple(words.pop(0).split("=", 1)))
        if words and words[0] in PROGRAMS and len(words) > 1:
            yield Command(page, number, tuple(env), tuple(words), int(status[1]) if status else 0)
