"""Fragments, descriptors and swizzles, element by element as the PTX ISA writes them down."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sglang_aiter_moe.nvptx import matrix_layout as layout
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LANES = range(32)


def numbered(shape: tuple[int, ...], size: int) -> np.ndarray:
    """uint32 registers whose elements of ``size`` bytes all differ: 0.. as bf16 numbers or as bytes."""
    rng = np.random.default_rng(size)
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def element(registers: np.ndarray, lane: int, i: int, kind: str) -> float:
    """Element ``i`` of the vector that a lane's registers are."""
    return layout.decode(registers[0, lane], kind)[i]


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_a_of_16_bit_elements(kind, warps):
    registers = numbered((1, 32 * warps, 4), 2)
    matrix = layout.a_matrix(registers, kind)
    assert matrix.shape == (1, 16 * warps, 16)
    for warp in range(warps):
        for lane in LANES:
            for i in range(8):
                row = lane // 4 + (0 if i < 2 or 4 <= i < 6 else 8)
                column = lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)
                expected = element(registers, 32 * warp + lane, i, kind)
                assert np.array_equal(matrix[0, 16 * warp + row, column], expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "s8", "u8"])
def test_a_and_b_of_8_bit_elements(kind):
    a, b = numbered((1, 32, 4), 1), numbered((1, 32, 2), 1)
    left, right = layout.a_matrix(a, kind), layout.b_matrix(b, kind)
    assert left.shape == (1, 16, 32) and right.shape == (1, 32, 8)
    for lane in LANES:
        for i in range(16):
            row = lane // 4 + (0 if i < 4 or 8 <= i < 12 else 8)
            column = lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)
            assert np.array_equal(left[0, row, column], element(a, lane, i, kind), equal_nan=True)
        for i in range(8):
            row = lane % 4 * 4 + (i & 3) + (16 if i >= 4 else 0)
            expected = element(b, lane, i, kind)
            assert np.array_equal(right[0, row, lane // 4], expected, equal_nan=True)


def test_b_of_16_bit_elements():
    b = numbered((1, 32, 2), 2)
    matrix = layout.b_matrix(b, "bf16")
    for lane in LANES:
        for i in range(4):
            row = lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0)
            expected = element(b, lane, i, "bf16")
            assert np.array_equal(matrix[0, row, lane // 4], expected, equal_nan=True)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("columns", [8, 16, 32, 160])
def test_results_and_back(columns, warps):
    matrix = np.arange(16 * warps * columns).reshape(1, 16 * warps, columns)
    registers = layout.result_registers(matrix)
    for warp in range(warps):
        for lane in LANES:
            for r in range(columns // 2):
                row = 16 * warp + lane // 4 + (8 if r % 4 >= 2 else 0)
                column = r // 4 * 8 + lane % 4 * 2 + r % 2
                assert registers[0, 32 * warp + lane, r] == matrix[0, row, column]
    assert np.array_equal(layout.result_matrix(registers), matrix)


@pytest.mark.parametrize("width", [128, 64, 32])
def test_swizzles(width):
    """Lines of 128 bytes repeat after 8, 4 or 2: the number of the line changes the place of its 16-byte pieces."""
    for row in range(32):
        for piece in range(width // 16):
            line = row * width // 128
            inside = row * width % 128 // 16 + piece
            expected = line * 128 + (inside ^ line % (width // 16)) * 16
            assert layout.swizzled(np.array(row * width + piece * 16), width) == expected


def test_descriptors():
    bits = 0x1234 >> 4 | 0x80 >> 4 << 16 | 0x400 >> 4 << 32 | 3 << 49 | 1 << 62
    d = layout.descriptor(np.array([bits], np.uint64))
    assert (d.start, d.leading, d.stride, d.base_offset, d.swizzle) == (
        0x1230, 0x80, 0x400, 3, 128,
    )  # fmt: skip
    with pytest.raises(ValueError, match="different swizzles"):
        layout.descriptor(np.array([1 << 62, 2 << 62], np.uint64))


def test_operands_in_shared_memory():
    """With and without a swizzle: each row's 32 bytes, found where a writer that follows the layout put them."""
    rows = 24
    for mode, width in ((1, 128), (2, 64), (3, 32)):
        memory = {}
        for row in range(rows):
            for piece in range(width // 16):
                at = 1024 + row * width + piece * 16
                memory[int(layout.swizzled(np.array(at), width))] = row, piece
        for k in range(width // 32):
            bits = (1024 + 32 * k) >> 4 | (8 * width) >> 4 << 32 | mode << 62
            at = layout.operand_addresses(layout.descriptor(np.array([bits], np.uint64)), rows)
            for row in range(rows):
                assert [memory[int(a)] for a in at[0, row]] == [(row, 2 * k), (row, 2 * k + 1)]
    bits = 2048 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32
    at = layout.operand_addresses(layout.descriptor(np.array([bits], np.uint64)), rows)
    for row in range(rows):
        group = 2048 + row // 8 * 256 + row % 8 * 16
        assert list(at[0, row]) == [group, group + 128]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_small_matrices(count, transposed):
    halves = np.arange(count * 64, dtype=np.uint16).reshape(1, count, 8, 8)
    registers = layout.ldmatrix_registers(halves.view(np.uint32), transposed)
    assert registers.shape == (1, 32, count)
    for lane in LANES:
        for m in range(count):
            for i in range(2):
                row, column = lane // 4, lane % 4 * 2 + i
                if transposed:
                    row, column = column, row
                got = registers[0, lane, m] >> np.uint32(16 * i) & np.uint32(0xFFFF)
                assert got == halves[0, m, row, column]
    back = layout.stmatrix_rows(registers, transposed)
    assert np.array_equal(back.view(np.uint16), halves)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
