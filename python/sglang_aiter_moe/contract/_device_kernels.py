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
def _arrive(counter_ptr):
    """Says that this program has read its part of an expert."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def _await(counter_ptr, arrivals):
    """Waits for ``arrivals`` arrivals; all programs that make them run at the same time."""
    seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    while seen < arrivals:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _item(i, COLUMNS, ROWS: tl.constexpr, HIGH: tl.constexpr):
    """Unit, row within it and column of an item; a unit has ROWS x COLUMNS, neighbours are HIGH rows x 32 / HIGH."""
    above = i // HIGH
    column = above % COLUMNS
    above = above // COLUMNS
    return above // (ROWS // HIGH), (above % (ROWS // HIGH)) * HIGH + i % HIGH, column


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
    AHEAD: tl.constexpr,  # the next expert is read while one waits to write this one, else after the write
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    i = tl.arange(0, ITEMS)
    item = member * STEP + i
    here = (i < STEP) & (item < N * PIECES)
    tile, line, piece = _item(item, PIECES, 16, 8)
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
    if MEET:
        _arrive(counters_ptr + group)
        if AHEAD:
            after = group + GROUPS
            following = tl.load(source + after * size + source_at, mask=inside & (after < E))
    arrivals = 0
    for expert in range(group, E, GROUPS):
        if MEET:
            arrivals += MEMBERS
            _await(counters_ptr + group, arrivals)
            if AHEAD:  # the next one's, before this one's bytes go out: nobody arrives twice in between
                _arrive(counters_ptr + group)
        else:
            tl.debug_barrier()  # every thread has read before one overwrites it
        tl.store(target + expert * size + target_at, content, mask=inside)
        content = following
        if MEET:
            after = expert + (2 * GROUPS if AHEAD else GROUPS)
            following = tl.load(source + after * size + source_at, mask=inside & (after < E))
            if not AHEAD:
                content = following
                _arrive(counters_ptr + group)


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
def _words(
    raw,
    upper_at,
    lower_at,
    packed,
    first,
    second,
    UNPACK: tl.constexpr,
    EVEN: tl.constexpr,
    PAD: tl.constexpr,
):
    """The four words of an item."""
    if UNPACK:
        a = tl.load(packed, mask=first)
        b = tl.load(packed + 16, mask=first)
        c = tl.load(packed + 32, mask=first)
        d = tl.load(packed + 48, mask=first)
    else:
        a, c = _pair(raw + upper_at, first, second, EVEN, PAD)
        b, d = _pair(raw + lower_at, first, second, EVEN, PAD)
    return a, b, c, d


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
    AHEAD: tl.constexpr,  # the next expert is read while one waits to write this one, else after the write
    EVEN: tl.constexpr,  # WORDS is even
    PAD: tl.constexpr,
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    width = (WORDS + 1) // 2
    i = tl.arange(0, ITEMS)
    item = member * STEP + i
    here = (i < STEP) & (item < N // 2 * width)
    block, line, pair = _item(item, width, 16, 8)
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
    a, b, c, d = _words(raw, upper_at, lower_at, packed, here, second, UNPACK, EVEN, PAD)
    next_a, next_b, next_c, next_d = a, b, c, d
    if MEET:
        _arrive(counters_ptr + group)
        if AHEAD:
            after = group + GROUPS
            raw = raw_ptr + after * raw_size
            packed = packed_ptr + after * packed_size + packed_at
            first, then = here & (after < E), second & (after < E)
            next_a, next_b, next_c, next_d = _words(
                raw, upper_at, lower_at, packed, first, then, UNPACK, EVEN, PAD
            )
    arrivals = 0
    for expert in range(group, E, GROUPS):
        if MEET:
            arrivals += MEMBERS
            _await(counters_ptr + group, arrivals)
            if AHEAD:  # as in move_tiles
                _arrive(counters_ptr + group)
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
        a, b, c, d = next_a, next_b, next_c, next_d
        if MEET:
            after = expert + (2 * GROUPS if AHEAD else GROUPS)
            raw = raw_ptr + after * raw_size
            packed = packed_ptr + after * packed_size + packed_at
            first, then = here & (after < E), second & (after < E)
            next_a, next_b, next_c, next_d = _words(
                raw, upper_at, lower_at, packed, first, then, UNPACK, EVEN, PAD
            )
            if not AHEAD:
                a, b, c, d = next_a, next_b, next_c, next_d
                _arrive(counters_ptr + group)


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
    AHEAD: tl.constexpr,  # the next expert is read while one waits to write this one, else after the write
    HIGH: tl.constexpr,  # of 32 neighbouring items, so many are in one column
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    i = tl.arange(0, ITEMS)
    item = member * STEP + i
    here = (i < STEP) & (item < N * WORDS)
    block, line, word = _item(item, WORDS, 32, HIGH)
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
    if MEET:
        _arrive(counters_ptr + group)
        if AHEAD:
            after = group + GROUPS
            following = tl.load(source + after * size + source_at, mask=here & (after < E))
    arrivals = 0
    for expert in range(group, E, GROUPS):
        if MEET:
            arrivals += MEMBERS
            _await(counters_ptr + group, arrivals)
            if AHEAD:  # the next one's, before this one's bytes go out: nobody arrives twice in between
                _arrive(counters_ptr + group)
        else:
            tl.debug_barrier()
        tl.store(target + expert * size + target_at, content, mask=here)
        content = following
        if MEET:
            after = expert + (2 * GROUPS if AHEAD else GROUPS)
            following = tl.load(source + after * size + source_at, mask=here & (after < E))
            if not AHEAD:
                content = following
                _arrive(counters_ptr + group)
