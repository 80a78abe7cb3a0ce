"""Packed E2M1 words to bf16, in the registers that loaded them.

A 32-bit word holds eight codes of one row, consecutive along K. Plane ``n`` is nibble ``n`` of every word. The
order of K
inside a matrix product is free as long as both operands agree, so a product over 128 columns is eight
products over the 16 words of a row, one a plane, and no code ever moves to another lane.

Two words at a time: a bf16 pair of plane ``n`` is ``sign << 15 | magnitude << 6``, which is the number times 2**-126,
subnormal and zero included. The block's scale brings it back by one multiplication: its bf16 exponent field is
the E8M0 byte + 62, so that what is left, 2**-64, is applied to the accumulator.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import e2m1_to_f32, e8m0_to_f32

SCALE_BIAS: tl.constexpr = tl.constexpr(62)
ACCUMULATOR_SCALE: tl.constexpr = tl.constexpr(2.0**64)


def _plane(n: int) -> str:
    """PTX for plane ``n``: word pairs are in %%lo (nibbles 0..3) and %%hi (4..7), the scale pair in $10."""
    source = "lo" if n < 4 else "hi"
    position = 4 * (n % 4)

    def shifted(name: str, by: int) -> str:
        if by == 0:
            return f"mov.b32 {name}, {source};"
        op = "shl" if by > 0 else "shr"
        return f"{op}.b32 {name}, {source}, {abs(by)};"

    return (
        shifted("s", 12 - position)
        + shifted("m", 6 - position)
        + "and.b32 m, m, 0x01C001C0;"
        + "lop3.b32 m, s, 0x80008000, m, 0xEA;"  # (s & mask) | m
        + f"mul.rn.bf16x2 ${n}, m, $10;"
    )


_DECODE = (
    "{ .reg .b32 lo, hi, s, m;"
    "prmt.b32 lo, $8, $9, 0x5410; prmt.b32 hi, $8, $9, 0x7632;"
    + "".join(_plane(n) for n in range(8))
    + "}"
)
DECODE: tl.constexpr = tl.constexpr(_DECODE)


@triton.jit
def opaque(v):
    """``v``, but the compiler no longer knows its value: keeps it from choosing layouts by contiguity."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def scale_pair(byte):
    """E8M0 bytes to a pair of bf16 with the exponent field byte + 62, both halves alike, in an int32.

    Scales above 2**65 (byte 192), and NaN, become Inf (``codecs.inf_to_nan``).
    """
    exponent = tl.minimum(byte.to(tl.int32), 193) + SCALE_BIAS
    return exponent * 0x00800080


@triton.jit
def planes(words, scale, ASM: tl.constexpr):
    """int32 words and E8M0 bytes, of one shape, to the eight planes.

    ASM: bf16, 2**-64 of their value. Else (Triton's interpreter): float32, their value.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            DECODE,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words, scale],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        s = e8m0_to_f32(scale)
        return (
            e2m1_to_f32(words & 15) * s,
            e2m1_to_f32((words >> 4) & 15) * s,
            e2m1_to_f32((words >> 8) & 15) * s,
            e2m1_to_f32((words >> 12) & 15) * s,
            e2m1_to_f32((words >> 16) & 15) * s,
            e2m1_to_f32((words >> 20) & 15) * s,
            e2m1_to_f32((words >> 24) & 15) * s,
            e2m1_to_f32((words >> 28) & 15) * s,
        )


@triton.jit
def prefetch_l2(ptr, nbytes):
    """Starts one bulk copy of ``nbytes`` (a multiple of 16) from device memory to L2, by one thread of the program."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.int64), nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
