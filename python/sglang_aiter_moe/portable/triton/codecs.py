"""E2M1, E4M3 and E8M0 in integer operations: what every kernel here decodes with and rounds with.

No conversion instruction of a target is used, so the same code runs on gfx942, gfx950, gfx1250, CUDA and
under Triton's interpreter. Decoding is exact: E2M1's three magnitude bits, put where a float32 keeps its
two low exponent bits and its first mantissa bit, *are* the number times 2**-126, subnormal and zero included.
"""

import triton
import triton.language as tl

TWO_POW_126: tl.constexpr = tl.constexpr(2.0**126)
TWO_POW_120: tl.constexpr = tl.constexpr(2.0**120)
TWO_POW_23: tl.constexpr = tl.constexpr(2.0**23)


@triton.jit
def e2m1_to_f32(code):
    """int32 codes (bits 0..3) to float32."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * TWO_POW_126


@triton.jit
def e4m3_to_f32(code):
    """int32 codes (bits 0..7) of finite E4M3 numbers to float32 (exponent bias 7: 2**120 below float32's)."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * TWO_POW_120


@triton.jit
def e8m0_to_f32(code):
    """E8M0 bytes to float32: 0 is the subnormal 2**-127, 255 is NaN (OCP MX v1.0 section 5.4.1)."""
    b = code.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    bits = tl.where(b == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def f32_to(v, dtype: tl.constexpr, DOT: tl.constexpr):
    """``v.to(dtype)``, nearest even; under DOT "f32" (Triton's interpreter, which truncates to bf16) by hand."""
    if DOT == "f32" and dtype == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
        v = rounded.to(tl.float32, bitcast=True)
    return v.to(dtype)


@triton.jit
def f32_to_e2m1(v):
    """float32 to E2M1 codes (int32): nearest, ties to even mantissa; |v| >= 6, Inf and NaN give +-6.

    The code is how many of the seven midpoints lie below |v|; a midpoint itself belongs to the even
    neighbour. Written as "not below" so that NaN passes all of them.
    """
    a = tl.abs(v)
    code = 1 - (a <= 0.25).to(tl.int32)
    code += 1 - (a < 0.75).to(tl.int32)
    code += 1 - (a <= 1.25).to(tl.int32)
    code += 1 - (a < 1.75).to(tl.int32)
    code += 1 - (a <= 2.5).to(tl.int32)
    code += 1 - (a < 3.5).to(tl.int32)
    code += 1 - (a <= 5.0).to(tl.int32)
    return code | ((v.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def f32_to_e4m3(v):
    """float32 to E4M3 codes (int32): nearest even, saturating at 448; NaN and Inf give NaN (0x7F)."""
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    mag = bits & 0x7FFFFFFF
    a = mag.to(tl.float32, bitcast=True)
    rounded = (mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20
    normal = tl.minimum(rounded - (120 << 3), 0x7E)
    # Below 2**-6 the step is 2**-9: adding 2**23 rounds a * 2**9 to an integer.
    small = ((a * 512.0 + TWO_POW_23).to(tl.int32, bitcast=True)) & 0xF
    code = tl.where(a < 0.015625, small, normal)
    code = tl.where(mag >= 0x7F800000, 0x7F, code)
    return sign | code


@triton.jit
def inf_to_nan(v):
    """float32: Inf and NaN give NaN; everything else stays as it is. One multiply-add.

    Hopper forms bring a NaN weight scale (E8M0 255) in as Inf, which an activation would turn into a finite number; so
    stage 1's sums pass here. What comes after stage 2 may be Inf in place of NaN.
    """
    return v + v * 0.0


@triton.jit
def mx_scale(amax, FORMAT: tl.constexpr, RULE: tl.constexpr):
    """The E8M0 byte (int32) for a block whose largest magnitude is ``amax``.

    FORMAT "e2m1" or "e4m3"; RULE "epilogue", "roundup" or "even" (docs/contract.md section d). Inf and
    NaN give 255, but for "epilogue", which does not look: only NaN does.
    """
    bits = amax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    EMAX: tl.constexpr = 2 if FORMAT == "e2m1" else 8
    if RULE == "roundup":
        MAX: tl.constexpr = 6.0 if FORMAT == "e2m1" else 448.0
        quotient = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
        scale = ((quotient.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + 0x7FFFFF) >> 23
        return tl.where(bits >= 0x7F800000, 255, scale)
    HALF: tl.constexpr = (
        0x400000 if RULE == "epilogue" else (0x200000 if FORMAT == "e2m1" else 0x80000)
    )
    exponent = (bits + HALF) >> 23
    scale = tl.maximum(exponent - EMAX, 0)
    if RULE == "even":  # a NaN's bits plus HALF may pass 2**31
        return tl.where((exponent >= 255) | (bits >= 0x7F800000), 255, scale)
    return tl.where(bits > 0x7F800000, 255, scale)


@triton.jit
def quantize_blocks(v, FORMAT: tl.constexpr, RULE: tl.constexpr):
    """``v [R, C]`` float32, C a multiple of 32 -> codes int32 ``[R, C]`` and scales int32 ``[R, C/32]``."""
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    blocks = tl.reshape(v, (R, C // 32, 32))
    # Largest magnitude by its bits: as integers NaN counts as larger than Inf and is not lost.
    amax_bits = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    scale = mx_scale(amax_bits.to(tl.float32, bitcast=True), FORMAT, RULE)
    # 1 / 2**(s - 127) is the E8M0 value of 254 - s, exact: one multiplication divides.
    scaled = blocks * e8m0_to_f32(254 - scale)[:, :, None]
    # Under a NaN scale codes mean nothing; make them the same on every machine.
    lost = (scale == 255)[:, :, None]
    if FORMAT == "e2m1":
        codes = tl.where(lost, 7, f32_to_e2m1(scaled))
    else:
        codes = tl.where(lost, 0x7F, f32_to_e4m3(scaled))
    return tl.reshape(codes, (R, C)), scale
