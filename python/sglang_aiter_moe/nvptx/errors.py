"""Errors of the PTX interpreter: what the program did, where in its text, and in which CTA, warp and lane."""

from __future__ import annotations

from sglang_aiter_moe.errors import ContractError


class PtxError(ContractError):
    """Text that is not PTX as LLVM prints it, or that names something that is not modelled."""


class ExecutionError(ContractError):
    """A program that did what PTX leaves undefined, what hardware faults on, or what never ends.

    Attributes:
        line: line of the instruction in the PTX text, counted from 1; 0 where none is known.
        opcode: the instruction's full name.
        source: file, line and column that the compiler names for it, "" where it names none.
        cta: (x, y, z) of the first CTA that did it, or None.
        warp: warp of that CTA, or None.
        lane: lane of that warp, or None.
    """

    line: int = 0
    opcode: str = ""
    source: str = ""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None


class DeadlockError(ExecutionError):
    """Every warp that has not ended waits for something that nobody is left to do."""
