"""Apply, check and revert: the order of work."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

import sglang_aiter_moe
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree import git, transaction
from sglang_aiter_moe.intree.anchors import Source
from sglang_aiter_moe.intree.edits import PACKAGE, Edit, Editor, Outcome, edited_files
from sglang_aiter_moe.intree.manifest import (
    FOLDER,
    JOURNAL,
    NAME,
    EditedFile,
    Manifest,
    read_manifest,
    sha256,
    text_lines,
)
from sglang_aiter_moe.intree.packages import SOURCE, placed_files, placed_tests
from sglang_aiter_moe.intree.transaction import Change
from sglang_aiter_moe.intree.tree import Tree


@dataclass
class Report:
    """What a command did, or would do.

    Attributes:
        tree: where.
        state: "original", "applied" or "interrupted", as it was found.
        edits: one a patch.
        changes: what was or would be written.
        done: in one sentence.
        refusal: why :func:`apply` would write nothing of it; found by :func:`check` alone.
    """

    tree: Tree
    state: str
    edits: list[Edit] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    done: str = ""
    refusal: ContractError | None = None

    def diff(self) -> str:
        """Unified, of the edited files. New files are only counted."""
        parts = []
        for change in self.changes:
            if change.before is None or change.after is None:
                continue
            name = self.tree.shown(change.path)
            old, new = text_lines(change.before), text_lines(change.after)
            for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
                parts.append(
                    line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                )
        return "".join(parts)

    def as_dict(self) -> dict:
        return {
            "tree": str(self.tree.root),
            "package": str(self.tree.package),
            "release": str(self.tree.release),
            "state": self.state,
            "done": self.done,
            "refusal": None if self.refusal is None else str(self.refusal),
            "edits": [edit.as_dict() for edit in self.edits],
            "edited": [self.tree.shown(c.path) for c in self.changes if c.before is not None],
            "new": [self.tree.shown(c.path) for c in self.changes if c.before is None],
            "diff": self.diff(),
        }


def check(tree: Tree, *, tests: bool = True, allow_uncommitted: bool = False) -> Report:
    """What :func:`apply` would do; writes nothing.

    A tree that can be read and edited, but not be written as it is, gets its report with ``refusal``.

    Raises:
        ContractError: as :func:`apply`.
    """
    _refuse_unfinished(tree)
    manifest = read_manifest(tree.package)
    if manifest is not None:
        report = _applied(tree, manifest)
        _refuse_another(tree, manifest)
        return report
    report = _planned(tree, tests)
    try:
        _refuse_unwritable(tree, report.changes, allow_uncommitted)
    except ContractError as error:
        report.refusal = error
    return report


def apply(tree: Tree, *, tests: bool = True, allow_uncommitted: bool = False) -> Report:
    """Makes the patch set part of a tree. A tree that has it stays as it is.

    Args:
        tree: from :func:`.tree.find_tree`.
        tests: place the tests as well, in a source tree.
        allow_uncommitted: also edit files that have changes which are not in git.

    Raises:
        ContractError: the code at a place of an edit means something else, the tree is half-applied, a
            file cannot be written or has uncommitted changes. Nothing was changed then.
    """
    with transaction.locked(tree.package):
        note = _settle(tree, wanted="apply")
        manifest = read_manifest(tree.package)
        if manifest is not None:
            report = _applied(tree, manifest)
            _refuse_another(tree, manifest)
            report.done = note or "nothing to do: the patch set is in the tree already"
            return report
        report = _planned(tree, tests)
        _refuse_unwritable(tree, report.changes, allow_uncommitted)
        transaction.carry_out(tree.package, "apply", report.changes)
    report.done = "applied"
    return report


def revert(tree: Tree) -> Report:
    """Takes the patch set out again: every byte as it was.

    Raises:
        ContractError: a file was changed since, or cannot be written. Nothing was changed then.
    """
    with transaction.locked(tree.package):
        note = _settle(tree, wanted="revert")
        manifest = read_manifest(tree.package)
        if manifest is None:
            _refuse_remains(tree)
            return Report(tree, "original", done=note or "nothing to do: the tree is as released")
        changes = _backwards(tree, manifest)
        transaction.carry_out(tree.package, "revert", changes)
    return Report(tree, "applied", changes=changes, done="reverted")


# --- what is to be written -----------------------------------------------------------------------


def _planned(tree: Tree, tests: bool) -> Report:
    _refuse_remains(tree)
    report = Report(tree, "original")
    edited: dict[str, EditedFile] = {}
    for name, edit in edited_files().items():
        path = tree.package / name
        if not path.is_file():
            raise ContractError(
                f"{tree.shown(path)} is missing",
                allowed="every file that is edited",
                fix="use a complete checkout or wheel of a tested release",
            )
        before = path.read_bytes()
        editor = Editor(Source(tree.shown(path), before), tree.release)
        edit(editor)
        report.edits += editor.edits
        if any(made.outcome is Outcome.MADE for made in editor.edits):
            after = editor.source.module.bytes
            report.changes.append(Change(path, before, after))
            edited[name] = EditedFile.of(before, after)
    placed = {tree.package / name: data for name, data in placed_files().items()}
    if tests and tree.tests is not None:
        placed |= _tests(tree)
    taken = [path for path in placed if path.exists()]
    if taken:
        raise ContractError(
            f"{tree.shown(taken[0])} exists already",
            allowed=f"no {FOLDER} in SGLang's package, and no tests of ours",
            fix="remove it: it is no part of SGLang",
        )
    manifest = Manifest(
        version=sglang_aiter_moe.__version__,
        release=str(tree.release),
        patches=[edit.patch for edit in report.edits if edit.outcome is Outcome.MADE],
        edited=edited,
        placed={_relative(tree, path): sha256(data) for path, data in placed.items()},
    )
    placed[tree.package / FOLDER / NAME] = manifest.to_bytes()
    # The packages first and the manifest last: an interrupted tree imports, or says what it is.
    report.changes = [
        *(Change(path, None, data) for path, data in placed.items()),
        *report.changes,
    ]
    return report


def _tests(tree: Tree) -> dict[Path, bytes]:
    ours = SOURCE.parents[1] / "test" / "registered"
    if not ours.is_dir():  # installed from a wheel, which has no tests
        return {}
    files, support = placed_tests(ours)
    found = {tree.tests / name: data for name, data in files.items()}
    return found | {tree.package / name: data for name, data in support.items()}


def _backwards(tree: Tree, manifest: Manifest) -> list[Change]:
    changes = []
    for name, file in manifest.edited.items():
        path = tree.package / name
        now = path.read_bytes() if path.is_file() else b""
        if sha256(now) == file.before:
            continue  # somebody restored it
        original = file.original(now)
        if sha256(now) != file.after or sha256(original) != file.before:
            raise _touched(tree, path)
        changes.append(Change(path, now, original))
    for name, digest in manifest.placed.items():
        path = tree.package / name
        if not path.exists():
            continue
        data = path.read_bytes()
        if sha256(data) != digest:
            raise _touched(tree, path)
        changes.append(Change(path, data, None))
    path = tree.package / FOLDER / NAME
    changes.append(Change(path, path.read_bytes(), None))
    return changes


def _touched(tree: Tree, path: Path) -> ContractError:
    return ContractError(
        f"{tree.shown(path)} was changed after the patch set was applied",
        allowed="the files as `apply` left them",
        fix="undo that change (git stash, git checkout), or restore the file from git or the wheel",
    )


def _relative(tree: Tree, path: Path) -> str:
    """From SGLang's package; tests are beside it in a source tree."""
    if path.is_relative_to(tree.package):
        return path.relative_to(tree.package).as_posix()
    return "../../" + path.relative_to(tree.root).as_posix()


