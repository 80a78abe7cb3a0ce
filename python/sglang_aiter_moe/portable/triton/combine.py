"""The sum over a token's experts, in slot order: the same bits every time."""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import f32_to
from sglang_aiter_moe.portable.triton.sort import tokens_here


@triton.jit
def combine_kernel(
    part_ptr,  # [M * topk, H], one row a pair, already weighted
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    out_ptr,  # [M, H]
    stride_out,
    M,
    topk,
    G,
    H: tl.constexpr,
    H_USED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    m = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    end = tl.where(m < tokens_here(tokens_ptr, M, HAS_TOKENS), H_USED, 0)
    acc = tl.zeros([BLOCK_H], tl.float32)
    for k in range(topk):
        pair = m * topk + k
        id = tl.load(ids_ptr + pair)
        # Rows of pairs that no expert computed were never written.
        here = (id >= 0) & (id < G)
        if HAS_MASK:
            here = here & (tl.load(mask_ptr + tl.where(here, id, 0)) != 0)
        at = tl.where(here, col, H)  # H is past every used column: not loaded
        row = part_ptr + pair.to(tl.int64) * H
        acc += tl.load(row + at, mask=at < end, other=0.0).to(tl.float32)
    at = out_ptr + m.to(tl.int64) * stride_out + col
    tl.store(at, f32_to(acc, out_ptr.dtype.element_ty, DOT), mask=col < H)
