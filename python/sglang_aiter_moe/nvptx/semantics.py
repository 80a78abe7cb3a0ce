"""Opcode -> how it is executed: the union of the tables of every subject."""

from __future__ import annotations

from collections.abc import Callable

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.nvptx import (
    barriers,
    convert,
    copies,
    exchange,
    float_alu,
    integer,
    lines,
    matrix,
    matrix_moves,
    memory_ops,
    moves,
    packed,
    packed_integer,
    tensor_copy,
)
from sglang_aiter_moe.nvptx.decode import Operation, refuse
from sglang_aiter_moe.nvptx.text import Instruction, with_opcode

_ARITHMETIC = (integer, float_alu, packed, packed_integer)
"""Subjects that share opcodes; the type, the name's last part, says whose an instruction is."""
_SUBJECTS = (
    convert, moves, exchange, memory_ops, lines, copies, barriers, matrix, matrix_moves, tensor_copy,
)  # fmt: skip


def _by_type(opcode: str) -> Callable[[Instruction], Operation]:
    def build_one(instruction: Instruction) -> Operation:
        kind = instruction.modifiers[-1] if instruction.modifiers else ""
        for subject in _ARITHMETIC:
            if kind in subject.TYPES and opcode in subject.TABLE:
                return subject.TABLE[opcode](instruction)
        raise refuse(instruction, f"{opcode} of {kind or 'no type'}")

    return build_one


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    opcode: _by_type(opcode) for subject in _ARITHMETIC for opcode in subject.TABLE
} | {opcode: build for subject in _SUBJECTS for opcode, build in subject.TABLE.items()}
"""Longest dotted prefix of a name -> its builder."""


def opcode_of(name: str) -> str | None:
    """The longest prefix of ``name`` that a table has."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (opcode := ".".join(parts[:count])) in BUILDERS:
            return opcode
    return None


def build(instruction: Instruction) -> Operation:
    """The function that executes ``instruction`` on a group.

    Raises:
        PtxError: an opcode, modifier or operand that is not modelled.
    """
    opcode = opcode_of(instruction.name)
    if opcode is None:
        raise refuse(instruction, f"the opcode {instruction.name}")
    try:
        return BUILDERS[opcode](with_opcode(instruction, opcode))
    except ContractError:
        raise
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise refuse(instruction, f"{instruction.name} with these operands") from error
