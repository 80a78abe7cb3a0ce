"""How SGLang, AITER and this project read a variable's value. Source: docs/contract.md section b.5.

A parser takes the raw value (``None`` when the variable is not set) and returns what the reader
understands, or raises what the reader raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Parser = Callable[[str | None], Any]


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


def trimmed_and_lowered(value: str | None) -> str:
    """The value in lower case, without spaces around it."""
    return (value or "").strip().lower()


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


def sglang_env_bool(default: bool) -> Parser:
    """SGLang's ``EnvBool``: four spellings each of on and off, in any case; junk is the default, with a warning."""

    def parse(value: str | None) -> bool:
        lower = "" if value is None else value.lower()
        return lower in ("true", "1", "yes", "y") or (
            default and lower not in ("false", "0", "no", "n")
        )

    return parse
