"""The Triton kernels of ``device_moves`` for weights, and what those for scales (``_device_scale_kernels``) share.

All have the same shape. An item is what one thread moves at a time; items of a unit (a tile of 16 rows, a block of
32) are numbered so that 32 neighbours are 8 rows by 4 columns: whole sectors of memory on the raw side and on
the packed one, without a detour through shared memory. A program belongs to one expert at a time, holds its items
in registers, and takes every GROUPS-th expert.

Columns are counted up to a power of two, so that a thread's items are a constant number of bytes apart and one
address serves them all: what a program holds in registers is bytes, not addresses, and more programs fit on a
processor. Those that wait for each other gain by that. Weights moved by programs apart do not, and
``move_tiles_apart`` counts the columns as they are (docs/performance.md has both).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr):
    """Says that this program has read its part of an expert."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait_for(counter_ptr, arrivals):
    """Waits for ``arrivals`` arrivals; all programs that make them run at the same time."""
    seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    while seen < arrivals:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def items_of(
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
def raw_rows(rows_ptr, unit, row, inside, ROWS: tl.constexpr, IN_ORDER: tl.constexpr):
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
def move_tiles_apart(
    raw_ptr,  # [E, N, PIECES, 4] int32: rows of pieces of 16 bytes
    packed_ptr,  # [E, N/16, PIECES, 16, 4] int32; may be raw_ptr if tiles are where their rows were
    rows_ptr,  # [N] int32: raw row at each packed row position
    E,
    N,
    PIECES,
    MEMBERS,
    GROUPS,
    STEP,  # pieces a program
    ITEMS: tl.constexpr,  # STEP, up to a power of two
    IN_ORDER: tl.constexpr,
    UNPACK: tl.constexpr,
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    i = tl.arange(0, ITEMS)
    item = member * STEP + i
    here = (i < STEP) & (item < N * PIECES)
    above = item // 8
    piece = above % PIECES
    above = above // PIECES
    tile, line = above // 2, (above % 2) * 8 + item % 8
    row = raw_rows(rows_ptr, tile, line, here, 16, IN_ORDER)
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
    for expert in range(group, E, GROUPS):
        tl.debug_barrier()  # every thread has read before one overwrites it
        tl.store(target + expert * size + target_at, content, mask=inside)


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
    tile, line, piece, beyond, here = items_of(member, PIECES, N, ITEMS, WIDE, 16, LANES)
    row = raw_rows(rows_ptr, tile, line, here, 16, IN_ORDER)
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
        arrive(counters_ptr + group)
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
            wait_for(counters_ptr + group, arrivals)
            if (
                AHEAD
            ):  # for the next expert, before this one goes out: all have arrived for this one
                arrive(counters_ptr + group)
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
                arrive(counters_ptr + group)
