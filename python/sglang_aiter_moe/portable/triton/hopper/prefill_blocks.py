"""Blocks of tokens of the prefill form: how many columns are computed, and where their rows begin (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sglang_aiter_moe.portable.triton.hopper.prefill import copy_layout


@gluon.constexpr_function
def column_choices(T):
    """(N1, N2) in ascending order; a block runs the first whose sum holds its tokens."""
    return {
        8: ((8, 0),),
        16: ((8, 0), (16, 0)),
        32: ((16, 0), (32, 0)),
        64: ((32, 0), (64, 0)),
        96: ((32, 0), (64, 0), (64, 32)),
        128: ((64, 0), (64, 32), (128, 0)),
        160: ((64, 0), (64, 32), (128, 0), (128, 32)),
    }[T]


@gluon.constexpr_function
def number_of_choices(T):
    return len(column_choices(T))


@gluon.constexpr_function
def columns1(T, j):
    return column_choices(T)[j][0]


@gluon.constexpr_function
def columns2(T, j):
    return column_choices(T)[j][1]


@gluon.constexpr_function
def columns(T, j):
    """Most tokens of choice ``j``; 0 before the first."""
    return columns1(T, j) + columns2(T, j) if j >= 0 else 0


@gluon.jit
def row_starts(
    pairs_ptr,
    first,
    num_pairs,
    topk,
    STRIDE: gl.constexpr,
    WIDE: gl.constexpr,
    N: gl.constexpr,
    W: gl.constexpr,
):
    """Element offsets ``[N, 128]`` of 128 columns of the rows of a block's pairs; unused ones read the last row."""
    CL: gl.constexpr = copy_layout(W)
    pair = gl.load(pairs_ptr + first + gl.arange(0, N, layout=gl.SliceLayout(1, CL)))
    row = gl.minimum(pair, num_pairs - 1) // topk
    if WIDE:
        row = row.to(gl.int64)
    return row[:, None] * STRIDE + gl.arange(0, 128, layout=gl.SliceLayout(0, CL))[None, :]


@gluon.jit
def shared(STAGES: gl.constexpr, N: gl.constexpr):
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], L)
