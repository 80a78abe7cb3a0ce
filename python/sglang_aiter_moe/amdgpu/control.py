"""Where waves go: branches, barriers, ends. The machine executes these at the end of a basic block.

Source: AMD, "CDNA3 ISA", section SOPP.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.decode import refuse
from sglang_aiter_moe.amdgpu.state import EXEC, VCC, Batch


def _zero(i: int) -> Callable[[Batch], np.ndarray]:
    def test(b: Batch) -> np.ndarray:
        b.check_s(i)
        b.check_s(i + 1)
        return (b.s[i] | b.s[i + 1]) == 0

    return test


def _not(test: Callable[[Batch], np.ndarray]) -> Callable[[Batch], np.ndarray]:
    return lambda b: ~test(b)


CONDITIONS: dict[str, Callable[[Batch], np.ndarray]] = {
    "s_cbranch_scc0": lambda b: ~b.scc,
    "s_cbranch_scc1": lambda b: b.scc,
    "s_cbranch_vccz": _zero(VCC),
    "s_cbranch_vccnz": _not(_zero(VCC)),
    "s_cbranch_execz": _zero(EXEC),
    "s_cbranch_execnz": _not(_zero(EXEC)),
}
"""Conditional branch -> bool [waves]: who takes it."""
BRANCH, BARRIER, END = "s_branch", "s_barrier", "s_endpgm"
TERMINATORS = frozenset((*CONDITIONS, BRANCH, BARRIER, END))


def check(instruction: Instruction) -> None:
    """Refuses a terminator with another form than a branch to a label, or a barrier or end without operands."""
    kinds = [operand.kind for operand in instruction.operands]
    wanted = [] if instruction.opcode in (BARRIER, END) else ["label"]
    if kinds != wanted or instruction.modifiers:
        raise refuse(instruction, f"this form of {instruction.opcode}")
