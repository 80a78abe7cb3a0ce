"""Shared memory that two warps use with nothing between them: reported, whatever the order they ran in."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.nvptx.errors import ExecutionError
from sglang_aiter_moe.nvptx.tensor_map import TensorMap
from sglang_aiter_moe.testing.ptx_snippets import module, run_module
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

START = """mov.u32 %r0, %tid.x; ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd2, %r0, 16, %rd1; mov.b32 %r4, smem;
mad.lo.u32 %r6, %r0, 16, %r4; xor.b32 %r7, %r6, 512; setp.ge.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 0;
mov.b32 %r9, 0; and.b32 %r8, %r0, 31; mad.lo.u32 %r5, %r8, 16, %r4;
"""
"""%r6: 16 bytes a thread; %r7: those of the same lane of the other warp; %r5: of the lane in warp 0."""
INIT = "@%p2 mbarrier.init.shared::cta.b64 [%r4+2048], 32; bar.sync 0;"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [%r4+2048], %r9; @!%p3 bra W;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r4+2048];"


def execute(lines: str, **options) -> np.ndarray:
    """The 64 x 4 words of global memory that copies read, afterwards; parameter 1 is a tensor map of them."""
    memory = Memory()
    given = memory.place(np.arange(64 * 4, dtype=np.uint32), "given")
    tensor = TensorMap(given, 4, (32, 8), (128,), (32, 8), (1, 1), 0)
    where = memory.place(np.frombuffer(tensor.encode(), np.uint8).copy(), "map")
    run_module(
        module(START + lines + "\nret;", 2, threads=64),
        [given, where],
        memory,
        shared_bytes=4096,
        **options,
    )
    return memory.read(given, np.uint32, 64 * 4)


def race(lines: str, message: str = "with no barrier between the two", **options) -> ExecutionError:
    with pytest.raises(ExecutionError, match=message) as error:
        execute(lines, **options)
    execute(lines, checked=False, **options)
    return error.value


LOAD, STORE, OTHERS = (
    "ld.shared.b32 %r10, [%r6];",
    "st.shared.b32 [%r6], %r0;",
    "ld.shared.b32 %r10, [%r7];",
)


def test_a_load_of_what_another_warp_stored():
    execute(STORE + LOAD)
    execute(STORE + "bar.sync 0;" + OTHERS)
    error = race(STORE + OTHERS)
    assert (error.opcode, error.warp, error.lane) == ("ld.shared.b32", 0, 0)
    race("bar.sync 0;" + STORE + "bar.warp.sync -1;" + OTHERS)


def test_a_store_over_what_another_warp_loaded():
    execute(STORE + "bar.sync 0;" + OTHERS + "bar.sync 0;" + STORE)
    error = race(STORE + "bar.sync 0;" + OTHERS + STORE, "overwritten, which warp 1 read")
    assert (error.opcode, error.warp) == ("st.shared.b32", 0)


def test_a_barrier_orders_only_those_who_meet():
    other = STORE + "mov.b32 %r11, 1; @%p1 mov.b32 %r11, 2; barrier.sync %r11, 32;" + OTHERS
    race(other)
    execute(other.replace("mov.b32 %r11, 2", "mov.b32 %r11, 1").replace(", 32;", ", 64;"))


def test_an_mbarrier_carries_what_its_arrivals_know():
    """Warp 0 stores and arrives; warp 1 waits and loads."""
    one = INIT + "@%p1 bra OTHER; st.shared.b32 [%r5], %r0;" + ARRIVE + "bra.uni END; OTHER:"
    load = "ld.shared.b32 %r10, [%r5]; END:"
    execute(one + WAIT + load)
    race(
        INIT
        + "@%p1 bra OTHER;"
        + ARRIVE
        + "st.shared.b32 [%r5], %r0; bra.uni END; OTHER:"
        + WAIT
        + load
    )


def test_arrivals_without_a_wait_carry_too():
    lines = "@%p1 bra OTHER; st.shared.b32 [%r5], %r0; bar.arrive 2, 64; bra.uni END; OTHER: bar.sync 2, 64;"
    execute(lines + "ld.shared.b32 %r10, [%r5]; END:")


def test_copies():
    """A copy's data is its warp's until a barrier, and a copy may not begin over what others still read."""
    copy = "cp.async.cg.shared.global [%r6], [%rd2], 16; cp.async.wait_all;"
    execute(copy + "bar.sync 0;" + OTHERS)
    race(copy + OTHERS)
    again = copy + "bar.sync 0;" + OTHERS
    race(again + copy, "given to a copy, which warp 1 read")
    execute(again + "bar.sync 0;" + copy)


def test_matrices():
    store = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6], {%r0, %r0, %r0, %r0};"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];"
    execute(store + "bar.sync 0;" + load + "bar.sync 0;" + store)
    race(store + load)
    race(store + "bar.sync 0;" + load + store, "overwritten")


ONE = """ld.param.u64 %rd3, [p1]; add.u32 %r3, %r4, 2048; @%p2 mbarrier.init.shared::cta.b64 [%r3], 1;
fence.proxy.async.shared::cta; bar.sync 0;
"""
COPY = """@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 1024;
@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd3, {%r9, %r9}], [%r3];
"""
EITHER = "@%p1 bra OTHER; {} bra.uni END; OTHER: {} END:"


@pytest.mark.parametrize("late", [True, False])
def test_who_knows_what_copies_brought_that_report_to_an_mbarrier(late):
    """Warps that waited for it or met one that did; not the warp that began the copies."""
    copy = "@%p1 bra BEHIND; cp.async.cg.shared.global [%r5], [%rd2], 16;"
    copy += "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r4+2048]; BEHIND:"
    load = "ld.shared.b32 %r10, [%r5];"
    execute(INIT + copy + WAIT + load, late=late)
    execute(INIT + copy + EITHER.format("", WAIT) + "bar.sync 0;" + load, late=late)
    if late:
        race(INIT + copy + EITHER.format("", WAIT + load) + load, "has not waited")
        race(INIT + copy + EITHER.format(load, WAIT), "still in flight|has not waited")
    # Copies order nothing else: what their warp stored before needs an arrival of its own.
    stored = INIT + EITHER.replace("OTHER", "LATER").replace("END", "THEN")
    stored = stored.format("st.shared.b32 [%r5+1024], %r0;", "") + copy
    if late:
        race(stored + EITHER.format("", WAIT + "ld.shared.b32 %r10, [%r5+1024];"))


@pytest.mark.parametrize("late", [True, False])
def test_who_knows_what_a_tensor_copy_brought(late):
    """Warps that waited for it, or met one that did; not those who come later by chance."""
    execute(ONE + COPY + WAIT + OTHERS, late=late)
    execute(ONE + COPY + EITHER.format(WAIT, "") + "bar.sync 0;" + OTHERS, late=late)
    error = race(ONE + COPY + EITHER.format(WAIT, OTHERS), "has not waited", late=late)
    assert (error.opcode, error.warp) == ("ld.shared.b32", 1)
    race(ONE + COPY + EITHER.format(WAIT, STORE), "overwritten.*has not waited", late=late)
    matrix = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];"
    race(ONE + COPY + EITHER.format(WAIT, matrix), "has not waited", late=late)


def test_a_wait_for_another_mbarrier_tells_nothing_of_a_copy():
    """Warp 1 waits for an mbarrier whose own, empty phase completes after the copy has landed."""
    second = (
        "@%p2 mbarrier.init.shared::cta.b64 [%r3+8], 1; fence.proxy.async.shared::cta; bar.sync 0;"
    )
    before = "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r3+8];"
    other = WAIT.replace("W", "V").replace("2048", "2056")
    start = ONE + second + before + COPY
    race(start + EITHER.format(WAIT, other + OTHERS), "has not waited")
    after = EITHER.format(WAIT + before, other + OTHERS)
    execute(ONE + second + COPY + after)


def test_a_copy_over_what_another_copy_brought():
    """Warp 1 begins a copy where the copy landed that only warp 0 has waited for."""
    again = COPY.replace("%p2", "%p4").replace("%r3]", "%r3+8]")
    start = ONE + "setp.eq.u32 %p4, %r0, 32; @%p2 mbarrier.init.shared::cta.b64 [%r3+8], 1;"
    start += "fence.proxy.async.shared::cta; bar.sync 0;" + COPY
    race(start + EITHER.format(WAIT, again), "given to a copy, which a copy brought")
    execute(start + EITHER.format(WAIT, WAIT.replace("W", "V") + again))


def test_what_a_tensor_copy_may_not_overwrite():
    """Bytes that a store wrote with no proxy fence since, and bytes to which another copy is under way."""
    fence = "fence.proxy.async.shared::cta; bar.sync 0;"
    again = COPY.replace("1024", "2048") + COPY[COPY.index("@%p2 cp") :]
    wait = WAIT + "bar.sync 0;" + OTHERS
    with pytest.raises(ExecutionError, match=r"given to a copy, which a store wrote with no fence"):
        execute(ONE + STORE + "bar.sync 0;" + COPY + wait)
    execute(ONE + STORE + fence + COPY + wait)
    with pytest.raises(ExecutionError, match="while a copy to it is in flight"):
        execute(ONE + again + wait)
    cp_async = "cp.async.cg.shared.global [%r6], [%rd2], 16;"
    with pytest.raises(ExecutionError, match="while a copy to it is in flight"):
        execute(ONE + cp_async + "bar.sync 0;" + COPY + wait)


def test_an_mbarrier_knows_what_its_completed_phases_know():
    """Warp 0 arrives for phase 0, stores, arrives for phase 1 and says so in global memory, which orders nothing."""
    init = "st.global.b32 [%rd2], 0; @%p2 mbarrier.init.shared::cta.b64 [%r4+2048], 1; bar.sync 0; @%p1 bra OTHER;"
    arrive, stored = "@%p2 " + ARRIVE, "st.shared.b32 [%r5], %r0;"
    say = "@%p2 st.global.b32 [%rd1], 1; bra.uni END;"
    load = "OTHER: L: ld.acquire.gpu.global.b32 %r11, [%rd1]; setp.eq.b32 %p4, %r11, 0; @%p4 bra L;"
    load += WAIT + "ld.shared.b32 %r10, [%r5]; END:"
    execute(init + stored + arrive + say + load)
    second = arrive.replace("arrive.shared", "arrive.expect_tx.shared").replace("];", "], 16;")
    race(init + arrive + stored + second + say + load)


def test_an_mbarrier_is_used_behind_a_barrier_after_its_initialisation():
    unmet = INIT.replace("bar.sync 0;", "")
    for use in (ARRIVE, WAIT, "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r4+2048], 0;"):
        error = race(unmet + EITHER.format(ARRIVE, use), "used as an mbarrier, which warp 0 initia")
        assert error.warp == 1
    late_copy = ONE.replace("bar.sync 0;", "") + COPY.replace("%p2", "%p4")
    late_copy = "setp.eq.u32 %p4, %r0, 32;" + late_copy
    race(late_copy, "used as an mbarrier")
    race(late_copy.replace("@%p4 mbarrier.arrive", "@%p2 mbarrier.arrive"), "used as an mbarrier")
    ended = "@%p2 mbarrier.inval.shared::cta.b64 [%r4+2048];"
    execute(INIT + EITHER.format(ARRIVE, WAIT) + "bar.sync 0;" + ended)
    race(INIT + EITHER.format(ARRIVE, WAIT) + ended, "overwritten, which warp 1 read")


ATOM = "atom.shared.add.u32 %r10, [%r4], 1;"


def test_atomic_operations_do_not_race_with_each_other():
    start = "@%p2 st.shared.b32 [%r4], 5; bar.sync 0;"
    total = "bar.sync 0; ld.shared.b32 %r11, [%r4]; st.global.b32 [%rd2], %r11;"
    assert set(execute(start + ATOM + total)[::4].tolist()) == {69}
    assert set(execute(start + "red.shared.add.u32 [%r4], 2;" + total)[::4].tolist()) == {133}
    for plain in ("ld.shared.b32 %r10, [%r4];", "st.shared.b32 [%r4], %r0;"):
        race(start + EITHER.format(ATOM, plain), "which warp 0 changed")
        race(start + EITHER.format(plain, ATOM), "is changed, which warp 0")
    race(start.replace("bar.sync 0;", "") + ATOM, "is changed, which warp 0 wrote")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
