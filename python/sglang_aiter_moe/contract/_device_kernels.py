"""The Triton kernels of ``device_moves``.

All have the same shape. An item is what one thread moves at a time; items of a unit (a tile of 16 rows, a block of
32) are numbered so that 32 neighbours are 8 rows by 4 columns: whole sectors of memory on the raw side and on
the packed one, without a detour through shared memory. The columns are counted up to a power of two, so that a
thread's items are a constant number of bytes apart and one address serves them all: what a program holds in
registers is bytes, not addresses. A program belongs to one expert at a time, holds ITEMS items of it, and takes
every GROUPS-th expert.
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
def _items(
    member,
    COLUMNS,
    N,
    ITEMS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """What a program moves: unit, row in it, column of the lane, columns of the item beyond that, and whether it is.

    A unit has ROWS x WIDE items, of which COLUMNS columns are real; LANES items stand side by side.
    """
    i = tl.arange(0, ITEMS)
    lane, further = i % LANES, i // LANES * LANES
    above = member * (ITEMS // (8 * WIDE)) + i // (8 * WIDE)
    if ITEMS < 8 * WIDE:  # a part of 8 rows
        PARTS: tl.constexpr = 8 * WIDE // ITEMS
        above = member // PARTS + i * 0
        further += member % PARTS * ITEMS
    column, beyond = lane // 8 % WIDE, further // 8 % WIDE
    unit = above // (ROWS // 8)
    # The hint: a thread takes no neighbours, or bytes and addresses go through shared memory.
    row = tl.max_contiguous(above % (ROWS // 8) * 8 + i % 8, [1])
    return unit, row, column, beyond, (column + beyond < COLUMNS) & (unit < N // ROWS)


@triton.jit
def _rows(rows_ptr, unit, row, inside, ROWS: tl.constexpr, IN_ORDER: tl.constexpr):
    """The raw row of each item."""
    position = unit * ROWS + row
    if not IN_ORDER:
        position = tl.load(rows_ptr + position, mask=inside, other=0)
    return position


@triton.jit
def _words(raw, packed, inside, UNPACK: tl.constexpr):
    """What is to be moved."""
    return tl.load(packed, mask=inside) if UNPACK else tl.load(raw, mask=inside)


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
    ITEMS: tl.constexpr,  # pieces a program
    WIDE: tl.constexpr,  # PIECES, up to a power of two
    LANES: tl.constexpr,  # threads a program
    IN_ORDER: tl.constexpr,
    UNPACK: tl.constexpr,
    MEET: tl.constexpr,
    AHEAD: tl.constexpr,  # the next expert is read while one waits to write this one, else after the write
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    tile, line, piece, beyond, here = _items(member, PIECES, N, ITEMS, WIDE, 16, LANES)
    row = _rows(rows_ptr, tile, line, here, 16, IN_ORDER)
    word = tl.arange(0, 4)[None, :]
    raw_at = (row * PIECES + piece)[:, None] * 4 + word
    packed_at = ((tile * PIECES + piece) * 16 + line)[:, None] * 4 + word
    inside = here[:, None]
    size = tl.cast(N, tl.int64) * PIECES * 4
    raw, packed = raw_ptr + group * size, packed_ptr + group * size
    raw_more, packed_more = beyond[:, None] * 4, beyond[:, None] * 64
    content = _words(raw + raw_at + raw_more, packed + packed_at + packed_more, inside, UNPACK)
    following = content
    step = size * GROUPS
    if MEET:
        _arrive(counters_ptr + group)
        if AHEAD:
            following = _words(
                raw + step + raw_at + raw_more,
                packed + step + packed_at + packed_more,
                inside & (group + GROUPS < E),
                UNPACK,
            )
    arrivals = 0
    for expert in range(group, E, GROUPS):
        if MEET:
            arrivals += MEMBERS
            _await(counters_ptr + group, arrivals)
            if (
                AHEAD
            ):  # for the next expert, before this one goes out: all have arrived for this one
                _arrive(counters_ptr + group)
        else:
            tl.debug_barrier()  # every thread has read before one overwrites it
        if UNPACK:
            tl.store(raw + raw_at + raw_more, content, mask=inside)
        else:
            tl.store(packed + packed_at + packed_more, content, mask=inside)
        raw += step
        packed += step
        if MEET:
            content = following
            after = step if AHEAD else step * 0
            following = _words(
                raw + after + raw_at + raw_more,
                packed + after + packed_at + packed_more,
                inside & (expert + (2 * GROUPS if AHEAD else GROUPS) < E),
                UNPACK,
            )
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
def _four(
    upper,
    lower,
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
        a, c = _pair(upper, first, second, EVEN, PAD)
        b, d = _pair(lower, first, second, EVEN, PAD)
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
    ITEMS: tl.constexpr,  # a program: two words of a row and of the one 16 positions below
    WIDE: tl.constexpr,  # half of WORDS, up to a power of two
    LANES: tl.constexpr,  # threads a program
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
    # A unit is half a block: the other half is moved along.
    block, line, pair, beyond, here = _items(member, width, N // 2, ITEMS, WIDE, 16, LANES)
    upper_row = _rows(rows_ptr, block, line, here, 32, IN_ORDER)
    lower_row = _rows(rows_ptr, block, line + 16, here, 32, IN_ORDER)
    RAW: tl.constexpr = 1 if EVEN else 2
    pitch = width if EVEN else WORDS
    second = here & ((pair + beyond) * 2 + 1 < WORDS)
    raw_more, packed_more = beyond * RAW, beyond * 64
    packed_at = (block * width + pair) * 64 + line
    raw_size = tl.cast(N, tl.int64) * pitch
    packed_size = tl.cast(N, tl.int64) * width * 2
    raw, packed = raw_ptr + group * raw_size, packed_ptr + group * packed_size
    upper_at, lower_at = upper_row * pitch + pair * RAW, lower_row * pitch + pair * RAW
    a, b, c, d = _four(
        raw + upper_at + raw_more,
        raw + lower_at + raw_more,
        packed + packed_at + packed_more,
        here,
        second,
        UNPACK,
        EVEN,
        PAD,
    )
    next_a, next_b, next_c, next_d = a, b, c, d
    raw_step, packed_step = raw_size * GROUPS, packed_size * GROUPS
    if MEET:
        _arrive(counters_ptr + group)
        if AHEAD:
            there = group + GROUPS < E
            next_a, next_b, next_c, next_d = _four(
                raw + raw_step + upper_at + raw_more,
                raw + raw_step + lower_at + raw_more,
                packed + packed_step + packed_at + packed_more,
                here & there,
                second & there,
                UNPACK,
                EVEN,
                PAD,
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
        # Turning four words over their diagonal twice gives them back.
        w0, w1 = _column(a, b, c, d, 0), _column(a, b, c, d, 1)
        w2, w3 = _column(a, b, c, d, 2), _column(a, b, c, d, 3)
        if UNPACK:
            _store_pair(raw + upper_at + raw_more, w0, w2, here, second, EVEN)
            _store_pair(raw + lower_at + raw_more, w1, w3, here, second, EVEN)
        else:
            out = packed + packed_at + packed_more
            tl.store(out, w0, mask=here)
            tl.store(out + 16, w1, mask=here)
            tl.store(out + 32, w2, mask=here)
            tl.store(out + 48, w3, mask=here)
        raw += raw_step
        packed += packed_step
        if MEET:
            a, b, c, d = next_a, next_b, next_c, next_d
            raw_after = raw_step if AHEAD else raw_step * 0
            packed_after = packed_step if AHEAD else packed_step * 0
            there = expert + (2 * GROUPS if AHEAD else GROUPS) < E
            next_a, next_b, next_c, next_d = _four(
                raw + raw_after + upper_at + raw_more,
                raw + raw_after + lower_at + raw_more,
                packed + packed_after + packed_at + packed_more,
                here & there,
                second & there,
                UNPACK,
                EVEN,
                PAD,
            )
            if not AHEAD:
                a, b, c, d = next_a, next_b, next_c, next_d
                _arrive(counters_ptr + group)


@triton.jit
def _two(raw, packed, first, second, UNPACK: tl.constexpr, EVEN: tl.constexpr):
    """The two words of an item."""
    if UNPACK:
        a = tl.load(packed, mask=first)
        b = tl.load(packed + 32, mask=second)
    else:
        a, b = _pair(raw, first, second, EVEN, 0)
    return a, b


@triton.jit
def move_n32k4(
    raw_ptr,  # [E, N, WORDS] int32: rows of four scales; as int64 if EVEN
    packed_ptr,  # [E, N/32, WORDS, 32] int32; may be raw_ptr
    rows_ptr,  # [N] int32: raw row at each packed position
    counters_ptr,  # [GROUPS] int32 zeros if MEET
    E,
    N,
    WORDS,
    MEMBERS,
    GROUPS,
    ITEMS: tl.constexpr,  # a program: two words of a row
    WIDE: tl.constexpr,  # half of WORDS, up to a power of two
    LANES: tl.constexpr,  # threads a program
    IN_ORDER: tl.constexpr,
    UNPACK: tl.constexpr,
    MEET: tl.constexpr,
    AHEAD: tl.constexpr,  # the next expert is read while one waits to write this one, else after the write
    EVEN: tl.constexpr,  # WORDS is even
    PAD: tl.constexpr,  # not used: no column is padded
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    width = (WORDS + 1) // 2
    block, line, pair, beyond, here = _items(member, width, N, ITEMS, WIDE, 32, LANES)
    row = _rows(rows_ptr, block, line, here, 32, IN_ORDER)
    RAW: tl.constexpr = 1 if EVEN else 2
    pitch = width if EVEN else WORDS
    second = here & ((pair + beyond) * 2 + 1 < WORDS)
    raw_more, packed_more = beyond * RAW, beyond * 64
    raw_at = row * pitch + pair * RAW
    packed_at = (block * WORDS + pair * 2) * 32 + line
    raw_size, packed_size = tl.cast(N, tl.int64) * pitch, tl.cast(N, tl.int64) * WORDS
    raw, packed = raw_ptr + group * raw_size, packed_ptr + group * packed_size
    raw_step, packed_step = raw_size * GROUPS, packed_size * GROUPS
    a, b = _two(
        raw + raw_at + raw_more, packed + packed_at + packed_more, here, second, UNPACK, EVEN
    )
    next_a, next_b = a, b
    if MEET:
        _arrive(counters_ptr + group)
        if AHEAD:
            there = group + GROUPS < E
            next_a, next_b = _two(
                raw + raw_step + raw_at + raw_more,
                packed + packed_step + packed_at + packed_more,
                here & there,
                second & there,
                UNPACK,
                EVEN,
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
        if UNPACK:
            _store_pair(raw + raw_at + raw_more, a, b, here, second, EVEN)
        else:
            tl.store(packed + packed_at + packed_more, a, mask=here)
            tl.store(packed + packed_at + packed_more + 32, b, mask=second)
        raw += raw_step
        packed += packed_step
        if MEET:
            a, b = next_a, next_b
            raw_after = raw_step if AHEAD else raw_step * 0
            packed_after = packed_step if AHEAD else packed_step * 0
            there = expert + (2 * GROUPS if AHEAD else GROUPS) < E
            next_a, next_b = _two(
                raw + raw_after + raw_at + raw_more,
                packed + packed_after + packed_at + packed_more,
                here & there,
                second & there,
                UNPACK,
                EVEN,
            )
            if not AHEAD:
                a, b = next_a, next_b
                _arrive(counters_ptr + group)
