"""``ldmatrix`` and ``stmatrix``: 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers.

Lane ``8 * m + r`` gives the address of row ``r`` of matrix ``m``. Source: PTX ISA 8.7, "ldmatrix", "stmatrix".
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import matrix_layout as layout
from sglang_aiter_moe.nvptx.decode import Operation, address, operands, refuse
from sglang_aiter_moe.nvptx.matrix import gather, slots, whole_warps
from sglang_aiter_moe.nvptx.state import LANES, Group
from sglang_aiter_moe.nvptx.text import Instruction

ROW = 16
"""Bytes of a row."""


def _form(instruction: Instruction) -> tuple[int, bool]:
    """(matrices, transposed) of ``.sync.aligned.m8n8.xN[.trans].shared[::cta].b16``."""
    rest = [m for m in instruction.modifiers if m != "trans"]
    counts = {"x1": 1, "x2": 2, "x4": 4}
    if (
        rest[:3] != ["sync", "aligned", "m8n8"]
        or rest[3] not in counts
        or rest[4] not in ("shared", "shared::cta")
        or rest[5:] != ["b16"]
    ):
        raise refuse(instruction, f"the form {instruction.name}")
    return counts[rest[3]], "trans" in instruction.modifiers


def _row_addresses(addresses: np.ndarray, count: int) -> np.ndarray:
    """[n, count, 8] of the lanes' [n, 32]."""
    return addresses[:, : 8 * count].reshape(len(addresses), count, 8)


def _lane_of(fault: Fault, count: int) -> Fault:
    """A position in [n, count, 8] as one in [n, 32]."""
    if fault.lane is not None:
        row, inside = divmod(fault.lane, 8 * count)
        fault.lane = row * LANES + inside
    return fault


def _ldmatrix(instruction: Instruction) -> Operation:
    count, transposed = _form(instruction)
    destination, at = operands(instruction, 2)
    registers = slots(instruction, destination, count)
    read = address(instruction, at, "shared")

    def execute(g: Group) -> None:
        whole_warps(g, "ldmatrix")
        try:
            rows, unwritten = g.state.shared.look(
                g.cta[:, None, None], _row_addresses(read(g), count), ROW
            )
        except Fault as fault:
            raise _lane_of(fault, count) from None
        if g.state.races is not None:
            _race(g, read(g), count, g.state.races.load)
        words = np.ascontiguousarray(rows).view(np.uint32)
        found = layout.ldmatrix_registers(words, transposed)
        unknown = None if unwritten is None else _unknown(unwritten, transposed)
        for i, slot in enumerate(registers):
            if unknown is not None:
                g.state.unknown = unknown[:, :, i]
            g.put(slot, found[:, :, i])

    return execute


def _race(g: Group, addresses: np.ndarray, count: int, access) -> None:
    """Tells of the accesses of the lanes whose addresses count."""
    part = (
        g if count == 4 else g.narrow(np.broadcast_to(np.arange(LANES) < 8 * count, (g.n, LANES)))
    )
    access(part, addresses, ROW)


def _unknown(unwritten: np.ndarray, transposed: bool) -> np.ndarray:
    """Of bytes that nothing has written, bool [n, count, 8, 16]: bytes of the registers, uint8 [n, 32, count]."""
    words = np.ascontiguousarray(np.where(unwritten, np.uint8(255), np.uint8(0))).view(np.uint32)
    moved = np.ascontiguousarray(layout.ldmatrix_registers(words, transposed))
    parts = moved.view(np.uint8).reshape(*moved.shape, 4) != 0
    return (parts << np.arange(4)).sum(-1).astype(np.uint8)


def _stmatrix(instruction: Instruction) -> Operation:
    count, transposed = _form(instruction)
    at, values = operands(instruction, 2)
    registers = slots(instruction, values, count)
    read = address(instruction, at, "shared")

    def execute(g: Group) -> None:
        whole_warps(g, "stmatrix")
        rows = layout.stmatrix_rows(gather(g, registers), transposed)
        try:
            g.state.shared.store(
                g.cta[:, None, None], _row_addresses(read(g), count), rows.view(np.uint8)
            )
        except Fault as fault:
            raise _lane_of(fault, count) from None
        if g.state.races is not None:
            _race(g, read(g), count, g.state.races.store)

    return execute


TABLE = {"ldmatrix": _ldmatrix, "stmatrix": _stmatrix}
