"""What came of a cell: one of five classes."""

from __future__ import annotations

import re
from enum import StrEnum

from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.expected import CLOSE
from sglang_aiter_moe.matrix.one_cell import Outcome


class Class(StrEnum):
    """Names as in the JSON."""

    RIGHT = "right"
    REFUSED = "refused"
    REFUSED_LATE = "refused_late"
    SILENT_WRONG = "silent_wrong"
    CRASHED = "crashed"


#: Errors that somebody raised on purpose and that name what is not supported. Anything else is a crash: an
#: AttributeError deep in a loader, ``int('many')``, a kernel that does not exist on the architecture.
_CLEAR = (
    ("ContractError", ""),
    ("UpdateFailed", ""),
    ("ValueError", r"Current platform \S+ not support mxfp4"),
    ("NotImplementedError", r"SiTUv2 is not supported"),
    ("NotImplementedError", r"does not support expert-parallel yet"),
    ("RuntimeError", r"Unsupported activation for ck_moe_stage1"),
    ("RuntimeError", r"Unsupported scales/output dtype"),
    ("ValueError", r"situ \w+ must be > 0"),
    ("ValueError", r"split-k bias is not supported"),
    ("TypeError", r"MoE bias must be fp32"),
)


def is_clear(outcome: Outcome) -> bool:
    """Whether an error says what was wrong."""
    return any(
        outcome.error_type == kind and re.search(pattern, outcome.error) for kind, pattern in _CLEAR
    )


def classify(cell: Cell, outcome: Outcome) -> Class:
    """The class of what happened.

    A clear error at load is a refusal. At the call it is one too if it is about what changed after the load; what
    the first call says, or would have said without the change, was known at load, and came late.
    """
    if outcome.stage == "done":
        return Class.RIGHT if outcome.mode and outcome.diff < CLOSE else Class.SILENT_WRONG
    if not is_clear(outcome):
        return Class.CRASHED
    if outcome.stage == "first call" or (outcome.stage == "call" and cell.change == "nothing"):
        return Class.REFUSED_LATE
    return Class.REFUSED


#: Spellings that people mean as "on".
MEANT_ON = ("1", "true", "True", "yes", "on", " 1", "01")


def asked_mode(cell: Cell) -> str | None:
    """The mode that SiTUv2's flags ask for at the call; None where they do not decide.

    By what a person means, not by how anybody parses it.
    """
    if cell.activation != "situv2" or cell.arch == "gfx1250":
        return None
    a8w4, a4w4 = cell.a8w4, cell.a4w4
    if cell.change == "set A8W4=1":
        a8w4 = "1"
    elif cell.change == "unset A8W4":
        a8w4 = None
    elif cell.change == "set A4W4=1":
        a4w4 = "1"
    elif cell.change == "unset A4W4":
        a4w4 = None
    if a8w4 in MEANT_ON:
        return "A8W4"
    return "A4W4" if a4w4 in MEANT_ON else "A16W4"


def in_another_mode(cell: Cell, outcome: Outcome) -> bool:
    """Right numbers, from another mode than was asked for (its speed and memory are other ones)."""
    asked = asked_mode(cell)
    right = classify(cell, outcome) is Class.RIGHT
    return right and asked is not None and outcome.mode != asked
