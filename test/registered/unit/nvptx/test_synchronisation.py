"""Warps that wait for each other in the PTX interpreter: barriers, mbarriers, spins, deadlocks; and where warps go."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.nvptx.errors import DeadlockError, ExecutionError, PtxError
from sglang_aiter_moe.testing.ptx_snippets import module, run_module
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

START = """mov.u32 %r0, %tid.x; ld.param.u64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
mad.lo.u32 %r3, %r1, %r2, %r0; mad.wide.u32 %rd2, %r3, 4, %rd1; mov.b32 %r4, smem; shl.b32 %r5, %r0, 2;
add.s32 %r6, %r4, %r5; shr.u32 %r7, %r0, 5; and.b32 %r8, %r0, 31;
"""
"""%rd2: a word of the output a thread; %r6: a word of shared memory a thread; %r7, %r8: warp and lane."""
STORE = "st.global.b32 [%rd2], %r20;"


def execute(lines: str, *, threads: int = 64, ctas: int = 1, **options) -> np.ndarray:
    """The output words [ctas, threads]."""
    memory = Memory()
    out = memory.place(np.zeros(ctas * threads, np.uint32), "out")
    options.setdefault("shared_bytes", 4096)
    run_module(
        module(START + lines + "\nret;", 1, threads=threads), [out], memory, (ctas, 1, 1), **options
    )
    return memory.read(out, np.uint32, (ctas, threads))


def test_a_barrier_between_a_store_and_a_load_of_another_warp():
    """Warp 0 has far to go before it stores; warp 1 reads what it stores."""
    slow = """setp.ge.u32 %p1, %r0, 32; @%p1 bra MEET; mov.b32 %r20, 0;
    L: add.s32 %r20, %r20, 1; setp.lt.s32 %p2, %r20, 9; @%p2 bra L; st.shared.b32 [%r6], %r0;
    MEET: bar.sync 0; @%p1 st.shared.b32 [%r6], %r0; bar.sync 0;"""
    swap = "xor.b32 %r21, %r6, 128; ld.shared.b32 %r20, [%r21];"
    out = execute(slow + swap + STORE)
    assert out[0].tolist() == [*range(32, 64), *range(32)]


def test_named_barriers_hold_only_their_threads():
    """Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2, each after as many turns as its number says."""
    lines = """st.shared.b32 [%r6], %r0; shr.u32 %r9, %r7, 1; add.s32 %r10, %r9, 1; mov.b32 %r21, 0;
    L: add.s32 %r21, %r21, 1; setp.le.u32 %p1, %r21, %r7; @%p1 bra L;
    barrier.sync %r10, 64; xor.b32 %r22, %r6, 128; ld.shared.b32 %r20, [%r22];"""
    out = execute(lines + STORE, threads=128)
    assert out[0].tolist() == [*range(32, 64), *range(32), *range(96, 128), *range(64, 96)]


def test_arrive_does_not_wait():
    lines = """setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER; st.shared.b32 [%r6], %r0; bar.arrive 3, 64;
    mov.b32 %r20, 7; bra.uni END;
    CONSUMER: bar.sync 3, 64; ld.shared.b32 %r20, [%r6+-128]; END:"""
    out = execute(lines + STORE)
    assert out[0].tolist() == [7] * 32 + list(range(32))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("setp.ge.u32 %p1, %r0, 32; @%p1 bra E; bar.sync 0; E:",
         r"barrier 0 of CTA 0 of the batch has 32 of 64 threads"),
        ("add.s32 %r9, %r7, 1; barrier.sync %r9, 64;", "barrier 1 .* barrier 2"),
        ("setp.eq.u32 %p1, %r0, 0; @%p1 bra E; bar.sync 0; E: bar.sync 1;", "a part of a warp, at an aligned barrier"),
        ("setp.eq.u32 %p1, %r0, 0; @%p1 bra E; bar.warp.sync -1; E: bar.sync 1;",
         "the membership mask names do not come"),
        ("mov.b32 %r9, 0; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r4], 2; bar.sync 0;"
         "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];"
         "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r9; @!%p2 bra W;",
         "parity 0 .* lacks 1 of 2 arrivals and 0 bytes"),
        ("mov.b32 %r9, 0; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r4], 1; bar.sync 0;"
         "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 64;"
         "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r9; @!%p2 bra W;", "0 of 1 arrivals and 64 bytes"),
        ("W: ld.acquire.gpu.global.b32 %r9, [%rd2]; setp.eq.b32 %p1, %r9, 0; @%p1 bra W;", "spins on a value"),
    ],
)  # fmt: skip
def test_deadlocks_say_who_waits_for_what(lines, message):
    with pytest.raises(DeadlockError, match=message) as error:
        execute(lines)
    assert "warps [" in str(error.value)
    assert error.value.line > 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("add.s32 %r9, %r7, 1; mul.lo.u32 %r9, %r9, 32; barrier.sync 1, %r9;", r"used with \[32, 64\] threads"),
        ("bar.sync 0, 32; bar.sync 0, 32;", "gets 64 threads, and expects 32"),
        ("bar.sync 0, 33;", "given 33 threads"),
        ("bar.sync 16;", "named barrier"),
        ("mov.b32 %r9, 0; mbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r9;", "no mbarrier.init made it"),
        ("setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r4], 1; bar.sync 0;"
         "mbarrier.arrive.shared::cta.b64 _, [%r4]; mbarrier.arrive.shared::cta.b64 _, [%r4];", "."),
        ("setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r4], 0;", "initialised for 0 arrivals"),
    ],
)  # fmt: skip
def test_barriers_used_wrong(lines, message):
    if message == ".":  # 1 arrival a phase: 64 arrivals turn it 64 times, which is allowed
        execute(lines)
        return
    with pytest.raises(ExecutionError, match=message):
        execute(lines)


RING = """mov.b32 %r30, 0; mov.b32 %r31, 0; mov.b32 %r20, 0; setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r4], 32; @%p1 mbarrier.init.shared::cta.b64 [%r4+8], 32; bar.sync 0;
setp.ge.u32 %p2, %r0, 32; @%p2 bra CONSUMER;
PRODUCE: xor.b32 %r32, %r31, 1;
{ .reg .pred done; W: mbarrier.try_wait.parity.shared.b64 done, [%r4+8], %r32; @!done bra.uni W; }
mad.lo.u32 %r33, %r30, 100, %r0; st.shared.b32 [%r6+64], %r33; mbarrier.arrive.shared::cta.b64 _, [%r4];
xor.b32 %r31, %r31, 1; add.s32 %r30, %r30, 1; setp.lt.s32 %p3, %r30, 5; @%p3 bra PRODUCE; bra.uni END;
CONSUMER:
{ .reg .pred done; W: mbarrier.try_wait.parity.shared.b64 done, [%r4], %r31; @!done bra.uni W; }
ld.shared.b32 %r33, [%r6+-64]; add.s32 %r20, %r20, %r33; mbarrier.arrive.shared::cta.b64 _, [%r4+8];
xor.b32 %r31, %r31, 1; add.s32 %r30, %r30, 1; setp.lt.s32 %p3, %r30, 5; @%p3 bra CONSUMER;
END:"""


def test_a_ring_of_one_slot():
    """Five values a lane go from warp 0 to warp 1 through one word, with a full and an empty mbarrier."""
    out = execute(RING + STORE)
    assert out[0, 32:].tolist() == [100 * 10 + 5 * lane for lane in range(32)]


@pytest.mark.parametrize("ctas", [1, 5])
def test_rings_of_many_ctas_side_by_side(ctas):
    assert (execute(RING + STORE, ctas=ctas)[:, 32:] == execute(RING + STORE)[0, 32:]).all()


@pytest.mark.parametrize(
    "wrong", [("xor.b32 %r32, %r31, 1;", "mov.b32 %r32, %r31;"), ("[%r4+8], 32", "[%r4+8], 33")]
)
def test_a_wrong_parity_or_count_is_a_deadlock(wrong):
    with pytest.raises(DeadlockError, match="parity"):
        execute(RING.replace(*wrong) + STORE)


def test_an_mbarrier_is_made_again_only_after_it_was_invalidated():
    one = """setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
    @%p1 mbarrier.inval.shared::cta.b64 [%r4];"""
    execute(one + "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;")
    with pytest.raises(ExecutionError, match=r"no mbarrier\.init"):
        execute(one + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];")


ONCE = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r4], 1; bar.sync 0;"
WAITED = "mov.b32 %r9, 0; W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r9; @!%p2 bra W; bar.sync 0;"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("mbarrier.init.shared::cta.b64 [%r4], 1;", "initialised, and there is one"),
        (ONCE + "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;", "initialised, and there is one"),
        (ONCE + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];" + WAITED
         + "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;", "initialised, and there is one"),
        (ONCE + "@%p1 st.shared.b32 [%r4], %r0;", "is stored to, which is an mbarrier"),
        (ONCE + "@%p1 st.shared.b32 [%r4+4], %r0;", "is stored to, which is an mbarrier"),
        (ONCE + "@%p1 ld.shared.b32 %r20, [%r4];", "is read, which is an mbarrier"),
        (ONCE + "@%p1 red.shared.add.u32 [%r4], 1;", "which is an mbarrier"),
        (ONCE + "@%p1 cp.async.ca.shared.global [%r4], [%rd2], 4;", "is given to a copy, which is an mbarrier"),
        ("cp.async.ca.shared.global [%r6], [%rd2], 4; st.shared.b32 [%r6], %r0;", "while a copy to it is in flight"),
        ("setp.eq.u32 %p1, %r0, 0; cp.async.ca.shared.global [%r6], [%rd2], 4;"
         "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;", "while a copy to it is in flight"),
    ],
)  # fmt: skip
def test_bytes_of_an_mbarrier_or_in_flight_are_not_for_others(lines, message):
    with pytest.raises(ExecutionError, match=message):
        execute(lines)
    with pytest.raises(ExecutionError, match=message):
        execute(lines, ctas=3)


@pytest.mark.parametrize(
    "line",
    ["mbarrier.init.shared::cta.b64 [%r4], 1;", "mbarrier.inval.shared::cta.b64 [%r4+8];",
     "mbarrier.arrive.shared::cta.b64 _, [%r4+8];", "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r4+8], 4;",
     "mbarrier.try_wait.parity.shared.b64 %p4, [%r4+8], 0;"],
)  # fmt: skip
def test_who_uses_an_mbarrier_wrong_is_named(line):
    with pytest.raises(ExecutionError) as error:
        execute(ONCE + "setp.eq.u32 %p3, %r0, 37; @%p3 " + line, ctas=2)
    assert (error.value.warp, error.value.lane) == (1, 5)


def test_bytes_of_an_mbarrier_that_ended_are_ordinary():
    ended = ONCE + "bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%r4]; bar.sync 0;"
    out = execute(ended + "st.shared.b32 [%r6], %r0; ld.shared.b32 %r20, [%r6];" + STORE)
    assert out[0].tolist() == list(range(64))
    with pytest.raises(ExecutionError, match="nothing has written"):
        execute(ended + "ld.shared.b32 %r20, [%r4];" + STORE)


GRID = """setp.ne.u32 %p1, %r0, 0; @%p1 bra MET; red.release.gpu.global.add.u32 [%rd1], 1;
WAIT: ld.acquire.gpu.global.u32 %r9, [%rd1]; setp.lt.u32 %p2, %r9, 6; @%p2 bra WAIT; MET: bar.sync 0;
ld.global.b32 %r20, [%rd1]; setp.eq.u32 %p3, %r3, 0; @!%p3 st.global.b32 [%rd2], %r20;"""


def test_a_grid_meets_at_a_counter():
    out = execute(GRID, ctas=6, cooperative=True)
    assert set(out.reshape(-1).tolist()) == {6}


def test_a_grid_that_does_not_run_at_once_never_meets():
    with pytest.raises(DeadlockError, match="spins on a value in global memory"):
        execute(GRID, ctas=6, lockstep=2)


def test_lanes_take_as_many_turns_as_they_want():
    lines = """mov.b32 %r20, 0; L: setp.ge.u32 %p1, %r20, %r8; @%p1 bra D; add.s32 %r20, %r20, 1; bra.uni L;
    D: shfl.sync.bfly.b32 %r20, %r20, 1, 31, -1;"""
    assert execute(lines + STORE)[0].tolist() == [i ^ 1 for i in range(32)] * 2


def test_brx_goes_by_the_table():
    lines = """and.b32 %r9, %r8, 3; T: .branchtargets A, B, C; brx.idx %r9, T;
    A: mov.b32 %r20, 10; bra.uni E; B: mov.b32 %r20, 20; bra.uni E; C: mov.b32 %r20, 30; E:"""
    with pytest.raises(ExecutionError, match=r"brx.idx 3 of 3 targets") as error:
        execute(lines + STORE)
    assert error.value.lane == 3
    out = execute(
        lines.replace("and.b32 %r9, %r8, 3", "setp.gt.u32 %p1, %r8, 1; selp.b32 %r9, 2, %r8, %p1")
        + STORE
    )
    assert out[0].tolist() == ([10, 20] + [30] * 30) * 2


def test_lanes_that_return_early():
    out = execute("setp.lt.u32 %p1, %r8, 7; mov.b32 %r20, 3; @%p1 ret; " + STORE)
    assert out[0].tolist() == ([0] * 7 + [3] * 25) * 2


def test_a_warp_meets_at_bar_warp_sync():
    """Lane 0 waits for the other warp; the other lanes may not pass without it."""
    lines = """mov.b32 %r9, 0; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r4], 1; bar.sync 0;
    setp.ge.u32 %p2, %r0, 32; @%p2 bra OTHER; setp.ne.u32 %p3, %r8, 0; @%p3 bra MEET;
    W: mbarrier.try_wait.parity.shared.b64 %p4, [%r4], %r9; @!%p4 bra W;
    ld.shared.b32 %r21, [%r4+64]; st.shared.b32 [%r4+68], %r21;
    MEET: bar.warp.sync -1; ld.shared.b32 %r20, [%r4+68]; bra.uni END;
    OTHER: setp.eq.u32 %p5, %r8, 0; @%p5 st.shared.b32 [%r4+64], 42; @%p5 mbarrier.arrive.shared::cta.b64 _, [%r4];
    mov.b32 %r20, 1; END:"""
    assert execute(lines + STORE)[0].tolist() == [42] * 32 + [1] * 32


def exchange(line: str, **options) -> list[int]:
    return execute(line + STORE, threads=32, **options)[0].tolist()


def test_shuffles():
    lane = np.arange(32)
    assert exchange("shfl.sync.bfly.b32 %r20, %r8, 5, 31, -1;") == (lane ^ 5).tolist()
    assert exchange("shfl.sync.idx.b32 %r20, %r8, 3, 31, -1;") == [3] * 32
    up = [i - 4 if i >= 4 else i for i in range(32)]
    assert exchange("shfl.sync.up.b32 %r20, %r8, 4, 0, -1;") == up
    down = [i + 4 if i + 4 < 32 else i for i in range(32)]
    assert exchange("shfl.sync.down.b32 %r20, %r8, 4, 31, -1;") == down
    # Segments of 8: the mask in bits 8 and up keeps a lane in its own.
    inside = "shfl.sync.down.b32 %r21|%p1, %r8, 4, 6175, -1; selp.b32 %r20, %r21, 99, %p1;"
    assert exchange(inside) == [i + 4 if i % 8 < 4 else 99 for i in range(32)]


def test_reductions_votes_and_election():
    assert exchange("sub.s32 %r9, 3, %r8; redux.sync.max.s32 %r20, %r9, -1;") == [3] * 32
    assert exchange("redux.sync.add.u32 %r20, %r8, -1;") == [496] * 32
    assert exchange("redux.sync.or.b32 %r20, %r8, -1;") == [31] * 32
    odd = "and.b32 %r9, %r8, 1; setp.eq.u32 %p1, %r9, 1;"
    assert exchange(odd + "vote.sync.ballot.b32 %r20, %p1, -1;") == [0xAAAAAAAA] * 32
    assert exchange(odd + "vote.sync.any.pred %p2, %p1, -1; selp.b32 %r20, 1, 0, %p2;") == [1] * 32
    assert exchange(odd + "vote.sync.all.pred %p2, %p1, -1; selp.b32 %r20, 1, 0, %p2;") == [0] * 32
    assert exchange("elect.sync %r9|%p1, -1; selp.b32 %r20, 7, %r9, %p1;") == [7] + [0] * 31
    assert exchange(odd + "mov.b32 %r20, 0; @%p1 activemask.b32 %r20;") == [0, 0xAAAAAAAA] * 16


def test_lanes_that_take_part_without_being_there():
    some = "setp.lt.u32 %p1, %r8, 4; mov.b32 %r20, 0; "
    with pytest.raises(ExecutionError, match="names lanes that have ended"):
        exchange(some + "@%p1 shfl.sync.bfly.b32 %r20, %r8, 1, 31, -1;")
    with pytest.raises(ExecutionError, match="a lane that does not take part"):
        exchange(some + "@%p1 shfl.sync.bfly.b32 %r20, %r8, 4, 31, 15;")
    got = exchange(some + "@%p1 redux.sync.add.s32 %r20, %r8, 15;")
    assert got == [6] * 4 + [0] * 28


def test_membership_masks():
    """Lanes with different masks exchange among their own; no lane acts under a mask that does not name it."""
    halves = "setp.lt.u32 %p1, %r8, 16; selp.b32 %r9, 0xffff, 0xffff0000, %p1;"
    assert exchange(halves + "redux.sync.add.u32 %r20, %r8, %r9;") == [120] * 16 + [376] * 16
    low, high = 0xAAAA, 0xAAAA0000
    odd = "and.b32 %r10, %r8, 1; setp.eq.u32 %p2, %r10, 1;"
    ballot = "vote.sync.ballot.b32 %r20, %p2, %r9;"
    assert exchange(halves + odd + ballot) == [low] * 16 + [high] * 16
    assert (
        exchange(halves + "shfl.sync.bfly.b32 %r20, %r8, 1, 31, %r9;")
        == (np.arange(32) ^ 1).tolist()
    )
    elect = "elect.sync %r11|%p3, %r9; selp.b32 %r20, 7, 0, %p3;"
    assert exchange(halves + elect) == ([7] + [0] * 15) * 2
    for line in ("redux.sync.add.u32 %r20, %r8, 0xffff;", "bar.warp.sync 0xffff;", "elect.sync %r9|%p1, 0xffff;",
                 "shfl.sync.bfly.b32 %r20, %r8, 1, 31, 0xffff;", "vote.sync.any.pred %p2, %p2, 0xffff;"):  # fmt: skip
        with pytest.raises(ExecutionError, match="does not name it") as error:
            exchange("setp.lt.u32 %p2, %r8, 3;" + line)
        assert error.value.lane == 16
    with pytest.raises(ExecutionError, match=r"names do not come|names lanes that have ended"):
        exchange(halves.replace("0xffff,", "-1,") + "redux.sync.add.u32 %r20, %r8, %r9;")


def test_lanes_that_come_by_another_way_are_waited_for():
    """Lanes 4 and up jump over code that the others spin in, and meet them at the shuffle."""
    lines = """setp.ge.u32 %p1, %r8, 4; @%p1 bra MEET;
    W: ld.acquire.gpu.global.b32 %r9, [%rd1]; setp.eq.b32 %p2, %r9, 0; @%p2 bra W;
    MEET: bar.warp.sync -1; shfl.sync.idx.b32 %r20, %r8, 3, 31, -1;"""
    start = (
        "setp.lt.u32 %p3, %r0, 32; @%p3 bra FIRST; mov.b32 %r20, 1; st.global.b32 [%rd1], %r20; "
    )
    start += "bra.uni END; FIRST: "
    assert execute(start + lines + "END:" + STORE)[0].tolist() == [3] * 32 + [1] * 32


def test_special_registers():
    lines = "mov.u32 %r20, %ctaid.x; mov.u32 %r21, %nctaid.x; mad.lo.u32 %r20, %r20, 100, %r21; mov.u32 %r22, %laneid;"
    out = execute(lines + "mad.lo.u32 %r20, %r22, 1000, %r20;" + STORE, ctas=3)
    lane = np.arange(64) % 32
    assert np.array_equal(out, lane * 1000 + 100 * np.arange(3)[:, None] + 3)
    clocks = "mov.u32 %r21, %clock; mov.u32 %r22, %clock; setp.gt.u32 %p1, %r22, %r21; selp.b32 %r20, 1, 0, %p1;"
    assert execute(clocks + STORE)[0].all()


def test_a_launch_that_does_not_end():
    with pytest.raises(ExecutionError, match="has not ended"):
        execute("L: bra.uni L;", max_instructions=1000)


def test_launches_of_a_wrong_size():
    with pytest.raises(ExecutionError, match="shared memory"):
        execute("", shared_bytes=300000)
    with pytest.raises(ExecutionError, match="a CTA of"):
        execute("", block=(32, 1, 1))


@pytest.mark.parametrize(
    "line",
    ["mbarrier.test_wait.shared.b64 %p1, [%r4], %rd1;", "mbarrier.arrive.shared.b64 %rd5, [%r4];",
     "barrier.red.popc.u32 %r9, 0, %p1;",
     "call foo;", "fence.weird;", "match.any.sync.b32 %r9, %r8, -1;"],
)  # fmt: skip
def test_other_forms_are_refused(line):
    with pytest.raises(PtxError, match="not modelled"):
        execute(line)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
