"""Errors that say what was wrong, what is allowed, and what to do."""

from __future__ import annotations

from numbers import Real
from typing import Any


class ContractError(ValueError):
    """A combination that AITER would refuse, crash on, or compute silently wrong.

    Args:
        what: what was wrong, naming the tensor or variable and its value.
        allowed: what is allowed in its place.
        fix: what the reader should do, if possible the line to type.
    """

    def __init__(self, what: str, *, allowed: str, fix: str) -> None:
        self.what = what
        self.allowed = allowed
        self.fix = fix
        super().__init__(f"{what}. Allowed: {allowed}. To fix: {fix}.")

    def __reduce__(self):
        # Keyword-only arguments do not survive the default exception pickling, and SGLang
        # hands exceptions between processes.
        return (_rebuild, (type(self), self.what, self.allowed, self.fix))


class PatchError(ContractError):
    """A patch of the plugin is not in force where it has to be."""


def check_integer(name: str, value: Any, *, fix: str, least: int | None = None) -> None:
    """Refuses what is no integer, before it becomes a size or an index far from its name.

    An integer is what Python can index with (torch's symbolic ones too), except True, False and tensors, whose value
    may be on a device.

    Raises:
        ContractError: naming ``name`` and its value.
    """
    kind = type(value)
    # Tensors and arrays, which have __index__ too, can be written to.
    whole = hasattr(kind, "__index__") and kind is not bool and not hasattr(kind, "__setitem__")
    if not whole or (least is not None and value < least):
        raise ContractError(
            f"{name} is {value!r}",
            allowed="an integer" if least is None else f"an integer of at least {least}",
            fix=fix,
        )


def check_number(name: str, value: Any, *, fix: str) -> None:
    """Refuses what is no real number, as :func:`check_integer` does."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ContractError(f"{name} is {value!r}", allowed="a number", fix=fix)


def _rebuild(cls: type[ContractError], what: str, allowed: str, fix: str) -> ContractError:
    return cls(what, allowed=allowed, fix=fix)
