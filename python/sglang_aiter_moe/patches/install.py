"""Puts patches in place, everywhere that SGLang holds the function, and verifies that they stay.

SGLang's own hook registry sets one attribute and the copies that other modules made by ``from x import
y``. It does not reach an alias in the defining module (``biased_grouped_topk``), functions kept in a
dict (the permute pools, the fused-op pool) or in a list, and it logs failures and goes on. Here every
reference that can be found is replaced, and what cannot be replaced is a refusal.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from sglang_aiter_moe.patches.model import How, Patch, State, Status, load, resolve

_REGISTRY_DEPTH = 2  # registries are dicts of functions or dicts of dicts of functions
_ABSENT = object()


def install(state: State) -> None:
    """Applies one patch in this process. The outcome is ``state.status``; nothing is raised."""
    patch = state.patch
    try:
        owner, name, original = _find(patch)
    except (ImportError, AttributeError) as error:
        state.refuse(f"the target does not exist: {error}")
        return
    try:
        replacement = _make(patch, None if original is _ABSENT else original)
    except Exception as error:  # whatever it is, it is the reason why this patch is not in force
        state.refuse(f"{patch.function} cannot be used: {type(error).__name__}: {error}")
        return
    setattr(owner, name, replacement)
    state.original, state.replacement = original, replacement
    # A constant (True) is the same object in hundreds of modules: only this one is meant.
    if callable(original):
        for holder, key in _references(original):
            _put(holder, key, replacement)
    state.status = Status.IN_FORCE
    state.reason = f"without it, {patch.why}"


def _find(patch: Patch) -> tuple[Any, str, Any]:
    if not patch.adds:
        return resolve(patch.target)
    module_name, _, name = patch.target.partition(":")
    module = importlib.import_module(module_name)
    return module, name, getattr(module, name, _ABSENT)


def _make(patch: Patch, original: Any) -> Any:
    function = load(patch.function)
    if patch.how is How.VALUE:
        return function(original)
    plain = original.__func__ if isinstance(original, staticmethod | classmethod) else original
    if not callable(plain) or isinstance(plain, type):
        raise TypeError(f"the target is a {type(original).__name__}, not a function")

    if patch.how is How.AROUND:

        @functools.wraps(plain)
        def patched(*args, **kwargs):
            return function(plain, *args, **kwargs)

    else:

        @functools.wraps(plain)
        def patched(*args, **kwargs):
            return function(*args, **kwargs)

    return type(original)(patched) if plain is not original else patched


def verify(state: State, held: dict[int, list[str]] | None = None) -> str | None:
    """Why a patch that was installed is no longer in force; None if it is.

    ``held``: what :func:`held_for_good` gave, for callers that verify many patches.
    """
    try:
        _, _, current = resolve(state.patch.target)
    except (ImportError, AttributeError) as error:
        return f"the target is gone: {error}"
    if state.patch.how is How.VALUE and not callable(state.replacement):
        if current is not state.replacement and current != state.replacement:
            return f"it was set back to {current!r}"
        return None
    if not _leads_to(current, state.replacement):
        return f"it was replaced by {getattr(current, '__qualname__', current)!r}"
    foreign = _foreign_replacement(state.patch.target)
    if foreign:
        return f"another plugin replaces it: {foreign}"
    if callable(state.original):
        left = [_describe(holder, key) for holder, key in _references(state.original)]
        left += (held_for_good() if held is None else held).get(id(state.original), [])
        if left:
            return f"the unpatched function is still used by {', '.join(sorted(left)[:5])}"
    overriding = _overriding_subclasses(state.patch.target)
    if overriding:
        return f"it is overridden by {', '.join(overriding)}"
    return None


def _leads_to(current: Any, replacement: Any) -> bool:
    """Whether ``current`` is ``replacement``, or another plugin's wrapper around it."""
    seen = 0
    while current is not None and seen < 20:
        if current is replacement:
            return True
        current = getattr(current, "__wrapped__", None)
        seen += 1
    return False


def _foreign_replacement(target: str) -> str | None:
    registry = sys.modules.get("sglang.srt.plugins.hook_registry")
    if registry is None:
        return None
    hooks = registry.HookRegistry._hooks.get(target.replace(":", "."), ())
    for kind, hook, source in hooks:
        if getattr(kind, "value", kind) == "replace":
            return f"{getattr(hook, '__qualname__', hook)} ({source})"
    return None


def _overriding_subclasses(target: str) -> list[str]:
    """Subclasses of the patched class that bring their own version of the patched method."""
    owner, name, _ = resolve(target)
    if not isinstance(owner, type) or name == "__init__":
        return []
    pending, found = list(owner.__subclasses__()), []
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if name in vars(cls):
            found.append(f"{cls.__module__}.{cls.__qualname__}")
    return sorted(found)


def _sglang_modules() -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith("sglang_aiter_moe"):
            yield module


def _references(function: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of each name or registry entry that is ``function``.

    Looked at: names of all modules, and dicts and lists that an SGLang module or class holds, two
    levels deep.
    """
    for module in _sglang_modules():
        for name, value in list(vars(module).items()):
            if value is function:
                yield module, name
            elif module.__name__.startswith("sglang"):
                if isinstance(value, dict | list):
                    yield from _in_registry(value, function, _REGISTRY_DEPTH)
                elif isinstance(value, type) and value.__module__ == module.__name__:
                    yield from _in_class(value, function)


def _in_class(cls: type, function: Any) -> Iterator[tuple[Any, Any]]:
    for name, value in list(vars(cls).items()):
        if value is function:
            yield cls, name
        elif isinstance(value, dict | list):
            yield from _in_registry(value, function, _REGISTRY_DEPTH)


def _in_registry(registry: dict | list, function: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    items = list(registry.items() if isinstance(registry, dict) else enumerate(registry))
    for key, value in items:
        if value is function:
            yield registry, key
        elif depth > 1 and isinstance(value, dict | list):
            yield from _in_registry(value, function, depth - 1)


def held_for_good() -> dict[int, list[str]]:
    """What SGLang's module-level ``functools.partial`` objects and default arguments hold: id -> where."""
    held: dict[int, list[str]] = {}
    for module in _sglang_modules():
        if not module.__name__.startswith("sglang"):
            continue
        for name, value in list(vars(module).items()):
            where = f"{module.__name__}.{name}"
            if isinstance(value, functools.partial):
                held.setdefault(id(value.func), []).append(f"{where} (functools.partial)")
            elif isinstance(value, types.FunctionType):
                _defaults(value, where, held)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for method, function in list(vars(value).items()):
                    function = getattr(function, "__func__", function)
                    if isinstance(function, types.FunctionType):
                        _defaults(function, f"{where}.{method}", held)
    return held


def _defaults(function: types.FunctionType, where: str, held: dict[int, list[str]]) -> None:
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if callable(value):
            held.setdefault(id(value), []).append(f"{where} (default argument)")


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict | list):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _describe(holder: Any, key: Any) -> str:
    if isinstance(holder, dict | list):
        return f"a registry ({key!r})"
    return f"{getattr(holder, '__qualname__', getattr(holder, '__name__', holder))}.{key}"


def uninstall(state: State) -> None:
    """Takes a patch out again (for tests in one process)."""
    owner, name, _ = _find(state.patch)
    if state.original is _ABSENT:
        delattr(owner, name)
    else:
        for holder, key in _references(state.replacement):
            _put(holder, key, state.original)
        setattr(owner, name, state.original)
    state.status, state.original, state.replacement = Status.WAITING, None, None
