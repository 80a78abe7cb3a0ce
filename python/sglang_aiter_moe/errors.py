"""Errors that say what was wrong, what is allowed, and what to do."""

from __future__ import annotations


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


def _rebuild(cls: type[ContractError], what: str, allowed: str, fix: str) -> ContractError:
    return cls(what, allowed=allowed, fix=fix)
