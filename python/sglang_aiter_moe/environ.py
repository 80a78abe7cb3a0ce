"""Every environment variable of the MXFP4 MoE path: who reads it, when, with which parser.

A parser takes the raw value (``None`` when the variable is not set) and returns what the reader
understands, or raises what the reader raises. Source: docs/contract.md section b.5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Parser = Callable[[str | None], Any]


# --- parsers -----------------------------------------------------------------------------------


def exactly_one(default: str = "0") -> Parser:
    """AITER's switch: on if and only if the value is the single character ``1``."""

    def parse(value: str | None) -> bool:
        return (default if value is None else value) == "1"

    return parse


def substring_of_one(default: str = "0") -> Parser:
    """AITER's ``value in ("1")``: a substring test, so the empty string counts as on."""

    def parse(value: str | None) -> bool:
        return (default if value is None else value) in "1"

    return parse


def truthy_list(value: str | None) -> bool:
    """AITER's gfx1250 switches: on for five spellings."""
    return value in ("1", "true", "True", "yes", "YES")


def integer(default: int) -> Parser:
    """Python's ``int()``; raises ValueError on anything else, as AITER does."""

    def parse(value: str | None) -> int:
        return default if value is None else int(value)

    return parse


def lowered(default: str) -> Parser:
    """The value in lower case."""

    def parse(value: str | None) -> str:
        return (default if value is None else value).lower()

    return parse


def verbatim(default: str | None) -> Parser:
    """The value as it is."""

    def parse(value: str | None) -> str | None:
        return default if value is None else value

    return parse


def sglang_bool(default: str = "false") -> Parser:
    """SGLang's ``get_bool_env_var``: ``true`` and ``1`` in any case are on, all else is off."""

    def parse(value: str | None) -> bool:
        return (default if value is None else value).lower() in ("true", "1")

    return parse


# --- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        meaning: what it does, in one sentence.
        default: what holds when it is not set, as text.
        when: when its readers read it.
        aiter: AITER's parser, None if AITER does not read it.
        sglang: SGLang's parser, None if SGLang does not read it.
        ours: this project's parser, None if it is not one of ours.
        accepted: the spellings to use.
    """

    name: str
    meaning: str
    default: str
    when: str
    aiter: Parser | None = None
    sglang: Parser | None = None
    ours: Parser | None = None
    accepted: str = "0, 1"
    source: str = ""
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def readers(self) -> tuple[str, ...]:
        """The names of those who read it."""
        pairs = (("SGLang", self.sglang), ("AITER", self.aiter), ("sglang-aiter-moe", self.ours))
        return tuple(name for name, parser in pairs if parser)

    def sglang_reads(self, value: str | None) -> Any:
        """What SGLang understands by a raw value; None if SGLang does not read the variable."""
        return self.sglang(value) if self.sglang else None

    def aiter_reads(self, value: str | None) -> Any:
        """What AITER understands by a raw value; None if AITER does not read the variable."""
        return self.aiter(value) if self.aiter else None


_TABLE = (
    Variable(
        "AITER_SITUV2_A8W4",
        "Runs SiTUv2 layers in A8W4; wins over AITER_SITUV2_A4W4. No effect on gfx1250.",
        "0",
        "SGLang: at weight load. AITER: at every call.",
        aiter=exactly_one(),
        sglang=sglang_bool(),
    ),
    Variable(
        "AITER_SITUV2_A4W4",
        "Runs SiTUv2 layers in A4W4 unless A8W4 is on. AITER before v0.1.19.post1 ignores it.",
        "0",
        "SGLang: at weight load. AITER: at every call.",
        aiter=exactly_one(),
        sglang=sglang_bool(),
    ),
    Variable(
        "AITER_FORCE_A8W4",
        "On gfx1250: A8W4 instead of A4W4, for every activation.",
        "0",
        "SGLang: at import. AITER: at every call, on gfx1250 only.",
        aiter=substring_of_one(),
        sglang=sglang_bool(),
    ),
    Variable(
        "SGLANG_AITER_MOE_ENABLE",
        "Switches the whole patch set on or off.",
        "1",
        "At plugin registration.",
        ours=verbatim("1"),
    ),
    Variable(
        "SGLANG_AITER_MOE_BACKEND",
        "What executes the AITER path.",
        "auto",
        "At plugin registration.",
        ours=verbatim("auto"),
        accepted="auto, aiter, portable",
    ),
    Variable(
        "SGLANG_AITER_MOE_A16W4_KERNEL",
        "States which w13 layout this AITER's SiTUv2 A16W4 kernel is built to read.",
        "separated",
        "At weight load.",
        ours=verbatim("separated"),
        accepted="separated, gu_interleaved",
    ),
    Variable(
        "SGLANG_AITER_MOE_ALLOW_UNTESTED",
        "Lets the patch set run on an SGLang release outside the tested range.",
        "0",
        "At plugin registration.",
        ours=verbatim("0"),
    ),
)

VARIABLES: Mapping[str, Variable] = {v.name: v for v in _TABLE}


def snapshot(names: tuple[str, ...], env: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """The raw values of some variables, None for each that is not set."""
    env = os.environ if env is None else env
    return {name: env.get(name) for name in names}
