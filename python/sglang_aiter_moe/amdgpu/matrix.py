"""MFMA: matrix products of one wave, dense and with E8M0 scales.

A lane's place: with M rows (M = N is 16 or 32), lane l holds row l % M of A and column l % M of B, and of the products'
K the part l / M. The result's register r holds row 4 * (l / 16) + r (16 x 16) or 8 * (r / 4) + 4 * (l / 32) + r % 4
(32 x 32), column l % M. EXEC is ignored. The product is exact to float64 and rounded to float32 once; hardware's order
of accumulation and its treatment of subnormal numbers are not modelled. Sources: AMD, "CDNA3 ISA" and "CDNA4 ISA",
chapter "Matrix Arithmetic Instructions" (V_MFMA_SCALE_F32_*_F8F6F4: CBSZ and BLGP name the formats of A and B, 0 E4M3,
1 E5M2, 4 E2M1; OP_SEL and OP_SEL_HI the byte of each scale register).
"""

from __future__ import annotations

import re

import numpy as np

from sglang_aiter_moe.amdgpu import formats
from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.convert_scaled import small_format
from sglang_aiter_moe.amdgpu.decode import Modifiers, constant, refuse, vector, words
from sglang_aiter_moe.amdgpu.state import LANES, Batch

U8, U16, U32, F16, F32, F64 = np.uint8, np.uint16, np.uint32, np.float16, np.float32, np.float64
_F8F6F4 = {0: formats.E4M3, 1: formats.E5M2, 4: formats.E2M1}


