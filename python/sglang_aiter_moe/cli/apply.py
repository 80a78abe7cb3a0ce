"""`apply`: the patch set as a change of SGLang's source."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_aiter_moe.cli.output import JsonOption, console, write_json
from sglang_aiter_moe.errors import ContractError

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_aiter_moe.intree.run import Report


def apply(
    tree: Annotated[
        Path,
        typer.Argument(
            metavar="TREE",
            help="A checkout of SGLang, or the directory that holds `sglang` (site-packages).",
            show_default=False,
        ),
    ],
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Write what would change to standard output, as a unified diff, and nothing to the tree.",
        ),
    ] = False,
    revert: Annotated[
        bool, typer.Option("--revert", help="Take the patch set out again, byte for byte.")
    ] = False,
    release: Annotated[
        str | None,
        typer.Option(help="The SGLang release that the tree is based on, if it does not say."),
    ] = None,
    tests: Annotated[bool, typer.Option(help="Place the tests as well, in a source tree.")] = True,
    allow_uncommitted: Annotated[
        bool,
        typer.Option(
            "--allow-uncommitted", help="Also edit files with changes that are not in git."
        ),
    ] = False,
    json_target: JsonOption = None,
) -> None:
    """Make the patch set part of an SGLang source tree or unpacked release (0.5.17 to 0.5.23)."""
    if check and revert:
        raise typer.BadParameter("--check and --revert exclude each other")
    report = _run(tree, check, revert, release, tests, allow_uncommitted)
    if check and json_target != "-":
        # As bytes: a console would expand tabs, and `git apply` has to find the file's own line ends.
        sys.stdout.flush()
        sys.stdout.buffer.write(report.diff().encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
    # Standard output has the diff or the JSON, and nothing else with it.
    _show(report, console("-" if check else json_target))
    write_json(report.as_dict(), json_target)
    if report.refusal is not None:
        raise typer.Exit(2)  # as `apply` itself would end


def _run(
    root: Path,
    check: bool,
    revert: bool,
    release: str | None,
    tests: bool,
    allow_uncommitted: bool,
) -> Report:
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise ContractError(
            f"LibCST is not installed: {error}",
            allowed="LibCST 1.1 or newer, which edits a file without touching the rest of it",
            fix="type `pip install 'sglang-aiter-moe[apply]'`",
        ) from None
    from sglang_aiter_moe.intree import run
    from sglang_aiter_moe.intree.tree import find_tree

    found = find_tree(root, release)
    if revert:
        return run.revert(found)
    if check:
        return run.check(found, tests=tests, allow_uncommitted=allow_uncommitted)
    return run.apply(found, tests=tests, allow_uncommitted=allow_uncommitted)


def _show(report: Report, out: Console) -> None:
    width = max((len(edit.outcome.value) for edit in report.edits), default=0)
    for edit in report.edits:
        line = f"[{edit.outcome.value:<{width}}] {edit.patch}: {edit.detail}"
        out.print(line, markup=False, soft_wrap=True)
    kinds = Counter(
        "new" if c.before is None else "removed" if c.after is None else "edited"
        for c in report.changes
    )
    counted = ", ".join(f"{count} files {kind}" for kind, count in sorted(kinds.items()))
    done = report.done or "would be applied"
    line = f"SGLang {report.tree.release} in {report.tree.package}: {done}"
    out.print(f"{line} ({counted})" if counted else line, markup=False, soft_wrap=True)
    if report.refusal is not None:
        out.print(f"but not as it is: {report.refusal}", markup=False, soft_wrap=True)
