"""Conversions to and from FP8, BF8 and FP4, those of gfx950 with an E8M0 scale included.

The scale operand is a float32 whose exponent field is the E8M0 scale: decoding multiplies by 2 ** (field - 127),
encoding divides. Rounding is to nearest even. Beyond the largest number FP8 becomes NaN and BF8 infinity
(MODE.FP16_OVFL is 0), FP4 its largest number. Where a part of a register is written the rest is kept. Sources: AMD,
"CDNA3 ISA" and "CDNA4 ISA", sections VOP1 and VOP3; where op_sel puts a part: LLVM's printed form of its
llvm.amdgcn.cvt intrinsics.
"""

from __future__ import annotations

import re

import numpy as np

from sglang_aiter_moe.amdgpu import formats
from sglang_aiter_moe.amdgpu.assembly import Instruction, Operand
from sglang_aiter_moe.amdgpu.atomics import bf16_to_f32, f32_to_bf16
from sglang_aiter_moe.amdgpu.decode import Modifiers, kept, refuse, vector, words, write
from sglang_aiter_moe.amdgpu.state import Batch

U16, U32, F16, F32, F64 = np.uint16, np.uint32, np.float16, np.float32, np.float64
_TARGETS = {
    "gfx942": {"fp8": formats.E4M3_FNUZ, "bf8": formats.E5M2_FNUZ},
    "gfx950": {"fp8": formats.E4M3, "bf8": formats.E5M2, "fp4": formats.E2M1},
}


def small_format(instruction: Instruction, name: str) -> str:
    """What "fp8", "bf8" or "fp4" is on the instruction's target."""
    known = _TARGETS.get(instruction.target, {})
    if name not in known:
        raise refuse(instruction, f"{name} on {instruction.target or 'no target'}")
    return known[name]


def _codes(field: np.ndarray, small: str, count: int) -> list[np.ndarray]:
    """The values of a field's codes, the lowest bits first: float64."""
    bits = 4 if small == formats.E2M1 else 8
    table = formats.values(small)
    return [table.take((field >> U32(bits * i)) & U32((1 << bits) - 1)) for i in range(count)]


def _encoded(values: list[np.ndarray], small: str) -> np.ndarray:
    bits = 4 if small == formats.E2M1 else 8
    out = U32(0)
    for i, value in enumerate(values):
        out = out | (formats.encode(value, small, saturate=False).astype(U32) << U32(bits * i))
    return out


def _factor(read):
    """E8M0 of the exponent field of the scale operand."""
    table = formats.scales()
    return lambda b: table.take((read(b) >> U32(23)) & U32(0xFF))


def _narrowed(value: np.ndarray, wide: str) -> np.ndarray:
    if wide == "bf16":
        return f32_to_bf16(value.astype(F32))
    return value.astype(F16).view(U16)


def _wide_sources(instruction: Instruction, operands: list[Operand], wide: str):
    """The two numbers that are encoded: two float32 operands, or one operand of two halves."""
    if wide == "f32":
        reads = [vector(instruction, o, "f32") for o in operands]
        return lambda b: [read(b).astype(F64) for read in reads]
    if len(operands) != 1:
        raise refuse(instruction, f"{len(operands)} sources of two halves")
    read = vector(instruction, operands[0], "u32")

    def halves(b: Batch) -> list[np.ndarray]:
        parts = [(read(b) >> U32(16 * i)).astype(U16) for i in (0, 1)]
        return [(bf16_to_f32(p) if wide == "bf16" else p.view(F16)).astype(F64) for p in parts]

    return halves


def _part(instruction: Instruction, target: Operand, shift: int, bits: int):
    """Writes some bits of a register and keeps the others."""
    words(instruction, target, 1)
    if target.kind != "v":
        raise refuse(instruction, "a destination that is not a vector register")
    old, keep = kept(instruction, target), U32(~(((1 << bits) - 1) << shift) & 0xFFFFFFFF)
    return lambda b, value: b.set_v(target.index, (old(b) & keep) | (value << U32(shift)))


