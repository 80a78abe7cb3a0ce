"""The Triton kernels of ``device_moves`` for E8M0 scales; ``_device_kernels`` says how they are made."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_aiter_moe.contract._device_kernels import arrive, items_of, raw_rows, wait_for


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
    block, line, pair, beyond, here = items_of(member, width, N // 2, ITEMS, WIDE, 16, LANES)
    upper_row = raw_rows(rows_ptr, block, line, here, 32, IN_ORDER)
    lower_row = raw_rows(rows_ptr, block, line + 16, here, 32, IN_ORDER)
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
        arrive(counters_ptr + group)
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
            wait_for(counters_ptr + group, arrivals)
            if AHEAD:  # as in move_tiles
                arrive(counters_ptr + group)
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
                arrive(counters_ptr + group)


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
):
    member = tl.program_id(0) % MEMBERS
    group = tl.program_id(0) // MEMBERS
    width = (WORDS + 1) // 2
    block, line, pair, beyond, here = items_of(member, width, N, ITEMS, WIDE, 32, LANES)
    row = raw_rows(rows_ptr, block, line, here, 32, IN_ORDER)
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
        arrive(counters_ptr + group)
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
            wait_for(counters_ptr + group, arrivals)
            if AHEAD:  # as in move_tiles
                arrive(counters_ptr + group)
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
                arrive(counters_ptr + group)
