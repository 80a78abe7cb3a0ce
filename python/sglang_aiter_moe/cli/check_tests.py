"""`check-tests`: does SGLang's CI see every test file?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sglang_aiter_moe.cli.output import JsonOption, console, write_json
from sglang_aiter_moe.testing.check_registration import check_paths


def check_tests(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH...", help="Test files or directories.", show_default=False),
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Check the registration rule: a literal top-level register_*_ci call and a __main__ entry."""
    files, violations = check_paths(paths or [Path("test/registered")])
    out = console(json_target)
    for violation in violations:
        out.print(str(violation), markup=False, soft_wrap=True)
    out.print(f"{len(files)} files looked at, {len(violations)} violations")
    write_json(
        {
            "files": len(files),
            "violations": [asdict(violation) for violation in violations],
        },
        json_target,
    )
    raise typer.Exit(1 if violations else 0)
