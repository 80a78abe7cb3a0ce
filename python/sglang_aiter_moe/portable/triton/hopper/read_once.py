"""Kernels whose bulk copies bring what is read once: L2 is told to give up those lines first.

Without it weights push out of L2 what is read again: tokens, stage 1's output, the parts of the sum
(docs/kernel-notes.md, version 60). Triton 3.6's bulk copy has no argument for it, so the copies in a kernel's PTX get
it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading

import triton
from triton import knobs
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

EVICT_FIRST = "0x12F0000000000000"
"""What ``createpolicy.fractional.L2::evict_first.b64`` gives on sm_90, as CUTLASS writes it (CacheHintSm90)."""
_COPY = re.compile(
    r"(cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global\.mbarrier::complete_tx::bytes)( [^;]*);"
)

_COMPILING = threading.RLock()
"""The hook is one for all threads: who ended first would take it from another's compilation, whose copies then lack
the hint for good (Triton keeps the kernel)."""


def hint(ptx: str) -> str:
    """``ptx`` with the hint on every bulk copy to shared memory.

    Raises:
        ValueError: there is none.
    """
    hinted, found = _COPY.subn(rf"\1.L2::cache_hint\2, {EVICT_FIRST};", ptx)
    if not found:
        raise ValueError("no bulk copy to shared memory that could get a cache hint")
    return hinted


def _stages(name: str, before, *of) -> tuple[str, str] | None:
    """``knobs.runtime.add_stages_inspection_hook``: adds to a compilation's stages; without arguments its cache key."""
    key = before(*of) if before else ("", "")
    if not of:
        return key
    stages = of[1]

    def ptx(source, metadata, make=stages["ptx"]):
        made = make(source, metadata)
        # Another thread may compile meanwhile.
        return hint(made) if metadata["name"] == name else made

    stages["ptx"] = ptx
    return None


@contextlib.contextmanager
def _hinted(name: str):
    with _COMPILING:
        before = knobs.runtime.add_stages_inspection_hook
        knobs.runtime.add_stages_inspection_hook = functools.partial(_stages, name, before)
        try:
            yield
        finally:
            knobs.runtime.add_stages_inspection_hook = before


class Source(GluonASTSource):
    """Has a key of its own in Triton's cache of compiled kernels."""

    def hash(self) -> str:
        return f"{super().hash()}-read-once-{EVICT_FIRST}"


def compile(source: Source, target=None, options=None, **rest):
    """``triton.compile`` of a kernel's source, with the hint.

    Raises:
        RuntimeError: the kernel has none: other code set the hook as well and replaced its PTX.
    """
    name = source.fn.__name__
    with _hinted(name):
        made = triton.compile(source, target=target, options=options, **rest)
    if EVICT_FIRST not in made.asm.get("ptx", EVICT_FIRST):
        raise RuntimeError(
            f"the copies of {name} lack their cache hint; leave out other uses of "
            "triton.knobs.runtime.add_stages_inspection_hook that change PTX"
        )
    return made


class read_once(GluonJITFunction):
    """In place of ``gluon.jit`` above a kernel that is launched."""

    def create_binder(self):
        made = super().create_binder()
        self.ASTSource, self.compile = Source, compile
        return made
