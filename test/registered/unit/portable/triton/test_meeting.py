"""The meeting of the one-launch form's programs (``whole_meeting.meet``), as a model: every interleaving of two
launches that share a counter, as they must not, and of the clean launch that follows.

A launch's program reads, comes, waits and goes. In a clean launch nobody may go before all have come, and in none may
anybody wait for ever.
"""

from __future__ import annotations

import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

MEETING = 4
"""The kernel has 1024."""
WRAP = MEETING * 8
"""The kernel has 2**32."""


class Counted:
    """As the kernel does it: memory is one counter; a program's own number is its value before it came."""

    @staticmethod
    def read(memory, n):
        return memory[0]

    @staticmethod
    def come(memory, p, n):
        return ((memory[0] + (MEETING + 1 - n if p == 0 else 1)) % WRAP,)

    @staticmethod
    def waits(memory, before, n):
        return (memory[0] ^ before) < MEETING

    @staticmethod
    def go(memory, before, n):
        return memory


class Targeted:
    """As it was: a counter, and beside it the target of the launch before, which the next one starts from."""

    @staticmethod
    def read(memory, n):
        return (memory[1] + n) % WRAP

    @staticmethod
    def come(memory, p, n):
        return ((memory[0] + 1) % WRAP, memory[1])

    @staticmethod
    def waits(memory, target, n):
        return (memory[0] - target) % WRAP >= WRAP // 2

    @staticmethod
    def go(memory, target, n):
        return (memory[0], target)


READS, COMES, WAITS, GONE = range(4)


def outcomes(protocol, memory: tuple, launches: tuple[int, ...]) -> tuple[set[tuple], bool, bool]:
    """All interleavings: what memory holds in the end, whether somebody went before all of its launch had come, and
    whether some were left waiting."""
    programs = tuple((launch, p) for launch, n in enumerate(launches) for p in range(n))
    start = (memory, ((READS, 0),) * len(programs))
    seen, stack, ends, early, stuck = {start}, [start], set(), False, False
    while stack:
        memory, states = stack.pop()
        moves = []
        for i, (launch, p) in enumerate(programs):
            at, mine = states[i]
            n = launches[launch]
            if at == READS:
                moves.append((i, memory, (COMES, protocol.read(memory, n))))
            elif at == COMES:
                moves.append((i, protocol.come(memory, p, n), (WAITS, mine)))
            elif at == WAITS and not protocol.waits(memory, mine, n):
                behind = [s for s, q in zip(states, programs, strict=True) if q[0] == launch]
                early |= any(where in (READS, COMES) for where, _ in behind)
                moves.append((i, protocol.go(memory, mine, n), (GONE, 0)))
        if not moves:
            if all(where == GONE for where, _ in states):
                ends.add(memory)
            else:
                stuck = True
        for i, after, state in moves:
            following = (after, (*states[:i], state, *states[i + 1 :]))
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return ends, early, stuck


COUNTERS = [0, MEETING, WRAP // 2 - MEETING, WRAP - MEETING]


@pytest.mark.parametrize("start", COUNTERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_clean_launch_waits_for_all_and_ends(start, n):
    """At 0, at half of what the counter holds and where it wraps."""
    ends, early, stuck = outcomes(Counted, (start,), (n,))
    assert ends == {((start + MEETING) % WRAP,)} and not early and not stuck


@pytest.mark.parametrize("start", [0, WRAP - MEETING])
@pytest.mark.parametrize("launches", [(2, 2), (2, 3), (3, 2), (1, 3)])
def test_two_launches_at_once_end_and_leave_a_counter_that_works(start, launches):
    """They may let each other pass (their scratch memory is shared, too); what follows is as if they had not been."""
    ends, _, stuck = outcomes(Counted, (start,), launches)
    assert ends == {((start + 2 * MEETING) % WRAP,)} and not stuck
    for end in ends:
        for n in (2, 3):
            _, early, stuck = outcomes(Counted, end, (n,))
            assert not early and not stuck


def test_what_it_was_before_stays_broken():
    """The model sees it: after two launches at once the next one's programs no longer wait for each other."""
    _, early, stuck = outcomes(Targeted, (0, 0), (2,))
    assert not early and not stuck
    ends, _, _ = outcomes(Targeted, (0, 0), (2, 2))
    assert any(outcomes(Targeted, end, (2,))[1] for end in ends)


def test_programs_that_share_a_launch_may_meet_another():
    """Two at once do pass each other: the rule that graphs of a stream must not run at the same time stays."""
    assert outcomes(Counted, (0,), (2, 2))[1]


def test_the_kernel_is_the_model():
    """Its sum is a power of two that all programs of a GPU fit, and its instructions are those of ``Counted``."""
    pytest.importorskip("triton")
    from sglang_aiter_moe.portable.triton.hopper import whole_meeting

    meeting = whole_meeting.MEETING.value
    assert meeting & (meeting - 1) == 0 and meeting >= 256 and 2**32 % meeting == 0
    text = whole_meeting.MEET.value
    assert "red.release.gpu.global.add.u32 [$1], $3;" in text
    waits = f"ld.acquire.gpu.global.u32 t, [$1]; xor.b32 t, t, $2;setp.lt.u32 p, t, {meeting}; @p bra WAIT;"
    assert waits in text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
