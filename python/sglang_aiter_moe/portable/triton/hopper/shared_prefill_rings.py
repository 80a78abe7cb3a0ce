"""The rings of the shared prefill form, and the roles that fill them from global memory (Gluon).

A ring is a few slots of shared memory with two mbarriers each: "full", at which those arrive who filled a slot, and
"empty", at which those arrive who have read it. Who waits keeps the slot and the parity that its turn has.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sglang_aiter_moe.portable.triton.hopper.fp8 import async_load
from sglang_aiter_moe.portable.triton.hopper.mx_prefill import chunk_layout
from sglang_aiter_moe.portable.triton.hopper.prefill_blocks import (
    column_choices,
    columns,
    columns1,
    columns2,
    number_of_choices,
    row_starts,
)
from sglang_aiter_moe.portable.triton.hopper.ring import bulk_copy

FACTS = gl.constexpr(4)
"""Tiles that the facts' warp is ahead."""
SLOT_BYTES = gl.constexpr(4096 + 512)
"""Words and scales of a step and a group of consumers."""


@gluon.constexpr_function
def most1(T):
    return max(n for n, _ in column_choices(T))


@gluon.constexpr_function
def most2(T):
    return max(n for _, n in column_choices(T))


@gluon.jit
def advance(slot, phase, S: gl.constexpr):
    """The ring's next slot, and the parity that says it is full."""
    last = slot == S - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def narrow(smem, N: gl.constexpr, MOST: gl.constexpr):
    """The first N rows of a slot that has MOST."""
    if N == MOST:
        return smem
    else:
        return smem.slice(0, N, dim=0)


@gluon.jit
def barriers(S: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=EMPTY)
    return full, empty


@gluon.constexpr_function
def plain_layout(rank):
    """Of one of several tensors."""
    return gl.SwizzledSharedLayout(1, 1, 1, order=list(range(rank - 1, -1, -1)))


@gluon.jit
def plain(dtype: gl.constexpr, shape: gl.constexpr):
    return gl.allocate_shared_memory(dtype, shape, plain_layout(len(shape) - 1))


@gluon.constexpr_function
def group_pairs(G):
    """Pairs of consumers' groups: 128 rows each."""
    return (G + 1) // 2


@gluon.jit
def make_rings(
    desc_w, desc_s, BH: gl.constexpr, T: gl.constexpr, TS: gl.constexpr, PS: gl.constexpr, LW: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """(words, scales, barriers), (tokens, more tokens, barriers), (references, row factors, pairs, tokens' scales,
    barriers). Words, scales, references and factors: each group's, slot after slot (references: two groups')."""
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    words = gl.allocate_shared_memory(gl.int32, [PS * G, BH, 4 // BH, 8, 32], desc_w.layout)
    scales = gl.allocate_shared_memory(gl.int32, [PS * G, BH, 2 // BH, 4, 16], desc_s.layout)
    tokens1 = gl.allocate_shared_memory(gl.float8e4nv, [TS, most1(T), 128], L)
    tokens2 = 0
    if most2(T) > 0:
        tokens2 = gl.allocate_shared_memory(gl.float8e4nv, [TS, most2(T), 128], L)
    facts = (
        plain(gl.int32, [FACTS * group_pairs(G), 128]), plain(gl.float32, [FACTS * group_pairs(G), 128]),
        plain(gl.int32, [FACTS, 256]), plain(gl.float32, [FACTS, 256]), barriers(FACTS, 1, G),
    )  # fmt: skip
    rings = (
        (words, scales, barriers(PS, 1, G)),
        (tokens1, tokens2, barriers(TS, 32 * LW, G)),
        facts,
    )
    fence_async_shared()
    return rings


@gluon.jit
def copy_weights(
    desc_w, desc_s, ring, slot, phase, first, tile, STEPS: gl.constexpr, PS: gl.constexpr, BH: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """All steps of one row tile; ``first`` and ``tile`` as the descriptors count (``ring.fill``). Rows past the end are
    zeros."""
    words, scales, bars = ring
    full, empty = bars
    for step in range(STEPS):
        mbarrier.wait(empty.index(slot), phase ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, SLOT_BYTES * G)
        for g in gl.static_range(G):
            at = [first, tile + g * (4 // BH), step * 8, 0]
            bulk_copy(desc_w, at, bar, words.index(slot * G + g))
        for g in gl.static_range(G):
            at = [first, tile // 2 + g * (2 // BH), step // 2 * 4, 0]
            bulk_copy(desc_s, at, bar, scales.index(slot * G + g))
        slot, phase = advance(slot, phase, PS)
    return slot, phase


@gluon.jit
def copy_tokens(
    ring, slot, phase, x_ptr, pairs_ptr, n, num_pairs, topk, STEPS: gl.constexpr, STRIDE: gl.constexpr,
    WIDE: gl.constexpr, T: gl.constexpr, TS: gl.constexpr, LW: gl.constexpr,
):  # fmt: skip
    """All steps of a block of ``n`` tokens."""
    tokens1, tokens2, bars = ring
    full, empty = bars
    for j in gl.static_range(number_of_choices(T)):
        if (n > columns(T, j - 1)) & (n <= columns(T, j)):
            N1: gl.constexpr = columns1(T, j)
            N2: gl.constexpr = columns2(T, j)
            L: gl.constexpr = chunk_layout(LW)
            at1 = row_starts(pairs_ptr, 0, num_pairs, topk, STRIDE, WIDE, N1, L)
            at2 = 0
            if N2 > 0:
                at2 = row_starts(pairs_ptr + N1, 0, num_pairs, topk, STRIDE, WIDE, N2, L)
            # Columns that are not used are zeros: L2 is not asked for them.
            used1 = (gl.arange(0, N1, layout=gl.SliceLayout(1, L)) < n)[:, None]
            used2 = used1
            if N2 > 0:
                used2 = (gl.arange(0, N2, layout=gl.SliceLayout(1, L)) < n - N1)[:, None]
            for step in range(STEPS):
                mbarrier.wait(empty.index(slot), phase ^ 1)
                async_load(
                    narrow(tokens1.index(slot), N1, most1(T)),
                    x_ptr + (at1 + step * 128),
                    mask=used1,
                )
                if N2 > 0:
                    async_load(
                        narrow(tokens2.index(slot), N2, most2(T)),
                        x_ptr + (at2 + step * 128),
                        mask=used2,
                    )
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                slot, phase = advance(slot, phase, TS)
    return slot, phase
