"""The Triton kernels of ``device_moves``.

All have the same shape. An item is what one thread moves at a time; items of a unit (a tile of 16 rows, a block of
32) are numbered so that 32 neighbours are 8 rows by 4 columns: whole sectors of memory on the raw side and on
the packed one, without a detour through shared memory. A program belongs to one expert at a time, holds up to
STEP items of it in registers, and takes every GROUPS-th expert.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _meet(counter_ptr, arrivals):
    """Waits until ``arrivals`` programs have come here; all of them run at the same time."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while seen < arrivals:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _item(i, COLUMNS, ROWS: tl.constexpr):
    """Unit, row within it and column of an item; a unit has ROWS x COLUMNS."""
    above = i // 8
    column = above % COLUMNS
    above = above // COLUMNS
    return above // (ROWS // 8), (above % (ROWS // 8)) * 8 + i % 8, column


@triton.jit
def _rows(rows_ptr, unit, row, inside, ROWS: tl.constexpr, IN_ORDER: tl.constexpr):
    """The raw row of each item."""
    position = unit * ROWS + row
    if not IN_ORDER:
        position = tl.load(rows_ptr + position, mask=inside, other=0)
    return position


@triton.jit
def move_tiles(
    raw_ptr,  # [E, N, PIECES, 4] int32: rows of pieces of 16 bytes
    packed_ptr,  # [E, N/16, PIECES, 16, 4] int32; may be raw_ptr
    rows_ptr,  # [N] int32: raw row at each packed row position
    counters_ptr,  # [GROUPS] int32 zeros if MEET
    E,
    N,
    PIECES,
    MEMBERS,
    GROUPS,
    STEP,  # items (pieces) a program
    ITEMS: tl.constexpr,  # STEP, rounded up
    IN_ORDER: tl.constexpr,
    UNPACK: tl.constexpr,
    MEET: tl.constexpr,
    AHEAD: tl.constexpr,  # the next expert is read before the wait, else after the write
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    i = tl.arange(0, ITEMS)
    item = member * STEP + i
    here = (i < STEP) & (item < N * PIECES)
    tile, line, piece = _item(item, PIECES, 16)
    row = _rows(rows_ptr, tile, line, here, 16, IN_ORDER)
    word = tl.arange(0, 4)[None, :]
    raw_at = (row * PIECES + piece)[:, None] * 4 + word
    packed_at = ((tile * PIECES + piece) * 16 + line)[:, None] * 4 + word
    inside = here[:, None]
    size = tl.cast(N, tl.int64) * PIECES * 4
    if UNPACK:
        source, source_at, target, target_at = packed_ptr, packed_at, raw_ptr, raw_at
    else:
        source, source_at, target, target_at = raw_ptr, raw_at, packed_ptr, packed_at
    content = tl.load(source + group * size + source_at, mask=inside)
    following = content
    arrivals = 0
    for expert in range(group, E, GROUPS):
        after = expert + GROUPS
        if MEET:
            if AHEAD:
                following = tl.load(source + after * size + source_at, mask=inside & (after < E))
            arrivals += MEMBERS
            _meet(counters_ptr + group, arrivals)
        else:
            tl.debug_barrier()  # every thread has read before one overwrites it
        tl.store(target + expert * size + target_at, content, mask=inside)
        if MEET and not AHEAD:
            following = tl.load(source + after * size + source_at, mask=inside & (after < E))
        content = following


@triton.jit
def _column(a, b, c, d, Q: tl.constexpr):
    """Byte Q of four words, one above the other."""
    low = ((a >> (8 * Q)) & 255) | (((b >> (8 * Q)) & 255) << 8)
    return low | (((c >> (8 * Q)) & 255) << 16) | (((d >> (8 * Q)) & 255) << 24)


@triton.jit
def _pair(at, first, second, EVEN: tl.constexpr, PAD: tl.constexpr):
    """Two words of a row: one of 8 bytes if EVEN."""
    if EVEN:
        both = tl.load(at, mask=first, other=0)
        a = both.to(tl.int32)
        b = (both >> 32).to(tl.int32)
    else:
        a = tl.load(at, mask=first, other=PAD)
        b = tl.load(at + 1, mask=second, other=PAD)
    return a, b


@triton.jit
def _store_pair(at, a, b, first, second, EVEN: tl.constexpr):
    if EVEN:
        both = (b.to(tl.int64) << 32) | (a.to(tl.int64) & 0xFFFFFFFF)
        tl.store(at, both, mask=first)
    else:
        tl.store(at, a, mask=first)
        tl.store(at + 1, b, mask=second)


@triton.jit
def _four(at, mask):
    """The four words of an item, packed."""
    return (
        tl.load(at, mask=mask),
        tl.load(at + 16, mask=mask),
        tl.load(at + 32, mask=mask),
        tl.load(at + 48, mask=mask),
    )


@triton.jit
def move_swizzled(
    raw_ptr,  # [E, N, WORDS] int32: rows of four scales; as int64 if EVEN
    packed_ptr,  # [E, N/32, WORDS/2 rounded up, 4, 16] int32; may be raw_ptr
    rows_ptr,  # [N] int32: raw row at each packed position
    counters_ptr,  # [GROUPS] int32 zeros if MEET
    E,
    N,
    WORDS,
    MEMBERS,
    GROUPS,
    STEP,  # items a program: two words of a row and of the one 16 positions below
    ITEMS: tl.constexpr,  # STEP, rounded up
    IN_ORDER: tl.constexpr,
    UNPACK: tl.constexpr,
    MEET: tl.constexpr,
    AHEAD: tl.constexpr,  # the next expert is read before the wait, else after the write
    EVEN: tl.constexpr,  # WORDS is even
    PAD: tl.constexpr,
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    width = (WORDS + 1) // 2
    i = tl.arange(0, ITEMS)
    item = member * STEP + i
    here = (i < STEP) & (item < N // 2 * width)
    block, line, pair = _item(item, width, 16)
    upper = _rows(rows_ptr, block, line, here, 32, IN_ORDER)
    lower = _rows(rows_ptr, block, line + 16, here, 32, IN_ORDER)
    if EVEN:
        upper_at, lower_at, second = upper * width + pair, lower * width + pair, here
    else:
        upper_at, lower_at = upper * WORDS + pair * 2, lower * WORDS + pair * 2
        second = here & (pair * 2 + 1 < WORDS)
    packed_at = (block * width + pair) * 64 + line
    raw_size = tl.cast(N, tl.int64) * (width if EVEN else WORDS)
    packed_size = tl.cast(N, tl.int64) * width * 2
    raw = raw_ptr + group * raw_size
    packed = packed_ptr + group * packed_size + packed_at
    if UNPACK:
        a, b, c, d = _four(packed, here)
    else:
        a, c = _pair(raw + upper_at, here, second, EVEN, PAD)
        b, d = _pair(raw + lower_at, here, second, EVEN, PAD)
    next_a, next_b, next_c, next_d = a, b, c, d
    arrivals = 0
    for expert in range(group, E, GROUPS):
        after = expert + GROUPS
        first, then = here & (after < E), second & (after < E)
        if MEET:
            if AHEAD:
                if UNPACK:
                    next_a, next_b, next_c, next_d = _four(
                        packed_ptr + after * packed_size + packed_at, first
                    )
                else:
                    raw = raw_ptr + after * raw_size
                    next_a, next_c = _pair(raw + upper_at, first, then, EVEN, PAD)
                    next_b, next_d = _pair(raw + lower_at, first, then, EVEN, PAD)
            arrivals += MEMBERS
            _meet(counters_ptr + group, arrivals)
        else:
            tl.debug_barrier()
        raw = raw_ptr + expert * raw_size
        packed = packed_ptr + expert * packed_size + packed_at
        # Turning four words over their diagonal twice gives them back.
        w0, w1 = _column(a, b, c, d, 0), _column(a, b, c, d, 1)
        w2, w3 = _column(a, b, c, d, 2), _column(a, b, c, d, 3)
        if UNPACK:
            _store_pair(raw + upper_at, w0, w2, here, second, EVEN)
            _store_pair(raw + lower_at, w1, w3, here, second, EVEN)
        else:
            tl.store(packed, w0, mask=here)
            tl.store(packed + 16, w1, mask=here)
            tl.store(packed + 32, w2, mask=here)
            tl.store(packed + 48, w3, mask=here)
        if MEET and not AHEAD:
            if UNPACK:
                next_a, next_b, next_c, next_d = _four(
                    packed_ptr + after * packed_size + packed_at, first
                )
            else:
                raw = raw_ptr + after * raw_size
                next_a, next_c = _pair(raw + upper_at, first, then, EVEN, PAD)
                next_b, next_d = _pair(raw + lower_at, first, then, EVEN, PAD)
        a, b, c, d = next_a, next_b, next_c, next_d


@triton.jit
def move_n32k4(
    raw_ptr,  # [E, N, WORDS] int32: rows of four scales
    packed_ptr,  # [E, N/32, WORDS, 32] int32; may be raw_ptr
    rows_ptr,  # [N] int32: raw row at each packed position
    counters_ptr,  # [GROUPS] int32 zeros if MEET
    E,
    N,
    WORDS,
    MEMBERS,
    GROUPS,
    STEP,  # items (words) a program
    ITEMS: tl.constexpr,  # STEP, rounded up
    IN_ORDER: tl.constexpr,
    UNPACK: tl.constexpr,
    MEET: tl.constexpr,
    AHEAD: tl.constexpr,  # the next expert is read before the wait, else after the write
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    i = tl.arange(0, ITEMS)
    item = member * STEP + i
    here = (i < STEP) & (item < N * WORDS)
    block, line, word = _item(item, WORDS, 32)
    row = _rows(rows_ptr, block, line, here, 32, IN_ORDER)
    raw_at = row * WORDS + word
    packed_at = (block * WORDS + word) * 32 + line
    size = tl.cast(N, tl.int64) * WORDS
    if UNPACK:
        source, source_at, target, target_at = packed_ptr, packed_at, raw_ptr, raw_at
    else:
        source, source_at, target, target_at = raw_ptr, raw_at, packed_ptr, packed_at
    content = tl.load(source + group * size + source_at, mask=here)
    following = content
    arrivals = 0
    for expert in range(group, E, GROUPS):
        after = expert + GROUPS
        if MEET:
            if AHEAD:
                following = tl.load(source + after * size + source_at, mask=here & (after < E))
            arrivals += MEMBERS
            _meet(counters_ptr + group, arrivals)
        else:
            tl.debug_barrier()
        tl.store(target + expert * size + target_at, content, mask=here)
        if MEET and not AHEAD:
            following = tl.load(source + after * size + source_at, mask=here & (after < E))
        content = following
