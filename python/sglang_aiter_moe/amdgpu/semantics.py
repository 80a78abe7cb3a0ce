"""Opcode -> how it is executed: the union of the tables of every subject."""

from __future__ import annotations

from collections.abc import Callable

from sglang_aiter_moe.amdgpu import (
    carry,
    convert,
    convert_scaled,
    lanes,
    lds,
    matrix,
    memory_ops,
    packed,
    scalar,
    scalar_memory,
    scratch,
    vector,
    vector_float,
)
from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.control import TERMINATORS
from sglang_aiter_moe.amdgpu.decode import check_modifiers, refuse
from sglang_aiter_moe.amdgpu.state import Batch
from sglang_aiter_moe.errors import ContractError

_SUBJECTS = (
    scalar, vector, vector_float, carry, convert, convert_scaled, lanes, matrix, memory_ops, packed,
    scratch, lds, scalar_memory,
)  # fmt: skip


def _tables() -> dict[str, Callable]:
    found: dict[str, Callable] = {}
    for subject in _SUBJECTS:
        for table in (subject.TABLE, getattr(subject, "SPECIAL", {})):
            for opcode in table:
                found[opcode] = subject.build
    return found


BUILDERS = _tables()
OPCODES = frozenset(BUILDERS) | TERMINATORS
"""Every opcode that is modelled, without the encoding's suffix."""


def build(instruction: Instruction) -> Callable[[Batch], None]:
    """The function that executes ``instruction`` on a batch.

    Raises:
        AssemblyError: an opcode, modifier or operand that is not modelled.
    """
    builder = BUILDERS.get(instruction.opcode)
    if builder is None:
        raise refuse(instruction, f"the opcode {instruction.opcode}")
    check_modifiers(instruction)
    try:
        return builder(instruction)
    except ContractError:
        raise
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        # Too few operands, a name where a number belongs: text that no assembler would take.
        raise refuse(instruction, f"{instruction.mnemonic} with these operands") from error
