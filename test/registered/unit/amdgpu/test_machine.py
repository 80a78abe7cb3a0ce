"""Whole programs: where waves go, what they share, what is reported."""

import struct
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import semantics
from sglang_aiter_moe.amdgpu.assembly import parse
from sglang_aiter_moe.amdgpu.control import TERMINATORS
from sglang_aiter_moe.amdgpu.errors import AssemblyError, ExecutionError
from sglang_aiter_moe.amdgpu.machine import run
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.testing.amdgpu_programs import PLACE, STORE, execute, fault, start
from sglang_aiter_moe.testing.amdgpu_wave import kernel_text
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")


@pytest.mark.parametrize("lockstep", [1, 3, 64])
def test_every_work_item_of_every_workgroup(lockstep):
    body = PLACE.format(block=128) + "	v_lshl_or_b32 v2, s2, 16, v0" + STORE
    out, statistics = execute(body, 10, block=128, lockstep=lockstep)
    assert out.tolist() == [g << 16 | i for g in range(10) for i in range(128)]
    assert statistics.wave_instructions == 10 * 2 * 8
    assert statistics.opcodes["v_lshl_or_b32"] == statistics.opcodes["s_endpgm"] == 20


def test_two_dimensions():
    """s2 is x and s3 y; v0 has the item's x in bits 0 to 9 and y in bits 10 to 19."""
    body = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_and_b32_e32 v3, 0x3ff, v0
	v_bfe_u32 v4, v0, 10, 10
	v_lshl_add_u32 v1, v4, 4, v3
	s_mul_i32 s8, s3, 3
	s_add_u32 s8, s8, s2
	s_lshl_b32 s8, s8, 7
	v_lshlrev_b32_e32 v2, 8, v4
	v_or_b32_e32 v2, v2, v3
	s_lshl_b32 s9, s2, 16
	v_or_b32_e32 v2, s9, v2
	s_lshl_b32 s9, s3, 24
	v_or_b32_e32 v2, s9, v2
	v_add_u32_e32 v1, s8, v1
	v_lshlrev_b32_e32 v1, 2, v1
"""
    text = kernel_text(body + STORE, block=128, y=1, items=1)
    memory = Memory()
    out = memory.reserve(4 * 3 * 2 * 128, "out")
    run(parse(text), "k", memory, struct.pack("<Q", out), (3, 2, 1), block=(16, 8, 1))
    want = [
        y << 24 | x << 16 | j << 8 | i
        for y in range(2)
        for x in range(3)
        for j in range(8)
        for i in range(16)
    ]
    assert memory.read(out, np.uint32, len(want)).tolist() == want


@pytest.mark.parametrize("lockstep", [1, 4, 64])
def test_loops_of_different_lengths(lockstep):
    """Workgroup g counts to 3 g + 1; workgroups that have ended are dropped while others run on."""
    body = PLACE.format(block=64) + """
	s_mul_i32 s9, s2, 3
	s_mov_b32 s10, 0
	v_mov_b32_e32 v2, 0
.LBB0_1:
	v_add_u32_e32 v2, s10, v2
	s_add_i32 s10, s10, 1
	s_cmp_le_i32 s10, s9
	s_cbranch_scc1 .LBB0_1
""" + STORE  # fmt: skip
    out, statistics = execute(body, 13, lockstep=lockstep)
    assert out.reshape(13, 64)[:, 5].tolist() == [sum(range(3 * g + 1)) for g in range(13)]
    assert statistics.opcodes["s_cmp_le_i32"] == sum(3 * g + 1 for g in range(13))


def test_waves_part_and_meet():
    """if / else by wave and by lane, with EXEC; both sides and the join are executed by whom they concern."""
    body = PLACE.format(block=256) + """
	v_lshrrev_b32_e32 v3, 6, v0
	v_readfirstlane_b32 s9, v3
	s_cmp_lg_u32 s9, 2
	s_cbranch_scc0 .LBB0_2
	v_mov_b32_e32 v2, 10
	s_branch .LBB0_3
.LBB0_2:
	v_mov_b32_e32 v2, 20
.LBB0_3:
	v_cmp_lt_u32_e32 vcc, 200, v0
	s_and_saveexec_b64 s[10:11], vcc
	s_cbranch_execz .LBB0_5
	v_add_u32_e32 v2, 5, v2
