"""Where warps go: branches and ends. The machine executes these at the end of a block.

Source: PTX ISA 8.7, "Control Flow Instructions".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_aiter_moe.nvptx import decode
from sglang_aiter_moe.nvptx.decode import refuse
from sglang_aiter_moe.nvptx.state import Group
from sglang_aiter_moe.nvptx.text import Instruction

ENDED = -1
Leave = Callable[[Group], "list[tuple[int, np.ndarray | None]]"]
"""Where the lanes of a group go: (position, lanes [n, 32] or None for all that act)."""


def is_terminator(name: str) -> bool:
    return name.split(".")[0] in ("bra", "brx", "ret", "exit", "trap")


def targets(instruction: Instruction) -> list[int]:
    """The positions that it may go to."""
    found = []
    for operand in instruction.operands:
        if operand.kind == "label":
            found.append(int(operand.value))
        elif operand.kind == "table":
            found += [int(x.value) for x in operand.items]
    return found


def build(instruction: Instruction, following: int) -> Leave:
    """``following`` is the position behind the instruction."""
    kind = instruction.name.split(".")[0]
    if kind == "bra" and [o.kind for o in instruction.operands] == ["label"]:
        return _conditional(instruction, int(instruction.operands[0].value), following)
    if kind in ("ret", "exit") and not instruction.operands:
        return _conditional(instruction, ENDED, following)
    if kind == "brx" and [o.kind for o in instruction.operands][1:] == ["table"]:
        if instruction.guard is not None:
            raise refuse(instruction, "brx with a guard")
        return _indexed(instruction)
    raise refuse(instruction, f"this form of {kind}")


def _conditional(instruction: Instruction, to: int, following: int) -> Leave:
    if instruction.guard is None:
        return lambda g: [(to, None)]
    test = guard(instruction)

    def leave(g: Group) -> list:
        taken = test(g)
        lanes = taken if g.mask is None else taken | ~g.mask
        if lanes.all():
            return [(to, None)]
        if g.mask is not None:
            taken = taken & g.mask
        if not taken.any():
            return [(following, None)]
        return [(to, taken), (following, g.lanes & ~taken)]

    return leave


def _indexed(instruction: Instruction) -> Leave:
    index = decode.source(instruction, instruction.operands[0], "u32")
    to = np.array(targets(instruction))

    def leave(g: Group) -> list:
        value, lanes = decode.full(g, index(g)), g.lanes
        bad = lanes & (value >= to.size)
        if bad.any():
            raise decode.fault(
                f"brx.idx {int(value[bad][0])} of {to.size} targets",
                "an index into the table",
                lane=int(np.flatnonzero(bad)[0]),
            )
        return [(int(to[v]), (value == v) & lanes) for v in np.unique(value[lanes])]

    return leave


def guard(instruction: Instruction) -> decode.Read:
    """The lanes for which ``@p`` holds, bool [n, 32]; of lanes that do not act it says nothing."""
    slot, negated = instruction.guard  # type: ignore[misc]

    def test(g: Group) -> np.ndarray:
        state = g.state
        if state.known[slot] & g.bits != g.bits:
            g.check(slot)
        value = state.values[slot][g.rows]
        return ~value if negated else value

    return test


def guarded(instruction: Instruction, operation: decode.Operation) -> decode.Operation:
    """The operation for the lanes where the guard holds."""
    if instruction.guard is None:
        return operation
    test = guard(instruction)

    def run(g: Group) -> np.ndarray | None:
        holds = test(g)
        if g.mask is not None:
            holds = holds & g.mask
        if not holds.any():
            return None
        passed = operation(g.narrow(holds))
        return None if passed is None else passed | ~holds

    return run