def _operand(instruction: Instruction, operand: Operand, rows: int | None = None):
    """Reads all registers of an operand, every lane.

    uint32 [waves, 64, registers], or with ``rows`` [waves, rows, 64 / rows, registers]: lanes that share a row
    together.
    """
    if operand.kind not in "va":
        raise refuse(instruction, "a matrix operand that is not in vector registers")
    reads = [
        vector(instruction, Operand(operand.kind, operand.index + i), "u32", all_lanes=True)
        for i in range(operand.count)
    ]

    def by_lane(b: Batch) -> np.ndarray:
        out = np.empty((b.waves, LANES, len(reads)), U32)
        for i, read in enumerate(reads):
            out[:, :, i] = read(b)
        return out

    def by_row(b: Batch) -> np.ndarray:
        out = np.empty((b.waves, rows, LANES // rows, len(reads)), U32)
        for i, read in enumerate(reads):
            out[:, :, :, i] = read(b).reshape(b.waves, LANES // rows, rows).transpose(0, 2, 1)
        return out

    return by_row if rows else by_lane


def _decoder(name: str):
    """uint32 [..., registers] to [..., elements], exact in the type that comes out (float16 or float32)."""
    if name == "bf16":
        return lambda x: (x.view(U16).astype(U32) << U32(16)).view(F32)
    if name in ("f16", "f32"):
        return lambda x: x.view(F16 if name == "f16" else F32)
    if name == formats.E2M1:
        pairs = formats.e2m1_pairs()
        return lambda x: pairs.take(x.view(U8)).view(F32)
    table = formats.values(name).astype(F32)
    return lambda x: table.take(x.view(U8))


def _runs_of_sixteen(x: np.ndarray, rows: int) -> np.ndarray:
    """8-bit operands of f8f6f4: a lane's 32 bytes are two runs of 16, half of K apart; to blocks of 32 along K.

    uint32 [waves, 64, 8] to [waves, blocks, rows, 8].
    """
    runs = x.reshape(x.shape[0], LANES // rows // 2, 2, rows, 2, 4)
    return runs.transpose(0, 4, 1, 3, 2, 5).reshape(x.shape[0], LANES // rows, rows, 8)


def _accumulate(instruction: Instruction, size: int):
    """(reader of C, writer of D): C as [registers, waves, 64] float32."""
    target, addend = instruction.operands[0], instruction.operands[3]
    count = size * size // LANES
    words(instruction, target, count)
    words(instruction, addend, count)
    if target.kind not in "va":
        raise refuse(instruction, "a destination that is not in vector registers")
    if addend.kind in ("int", "float"):
        value = constant(addend, "f32", instruction)

        def c(b: Batch):
            return value
    else:
        stack = [
            vector(instruction, Operand(addend.kind, addend.index + i), "f32", all_lanes=True)
            for i in range(count)
        ]

        def c(b: Batch):
            return np.stack([read(b) for read in stack])

    def write(b: Batch, product: np.ndarray) -> None:
        waves = product.shape[0]
        if size == 16:
            laid = product.reshape(waves, 4, 4, 16).transpose(2, 0, 1, 3)
        else:
            laid = product.reshape(waves, 4, 2, 4, 32).transpose(1, 3, 0, 2, 4)
        laid = laid.reshape(count, waves, LANES)
        with np.errstate(all="ignore"):
            value = (laid + c(b)).astype(F32).view(U32)
        for i in range(count):
            b.set_all_lanes(target.kind, target.index + i, value[i])

    return write


_DENSE = re.compile(
    r"v_mfma_f32_(16|32)x\1x(\d+)_?(bf16_1k|bf16|f16|xf32|f32|(?:fp8|bf8)_(?:fp8|bf8))$"
)


def _dense(instruction: Instruction):
    """v_mfma_f32_16x16x16_bf16 and its kin with one block."""
    size, k, kind = _DENSE.match(instruction.opcode).groups()
    size, k = int(size), int(k)
    modifiers = Modifiers(instruction)
    modifiers.done()
    names = _operand_formats(instruction, kind)
    sides = []
    for operand, name in zip(instruction.operands[1:3], names, strict=True):
        width = {"bf16": 2, "f16": 2, "f32": 4}.get(name, 1)
        words(instruction, operand, k * size // LANES * width // 4)
        sides.append((_operand(instruction, operand, size), _decoder(name)))
    (a, decode_a), (c, decode_c) = sides
    write = _accumulate(instruction, size)

    def execute(b: Batch) -> None:
        left = decode_a(a(b)).astype(F64).reshape(b.waves, size, k)
        right = decode_c(c(b)).astype(F64).reshape(b.waves, size, k)
        write(b, np.matmul(left, right.transpose(0, 2, 1)))

    return execute


def _operand_formats(instruction: Instruction, kind: str) -> list[str]:
    if kind == "xf32":
        raise refuse(instruction, "xf32, whose truncation of operands is not modelled")
    if "8_" not in kind:
        return ["bf16" if kind.startswith("bf16") else kind] * 2
    return [small_format(instruction, side) for side in kind.split("_")]


def _scale(instruction: Instruction, operand: Operand, byte: int, size: int):
    """E8M0 scales: lane l's byte is that of row l % size and block l / size of 32 elements: [waves, blocks, size]."""
    if operand.kind in ("int", "float"):
        value = formats.scales()[int(constant(operand, "u32", instruction)) >> (8 * byte) & 0xFF]
        return lambda b: np.full((1, 1, 1), value)
    read = vector(instruction, operand, "u32", all_lanes=operand.kind in "va")
    table, shift = formats.scales(), U32(8 * byte)

    def scale(b: Batch) -> np.ndarray:
        code = (np.broadcast_to(read(b), (b.waves, LANES)) >> shift) & U32(0xFF)
        return table.take(code).reshape(b.waves, LANES // size, size)

    return scale


def _f8f6f4(instruction: Instruction):
    """v_mfma_[scale_]f32_16x16x128_f8f6f4 and 32x32x64: A and B in 4 or 8 bits, a scale for each 32 elements.

    The products of a block of 32 elements are summed exactly, scaled, and the blocks' sums added in float64.
    """
    size = 16 if "_16x16x128_" in instruction.opcode else 32
    scaled = "_scale_" in instruction.opcode
    modifiers = Modifiers(instruction)
    codes = modifiers.take("cbsz"), modifiers.take("blgp")
    select, high = modifiers.take("op_sel", (0, 0, 0)), modifiers.take("op_sel_hi", (1, 1, 1))
    modifiers.done()
    if len(instruction.operands) != (6 if scaled else 4):
        raise refuse(instruction, f"{instruction.opcode} with {len(instruction.operands)} operands")
    sides, scales = [], []
    for i in (0, 1):
        if codes[i] not in _F8F6F4:
            raise refuse(instruction, f"the operand format {codes[i]} (6 bits)")
        name = _F8F6F4[codes[i]]
        operand = instruction.operands[1 + i]
        words(instruction, operand, 4 if name == formats.E2M1 else 8)
        sides.append((_operand(instruction, operand), _decoder(name), name == formats.E2M1))
        if scaled:
            byte = select[i] + 2 * high[i]
            scales.append(_scale(instruction, instruction.operands[4 + i], byte, size))
    write = _accumulate(instruction, size)

    # float32 holds a sum of 32 products of E2M1 numbers, of wider formats float64 does.
    exact = F32 if all(in_blocks for _, _, in_blocks in sides) else F64

    def side(b: Batch, read, decode, in_blocks: bool) -> np.ndarray:
        x = read(b)
        x = decode(x if in_blocks else _runs_of_sixteen(x, size))
        return x.astype(exact, copy=False).reshape(b.waves, -1, size, 32)

    def execute(b: Batch) -> None:
        left, right = (side(b, *s) for s in sides)
        product = np.matmul(left, right.transpose(0, 1, 3, 2))
        if not scaled:
            write(b, product.sum(1, dtype=F64))
            return
        of_rows, of_columns = (scale(b) for scale in scales)
        product = product * of_rows[..., None]
        product *= of_columns[:, :, None, :]
        write(b, product.sum(1))

    return execute


_SHAPES_DENSE = (
    "16x16x16_f16", "16x16x16_bf16", "32x32x8_f16", "32x32x8_bf16", "16x16x32_f16", "16x16x32_bf16",
    "32x32x16_f16", "32x32x16_bf16", "16x16x4_f32", "32x32x2_f32", "16x16x16f16", "32x32x8f16",
    "16x16x16bf16_1k", "32x32x8bf16_1k", "16x16x4f32", "32x32x2f32",
)  # fmt: skip
TABLE = {f"v_mfma_f32_{shape}": _dense for shape in _SHAPES_DENSE}
TABLE |= {
    f"v_mfma_f32_{shape}_{a}_{b}": _dense
    for shape in ("16x16x32", "32x32x16")
    for a in ("fp8", "bf8")
    for b in ("fp8", "bf8")
}
for _shape in ("16x16x128", "32x32x64"):
    TABLE |= {f"v_mfma{s}_f32_{_shape}_f8f6f4": _f8f6f4 for s in ("", "_scale")}


def build(instruction: Instruction):
    return TABLE[instruction.opcode](instruction)