# --- in what state the tree is -------------------------------------------------------------------


def _applied(tree: Tree, manifest: Manifest) -> Report:
    """The report of a tree that has the patch set.

    Raises:
        ContractError: only a part of it is there.
    """
    for name, file in manifest.edited.items():
        path = tree.package / name
        now = sha256(path.read_bytes()) if path.is_file() else None
        if now == file.before or now is None:
            raise _half(tree, f"{tree.shown(path)} is as released")
    for name in manifest.placed:
        if not (tree.package / name).is_file():
            raise _half(tree, f"{tree.shown(tree.package / name)} is missing")
    edits = [
        Edit(name, "", Outcome.MADE, f"in the tree, from version {manifest.version}")
        for name in manifest.patches
    ]
    return Report(tree, "applied", edits, done="the patch set is in the tree already")


def _refuse_another(tree: Tree, manifest: Manifest) -> None:
    """What was placed has to be what would be placed now."""
    now = {name: sha256(data) for name, data in placed_files().items()}
    if {name: manifest.placed.get(name) for name in now} != now:
        raise ContractError(
            f"{tree.root} has another patch set, of version {manifest.version}",
            allowed=f"a tree without it, or with this one ({sglang_aiter_moe.__version__})",
            fix=f"type `sglang-aiter-moe apply {tree.root} --revert`, then apply again",
        )


def _half(tree: Tree, what: str) -> ContractError:
    return ContractError(
        f"{tree.root} is half-applied: {what}, and {FOLDER}/{NAME} says that the patch set is in",
        allowed="all of the patch set, or nothing of it",
        fix=f"type `sglang-aiter-moe apply {tree.root} --revert`, then apply again",
    )


def _refuse_remains(tree: Tree) -> None:
    """Without a manifest nothing of ours may be there."""
    for name in edited_files():
        path = tree.package / name
        if path.is_file() and PACKAGE.encode() in path.read_bytes():
            raise ContractError(
                f"{tree.shown(path)} calls the patch set, and {FOLDER}/{NAME} is missing",
                allowed="all of the patch set with its record, or nothing of it",
                fix="restore the file from git or from the wheel, then apply again",
            )
    folder = tree.package / FOLDER
    if any(folder.rglob("*.py")):
        raise ContractError(
            f"{tree.shown(folder)} is there, and no {NAME} in it",
            allowed="all of the patch set with its record, or nothing of it",
            fix=f"remove {folder}, then apply again",
        )


def _refuse_unfinished(tree: Tree) -> None:
    action = transaction.unfinished(tree.package)
    if action is not None:
        raise ContractError(
            f"{tree.root} is half-changed: `{action}` was interrupted",
            allowed="a run that came to its end",
            fix=f"type `sglang-aiter-moe apply {tree.root}` to finish it, or with --revert to undo it",
        )


def _settle(tree: Tree, wanted: str) -> str:
    """Brings an interrupted run to the end that the user asks for now."""
    transaction.drop_leftovers(tree.package)
    action = transaction.unfinished(tree.package)
    if action is None:
        return ""
    transaction.resume(tree.package, forward=action == wanted)
    found = f"an interrupted `{action}` was found in {tree.package / JOURNAL}"
    return f"{found} and {'finished' if action == wanted else 'taken back'}"


def _refuse_unwritable(tree: Tree, changes: list[Change], allow_uncommitted: bool) -> None:
    transaction.check_writable(changes)
    if allow_uncommitted:
        return
    dirty = git.uncommitted(tree.root, [change.path for change in changes])
    if dirty:
        raise ContractError(
            f"{tree.root} has uncommitted changes in {', '.join(dirty[:5])}",
            allowed="files as they were committed, so that the edits can be told from your changes",
            fix="commit or stash them, or use --allow-uncommitted",
        )
