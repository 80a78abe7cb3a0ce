"""Conversions between number formats, packed and scaled ones included.

Rounding is to nearest even. gfx950's FP8 and BF8 are OCP's E4M3 and E5M2, gfx942's their FNUZ forms: instructions that
name neither take the program's target. Sources: AMD, "CDNA3 ISA" and "CDNA4 ISA", sections VOP1 and VOP3
(V_CVT_PK_BF16_F32, V_CVT_PK_FP8_F32, V_CVT_SCALEF32_PK_FP4_F32 and their kin).
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import Instruction
from sglang_aiter_moe.amdgpu.atomics import bf16_to_f32, f32_to_bf16
from sglang_aiter_moe.amdgpu.encoding import Row, build_row

U16, U32, I32, F16, F32, F64 = np.uint16, np.uint32, np.int32, np.float16, np.float32, np.float64


def _to_int(dtype):
    """Truncated towards zero, saturating; NaN becomes 0."""
    low, high = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)

    def convert(a):
        wide = np.nan_to_num(np.trunc(np.asarray(a, F64)), nan=0.0, posinf=high, neginf=low)
        return np.clip(wide, low, high).astype(dtype)

    return convert


def _byte(n: int):
    return lambda a: ((a >> U32(8 * n)) & U32(0xFF)).astype(F32)


def _pack(low, high):
    return low.astype(U32) | (high.astype(U32) << U32(16))


def _pair(f):
    return lambda a, b: _pack(*np.broadcast_arrays(f(a), f(b)))


def _f16_bits(a):
    return np.asarray(a).astype(F16).view(U16)


def _toward_zero_f16(a):
    """float32 to float16 towards zero (v_cvt_pkrtz)."""
    near = np.asarray(a).astype(F16)
    over = np.abs(near.astype(F32)) > np.abs(a)
    return np.where(over, np.nextafter(near, F16(0)), near).astype(F16).view(U16)


def _normalised(kind, scale: float):
    dtype = np.int16 if kind == "i16" else U16

    def convert(a):
        low = -1.0 if kind == "i16" else 0.0
        a = np.nan_to_num(np.clip(np.asarray(a, F64), low, 1.0))
        return np.rint(a * scale).astype(dtype).view(U16)

    return convert


TABLE: dict[str, Row] = {
    "v_cvt_f32_i32": ("f32", "i32", lambda a: a.astype(F32)),
    "v_cvt_f32_u32": ("f32", "u32", lambda a: a.astype(F32)),
    "v_cvt_i32_f32": ("i32", "f32", _to_int(I32)),
    "v_cvt_u32_f32": ("u32", "f32", _to_int(U32)),
    "v_cvt_f64_i32": ("f64", "i32", lambda a: a.astype(F64)),
    "v_cvt_f64_u32": ("f64", "u32", lambda a: a.astype(F64)),
    "v_cvt_i32_f64": ("i32", "f64", _to_int(I32)),
    "v_cvt_u32_f64": ("u32", "f64", _to_int(U32)),
    "v_cvt_f32_f64": ("f32", "f64", lambda a: a.astype(F32)),
    "v_cvt_f64_f32": ("f64", "f32", lambda a: a.astype(F64)),
    "v_cvt_f16_f32": ("f16", "f32", lambda a: a.astype(F16)),
    "v_cvt_f32_f16": ("f32", "f16", lambda a: a.astype(F32)),
    "v_cvt_f16_u16": ("f16", "u16", lambda a: a.astype(F16)),
    "v_cvt_f16_i16": ("f16", "i16", lambda a: a.astype(F16)),
    "v_cvt_u16_f16": ("u16", "f16", _to_int(U16)),
    "v_cvt_i16_f16": ("i16", "f16", _to_int(np.int16)),
    "v_cvt_f32_ubyte0": ("f32", "u32", _byte(0)),
    "v_cvt_f32_ubyte1": ("f32", "u32", _byte(1)),
    "v_cvt_f32_ubyte2": ("f32", "u32", _byte(2)),
    "v_cvt_f32_ubyte3": ("f32", "u32", _byte(3)),
    "v_cvt_rpi_i32_f32": ("i32", "f32", lambda a: _to_int(I32)(np.floor(np.asarray(a, F64) + 0.5))),
    "v_cvt_flr_i32_f32": ("i32", "f32", lambda a: _to_int(I32)(np.floor(a))),
    "v_cvt_pk_bf16_f32": ("u32", "f32 f32", _pair(f32_to_bf16)),
    "v_cvt_f32_bf16": ("f32", "u16", bf16_to_f32),
    "v_cvt_pk_f16_f32": ("u32", "f32 f32", _pair(_f16_bits)),
    "v_cvt_pkrtz_f16_f32": ("u32", "f32 f32", _pair(_toward_zero_f16)),
    "v_cvt_pk_u16_u32": ("u32", "u32 u32", _pair(lambda a: np.minimum(a, U32(0xFFFF)))),
    "v_cvt_pk_i16_i32": (
        "u32",
        "i32 i32",
        _pair(lambda a: np.clip(a, -32768, 32767).astype(np.int16).view(U16)),
    ),
    "v_cvt_pknorm_i16_f32": ("u32", "f32 f32", _pair(_normalised("i16", 32767.0))),
    "v_cvt_pknorm_u16_f32": ("u32", "f32 f32", _pair(_normalised("u16", 65535.0))),
}


def build(instruction: Instruction):
    return build_row(instruction, TABLE[instruction.opcode])