.LBB0_5:
	s_or_b64 exec, exec, s[10:11]
	v_add_u32_e32 v2, s9, v2
""" + STORE  # fmt: skip
    out, statistics = execute(body, 3, block=256)
    want = [(20 if i // 64 == 2 else 10) + 5 * (i > 200) + i // 64 for i in range(256)]
    assert out.tolist() == want * 3
    assert statistics.opcodes["v_readfirstlane_b32"] == 12
    taken = statistics.opcodes["v_mov_b32"]
    assert taken == 12  # each wave one side
    assert (
        statistics.opcodes["v_add_u32"] == 12 + 3 + 12
    )  # PLACE's; the last wave of each workgroup; the last


EXCHANGE = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_lshl_b32 s8, s2, 7
	v_add_u32_e32 v1, s8, v0
	v_lshlrev_b32_e32 v1, 2, v1
	v_lshlrev_b32_e32 v4, 2, v0
	v_lshlrev_b32_e32 v3, 2, v0
	v_add_u32_e32 v5, s8, v0
	{before}
	ds_write_b32 v4, v5
	s_barrier
	v_xor_b32_e32 v4, 0x100, v4
	ds_read_b32 v2, v4
	global_store_dword v1, v2, s[4:5]
"""


@pytest.mark.parametrize("lockstep", [1, 5])
def test_a_barrier_holds_until_all_waves_of_the_workgroup_are_there(lockstep):
    """One wave takes a detour; the other must not read its half of LDS before it has come."""
    detour = """
	v_readfirstlane_b32 s9, v0
	s_cmp_eq_u32 s9, 0
	s_cbranch_scc1 .LBB0_2
	s_branch .LBB0_3
.LBB0_1:
	s_branch .LBB0_4
.LBB0_2:
	v_mov_b32_e32 v6, 1
.LBB0_3:
	s_branch .LBB0_1
.LBB0_4:
"""
    out, _ = execute(EXCHANGE.format(before=detour), 5, block=128, lds=512, lockstep=lockstep)
    assert out.reshape(5, 128).tolist() == [
        [128 * g + (i ^ 64) for i in range(128)] for g in range(5)
    ]


def test_barriers_at_different_places_and_waves_that_have_ended():
    """Wave 1 waits at a barrier of its own, wave 2 ends without one."""
    body = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	v_lshrrev_b32_e32 v3, 6, v0
	v_readfirstlane_b32 s9, v3
	s_cmp_eq_u32 s9, 2
	s_cbranch_scc1 .LBB0_9
	s_cmp_eq_u32 s9, 1
	s_cbranch_scc1 .LBB0_1
	s_barrier
	ds_read_b32 v2, v1 offset:256
	s_branch .LBB0_2
.LBB0_1:
	ds_write_b32 v1, v0
	s_barrier
	v_mov_b32_e32 v2, 7
.LBB0_2:
	global_store_dword v1, v2, s[4:5]
.LBB0_9:
"""
    out, _ = execute(body, block=192, lds=1024, count=128)
    assert out.tolist() == [64 + i for i in range(64)] + [7] * 64


def test_a_missing_barrier_is_seen_as_unwritten_lds():
    text = (
        EXCHANGE.format(before="")
        .replace("	s_barrier\n", "")
        .replace(
            "ds_write_b32 v4, v5",
            """v_readfirstlane_b32 s9, v0
	s_cmp_eq_u32 s9, 0
	s_cbranch_scc1 .LBB0_7
	s_branch .LBB0_6
.LBB0_7:
	ds_write_b32 v4, v5
	v_xor_b32_e32 v4, 0x100, v4
	ds_read_b32 v2, v4
	s_endpgm
