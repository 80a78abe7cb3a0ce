"""A package that can be imported but not used.

SGLang imports ``torchvision`` and ``sgl_kernel`` at module level; both need a GPU build of torch. On a
machine without a GPU driver their place is taken by packages whose attributes and submodules exist and
whose functions raise as soon as one of them is called. Nothing on the paths that the tests run calls one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _Placeholder(type):
    """Metaclass of the stand-in objects: attributes resolve, calls and instances do not."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return make_object(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args, **kwargs):
        raise RuntimeError(
            f"{cls.__qualname__} was called, but it is only an import placeholder "
            "(sglang_aiter_moe/testing/placeholders); install the real package to use it"
        )


def make_object(qualname: str) -> type:
    """Returns a class named ``qualname``: it can be subclassed and annotated with, not called."""
    return _Placeholder(qualname, (), {"__module__": qualname.partition(".")[0]})


class _Module(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = make_object(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any submodule of a placeholder package is a placeholder too."""

    def __init__(self, package: str) -> None:
        self.prefix = f"{package}."

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(self.prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        """Nothing to run: attributes appear when they are asked for."""


def become_placeholder(package: str) -> None:
    """Turns the package being imported into a placeholder. Call it from its ``__init__``."""
    sys.modules[package].__class__ = _Module
    sys.meta_path.insert(0, _Finder(package))
