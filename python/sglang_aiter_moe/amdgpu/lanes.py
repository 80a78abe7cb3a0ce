"""What moves data between lanes: DPP controls, v_readlane and its kin, the permlane swaps.

Sources: AMD, "CDNA3 ISA", sections "DPP" and VOP1/VOP3; "CDNA4 ISA" for v_permlane16_swap and v_permlane32_swap; LLVM,
"AMDGPU Modifiers" for how DPP controls are written.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.decode import (
    Modifiers,
    Read,
    refuse,
    scalar,
    scalar_destination,
    vector,
    words,
)
from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.state import LANES, Batch

_LANE = np.arange(LANES)
_ROW, _COLUMN = _LANE // 16, _LANE % 16


def _within(source: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return np.where(valid, source, -1)


def dpp_lanes(modifiers: Modifiers, instruction: Instruction) -> np.ndarray:
    """Which lane each lane reads, int [64]; -1 for one out of bounds. Takes the control from ``modifiers``."""
    take = modifiers.take
    if perm := take("quad_perm"):
        return _LANE // 4 * 4 + np.array(perm)[_LANE % 4]
    if n := take("row_shl"):
        return _within(_LANE + n, _COLUMN + n < 16)
    if n := take("row_shr"):
        return _within(_LANE - n, n <= _COLUMN)
    if n := take("row_ror"):
        return _ROW * 16 + (_COLUMN - n) % 16
    if take("row_mirror"):
        return _ROW * 16 + 15 - _COLUMN
    if take("row_half_mirror"):
        return _LANE // 8 * 8 + 7 - _LANE % 8
    if (n := take("row_newbcast", None)) is not None:
        return _ROW * 16 + n
    if n := take("row_bcast"):
        if n == 15:
            return _within(_ROW * 16 - 1, _ROW > 0)
        if n == 31:
            return _within(np.full(LANES, 31), _ROW >= 2)
    if take("wave_shl"):
        return _within(_LANE + 1, _LANE < 63)
    if take("wave_shr"):
        return _within(_LANE - 1, _LANE > 0)
    if take("wave_rol"):
        return (_LANE + 1) % LANES
    if take("wave_ror"):
        return (_LANE - 1) % LANES
    raise refuse(instruction, "this DPP control")


class Dpp:
    """A DPP instruction's first source, and the lanes that it may write."""

    def __init__(self, modifiers: Modifiers, instruction: Instruction) -> None:
        lanes = dpp_lanes(modifiers, instruction)
        self._inside = lanes >= 0
        self._lanes = np.where(self._inside, lanes, 0)
        # LLVM prints the bit as bound_ctrl:1, and older ones as bound_ctrl:0; unprinted it is clear.
        self._zero = modifiers.take("bound_ctrl", None) is not None
        rows, banks = modifiers.take("row_mask", 15), modifiers.take("bank_mask", 15)
        self._enabled = (rows >> _ROW & 1 == 1) & (banks >> (_COLUMN // 4) & 1 == 1)

    def source(self, read: Read) -> Read:
        """The permuted source; lanes out of bounds, or whose source lane does not act, read 0."""

        def permuted(b: Batch) -> np.ndarray:
            value = np.broadcast_to(read(b), b.mask.shape)[:, self._lanes]
            valid = self._inside if b.full else b.mask[:, self._lanes] & self._inside
            return np.where(valid, value, value.dtype.type(0))

        return permuted

    def writes(self, b: Batch) -> np.ndarray:
        mask = b.mask & self._enabled
        if self._zero:
            return mask
        return mask & self._inside & b.mask[:, self._lanes]


def under(b: Batch, mask: np.ndarray, f, *arguments):
    """``f(b, *arguments)`` with other lanes acting than EXEC says."""
    before = b.mask, b.full
    b.mask, b.full = mask, bool(mask.all())
    try:
        return f(b, *arguments)
    finally:
        b.mask, b.full = before


def _read_first_lane(instruction: Instruction):
    """Lane: the first that acts, lane 0 where none does."""
    i = scalar_destination(instruction, instruction.operands[0], 1)
    source = instruction.operands[1]
    read = vector(instruction, source, all_lanes=True) if source.kind in "va" else None
    words(instruction, source, 1)
    if read is None:
        inner = scalar(instruction, source)
        return lambda b: b.set_s(i, inner(b))
    bank, n = source.kind, source.index

    def first(b: Batch) -> None:
        lane = b.mask.argmax(1)
        b.set_s(i, _one_lane(b, bank, n, lane))

    return first


def _one_lane(b: Batch, bank: str, n: int, lane: np.ndarray) -> np.ndarray:
    values, known = (b.v, b.v_known) if bank == "v" else (b.a, b.a_known)
    wave = np.arange(b.waves)
    if known[n] is not True:
        bad = ~np.broadcast_to(known[n], b.mask.shape)[wave, lane]
        if b.active is not None:
            bad &= b.active
        if bad.any():
            w = int(np.flatnonzero(bad)[0])
            raise Fault(
                f"lane {int(lane[w])} of {bank}{n} is read, and nothing has written it",
                allowed="lanes that the kernel wrote",
                fix="check EXEC where the register was written",
                lane=w * LANES + int(lane[w]),
            )
    return values[n][wave, lane]


def _read_lane(instruction: Instruction):
    i = scalar_destination(instruction, instruction.operands[0], 1)
    source = instruction.operands[1]
    if source.kind not in "va":
        raise refuse(instruction, "a source that is not a vector register")
    words(instruction, source, 1)
    select = scalar(instruction, instruction.operands[2])

    def read(b: Batch) -> None:
        lane = np.broadcast_to(select(b) & np.uint32(63), b.waves)
        b.set_s(i, _one_lane(b, source.kind, source.index, lane))

    return read


def _write_lane(instruction: Instruction):
    destination = instruction.operands[0]
    value = scalar(instruction, instruction.operands[1])
    select = scalar(instruction, instruction.operands[2])
    if destination.kind != "v":
        raise refuse(instruction, "a destination that is not a vector register")

    def write(b: Batch) -> None:
        lane = np.broadcast_to(select(b) & np.uint32(63), b.waves)
        mask = lane[:, None] == _LANE
        if b.active is not None:
            mask &= b.active[:, None]
        under(b, mask, Batch.set_v, destination.index, np.broadcast_to(value(b), b.waves)[:, None])

    return write


def _permlane_swap(instruction: Instruction):
    """Odd blocks of the first register for even blocks of the second; blocks of 16 or 32 lanes."""
    x, y = instruction.operands
    if x.kind != "v" or y.kind != "v":
        raise refuse(instruction, "an operand that is not a vector register")
    size = 16 if "permlane16" in instruction.opcode else 32

    def swap(b: Batch) -> None:
        if not b.full and (b.mask.any(1) & ~b.mask.all(1)).any():
            raise Fault(
                f"{instruction.opcode} with some lanes switched off",
                allowed="all lanes or none: what the others read is not modelled",
                fix="check EXEC",
                wave=int(np.flatnonzero(b.mask.any(1) & ~b.mask.all(1))[0]),
            )
        for register in (x.index, y.index):
            b.check("v", register)
        first, second = (b.v[r].reshape(b.waves, -1, 2, size) for r in (x.index, y.index))
        low = np.stack([first[:, :, 0], second[:, :, 0]], 2).reshape(b.waves, LANES)
        high = np.stack([first[:, :, 1], second[:, :, 1]], 2).reshape(b.waves, LANES)
        b.set_v(x.index, low)
        b.set_v(y.index, high)

    return swap


def _swap(instruction: Instruction):
    x, y = instruction.operands
    a, c = vector(instruction, x), vector(instruction, y)

    def swap(b: Batch) -> None:
        first, second = a(b), c(b)
        b.set_v(x.index, second)
        b.set_v(y.index, first)

    return swap


TABLE = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_swap_b32": _permlane_swap,
    "v_permlane32_swap_b32": _permlane_swap,
    "v_swap_b32": _swap,
}


def build(instruction: Instruction):
    modifiers = Modifiers(instruction)
    modifiers.done()
    return TABLE[instruction.opcode](instruction)
