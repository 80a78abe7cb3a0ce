"""Loads of the Hopper form: matrix fragments straight from global memory.

AITER's tile, 16 rows x 16 bytes, is an ``mma.m16n8k16`` A fragment: lane ``4 * g + t`` reads 16 bytes of row ``g``
in K block
``t``, and of row ``g + 8``. Tokens are the 8 columns. The shapes below, [8 rows, G, R/8, ..] and [4 K blocks, T, G,
..], make
Triton choose exactly these layouts for the loads, so that nothing is exchanged between lanes; the compiler
does not promise it, and test_hopper_code.py checks it.

G is the batch of a three-dimensional ``tl.dot``: one warp each. A *step* is 128 columns: 4 K blocks, 256 words of a
tile row.
"""

import triton
import triton.language as tl

from sglang_aiter_moe.portable.triton.hopper.decode import opaque, planes, scale_pair


@triton.jit
def weight_step(
    words_ptr,
    scale_ptr,
    word_base,  # first word of each row, [8, G, R/8]
    scale_base,  # first scale byte of each row, [8, G, R/8]
    step,  # [1, G, 1]
    K_BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Words ``[8, G, R/8, 16]`` and E8M0 bytes ``[4, 8, G, R/8]``. MASKED: past the last K block both read as 0."""
    t = tl.arange(0, 16) // 4
    w = tl.arange(0, 16) % 4
    j = tl.arange(0, 4)
    LAST: tl.constexpr = (K_BLOCKS - 1) // 4
    near = tl.minimum(step, LAST) if MASKED else step
    at = (word_base + near * 256)[:, :, :, None] + (t * 64 + w)[None, None, None, :]
    s_at = (scale_base + (near // 2 * 256 + near % 2 * 2))[None] + (j * 64)[:, None, None, None]
    if ASM:
        s_at = opaque(s_at)
    if MASKED:
        words = tl.load(
            words_ptr + at,
            mask=(step * 4)[:, :, :, None] + t[None, None, None, :] < K_BLOCKS,
            other=0,
        )
        scale = tl.load(
            scale_ptr + s_at, mask=(step * 4)[None] + j[:, None, None, None] < K_BLOCKS, other=0
        )
    else:
        words = tl.load(words_ptr + at)
        scale = tl.load(scale_ptr + s_at)
    return words, scale


@triton.jit
def weight_planes(words, scale, ASM: tl.constexpr):
    """The eight planes ``[G, R, 16]``."""
    G: tl.constexpr = words.shape[1]
    Q: tl.constexpr = words.shape[2]
    s = scale_pair(scale) if ASM else scale
    s = tl.permute(s, (1, 2, 3, 0))[:, :, :, :, None]
    s = tl.reshape(tl.broadcast_to(s, (8, G, Q, 4, 4)), (8, G, Q, 16))
    a, b, c, d, e, f, g, h = planes(words, s, ASM)
    return _rows(a), _rows(b), _rows(c), _rows(d), _rows(e), _rows(f), _rows(g), _rows(h)


@triton.jit
def _rows(p):
    G: tl.constexpr = p.shape[1]
    Q: tl.constexpr = p.shape[2]
    return tl.reshape(tl.permute(p, (1, 2, 0, 3)), (G, Q * 8, 16))


@triton.jit
def x_step(
    x_ptr,
    row_base,
    step,
    K_BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    PERMUTED: tl.constexpr,
    ASM: tl.constexpr,
):
    """The eight planes ``[G, 16, T]`` of a step of rows that start at ``row_base [T, G]`` (elements); ``step`` is
    ``[1, 1, G]``.

    Never masked: under MASKED the last K block is read again (times codes that are 0). PERMUTED: each step
    is stored as [4 plane pairs][4 K blocks][2 planes][4 words] and not in order.
    """
    T: tl.constexpr = row_base.shape[0]
    G: tl.constexpr = row_base.shape[1]
    t = tl.arange(0, 4)
    w = tl.arange(0, 4)
    if PERMUTED:
        LAST: tl.constexpr = (K_BLOCKS - 1) // 4
        near = tl.minimum(step, LAST) if MASKED else step
        at = (row_base[None, :, :] + near * 128 + (t * 8)[:, None, None])[:, :, :, None]
        at = x_ptr + at + tl.arange(0, 8)[None, None, None, :]
        a, b = _pair(at)
        c, d = _pair(at + 32)
        e, f = _pair(at + 64)
        g, h = _pair(at + 96)
    else:
        block = step * 4 + t[:, None, None]
        if MASKED:
            block = tl.minimum(block, K_BLOCKS - 1)
        n = tl.arange(0, 8)
        base = (row_base[None, :, :] + block * 32)[:, :, :, None, None]
        v = tl.load(
            x_ptr + base + (w * 8)[None, None, None, :, None] + n[None, None, None, None, :]
        )
        v = tl.reshape(v, (4, T, G, 4, 2, 2, 2))
        lo, hi = tl.split(v)  # the last bit of n
        a0, a2 = tl.split(lo)
        a1, a3 = tl.split(hi)
        a, e = tl.split(a0)
        c, g = tl.split(a2)
        b, f = tl.split(a1)
        d, h = tl.split(a3)
    return (
        _cols(a, ASM), _cols(b, ASM), _cols(c, ASM), _cols(d, ASM),
        _cols(e, ASM), _cols(f, ASM), _cols(g, ASM), _cols(h, ASM),
    )  # fmt: skip


@triton.jit
def _pair(pointers):
    v = tl.load(pointers)  # [4, T, G, 2 planes * 4 words]
    v = tl.reshape(v, (4, v.shape[1], v.shape[2], 2, 4))
    return tl.split(tl.permute(v, (0, 1, 2, 4, 3)))


@triton.jit
def _cols(p, ASM: tl.constexpr):
    T: tl.constexpr = p.shape[1]
    G: tl.constexpr = p.shape[2]
    p = tl.reshape(tl.permute(p, (2, 0, 3, 1)), (G, 16, T))
    return p if ASM else p.to(tl.float32)


@triton.jit
def multiply_step(acc, words, scale, x, ASM: tl.constexpr):
    """``acc [G, R, T]`` plus one step. ASM: the accumulator holds 2**-64 of the sum."""
    a = weight_planes(words, scale, ASM)
    acc = tl.dot(a[0], x[0], acc=acc, input_precision="ieee")
    acc = tl.dot(a[1], x[1], acc=acc, input_precision="ieee")
    acc = tl.dot(a[2], x[2], acc=acc, input_precision="ieee")
    acc = tl.dot(a[3], x[3], acc=acc, input_precision="ieee")
    acc = tl.dot(a[4], x[4], acc=acc, input_precision="ieee")
    acc = tl.dot(a[5], x[5], acc=acc, input_precision="ieee")
    acc = tl.dot(a[6], x[6], acc=acc, input_precision="ieee")
    acc = tl.dot(a[7], x[7], acc=acc, input_precision="ieee")
    return acc
