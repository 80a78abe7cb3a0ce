"""Where the elements of matrix operands are: in the registers of a warp or a warp group, and in shared memory.

Sources: NVIDIA, "PTX ISA": "Matrix fragments for mma.m16n8k16" and "m16n8k32", "Register fragments and shared memory
matrix layouts" of wgmma, "Matrix descriptor format", "ldmatrix", and "Swizzling modes" of tensor copies.

With lane ``l``, group ``g = l / 4``, place ``t = l % 4``, elements of ``s`` bytes, ``e = 4 / s`` of them a register:
register ``r`` of A holds row ``g + 8 * (r % 2)``, columns ``e * t + 4 * e * (r / 2)`` and on; of B, column ``g``, rows
``e * t + 4 * e * r`` and on; of the result, row ``g + 8 * (r / 2 % 2)``, column ``8 * (r / 4) + 2 * t + r % 2``. In a
warp group warp ``w`` has the rows from ``16 * w`` on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from sglang_aiter_moe.amdgpu import formats

LANES = 32
U16, U32, I64, F32 = np.uint16, np.uint32, np.int64, np.float32
BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
"""Element types of operands, and their sizes."""


def decode(words: np.ndarray, kind: str) -> np.ndarray:
    """uint32 ``[..., n]`` to the numbers in them, float32 ``[..., n * 4 / size]``, exactly."""
    words = np.ascontiguousarray(words, U32)
    if kind == "bf16":
        return (words.view(U16).astype(U32) << U32(16)).view(F32)
    if kind == "f16":
        return words.view(np.float16).astype(F32)
    if kind in ("s8", "u8"):
        return words.view(np.int8 if kind == "s8" else np.uint8).astype(F32)
    return _table(kind).take(words.view(np.uint8))


@functools.cache
def _table(kind: str) -> np.ndarray:
    return formats.values({"e4m3": formats.E4M3, "e5m2": formats.E5M2}[kind]).astype(F32)


@functools.cache
def _a_order(size: int, warps: int) -> np.ndarray:
    """For each element of A ``[16 * warps, 32 / size]``, where it is in ``[lane, register, part of a register]``."""
    e = 4 // size
    row, column = np.indices((16 * warps, 8 * e))
    warp, inner = row // 16, row % 16
    lane = warp * LANES + inner % 8 * 4 + column // e % 4
    register = inner // 8 + 2 * (column // (4 * e))
    return (lane * 4 + register) * e + column % e


def a_matrix(registers: np.ndarray, kind: str) -> np.ndarray:
    """A from registers: uint32 ``[n, 32 * warps, 4]`` to float32 ``[n, 16 * warps, 32 / size]``."""
    n, lanes, _ = registers.shape
    values = decode(registers, kind).reshape(n, -1)
    return values.take(_a_order(BYTES[kind], lanes // LANES), axis=1)


@functools.cache
def _b_order(size: int) -> np.ndarray:
    e = 4 // size
    row, column = np.indices((8 * e, 8))
    return (((column * 4 + row // e % 4) * 2) + row // (4 * e)) * e + row % e


def b_matrix(registers: np.ndarray, kind: str) -> np.ndarray:
    """B of ``mma.sync``: uint32 ``[n, 32, 2]`` to float32 ``[n, 32 / size, 8]``."""
    return decode(registers, kind).reshape(len(registers), -1).take(_b_order(BYTES[kind]), axis=1)


@functools.cache
def _result_order(columns: int, warps: int) -> np.ndarray:
    """For each ``[lane, register]`` of a result, where it is in ``[16 * warps, columns]``."""
    thread, r = np.indices((LANES * warps, columns // 2))
    lane = thread % LANES
    row = thread // LANES * 16 + lane // 4 + 8 * (r // 2 % 2)
    return row * columns + 8 * (r // 4) + 2 * (lane % 4) + r % 2


@functools.cache
def _result_places(columns: int, warps: int) -> np.ndarray:
    return np.argsort(_result_order(columns, warps).reshape(-1)).reshape(16 * warps, columns)


def result_matrix(registers: np.ndarray) -> np.ndarray:
    """``[n, 32 * warps, columns / 2]`` to ``[n, 16 * warps, columns]``."""
    n, lanes, count = registers.shape
    return registers.reshape(n, -1).take(_result_places(2 * count, lanes // LANES), axis=1)


def result_registers(matrix: np.ndarray) -> np.ndarray:
    """``[n, 16 * warps, columns]`` to ``[n, 32 * warps, columns / 2]``."""
    n, rows, columns = matrix.shape
    return matrix.reshape(n, -1).take(_result_order(columns, rows // 16), axis=1)


SWIZZLES = (0, 128, 64, 32)
"""Bytes of a swizzle by the two upper bits of a matrix descriptor."""


def swizzled(address: np.ndarray, width: int, base_offset: np.ndarray | int = 0) -> np.ndarray:
    """Where a swizzle of ``width`` bytes puts the 16 bytes of ``address``: the bits from 4 on are changed by those from
    7 on, two, three or none of them.

    ``base_offset``: how many rows of 128 bytes the pattern starts late.
    """
    if not width:
        return address
    mask = width // 16 - 1
    return address ^ (((address >> 7) - base_offset & mask) << 4)


@dataclass(frozen=True)
class Descriptor:
    """A shared memory matrix descriptor, for as many warp groups as ``bits`` has entries (int64 arrays)."""

    start: np.ndarray
    leading: np.ndarray
    stride: np.ndarray
    base_offset: np.ndarray
    swizzle: int


def descriptor(bits: np.ndarray) -> Descriptor:
    """Unpacks uint64 ``[n]``; offsets come out in bytes.

    Raises:
        ValueError: descriptors of different swizzles in one call.
    """
    bits = np.asarray(bits, np.uint64)

    def field(low: int, width: int) -> np.ndarray:
        return (bits >> np.uint64(low) & np.uint64((1 << width) - 1)).astype(I64)

    modes = np.unique(field(62, 2))
    if modes.size != 1:
        raise ValueError("matrix descriptors of different swizzles")
    return Descriptor(
        field(0, 14) << 4,
        field(16, 14) << 4,
        field(32, 14) << 4,
        field(49, 3),
        SWIZZLES[int(modes[0])],
    )


def operand_addresses(d: Descriptor, rows: int) -> np.ndarray:
    """Addresses of the 16-byte pieces of a K-major operand with ``rows`` rows (columns, for B) of 32 bytes.

    int64 ``[n, rows, 2]``. With a swizzle, rows lie its width apart in groups of eight, groups ``stride`` apart;
    without, a piece of eight rows is 128 bytes, the next eight rows ``stride``, the next 16 bytes of K ``leading``
    away.
    """
    row, piece = np.arange(rows)[:, None], np.arange(2)[None, :]
    start, stride = d.start[:, None, None], d.stride[:, None, None]
    if d.swizzle:
        at = start + row // 8 * stride + row % 8 * d.swizzle + piece * 16
        return swizzled(at, d.swizzle, d.base_offset[:, None, None])
    return start + row // 8 * stride + row % 8 * 16 + piece * d.leading[:, None, None]


def transposed_addresses(d: Descriptor, rows: int) -> np.ndarray:
    """As :func:`operand_addresses` for an operand of 16-bit elements that is stored the other way round (MN-major).

    int64 ``[n, 16, rows / 8]``: pieces of eight rows for each of the 16 columns. A line of ``swizzle`` bytes holds
    rows of one column; the next rows are ``leading`` away, the next eight columns ``stride``.
    """
    column, byte = np.arange(16)[:, None], np.arange(rows // 8)[None, :] * 16
    start = d.start[:, None, None]
    at = start + byte // d.swizzle * d.leading[:, None, None]
    at = at + column // 8 * d.stride[:, None, None] + column % 8 * d.swizzle + byte % d.swizzle
    return swizzled(at, d.swizzle, d.base_offset[:, None, None])


def ldmatrix_registers(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """What lanes receive: rows of 8 x 8 matrices, uint32 ``[n, count, 8, 4]``, to registers ``[n, 32, count]``.

    Lane ``l`` gets row ``l / 4``, elements ``2 * (l % 4)`` and the next; transposed: column ``l / 4``, rows
    ``2 * (l % 4)`` and the next.
    """
    n, count = rows.shape[:2]
    if transposed:
        halves = np.ascontiguousarray(rows).view(U16)
        rows = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(U32)
    return rows.reshape(n, count, LANES).transpose(0, 2, 1)


def stmatrix_rows(registers: np.ndarray, transposed: bool) -> np.ndarray:
    """The inverse of :func:`ldmatrix_registers`: ``[n, 32, count]`` to ``[n, count, 8, 4]``."""
    n, _, count = registers.shape
    rows = np.ascontiguousarray(registers.transpose(0, 2, 1)).reshape(n, count, 8, 4)
    if not transposed:
        return rows
    halves = rows.view(U16)
    return np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(U32)
