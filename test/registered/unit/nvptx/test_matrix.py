"""Products of matrices that are laid out lane by lane here, and what a missing wait does."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import formats
from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import matrix, matrix_moves, matrix_sums
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.nvptx.shared import BASE
from sglang_aiter_moe.testing.ptx_pieces import Piece
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CTAS = 2


def operand(kind: str, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(bits, values): random finite elements of a type."""
    rng = np.random.default_rng(seed)
    if kind == "bf16":
        bits = (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype("u2")
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "f16":
        value = rng.standard_normal(shape).astype(np.float16)
        return value.view(np.uint16), value.astype(np.float64)
    if kind in ("s8", "u8"):
        bits = rng.integers(0, 256, shape, dtype=np.uint8)
        return bits, bits.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    bits = rng.integers(0, 256, shape, dtype=np.uint8)
    bits[~np.isfinite(formats.values(kind))[bits]] = 0
    return bits, formats.values(kind)[bits]


def registers_a(bits: np.ndarray) -> np.ndarray:
    """[rows, 16, K] to [4, rows, 32] registers."""
    per = 4 // bits.itemsize
    out = np.zeros((4, len(bits), 32, per), bits.dtype)
    for lane in range(32):
        for i in range(4 * per):
            r, part = divmod(i, per)
            row = lane // 4 + 8 * (r % 2)
            column = lane % 4 * per + part + 4 * per * (r // 2)
            out[r, :, lane, part] = bits[:, row, column]
    return out.view(np.uint32)[..., 0]


def result(piece: Piece, names: list[str]) -> np.ndarray:
    """float64 or bits [rows, 16, columns] of accumulator registers."""
    got = np.stack([piece.get(n) for n in names])
    out = np.zeros((got.shape[1], 16, 2 * len(names)), np.uint32)
    for lane in range(32):
        for r in range(len(names)):
            row = lane // 4 + (8 if r % 4 >= 2 else 0)
            out[:, row, r // 4 * 8 + lane % 4 * 2 + r % 2] = got[r, :, lane]
    return out


def close(got: np.ndarray, expected: np.ndarray) -> None:
    """Bits of float32 against the exact sum rounded once."""
    assert np.array_equal(got.view(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("left", "right", "k"),
    [("bf16", "bf16", 16), ("f16", "f16", 16), ("e4m3", "e5m2", 32), ("e4m3", "e4m3", 32), ("s8", "u8", 32)],
)  # fmt: skip
def test_mma(left, right, k):
    integer = left == "s8"
    kind = "s32" if integer else "f32"
    piece = Piece(
        f".reg .b32 %r<20>;\nmma.sync.aligned.m16n8k{k}.row.col.{kind}.{left}.{right}.{kind} "
        "{%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r10, %r11, %r12, %r13};",
        matrix.TABLE,
    )
    rows = piece.state.rows
    a_bits, a = operand(left, (rows, 16, k), 1)
    b_bits, b = operand(right, (rows, k, 8), 2)
    for i, value in enumerate(registers_a(a_bits)):
        piece.set(f"%r{4 + i}", value)
    per = 4 // b_bits.itemsize
    b_registers = np.zeros((2, rows, 32, per), b_bits.dtype)
    for lane in range(32):
        for i in range(2 * per):
            r, part = divmod(i, per)
            b_registers[r, :, lane, part] = b_bits[
                :, lane % 4 * per + part + 4 * per * r, lane // 4
            ]
    for i, value in enumerate(b_registers.view(np.uint32)[..., 0]):
        piece.set(f"%r{8 + i}", value)
    start = np.arange(4) * 3
    for i in range(4):
        value = np.uint32(start[i]) if integer else np.float32(start[i]).view(np.uint32)
        piece.set(f"%r{10 + i}", value)
    piece.run()
    c = np.zeros((16, 8))
    for i in range(4):
        c[8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] = start[i]
    expected = a @ b + c
    got = result(piece, [f"%r{i}" for i in range(4)])
    if integer:
        assert np.array_equal(got.view(np.int32), expected.astype(np.int64))
    else:
        close(got, expected)


def stored(bits: np.ndarray, width: int) -> np.ndarray:
    """[n, K] elements K-major to bytes, rows of ``width`` bytes with its swizzle, by 128-byte lines."""
    raw = np.zeros((len(bits), width), np.uint8)
    data = np.ascontiguousarray(bits).view(np.uint8).reshape(len(bits), -1)
    raw[:, : data.shape[1]] = data
    out = np.zeros(raw.size, np.uint8)
    for row in range(len(bits)):
        for piece in range(width // 16):
            line, inside = (row * width) // 128, (row * width) % 128 // 16 + piece
            at = line * 128 + (inside ^ line % (width // 16)) * 16
            out[at : at + 16] = raw[row, 16 * piece : 16 * piece + 16]
    return out


def wgmma_piece(
    kind: str, columns: int, k: int, scale: str, late: bool, products: int = 1
) -> Piece:
    d = ", ".join(f"%d{i}" for i in range(columns // 2))
    tail = ", 0" if k == 16 else ""
    line = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{kind}.{kind} {{{d}}}, "
        f"{{%r0, %r1, %r2, %r3}}, %rd0, {scale}, 1, 1{tail};"
    )
    return Piece(
        f".reg .b32 %r<4>;\n.reg .b32 %d<{columns // 2}>;\n.reg .b64 %rd<1>;\n.reg .pred %p<1>;\n"
        "wgmma.fence.sync.aligned;\n"
        + f"{line}\nwgmma.commit_group.sync.aligned;\n" * products
        + "wgmma.wait_group.sync.aligned 1;\nwgmma.wait_group.sync.aligned 0;",
        matrix.TABLE,
        ctas=CTAS,
        warps=8,
        late=late,
    )


MODES = {128: 1, 64: 2, 32: 3}


def place_b(piece: Piece, bits: np.ndarray, width: int, proxy: str = "async") -> None:
    """B of every CTA, ``[CTAs, columns, K]``, at the window's start, and its descriptor."""
    for cta in range(CTAS):
        data = stored(bits[cta], width).reshape(-1, 16)
        piece.state.shared.store(cta, BASE + 16 * np.arange(len(data)), data, proxy=proxy)
    piece.set("%rd0", np.uint64(BASE >> 4 | 8 * width >> 4 << 32 | MODES[width] << 62))


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("kind", "columns", "k", "width"),
    [("bf16", 16, 16, 128), ("e4m3", 8, 32, 128), ("e5m2", 32, 32, 64), ("f16", 24, 16, 32)],
)
def test_wgmma_with_a_in_registers(kind, columns, k, width, late):
    piece = wgmma_piece(kind, columns, k, "1", late)
    rows = piece.state.rows
    a_bits, a = operand(kind, (rows, 16, k), 3)
    b_bits, b = operand(kind, (CTAS, columns, k), 4)
    for i, value in enumerate(registers_a(a_bits)):
        piece.set(f"%r{i}", value)
    names = [f"%d{i}" for i in range(columns // 2)]
    for name in names:
        piece.set(name, np.float32(2.5).view(np.uint32))
    place_b(piece, b_bits, width)
    piece.run(0, 1, 2)
    if late:
        with pytest.raises(Fault, match="%d0 is read while a result for it is in flight"):
            piece.get("%d0")
        with pytest.raises(Fault, match="is written while a result for it is in flight"):
            piece.set("%d1", np.uint32(0))
    piece.run(3)
    if late:  # one group may still be pending
        with pytest.raises(Fault, match="in flight"):
            piece.get("%d0")
    piece.run(4)
    cta = np.arange(rows) % CTAS  # row = warp * CTAs + CTA
    expected = np.einsum("rmk,rnk->rmn", a, b[cta]) + 2.5
    close(result(piece, names), expected)


def test_products_on_one_accumulator_add_up_and_only_the_last_wait_frees_it():
    piece = wgmma_piece("bf16", 8, 16, "1", True, products=2)
    a_bits, a = operand("bf16", (piece.state.rows, 16, 16), 5)
    b_bits, b = operand("bf16", (CTAS, 8, 16), 6)
    for i, value in enumerate(registers_a(a_bits)):
        piece.set(f"%r{i}", value)
    for i in range(4):
        piece.set(f"%d{i}", np.uint32(0))
    place_b(piece, b_bits, 32)
    piece.run(0, 1, 2, 3, 4, 5)
    with pytest.raises(Fault, match="in flight"):
        piece.get("%d0")
    piece.run(6)
    once = np.einsum("rmk,rnk->rmn", a, b[np.arange(piece.state.rows) % CTAS])
    expected = (once.astype(np.float32) + once).astype(np.float32)
    close(result(piece, [f"%d{i}" for i in range(4)]), expected)


@pytest.mark.parametrize("scale", ["0", "%p0"])
def test_scale_d_drops_the_accumulator(scale):
    """Per warp where it is a predicate; an accumulator that nothing wrote may be dropped and not added."""
    piece = wgmma_piece("bf16", 8, 16, scale, True)
    a_bits, a = operand("bf16", (piece.state.rows, 16, 16), 7)
    b_bits, b = operand("bf16", (CTAS, 8, 16), 8)
    for i, value in enumerate(registers_a(a_bits)):
        piece.set(f"%r{i}", value)
    place_b(piece, b_bits, 32)
    adds = np.zeros(piece.state.rows, bool)
    if scale == "%p0":
        adds[::3] = True
        piece.set("%p0", adds[:, None])
        piece.run()
        with pytest.raises(
            Fault, match=r"%d0 is read, and .* computed from what nothing has written"
        ):
            piece.get("%d0")
        for i in range(4):
            piece.set(f"%d{i}", np.float32(100).view(np.uint32))
    piece.run()
    expected = np.einsum("rmk,rnk->rmn", a, b[np.arange(piece.state.rows) % CTAS])
    close(result(piece, [f"%d{i}" for i in range(4)]), expected + 100 * adds[:, None, None])


def test_a_in_shared_memory():
    """The four warps of a group have 16 rows each."""
    piece = Piece(
        ".reg .b32 %d<4>;\n.reg .b64 %rd<2>;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, %rd1, %rd0, 0, 1, -1, 0, 0;\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;",
        matrix.TABLE, ctas=CTAS, warps=8, shared_bytes=16384,
    )  # fmt: skip
    a_bits, a = operand("bf16", (CTAS, 64, 16), 9)
    b_bits, b = operand("bf16", (CTAS, 8, 16), 10)
    place_b(piece, b_bits, 32)
    at = BASE + 4096
    for cta in range(CTAS):
        data = stored(a_bits[cta], 128).reshape(-1, 16)
        piece.state.shared.store(cta, at + 16 * np.arange(len(data)), data, proxy="async")
    piece.set("%rd1", np.uint64(at >> 4 | 1024 >> 4 << 32 | 1 << 62))
    piece.run()
    whole = -np.einsum("cmk,cnk->cmn", a, b)
    got = result(piece, [f"%d{i}" for i in range(4)])
    for row in range(piece.state.rows):
        warp, cta = divmod(row, CTAS)
        close(got[row], whole[cta, warp % 4 * 16 : warp % 4 * 16 + 16])


def test_what_is_read_late_is_what_is_there_then():
    """B that is overwritten before the wait changes the result in late mode."""
    piece = wgmma_piece("bf16", 8, 16, "0", True)
    a_bits, a = operand("bf16", (piece.state.rows, 16, 16), 11)
    b_bits, _ = operand("bf16", (CTAS, 8, 16), 12)
    later_bits, later = operand("bf16", (CTAS, 8, 16), 13)
    for i, value in enumerate(registers_a(a_bits)):
        piece.set(f"%r{i}", value)
    place_b(piece, b_bits, 32)
    piece.run(0, 1, 2)
    place_b(piece, later_bits, 32)
    piece.run(3, 4)
    expected = np.einsum("rmk,rnk->rmn", a, later[np.arange(piece.state.rows) % CTAS])
    close(result(piece, [f"%d{i}" for i in range(4)]), expected)


def test_b_must_be_fenced():
    piece = wgmma_piece("bf16", 8, 16, "0", True)
    for i in range(4):
        piece.set(f"%r{i}", np.uint32(0))
    bits, _ = operand("bf16", (CTAS, 8, 16), 14)
    place_b(piece, bits, 32, proxy="generic")
    with pytest.raises(Fault, match=r"no fence\.proxy\.async"):
        piece.run()
    piece = wgmma_piece("bf16", 8, 16, "0", True)
    for i in range(4):
        piece.set(f"%r{i}", np.uint32(0))
    place_b(piece, bits, 32, proxy="generic")
    piece.state.shared.fence(np.arange(CTAS))
    piece.run()


@pytest.mark.parametrize(
    "line",
    [
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D}, {A}, %rd0, 1, 1, 1, 2;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r0, %r1}, {A}, %rd0, 1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r0, %r1, %r2}, {A}, %rd0, 1, 1, 1;",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {D}, {%r4, %r5}, {%r6}, {D};",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0, %r1}, {%r4, %r5, %r6, %r7}, {%r2, %r3}, {%r0, %r1};",
    ],
)  # fmt: skip
def test_other_forms_are_refused(line):
    line = line.replace("{A}", "{%r4, %r5, %r6, %r7}").replace("{D}", "{%r0, %r1, %r2, %r3}")
    with pytest.raises(PtxError, match="is not modelled"):
        Piece(f".reg .b32 %r<8>;\n.reg .b64 %rd<1>;\n{line}", matrix.TABLE)


def test_sums_that_keep_few_bits():
    """Addends below the last bit kept are cut off towards zero, each by itself, as is the sum."""
    left = np.full((1, 16, 32), 2.0**-14, np.float32)
    left[:, :, 0] = 1.0
    right = np.ones((1, 32, 8), np.float32)
    right[:, 1:, 4:] = -1.0

    def total(kept: int | None, accumulator: float | None = None) -> np.ndarray:
        bits = None
        if accumulator is not None:
            bits = np.full((1, 16, 8), accumulator, np.float32).view(np.uint32)
        return matrix_sums.add_product(left, right, bits, False, kept).view(np.float32)[0, 0]

    small = 31 * 2.0**-14
    assert list(total(None)) == [1 + small] * 4 + [1 - small] * 4
    assert list(total(13)) == [1.0] * 8
    assert list(total(14)) == [1 + small] * 4 + [1 - small] * 4
    assert list(total(13, 3.0)) == [4.0] * 8
    assert list(total(13, 2.0**-14)) == [1.0] * 8


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_from_and_to_shared_memory(count, transposed):
    """Rows at places of their own, loaded, and stored elsewhere: what lanes hold, and the same bytes again."""
    names = ", ".join(f"%r{i}" for i in range(count))
    piece = Piece(
        ".reg .b32 %r<8>;\n"
        f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{names}}}, [%r6];\n"
        f"stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%r6+4096], {{{names}}};",
        matrix_moves.TABLE, ctas=CTAS, warps=1,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    where = BASE + 16 * rng.permutation(64)[:32]
    rows = rng.integers(0, 1 << 16, (CTAS, 8 * count, 8), dtype=np.uint16)
    used = where[: 8 * count]
    for cta in range(CTAS):
        piece.state.shared.store(cta, used, rows[cta].view(np.uint8))
    piece.set("%r6", where[None, :])
    piece.run()
    for m in range(count):
        got = piece.get(f"%r{m}")
        for cta in range(CTAS):
            matrix_of = rows[cta, 8 * m : 8 * m + 8]
            matrix_of = matrix_of.T if transposed else matrix_of
            for lane in range(32):
                pair = matrix_of[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
                assert got[cta, lane] == int(pair[0]) | int(pair[1]) << 16
    for cta in range(CTAS):
        again = piece.state.shared.load(cta, used + 4096, 16)
        assert np.array_equal(again, rows[cta].view(np.uint8))


def test_ldmatrix_leaves_unknown_what_nobody_wrote():
    """Row 3 of matrix 1 of warp 1, whose address lane 11 gives, goes to lanes 12 to 15 of the second register."""
    piece = Piece(
        ".reg .b32 %r<8>;\nldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0, %r1}, [%r6];",
        matrix_moves.TABLE, ctas=1, warps=2,
    )  # fmt: skip
    where = BASE + 16 * np.arange(32)
    piece.state.shared.store(0, where, np.zeros((32, 16), np.uint8))
    lanes = np.tile(where, (2, 1))
    lanes[1, 11] += 1024
    piece.set("%r6", lanes)
    piece.run()
    piece.get("%r0")
    with pytest.raises(Fault) as error:
        piece.get("%r1")
    assert error.value.lane == 32 + 12
    known = piece.everyone.unknown_bytes(piece.slot("%r1")) == 0
    assert np.flatnonzero(~known).tolist() == list(range(32 + 12, 32 + 16))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
