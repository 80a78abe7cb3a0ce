"""One line of `doctor`'s screen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, WARN, BAD = "ok", "warn", "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the screen.

    Attributes:
        section: heading.
        level: "ok", "warn" (missing here, or worth knowing) or "bad" (a contradiction).
        text: what was found.
        fix: what to do, if possible the line to type.
        group: findings of one group are shown as one line: the group, then their names.
        name: what it is called there.
    """

    section: str
    level: str
    text: str
    fix: str = ""
    group: str = ""
    name: str = ""

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["group"], values["name"]
        return values
