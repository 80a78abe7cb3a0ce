"""The layer's input in MXFP8 or MXFP4, one E8M0 scale per 32 columns."""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import quantize_blocks


@triton.jit
def store_quantized(
    codes, scale, codes_ptr, scale_ptr, row, col, ok, C: tl.constexpr, FORMAT: tl.constexpr
):
    """Writes ``codes [R, W]`` and ``scale [R, W/32]`` to rows ``row``, from column ``col`` of ``C``.

    E4M3 takes a byte a code, E2M1 two codes a byte, the even column in the low nibble.
    """
    R: tl.constexpr = codes.shape[0]
    W: tl.constexpr = codes.shape[1]
    ok = ok[:, None]
    if FORMAT == "e2m1":
        lo, hi = tl.split(tl.reshape(codes, (R, W // 2, 2)))
        byte = lo | (hi << 4)
        at = col // 2 + tl.arange(0, W // 2)
        tl.store(
            codes_ptr + row.to(tl.int64)[:, None] * (C // 2) + at[None, :],
            byte.to(tl.uint8),
            mask=ok & (at < C // 2)[None, :],
        )
    else:
        at = col + tl.arange(0, W)
        tl.store(
            codes_ptr + row.to(tl.int64)[:, None] * C + at[None, :],
            codes.to(tl.uint8),
            mask=ok & (at < C)[None, :],
        )
    at = col // 32 + tl.arange(0, W // 32)
    tl.store(
        scale_ptr + row.to(tl.int64)[:, None] * (C // 32) + at[None, :],
        scale.to(tl.uint8),
        mask=ok & (at < C // 32)[None, :],
    )


@triton.jit
def quantize_input_kernel(
    x_ptr,  # [M, H] bf16
    codes_ptr,
    scale_ptr,
    M,
    H: tl.constexpr,
    H_USED: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    ok = row < M
    mask = ok[:, None] & (col < H_USED)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * H + col[None, :], mask=mask, other=0.0)
    codes, scale = quantize_blocks(x.to(tl.float32), FORMAT, RULE)
    store_quantized(
        codes, scale, codes_ptr, scale_ptr, row, tl.program_id(1) * BLOCK_H, ok, H, FORMAT
    )
