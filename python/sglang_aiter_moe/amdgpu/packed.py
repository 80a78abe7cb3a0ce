"""Packed 16-bit arithmetic (VOP3P): two halves of a register at once.

op_sel names the half of each source that makes the low result, op_sel_hi the one that makes the high result; neg_lo and
neg_hi change the sign of a float half. Source: AMD, "CDNA3 ISA", section VOP3P.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu import floats
from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.decode import DTYPES, Modifiers, constant, refuse, vector, write
from sglang_aiter_moe.amdgpu.state import Batch
from sglang_aiter_moe.amdgpu.vector import shl, shr

U16, U32, F16, F64 = np.uint16, np.uint32, np.float16, np.float64


def _fma(a, b, c):
    return floats.to_odd(a.astype(F64) * b.astype(F64), c.astype(F64)).astype(F16)


# name -> (type of the halves, number of sources, function)
_INTEGERS = {
    "v_pk_add_u16": ("u16", 2, np.add), "v_pk_sub_u16": ("u16", 2, np.subtract), "v_pk_add_i16": ("i16", 2, np.add),
    "v_pk_sub_i16": ("i16", 2, np.subtract), "v_pk_mul_lo_u16": ("u16", 2, np.multiply),
    "v_pk_max_u16": ("u16", 2, np.maximum), "v_pk_min_u16": ("u16", 2, np.minimum),
    "v_pk_max_i16": ("i16", 2, np.maximum), "v_pk_min_i16": ("i16", 2, np.minimum),
    "v_pk_lshlrev_b16": ("u16", 2, lambda n, a: shl(a, n)), "v_pk_lshrrev_b16": ("u16", 2, lambda n, a: shr(a, n)),
    "v_pk_ashrrev_i16": ("i16", 2, lambda n, a: shr(a, n)),
    "v_pk_mad_u16": ("u16", 3, lambda a, b, c: a * b + c), "v_pk_mad_i16": ("i16", 3, lambda a, b, c: a * b + c),
}  # fmt: skip
_FLOATS = {
    "v_pk_add_f16": ("f16", 2, np.add), "v_pk_mul_f16": ("f16", 2, np.multiply), "v_pk_fma_f16": ("f16", 3, _fma),
    "v_pk_max_f16": ("f16", 2, floats.maximum), "v_pk_min_f16": ("f16", 2, floats.minimum),
}  # fmt: skip
TABLE = _INTEGERS | _FLOATS


def _half(instruction: Instruction, operand: Operand, kind: str, select: int, negate: int):
    dtype = np.dtype(DTYPES[kind])
    if not operand.plain or (negate and kind != "f16"):
        raise refuse(instruction, "a sign of this packed operand")
    if operand.kind in ("int", "float"):
        if select and operand.value != 0:
            raise refuse(instruction, "the high half of a constant")
        value = constant(operand, kind, instruction)
        value = -value if negate else value
        return lambda b: value
    read, shift = vector(instruction, operand, "u32"), U32(16 * select)

    def half(b: Batch) -> np.ndarray:
        value = (read(b) >> shift).astype(U16).view(dtype)
        return -value if negate else value

    return half


def build(instruction: Instruction):
    kind, count, f = TABLE[instruction.opcode]
    modifiers = Modifiers(instruction)
    target, *sources = instruction.operands
    if len(sources) != count:
        raise refuse(instruction, f"{instruction.opcode} with {len(sources)} sources")
    zeros, ones = (0,) * count, (1,) * count
    selects = modifiers.take("op_sel", zeros), modifiers.take("op_sel_hi", ones)
    signs = modifiers.take("neg_lo", zeros), modifiers.take("neg_hi", zeros)
    modifiers.done()
    low, high = (
        [_half(instruction, o, kind, s, n) for o, s, n in zip(sources, *which, strict=True)]
        for which in zip(selects, signs, strict=True)
    )
    put = write(instruction, target, "u32")

    def execute(b: Batch) -> None:
        parts = [
            np.asarray(f(*(read(b) for read in reads))).view(U16).astype(U32)
            for reads in (low, high)
        ]
        put(b, parts[0] | (parts[1] << U32(16)))

    return execute
