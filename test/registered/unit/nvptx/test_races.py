"""Shared memory that two warps use with nothing between them: reported, whatever the order they ran in."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.nvptx.errors import ExecutionError
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


def execute(lines: str, **options) -> None:
    memory = Memory()
    given = memory.place(np.arange(64 * 4, dtype=np.uint32), "given")
    run_module(
        module(START + lines + "\nret;", 1, threads=64),
        [given],
        memory,
        shared_bytes=4096,
        **options,
    )


def race(lines: str, message: str = "with no barrier between the two") -> ExecutionError:
    with pytest.raises(ExecutionError, match=message) as error:
        execute(lines)
    execute(lines, checked=False)
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
