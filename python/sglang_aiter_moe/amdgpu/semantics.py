"""Opcode -> how it is executed: the union of the tables of every subject."""

from __future__ import annotations

import re
from collections.abc import Callable

from sglang_aiter_moe.amdgpu import (
    carry,
    convert,
    convert_scaled,
    lanes,
    lds_ops,
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
    scratch, lds_ops, scalar_memory,
)  # fmt: skip


def _tables() -> dict[str, Callable]:
    found: dict[str, Callable] = {}
    for subject in _SUBJECTS:
        for table in (subject.TABLE, getattr(subject, "SPECIAL", {})):
            for opcode in table:
                found[opcode] = subject.build
    return found


BUILDERS = _tables()
_GFX950 = re.compile(
    r"v_mfma_scale_.*|v_mfma_.*_f8f6f4|v_mfma_f32_(16x16x32|32x32x16)_(f16|bf16)|ds_read_b64_tr_.*"
    r"|v_permlane(16|32)_swap_b32|v_bitop3_.*|v_cvt_scalef32_.*|v_cvt_pk_(bf16|f16)_f32|v_cvt_f32_bf16"
    r"|v_(maximum|minimum)3_f32|global_load_lds_dwordx[34]|buffer_atomic_pk_add_bf16"
)
"""What LLVM's assembler takes for gfx950 and not for gfx942; buffer_load_dwordx3 and x4 with ``lds`` besides."""
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
    if instruction.target == "gfx942" and _only_gfx950(instruction):
        raise refuse(instruction, f"{instruction.mnemonic} on gfx942, which does not have it,")
    check_modifiers(instruction)
    try:
        return builder(instruction)
    except ContractError:
        raise
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        # Too few operands, a name where a number belongs: text that no assembler would take.
        raise refuse(instruction, f"{instruction.mnemonic} with these operands") from error


def _only_gfx950(instruction: Instruction) -> bool:
    wide = instruction.opcode in ("buffer_load_dwordx3", "buffer_load_dwordx4")
    return bool(_GFX950.fullmatch(instruction.opcode)) or (wide and "lds" in instruction.modifiers)
