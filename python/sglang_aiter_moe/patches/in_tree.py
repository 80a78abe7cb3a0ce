"""Whether the installed SGLang has the patch set in its source (``sglang-aiter-moe apply``)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree.manifest import JOURNAL, Manifest, read_manifest


def sglang_package() -> Path | None:
    """Where SGLang is; None without one. Does not import it."""
    module = sys.modules.get("sglang")
    found = getattr(module, "__path__", None)
    if found is None:
        try:
            spec = importlib.util.find_spec("sglang")
        except (ImportError, ValueError):  # ValueError: a module without a spec stands in for it
            return None
        found = spec.submodule_search_locations if spec else None
    return Path(next(iter(found))) if found else None


def in_tree() -> tuple[Manifest | None, str | None]:
    """``(what is in the tree, what is wrong with it)``; both None for a released SGLang."""
    package = sglang_package()
    if package is None:
        return None, None
    if (package / JOURNAL).is_dir():
        return None, f"{package} is half-changed: `sglang-aiter-moe apply` was interrupted"
    try:
        return read_manifest(package), None
    except (ContractError, OSError) as error:
        return None, str(error)
