"""Errors of the AMD interpreter: what the program did, where in its text, and in which workgroup, wave and lane."""

from __future__ import annotations

from sglang_aiter_moe.errors import ContractError


class AssemblyError(ContractError):
    """Text that is not AMDGPU assembly as LLVM prints it, or that names something that is not modelled."""


class ExecutionError(ContractError):
    """A program that did what hardware leaves undefined, faults on, or what the interpreter does not model.

    Attributes:
        line: line of the instruction in the assembly text, counted from 1; 0 where none is known.
        opcode: the instruction's mnemonic.
        workgroup: (x, y, z) of the first workgroup that did it, or None.
        wave: wave of that workgroup, or None.
        lane: lane of that wave, or None.
    """

    line: int = 0
    opcode: str = ""
    workgroup: tuple[int, int, int] | None = None
    wave: int | None = None
    lane: int | None = None


class Fault(Exception):
    """Raised by the semantics of one instruction; the machine adds the place and makes it an :class:`ExecutionError`.

    Args:
        what: what happened.
        allowed: what would have been right.
        fix: what to look at.
        lane: which lane of the batch did it (wave * 64 + lane), or None.
        wave: which wave of the batch did it, or None.
    """

    def __init__(
        self, what: str, *, allowed: str, fix: str, lane: int | None = None, wave: int | None = None
    ) -> None:
        self.what, self.allowed, self.fix = what, allowed, fix
        self.lane, self.wave = lane, wave
        super().__init__(what)
