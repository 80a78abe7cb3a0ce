"""One side of a comparison: what is different about its server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.plugin import ENABLE

_ALLOWED = (
    "NAME=VALUE (an environment variable), unset=NAME, plugin=on|off, python=PATH (another environment), "
    "url=http://HOST:PORT (a server that runs already), label=TEXT"
)


@dataclass(frozen=True)
class Side:
    """What one side's server gets on top of the common environment.

    Attributes:
        name: "A" or "B".
        label: for people.
        env: variables; None removes one.
        python: an interpreter with SGLang, None for the common one.
        url: a server that runs already, None to start one.
    """

    name: str
    label: str
    env: Mapping[str, str | None] = field(default_factory=dict)
    python: Path | None = None
    url: str | None = None

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with this side's variables set and removed."""
        env = {name: value for name, value in base.items() if name not in self.env}
        return env | {name: value for name, value in self.env.items() if value is not None}

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "label": self.label,
            "env": dict(self.env),
            "python": None if self.python is None else str(self.python),
            "url": self.url,
        }


def check_url(option: str, url: str) -> None:
    """Refuses what is no server's address.

    Raises:
        ContractError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ContractError(
            f"{option} {url!r} is no server's address",
            allowed="http://HOST:PORT, or https://",
            fix=f"give {option} http://127.0.0.1:30000",
        )


def parse_side(name: str, settings: Sequence[str]) -> Side:
    """A side from its settings, as ``--a`` and ``--b`` take them.

    Raises:
        ContractError: a setting that is none, or that a running server can no longer take.
    """
    env: dict[str, str | None] = {}
    rest: dict[str, str] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not key or not separator or (key == "plugin" and value not in ("on", "off")):
            raise ContractError(
                f"--{name.lower()} {setting}",
                allowed=_ALLOWED,
                fix=f"write for instance --{name.lower()} AITER_SITUV2_A8W4=1",
            )
        if key == "plugin":
            env[ENABLE] = "1" if value == "on" else "0"
        elif key == "unset":
            env[value] = None
        elif key in ("python", "url", "label"):
            rest[key] = value
        else:
            env[key] = value
    if "url" in rest:
        check_url(f"--{name.lower()} url=", rest["url"])
    if "url" in rest and (env or "python" in rest):
        raise ContractError(
            f"--{name.lower()} names the running server {rest['url']} and settings for it",
            allowed="one of the two",
            fix="start that server with these settings, or leave url= out",
        )
    label = rest.get("label") or rest.get("url") or " ".join(settings) or "as is"
    python = Path(rest["python"]) if "python" in rest else None
    return Side(name, label, env, python, rest.get("url"))
