"""What an edit is, and the list of files that are edited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from packaging.version import Version

from sglang_aiter_moe.intree.anchors import Source
from sglang_aiter_moe.intree.manifest import FOLDER
from sglang_aiter_moe.patches.model import Patch
from sglang_aiter_moe.patches.table import GUARD, PATCHES

#: The import path of the placed packages.
PACKAGE = "sglang." + FOLDER.replace("/", ".")


class Outcome(StrEnum):
    MADE = "edited"
    UPSTREAM = "upstream"  # SGLang does it itself
    ABSENT = "no such code"  # the release does not have what is patched


@dataclass(frozen=True)
class Edit:
    """What became of one patch in one tree."""

    patch: str
    file: str
    outcome: Outcome
    detail: str

    def as_dict(self) -> dict[str, str]:
        return {
            "patch": self.patch,
            "file": self.file,
            "outcome": self.outcome.value,
            "detail": self.detail,
        }


class Editor:
    """Makes the edits of one file and keeps account of them.

    Attributes:
        source: the file.
        release: of the tree.
        edits: what became of each patch.
    """

    def __init__(self, source: Source, release: Version) -> None:
        self.source, self.release = source, release
        self.edits: list[Edit] = []

    def needs(self, name: str) -> bool:
        """Whether this release needs a patch; notes the reason if it does not."""
        reason = PATCH[name].not_needed_in(self.release)
        if reason is None:
            return True
        until = PATCH[name].until
        upstream = until is not None and self.release > Version(until)
        self.note(name, Outcome.UPSTREAM if upstream else Outcome.ABSENT, reason)
        return False

    def note(self, name: str, outcome: Outcome, detail: str) -> None:
        self.edits.append(Edit(name, self.source.path, outcome, detail))

    def made(self, name: str) -> None:
        self.note(name, Outcome.MADE, f"without it, {PATCH[name].why}")


#: Patches by name. Those of the portable backend have no place in SGLang's tree, nor has the self-check.
PATCH: dict[str, Patch] = {
    patch.name: patch
    for patch in PATCHES
    if patch.backends != frozenset({"portable"}) and not patch.plugin_only
}
PLUGIN_ONLY = frozenset({GUARD.name, *(patch.name for patch in PATCHES if patch.name not in PATCH)})


def edited_files() -> dict[str, Callable[[Editor], None]]:
    """File in SGLang's package -> what edits it."""
    from sglang_aiter_moe.intree import (
        edit_flashinfer,
        edit_mxfp4,
        edit_runner,
        edit_topk,
        edit_updates,
    )

    return {
        "srt/layers/quantization/mxfp4.py": edit_mxfp4.edit,
        "srt/layers/moe/topk.py": edit_topk.edit,
        "srt/layers/moe/moe_runner/aiter.py": edit_runner.edit,
        "srt/layers/moe/moe_runner/flashinfer_trtllm.py": edit_flashinfer.edit,
        "srt/model_executor/model_runner_components/weight_updater.py": edit_updates.edit_updater,
        "srt/managers/scheduler_components/weight_updater.py": edit_updates.edit_manager,
        "srt/eplb/eplb_manager.py": edit_updates.edit_rebalancing,
        "srt/model_loader/loader.py": edit_updates.edit_loader,
    }
