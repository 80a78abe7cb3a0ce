"""Which SGLang a command runs: the one given, this environment's, or a cached one made from the lock."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing import sglang_environment
from sglang_aiter_moe.testing.sglang_server import PACKAGE, PLACEHOLDERS

CLIENT_PLACEHOLDERS = PACKAGE / "testing" / "client_placeholders"
MAIN = "0.5.23"  # the lock's
_NEEDS_OLD_TRANSFORMERS = sglang_environment.OTHER_RELEASES[:5]
_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"


@dataclass(frozen=True)
class SGLang:
    """A Python with SGLang.

    Attributes:
        python: the interpreter.
        release: of SGLang.
        paths: what goes first on its PYTHONPATH.
    """

    python: Path
    release: str
    paths: tuple[str, ...] = ()

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """An environment in which ``python`` imports this SGLang, and this package."""
        env = dict(os.environ if base is None else base)
        given = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
        env["PYTHONPATH"] = os.pathsep.join([*self.paths, str(PACKAGE.parent), *given])
        return env


def find(python: Path | None = None, release: str | None = None) -> SGLang:
    """The SGLang to run.

    Args:
        python: an interpreter that has it.
        release: the release that is wanted; any if None.

    Raises:
        ContractError: ``python`` has no SGLang, or another release than ``release``, or the release is none
            of those that this package supports.
    """
    if python is not None:
        return _given(python, release)
    here = installed()
    if here is not None and release in (None, here):
        return SGLang(Path(sys.executable), here)
    return _cached(release or MAIN)


def client_environment(sglang: SGLang, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` for SGLang's benchmark client, which imports ``datasets`` for data that is not used here.

    An environment that is made from the lock lacks it, as it lacks what the import placeholders stand for:
    where those are on the path, one for ``datasets`` joins them.
    """
    given = [path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(PLACEHOLDERS) not in (*sglang.paths, *given):
        return dict(base)
    return {**base, "PYTHONPATH": os.pathsep.join([*given, str(CLIENT_PLACEHOLDERS)])}


def installed() -> str | None:
    """The SGLang release of this environment, None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """Where environments and data are kept: ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-aiter-moe"


def _given(python: Path, release: str | None) -> SGLang:
    try:
        done = subprocess.run(
            [str(python), "-c", _VERSION], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "no answer within 120 s"
        raise ContractError(
            f"--sglang-python {python}: {reason}",
            allowed="a Python interpreter",
            fix="give the path of a virtual environment's bin/python",
        ) from error
    # What is no Python may end well and say nothing.
    found = (done.stdout.strip() if done.returncode == 0 else "") or None
    if found is None or release not in (None, found):
        raise ContractError(
            f"{python} has {'SGLang ' + found if found else 'no SGLang'}",
            allowed=f"SGLang {release}" if release else "an environment with SGLang",
            fix=f"{python} -m pip install sglang" + (f"=={release}" if release else ""),
        )
    return SGLang(python, found)


def _cached(release: str) -> SGLang:
    known = (*sglang_environment.OTHER_RELEASES, MAIN)
    if release not in known:
        raise ContractError(
            f"--release {release}",
            allowed=", ".join(known),
            fix="choose one of these, or give an environment of your own with --sglang-python",
        )
    venv = cache_folder() / "sglang"
    others = () if release == MAIN else (release,)
    print(f"SGLang {release} on a CPU, kept in {venv}", file=sys.stderr)
    python = sglang_environment.build(venv, releases=others)
    paths = [str(PLACEHOLDERS)]
    if others:
        names = [release]
        if release in _NEEDS_OLD_TRANSFORMERS:
            names.append("transformers-5.12.1")
        paths = [*(str(venv / "releases" / name) for name in names), *paths]
    return SGLang(python, release, tuple(paths))