.LBB0_6:
	ds_write_b32 v4, v5""",
        )
    )
    with pytest.raises(ExecutionError, match="nothing has written it"):
        execute(text, block=128, lds=512)


def test_the_last_wave_may_be_part_of_one():
    body = PLACE.format(block=100) + "	v_mov_b32_e32 v2, v0" + STORE
    out, _ = execute(body, 2, block=100)
    assert out.tolist() == [*range(100), *range(100)]


def test_preloaded_arguments_are_in_scalar_registers():
    body = "	v_lshlrev_b32_e32 v1, 2, v0\n	v_mov_b32_e32 v2, s4" + STORE.replace(
        "s[4:5]", "s[2:3]"
    )
    text = kernel_text(body, kernargs=16).replace(
        "	.amdhsa_system_sgpr_workgroup_id_x 1",
        "	.amdhsa_user_sgpr_kernarg_preload_length 3\n	.amdhsa_user_sgpr_kernarg_preload_offset 0\n"
        "	.amdhsa_system_sgpr_workgroup_id_x 1",
    )
    memory = Memory()
    out = memory.reserve(256, "out")
    run(parse(text), "k", memory, struct.pack("<QQ", out, 0x1234), (1, 1, 1))
    assert memory.read(out, np.uint32, 64).tolist() == [0x1234] * 64


def test_a_fault_names_line_opcode_workgroup_wave_and_lane():
    body = PLACE.format(block=128) + """
	v_mov_b32_e32 v2, 0
	v_cmp_eq_u32_e32 vcc, 70, v0
	s_cmp_eq_u32 s2, 4
	s_cselect_b64 s[8:9], -1, 0
	s_and_b64 vcc, vcc, s[8:9]
	v_mov_b32_e32 v3, 0x1000
	v_cndmask_b32_e32 v1, v1, v3, vcc
""" + STORE  # fmt: skip
    e = fault(body, groups=6, block=128, lockstep=4)
    line = kernel_text(body).splitlines().index("	global_store_dword v1, v2, s[4:5]") + 1
    assert (e.line, e.opcode, e.workgroup, e.wave, e.lane) == (
        line,
        "global_store_dword",
        (4, 0, 0),
        1,
        6,
    )
    assert (
        f"line {line}: global_store_dword v1, v2, s[4:5] (workgroup (4, 0, 0), wave 1, lane 6)"
        in str(e)
    )
    assert "1024 bytes past the end of out" in str(e)


def test_a_loop_that_does_not_end():
    forever = ".LBB0_1:\n	s_branch .LBB0_1"
    e = fault(forever, max_instructions=1000)
    assert "1,001 wave-instructions, and the kernel has not ended" in str(e)
    assert "--max-instructions" in e.fix
    e = fault(forever, max_seconds=0.1)
    assert "wave-instructions in 0.1 s, and the kernel has not ended" in str(e)
    assert "--max-seconds" in e.fix


def test_the_limit_is_of_the_whole_launch():
    """Each of ten batches stays below it."""
    start("	s_nop 0", 10, lockstep=1, max_instructions=20)
    with pytest.raises(ExecutionError, match="22 wave-instructions"):
        start("	s_nop 0", 11, lockstep=1, max_instructions=20)


def test_code_that_runs_past_the_end():
    text = kernel_text("	v_mov_b32_e32 v1, 0").replace("	s_endpgm\n", "")
    with pytest.raises(ExecutionError, match="past the end of the text"):
        run(parse(text), "k", Memory(), bytes(8), (1, 1, 1))


def test_what_is_asked_for_has_to_be_there():
    program = parse(kernel_text(""))
    with pytest.raises(ExecutionError, match="the kernel nobody"):
        run(program, "nobody", Memory(), bytes(8), (1, 1, 1))
    with pytest.raises(ExecutionError, match="4 bytes of kernel arguments"):
        run(program, "k", Memory(), bytes(4), (1, 1, 1))


def test_an_unknown_opcode_is_refused_before_anything_runs():
    with pytest.raises(AssemblyError, match="the opcode v_wobble"):
        execute(PLACE.format(block=64) + "	v_wobble_f32 v2, v0" + STORE)


def test_lds_that_the_launch_states():
    body = PLACE.format(block=64) + "	ds_write_b32 v1, v0\n	ds_read_b32 v2, v1" + STORE
    out, _ = execute(body, lds_bytes=256)
    assert out.tolist() == list(range(64))
    assert "of 252" in str(fault(body, lds_bytes=252))


def test_the_list_of_opcodes():
    assert TERMINATORS < semantics.OPCODES
    assert {
        "v_mfma_scale_f32_16x16x128_f8f6f4",
        "s_cbranch_execnz",
        "ds_read_b64_tr_b16",
    } < semantics.OPCODES


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
