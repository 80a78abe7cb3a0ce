"""SGLang trees to apply the patch set to: copies of the releases that the tests run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_aiter_moe.testing import sglang_releases
from sglang_aiter_moe.testing.sglang_releases import MAIN

#: The variables of a process whose SGLang has the patch set in its source, and which has no plugin of ours:
#: the control only brings what a machine with AITER has.
WITHOUT_PLUGIN: Mapping[str, str | None] = {
    "SGLANG_PLUGINS": "aiter_moe_controls",
    "CARRIER_CONTROL": "in_tree",
    "SGLANG_AITER_MOE_BACKEND": None,
}


def released_package(release: str) -> Path:
    """SGLang's package as released, not to be written."""
    if release == MAIN:
        return Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations)))
    return Path(sys.prefix) / "releases" / release / "sglang"


def copy_release(release: str, root: Path, *, source: bool = False) -> Path:
    """Copies a release below ``root``; returns the tree to give to ``apply``.

    Args:
        release: one of ``sglang_releases.RELEASES``.
        root: a directory; it may be new.
        source: the layout of a checkout in place of that of site-packages.
    """
    package = root / "python" / "sglang" if source else root / "sglang"
    package.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        released_package(release), package, ignore=shutil.ignore_patterns("__pycache__")
    )
    if source:
        (root / "test" / "registered").mkdir(parents=True)
    return root


def search_path(release: str, tree: Path) -> str:
    """What goes first on PYTHONPATH for a tree of this release."""
    first = tree / "python" if (tree / "python").is_dir() else tree
    # In place of the release itself; what else it needs stays behind it.
    needed = (sglang_releases.search_path(release) or "").split(os.pathsep)[1:]
    return os.pathsep.join([str(first), *needed])
