"""Builds the virtual environment in which the real SGLang runs on a CPU, from the lock beside this file.

Standard library only: any Python can run it, as ``python -m sglang_aiter_moe.testing.sglang_environment``.
Steps that are done already are not done again.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

LOCK = Path(__file__).with_name("sglang-cpu-lock.txt")
PROJECT = Path(__file__).resolve().parents[3]
TORCH = "torch==2.13.0"
#: Carried for gpt-oss alone (``srt/releases.py``).
GPT_OSS_RELEASES = ("0.5.13", "0.5.14", "0.5.15", "0.5.16")
OTHER_RELEASES = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22")
#: Release -> the transformers that it pins; the lock's is too new up to 0.5.21.
TRANSFORMERS = {
    **dict.fromkeys(("0.5.13", "0.5.14"), "5.8.1"),
    **dict.fromkeys(("0.5.15", "0.5.16", *OTHER_RELEASES[:5]), "5.12.1"),
}


def build(
    venv: Path, *, python: str = sys.executable, torch: str = TORCH, releases: Iterable[str] = ()
) -> Path:
    """Builds or completes the environment; returns its Python.

    Args:
        venv: where.
        python: the interpreter to make it with (3.11 or newer).
        torch: requirement for torch, further pip arguments allowed ("torch==2.13.0 --index-url URL").
        releases: SGLang releases to install beside the lock's, each in ``venv/releases/X``.
    """
    interpreter = venv / "bin" / "python"
    if not interpreter.exists():
        _step(f"virtual environment {venv}", [python, "-m", "venv", str(venv)])
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    stamp = venv / ".lock-installed"
    wanted = hashlib.sha256((LOCK.read_text() + torch).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        _step("torch", [*pip, *torch.split()])
        _step("SGLang 0.5.23", [*pip, "--no-deps", "--no-compile", "-r", str(LOCK)])
        stamp.write_text(wanted)
    # Without a checkout there is nothing to install: callers put this package on the path.
    if (PROJECT / "pyproject.toml").exists() and not (venv / ".project-installed").exists():
        _step("this project", [*pip, "--no-deps", "--editable", str(PROJECT)])
        (venv / ".project-installed").touch()
    folder = venv / "releases"
    for name, packages in _beside(releases).items():
        if not (folder / name).is_dir():
            partial = folder / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _step(name, [*pip, "--no-deps", "--no-compile", "--target", str(partial), *packages])
            partial.rename(folder / name)
    return interpreter


def _beside(releases: Iterable[str]) -> dict[str, list[str]]:
    """Directory below ``releases`` -> what is installed there."""
    found = {}
    for release in releases:
        found[release] = [f"sglang=={release}"]
        if version := TRANSFORMERS.get(release):
            pins = ["huggingface_hub==1.33.0", "tokenizers==0.22.2"]
            found[f"transformers-{version}"] = [f"transformers=={version}", *pins]
    return found


def _step(what: str, command: list[str]) -> None:
    # Standard output belongs to the command that needs the environment: eval --json -.
    print(f"{what} ...", end=" ", flush=True, file=sys.stderr)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print("failed", file=sys.stderr)
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv-sglang"))
    parser.add_argument("--torch", default=TORCH, help="requirement for torch")
    parser.add_argument("--all-releases", action="store_true", help="and every supported release")
    options = parser.parse_args()
    releases = (*GPT_OSS_RELEASES, *OTHER_RELEASES) if options.all_releases else ()
    print(build(options.venv.absolute(), torch=options.torch, releases=releases))


if __name__ == "__main__":
    main()
