"""Runs a function right after a module was imported, without importing it.

Registering the plugin must be cheap in processes that build no model (the detokenizer, the command
line): there the modules to patch are not imported at all.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable

_waiting: dict[str, list[Callable[[], None]]] = {}


class _Loader(importlib.abc.Loader):
    def __init__(self, name: str, loader: importlib.abc.Loader) -> None:
        self.name, self.loader = name, loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        # The module goes on with its own loader: inspect and pickle look at it.
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for callback in _waiting.pop(self.name, ()):
            callback()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(fullname, spec.loader)
                return spec
        return None


_finder = _Finder()


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Calls ``callback`` at once if ``module`` is imported, else right after it has been.

    A module that is being imported now counts as not imported; its callback runs at once all the
    same, since its names cannot be waited for: callers verify later.
    """
    if module in sys.modules:
        callback()
        return
    _waiting.setdefault(module, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget_all() -> None:
    """Drops every waiting callback (for tests in one process)."""
    _waiting.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
