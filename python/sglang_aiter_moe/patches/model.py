"""What a patch is, and the state it can be in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from packaging.version import Version

from sglang_aiter_moe.srt.releases import FIRST


class Status(StrEnum):
    IN_FORCE = "in force"
    WAITING = "waiting"  # its module has not been imported in this process
    NOT_NEEDED = "not needed"
    REFUSED = "refused"


class How(StrEnum):
    """How the function of a patch takes the place of SGLang's.

    ``AROUND``: called as ``function(original, *args, **kwargs)``. ``REPLACE``: called in place of the
    original. ``VALUE``: ``function(original)`` is called once and its result is the new attribute (a
    subclass, a constant, a function imported from AITER).
    """

    AROUND = "around"
    REPLACE = "replace"
    VALUE = "value"


@dataclass(frozen=True)
class Patch:
    """One change to SGLang.

    Attributes:
        name: what it changes, in a few words; unique.
        target: ``module:attribute`` or ``module:Class.attribute`` in SGLang.
        function: ``module:attribute`` of this package, imported when the patch is applied.
        how: see :class:`How`.
        backends: the backends it belongs to: ``aiter``, ``portable``, ``inert`` (any other machine).
        since: first SGLang release that is patched; before it there is no such target, or the model
            that needs it is not served.
        until: last release that needs the patch; later ones have it upstream. None: all need it.
        upstream: what a later release does instead, shown as the reason for "not needed".
        why: what goes wrong without it.
        cpu_only: only where SGLang runs on a CPU.
        when_used: its module is not imported for the self-check. The patch is applied when somebody
            imports it, and refused there if it cannot be.
        plugin_only: ``sglang-aiter-moe apply`` does not make it.
        adds: the target may be missing: a module name that SGLang only has on ROCm.
    """

    name: str
    target: str
    function: str
    why: str
    how: How = How.AROUND
    backends: frozenset[str] = frozenset({"aiter", "portable"})
    since: str = FIRST
    until: str | None = None
    upstream: str = ""
    cpu_only: bool = False
    when_used: bool = False
    adds: bool = False
    plugin_only: bool = False

    @property
    def module(self) -> str:
        """The SGLang module that the target lives in."""
        return self.target.partition(":")[0]

    def not_needed_in(self, release: Version) -> str | None:
        """Why this SGLang release does not need the patch; None if it does."""
        if release < Version(FIRST) <= Version(self.since):
            return f"before {FIRST} gpt-oss's experts are patched and nothing else"
        if release < Version(self.since):
            return f"SGLang {release} has no such code (it came with {self.since})"
        if self.until is not None and release > Version(self.until):
            return f"upstream after {self.until}: {self.upstream}"
        return None


@dataclass
class State:
    """Where one patch stands in this process."""

    patch: Patch
    status: Status = Status.WAITING
    reason: str = ""
    original: Any = field(default=None, repr=False)
    replacement: Any = field(default=None, repr=False)

    def refuse(self, reason: str) -> None:
        self.status, self.reason = Status.REFUSED, reason

    def as_dict(self) -> dict[str, str]:
        """For ``doctor --json``."""
        return {
            "name": self.patch.name,
            "target": self.patch.target,
            "state": self.status.value,
            "reason": self.reason,
        }


def resolve(path: str) -> tuple[Any, str, Any]:
    """``module:Class.attribute`` -> (owner, attribute name, value as stored in the owner).

    Raises:
        ImportError, AttributeError: the module or the attribute does not exist.
    """
    module_name, _, qualname = path.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = qualname.split(".")
    for parent in parents:
        owner = _attribute(owner, parent)
    if isinstance(owner, type) and name not in vars(owner):
        raise AttributeError(f"{owner.__qualname__} does not define {name} itself")
    return owner, name, vars(owner)[name] if isinstance(owner, type) else _attribute(owner, name)


def _attribute(owner: Any, name: str) -> Any:
    """Python's own message guesses at a circular import while a module is being imported, as here."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise AttributeError(f"{owner.__name__} has no {name}") from None


def load(path: str) -> Callable[..., Any]:
    """Imports ``module:attribute`` of this package."""
    return resolve(path)[2]