def _decode(instruction: Instruction, pack: str, wide: str, small: str, scaled: bool):
    """[pk_]<wide>_<small>: op_sel or SDWA chooses which byte or half of the source."""
    modifiers = Modifiers(instruction)
    target, source, *rest = instruction.operands
    name = small_format(instruction, small)
    count = 2 if pack else 1
    step = 4 * count if name == formats.E2M1 else 8 * count
    select = modifiers.take("op_sel", (0, 0, 0))
    shift = select[0] * step if step == 16 else (select[0] + 2 * select[1]) * step
    if instruction.encoding == "sdwa":
        named = modifiers.take("src0_sel", "DWORD")
        places = {
            "DWORD": 0,
            "BYTE_0": 0,
            "WORD_0": 0,
            "BYTE_1": 8,
            "BYTE_2": 16,
            "WORD_1": 16,
            "BYTE_3": 24,
        }
        shift = places[named]
        modifiers.take("dst_sel"), modifiers.take("dst_unused")
    modifiers.done()
    if len(rest) != scaled or (not scaled and shift and instruction.encoding != "sdwa"):
        raise refuse(instruction, f"this form of {instruction.opcode}")
    read = vector(instruction, source, "u32")
    factor = _factor(vector(instruction, rest[0], "u32")) if scaled else None
    if wide == "f32":
        words(instruction, target, count)
        puts = [write(instruction, Operand("v", target.index + i), "f32") for i in range(count)]
    else:
        put = write(instruction, target, "u32")

    def convert(b: Batch) -> None:
        values = _codes(read(b) >> U32(shift), name, count)
        if factor is not None:
            scale = factor(b)
            values = [v * scale for v in values]
        if wide == "f32":
            for put_one, value in zip(puts, values, strict=True):
                put_one(b, value.astype(F32))
        else:
            low, high = (_narrowed(v, wide).astype(U32) for v in values)
            put(b, low | (high << U32(16)))

    return convert


def _encode(instruction: Instruction, wide: str, small: str, scaled: bool):
    """pk_<small>_<wide>: two numbers to a byte (FP4) or half of the destination, which op_sel's last entries choose."""
    modifiers = Modifiers(instruction)
    target, *sources = instruction.operands
    name = small_format(instruction, small)
    scale = sources.pop() if scaled else None
    if len(sources) != (2 if wide == "f32" else 1):
        raise refuse(instruction, f"this form of {instruction.opcode}")
    select = tuple(modifiers.take("op_sel", (0, 0, 0, 0)))
    modifiers.done()
    if name == formats.E2M1:
        chosen = select[2] + 2 * select[3]
        used, bits, shift = {2, 3}, 8, 8 * chosen
    else:
        last = 3 if wide == "f32" and scaled else 2
        used, bits, shift = {last}, 16, 16 * (select[last] if len(select) > last else 0)
    if any(bit for i, bit in enumerate(select) if i not in used):
        raise refuse(instruction, f"op_sel:{list(select)} of {instruction.opcode}")
    values = _wide_sources(instruction, sources, wide)
    factor = _factor(vector(instruction, scale, "u32")) if scaled else None
    put = _part(instruction, target, shift, bits)

    def convert(b: Batch) -> None:
        numbers = values(b)
        if factor is not None:
            by = factor(b)
            numbers = [n / by for n in numbers]
        put(b, _encoded(numbers, name))

    return convert


_DECODE = re.compile(r"v_cvt_(scalef32_)?(pk_)?(f32|bf16|f16)_(fp4|fp8|bf8)$")
_ENCODE = re.compile(r"v_cvt_(scalef32_)?pk_(fp4|fp8|bf8)_(f32|bf16|f16)$")
TABLE = dict.fromkeys(
    [
        *(f"v_cvt_{pack}f32_{small}" for pack in ("", "pk_") for small in ("fp8", "bf8")),
        *(f"v_cvt_scalef32_f32_{small}" for small in ("fp8", "bf8")),
        *(
            f"v_cvt_scalef32_pk_{wide}_{s}"
            for wide in ("f32", "bf16", "f16")
            for s in ("fp4", "fp8", "bf8")
        ),
        *(f"v_cvt_pk_{small}_f32" for small in ("fp8", "bf8")),
        *(
            f"v_cvt_scalef32_pk_{s}_{wide}"
            for wide in ("f32", "bf16", "f16")
            for s in ("fp4", "fp8", "bf8")
        ),
    ]
)


def build(instruction: Instruction):
    if found := _DECODE.match(instruction.opcode):
        scaled, pack, wide, small = found.groups()
        return _decode(instruction, pack, wide, small, bool(scaled))
    scaled, small, wide = _ENCODE.match(instruction.opcode).groups()
    return _encode(instruction, wide, small, bool(scaled))
