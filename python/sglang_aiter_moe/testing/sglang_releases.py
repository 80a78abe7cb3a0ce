"""The SGLang releases that the tests run, and how a process gets one of them.

The main release lives in the environment itself, every other one in ``releases/X`` below it, together with
what else it needs (see ``make test-sglang``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_aiter_moe.testing.sglang_environment import OTHER_RELEASES, TRANSFORMERS
from sglang_aiter_moe.testing.sglang_process import RESULT, printed
from sglang_aiter_moe.testing.sglang_server import environment, free_port

MAIN = "0.5.23"
RELEASES = (*OTHER_RELEASES, MAIN)
#: Among a probe's arguments: a port that is free when the probe starts, which may be long after it was asked for.
FREE_PORT = "a free port"


def search_path(release: str) -> str | None:
    """What goes first on PYTHONPATH for a release; None for the main one."""
    if release == MAIN:
        return None
    folder = Path(sys.prefix) / "releases"
    names = [release]
    if release in TRANSFORMERS:
        names.append(f"transformers-{TRANSFORMERS[release]}")
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: run `make test-sglang`")
    return os.pathsep.join(str(folder / name) for name in names)


def run_probe(
    module: str,
    *arguments: str,
    release: str = MAIN,
    timeout: float = 900,
    controls: bool = False,
    path: str | None = None,
    **variables: str | None,
) -> dict:
    """Runs ``python -m module arguments`` with an SGLang release; returns what it reported.

    FREE_PORT stands for a port in ``arguments``.
    ``path`` goes first on PYTHONPATH in place of the release's own. ``controls`` and ``variables``: see
    :func:`.sglang_server.environment`.

    Raises:
        RuntimeError: it failed or reported nothing; with the end of its output.
    """
    env: Mapping[str, str] = environment(
        release=path or search_path(release), controls=controls, **variables
    )
    words = [str(free_port()) if word == FREE_PORT else word for word in arguments]
    command = [sys.executable, "-m", module, *words]
    try:
        done = subprocess.run(
            command,
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=timeout,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        raise RuntimeError(f"{module} took more than {timeout:.0f} s\n{_end(output)}") from error
    for line in done.stdout.splitlines():
        found = printed(line, RESULT)
        if found is not None:
            return found[1]
    raise RuntimeError(f"{module} reported nothing\n{_end(done.stdout + done.stderr)}")


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-60:])
