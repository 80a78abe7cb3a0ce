"""Blocks of tokens of the prefill form: how many columns are computed, and where their rows begin (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def column_choices(T):
    """(N1, N2) in ascending order; a block runs the first whose sum holds its tokens."""
    return {
        8: ((8, 0),),
        16: ((8, 0), (16, 0)),
        24: ((8, 0), (16, 0), (16, 8)),
        32: ((16, 0), (32, 0)),
        48: ((16, 0), (32, 0), (32, 16)),
        64: ((32, 0), (64, 0)),
        80: ((32, 0), (64, 0), (64, 16)),
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
def rows_of(pairs_ptr, num_pairs, topk, WIDE: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    """Rows ``[N]`` of a block's pairs; unused ones read the last row."""
    pair = gl.load(pairs_ptr + gl.arange(0, N, layout=L))
    row = gl.minimum(pair, num_pairs - 1) // topk
    if WIDE:
        row = row.to(gl.int64)
    return row


@gluon.jit
def row_starts(
    pairs_ptr,
    first,
    num_pairs,
    topk,
    STRIDE: gl.constexpr,
    WIDE: gl.constexpr,
    N: gl.constexpr,
    CL: gl.constexpr,
):
    """Element offsets ``[N, 128]`` of 128 columns of the rows of a block's pairs, in the layout CL of their copy."""
    row = rows_of(pairs_ptr + first, num_pairs, topk, WIDE, N, gl.SliceLayout(1, CL))
    return row[:, None] * STRIDE + gl.arange(0, 128, layout=gl.SliceLayout(0, CL))[None, :]


@gluon.jit
def shared(STAGES: gl.constexpr, N: gl.constexpr):
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, 128], L)
