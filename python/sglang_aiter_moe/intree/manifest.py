"""What an applied tree says of itself: ``applied.json`` in the placed folder.

Which patches are in the tree, the digest of every file before and after, and the lines that each edit took
out, from which ``--revert`` makes the original again. Standard library alone: the plugin reads it too.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_aiter_moe.errors import ContractError

#: Of the placed packages, in SGLang's package.
FOLDER = "srt/layers/moe/aiter_moe"
NAME = "applied.json"
#: Of a run that has not come to its end.
JOURNAL = ".aiter_moe_journal"


@dataclass(frozen=True)
class EditedFile:
    """One file of SGLang.

    Attributes:
        before, after: SHA-256 of its content.
        removed: per changed place: the first line after the edit (from 0), how many lines it has now, and
            the text that was there.
    """

    before: str
    after: str
    removed: list[tuple[int, int, str]]

    @classmethod
    def of(cls, before: bytes, after: bytes) -> EditedFile:
        old, new = text_lines(before), text_lines(after)
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        removed = [
            (start, end - start, "".join(old[first:last]))
            for kind, first, last, start, end in matcher.get_opcodes()
            if kind != "equal"
        ]
        return cls(sha256(before), sha256(after), removed)

    def original(self, after: bytes) -> bytes:
        """The content before the edit, from the one after it."""
        lines = text_lines(after)
        for start, count, text in reversed(self.removed):
            lines[start : start + count] = [text]
        return "".join(lines).encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Manifest:
    """What was applied.

    Attributes:
        version: of this project.
        release: of SGLang, as the tree said or the user stated.
        patches: names of the patches that the edits are.
        edited: path from SGLang's package -> its edit.
        placed: path from SGLang's package (tests: from ``../../test``, written with it) -> SHA-256.
    """

    version: str
    release: str
    patches: list[str]
    edited: dict[str, EditedFile]
    placed: dict[str, str]

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Manifest:
        try:
            raw = json.loads(data)
            edited = {
                name: EditedFile(
                    file["before"], file["after"], [tuple(part) for part in file["removed"]]
                )
                for name, file in raw["edited"].items()
            }
            return cls(raw["version"], raw["release"], raw["patches"], edited, raw["placed"])
        except (ValueError, KeyError, TypeError) as error:
            raise ContractError(
                f"{path} is not what `apply` wrote: {error!r}",
                allowed="the file of an applied tree, unchanged",
                fix="restore SGLang's files from git or from the wheel, remove "
                f"{path.parent}, then apply again",
            ) from None


def read_manifest(package: Path) -> Manifest | None:
    """The manifest of SGLang's package; None for one that the patch set is not part of.

    Raises:
        ContractError: the file is damaged.
    """
    path = package / FOLDER / NAME
    return Manifest.from_bytes(path.read_bytes(), path) if path.is_file() else None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def text_lines(data: bytes) -> list[str]:
    """A file's lines with their ends; what is not UTF-8 survives being encoded again."""
    # Only "\n" ends a line here: what splitlines() takes for one may stand inside a string.
    text = data.decode("utf-8", "surrogateescape")
    parts = text.split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
