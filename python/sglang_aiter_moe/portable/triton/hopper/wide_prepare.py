"""Before stage 1 of the wide form: pairs listed by expert, and rows of x quantised as the mode asks, then brought to
one scale a row.

As ``mx_prefill_prepare`` with a row as the group: exact while a row's block scales lie within 14 binades (E2M1);
beyond, and for E4M3 below 2**-6 of its new scale, rounded to under 2**-17 of the row's largest value.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.codecs import (
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_to_f32,
    quantize_blocks,
)
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_prepare import e4m3_bytes
from sglang_aiter_moe.portable.triton.hopper.prepare import list_pairs


@triton.jit
def prepare_wide(
    x_ptr,  # [M, H] bf16
    x8_ptr,  # [M, X_STRIDE] e4m3 bytes in the operand's order
    scale_ptr,  # [M] float32
    ids_ptr,
    mask_ptr,
    tokens_ptr,
    pairs_ptr,  # these three: list_pairs
    starts_ptr,
    counter_ptr,
    M,
    topk,
    groups,
    num_experts,
    H: tl.constexpr,
    X_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    RULE: tl.constexpr,
    SHIFT: tl.constexpr,  # the row's largest scale stands at 2**SHIFT: mx_prefill_prepare.fold
    HAS_MASK: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two >= X_STRIDE
):
    """Program m quantises row m of x; the programs before list BLOCK pairs each."""
    tl.extra.cuda.gdc_launch_dependents()
    g = tl.program_id(0)
    chunks = tl.num_programs(0) - M
    if g < chunks:
        list_pairs(
            g, ids_ptr, mask_ptr, tokens_ptr, pairs_ptr, starts_ptr, counter_ptr, M, topk, groups, num_experts,
            HAS_MASK, HAS_TOKENS, T, BLOCK,
        )  # fmt: skip
    else:
        row = (g - chunks).to(tl.int64)
        p = tl.arange(0, WIDTH)
        v = tl.load(x_ptr + row * H + p, mask=p < H, other=0.0).to(tl.float32)
        codes, scale = quantize_blocks(tl.reshape(v, (1, WIDTH)), FORMAT, RULE)
        value = e4m3_to_f32(codes) if FORMAT == "e4m3" else e2m1_to_f32(codes)
        largest = tl.max(scale)
        down = tl.maximum(127 + SHIFT + scale - largest, 0) << 23
        down = tl.reshape(down.to(tl.float32, bitcast=True), (WIDTH // 32, 1))
        value = tl.reshape(value, (WIDTH // 32, 32)) * down
        # Columns [t][i][h][j] to [i][h][t][j] (mx_prefill).
        value = tl.permute(tl.reshape(value, (WIDTH // 128, 4, 8, 4)), (0, 2, 1, 3))
        value = tl.reshape(value, (WIDTH,))
        tl.store(x8_ptr + row * X_STRIDE + p, e4m3_bytes(value), mask=p < X_STRIDE)
        tl.store(scale_ptr + row, e8m0_to_f32(largest) * (1.0 / (1 << SHIFT)))
