"""The SGLang plugin: applies the patch set to the installed SGLang and proves it in force.

SGLang's plugin loader logs what goes wrong in a plugin and serves on. This plugin does not rely on it:
it applies its own patches, keeps the state of each, and checks all of them when the first MoE layer of a
process is built. One that is needed and not in force stops the load there with a PatchError.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Mapping
from functools import partial

from packaging.version import InvalidVersion, Version

from sglang_aiter_moe.entry import PluginStop
from sglang_aiter_moe.errors import PatchError
from sglang_aiter_moe.patches.in_tree import in_tree
from sglang_aiter_moe.patches.install import held_for_good, install, uninstall, verify
from sglang_aiter_moe.patches.model import Patch, State, Status
from sglang_aiter_moe.patches.table import GUARD, PATCHES
from sglang_aiter_moe.patches.when_imported import forget_all, when_imported
from sglang_aiter_moe.srt.releases import FIRST, FIRST_WITH_GPT_OSS, LAST
from sglang_aiter_moe.srt.switch import ENABLE, enabled

logger = logging.getLogger(__name__)

TESTED = (Version(FIRST), Version(LAST))
BACKEND = "SGLANG_AITER_MOE_BACKEND"
ALLOW_UNTESTED = "SGLANG_AITER_MOE_ALLOW_UNTESTED"
A16W4_KERNEL = "SGLANG_AITER_MOE_A16W4_KERNEL"
BACKENDS = ("auto", "aiter", "portable")

_states: list[State] = []
_registered = False
_checked = False


def register() -> None:
    """What the entry point ``aiter_moe`` calls (``entry.py``). Idempotent; touches no GPU.

    Modules that are imported are patched now, the others when they are.
    """
    global _registered
    if _registered:
        return
    _registered = True
    if not enabled():
        logger.info("sglang-aiter-moe is switched off: %s=%s", ENABLE, os.environ.get(ENABLE))
        return
    applied, problem = in_tree()
    problem = problem or release_problem() or backend_problem()
    backend = "inert" if problem else resolve_backend()[0]
    if backend == "portable" and (problem := portable_problem()):
        backend = "inert"
    guard = State(GUARD)
    _states.extend((guard, *(State(patch) for patch in PATCHES)))
    for state in _states[1:]:
        if applied is not None and state.patch.name in applied.patches:
            state.status = Status.NOT_NEEDED
            state.reason = f"in the tree already, from sglang-aiter-moe {applied.version}"
        elif problem:
            state.refuse(problem)
        elif reason := _not_needed(state.patch, backend):
            state.status, state.reason = Status.NOT_NEEDED, reason
    for state in _states:  # the guard first: in every release, for every backend
        if state.status is Status.WAITING:
            when_imported(state.patch.module, partial(_apply, state))


def _apply(state: State) -> None:
    global _checked
    install(state)
    if state.status is not Status.REFUSED:
        return
    if state.patch is GUARD:
        # Without the guard nobody would notice that the others are missing.
        raise PluginStop(f"sglang-aiter-moe cannot guard this SGLang: {state.reason}. {_way_out()}")
    if _checked:  # a module that was imported after the check
        _checked = (
            False  # should the importer swallow the error, the next MoE layer raises it again
        )
        self_check()


def resolve_backend(env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """``(backend, reason)``: ``aiter``, ``portable``, or ``inert`` when nothing is to be patched.

    Imports torch, which does not initialise a GPU.
    """
    asked = (os.environ if env is None else env).get(BACKEND, "auto")
    if asked != "auto":
        return asked, f"{BACKEND}={asked}"
    import torch

    if torch.version.hip is not None:
        return "aiter", f"{BACKEND} is auto and torch is a ROCm build ({torch.version.hip})"
    return "inert", f"{BACKEND} is auto and torch is not a ROCm build"


def backend_problem(env: Mapping[str, str] | None = None) -> str | None:
    """What is wrong with the value of SGLANG_AITER_MOE_BACKEND; None if nothing is."""
    asked = (os.environ if env is None else env).get(BACKEND, "auto")
    if asked not in BACKENDS:
        return f"{BACKEND}={asked!r} is not one of {', '.join(BACKENDS)}"
    if asked == "aiter":
        import torch

        if torch.version.hip is None:
            return f"{BACKEND}=aiter, but torch is not a ROCm build"
    return None


def installed_release() -> Version | None:
    """The installed SGLang; None without one. Does not import it when it is not imported."""
    module = sys.modules.get("sglang")
    text = getattr(module, "__version__", None)
    try:
        return Version(text or importlib.metadata.version("sglang"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def release_problem(env: Mapping[str, str] | None = None) -> str | None:
    """Why this SGLang is refused; None if it is in the tested range or the user allows it."""
    env = os.environ if env is None else env
    release = installed_release()
    if release is None:
        return "no SGLang release is installed"
    first, last = TESTED
    if (
        Version(FIRST_WITH_GPT_OSS) <= Version(release.public) <= last
        or env.get(ALLOW_UNTESTED) == "1"
    ):
        return None
    return (
        f"SGLang {release} is outside the tested range {first} to {last} (gpt-oss: from "
        f"{FIRST_WITH_GPT_OSS}; {ALLOW_UNTESTED}=1 applies the patches all the same)"
    )


def _not_needed(patch: Patch, backend: str) -> str | None:
    if backend not in patch.backends:
        return f"the backend is {backend} ({resolve_backend()[1]})"
    if patch.cpu_only and not _sglang_runs_on_cpu():
        return "SGLang does not run on a CPU here"
    return patch.not_needed_in(installed_release())


def _sglang_runs_on_cpu() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"


def portable_problem() -> str | None:
    """Registers portable as ``aiter``, unless this process has one; why it cannot, None if it can."""
    from sglang_aiter_moe import portable

    try:
        if not portable.is_portable(sys.modules.get("aiter")):
            portable.install(a16w4_kernel=os.environ.get(A16W4_KERNEL, "separated"))
    except Exception as error:  # a real AITER, a word that is no layout: the reason of the refusal
        return f"the portable AITER cannot be registered: {error}"
    return None


# --- the self-check --------------------------------------------------------------------------


def self_check() -> None:
    """Verifies every patch of this process.

    Raises:
        PatchError: a patch that is needed is not in force; names each one, why, and the way out.
    """
    for state in _states:
        if state.status is Status.WAITING and not state.patch.when_used:
            _import(state)
    failed, held = [], held_for_good()
    for state in _states:
        if state.status is Status.IN_FORCE and (problem := verify(state, held)):
            state.refuse(problem)
        if state.status is Status.REFUSED:
            failed.append(f"{state.patch.name} ({state.patch.target}): {state.reason}")
    if failed:
        raise PatchError(
            f"{len(failed)} of {len(_states)} patches of sglang-aiter-moe are not in force in "
            f"process {os.getpid()}: " + "; ".join(failed),
            allowed="every needed patch in force before the first MoE layer is built",
            fix=_way_out(),
        )


def _import(state: State) -> None:
    try:
        importlib.import_module(state.patch.module)
    except Exception as error:  # the reason, whatever it is, belongs into the refusal
        state.refuse(f"{state.patch.module} cannot be imported: {type(error).__name__}: {error}")
        return
    if state.status is Status.WAITING:
        _apply(state)


def _way_out() -> str:
    return (
        f"install sglang>={TESTED[0]},<={TESTED[1]} with no other plugin on these functions, "
        f"run `sglang-aiter-moe doctor` to see each patch, or switch the patch set off with {ENABLE}=0"
    )


def guard_first_moe_layer(original, self, *args, **kwargs):
    """Around ``FusedMoE.__init__``: every process that builds a model passes here."""
    check_once()
    return original(self, *args, **kwargs)


def check_once() -> None:
    """The self-check, unless this process has passed it.

    Raises:
        PatchError: as :func:`self_check`.
    """
    global _checked
    if _checked:
        return
    self_check()
    _checked = True
    summary = ", ".join(f"{count} {status}" for status, count in _count().items() if count)
    logger.info("sglang-aiter-moe: %s (process %d)", summary, os.getpid())


def _count() -> dict[str, int]:
    return {status.value: sum(state.status is status for state in _states) for status in Status}


def states() -> list[State]:
    """The state of each patch in this process; empty before :func:`register` and when switched off."""
    return list(_states)


def inspect_states() -> list[State]:
    """Registers, imports every module to patch, verifies: what ``doctor`` shows. Raises nothing."""
    register()
    try:
        for state in _states:
            if state.status is Status.WAITING:
                _import(state)
        self_check()
    except (PatchError, PluginStop) as error:
        logger.debug("%s", error)
    return states()


def unregister() -> None:
    """Takes every patch out of this process again (for tests)."""
    global _registered, _checked
    for state in reversed(_states):
        if state.replacement is not None:
            uninstall(state)
    _states.clear()
    forget_all()
    _registered = _checked = False
