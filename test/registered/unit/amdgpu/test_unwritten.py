"""What is read before anything wrote it, in whole programs: registers, masks, SCC, arguments."""

import sys

import pytest

from sglang_aiter_moe.amdgpu.assembly import parse
from sglang_aiter_moe.amdgpu.errors import ExecutionError
from sglang_aiter_moe.amdgpu.machine import run
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.testing.amdgpu_programs import PLACE, STORE, execute, fault, start
from sglang_aiter_moe.testing.amdgpu_wave import kernel_text
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("v_add_u32_e32 v2, v0, v9", "v9 is read"),
        ("s_add_u32 s9, s30, 1", "s30 is read"),
        ("s_mov_b64 exec, s[30:31]", "s30 is read"),
        ("v_cndmask_b32_e64 v2, v0, v0, s[30:31]", "s30 is read"),
        ("s_cbranch_vccnz .LBB0_1\n.LBB0_1:", "vcc_lo is read"),
        ("ds_read_b32 v2, v0", "LDS"),
        ("s_load_dword s9, s[0:1], 0x1000", "past the end of kernargs"),
        (
            "s_mov_b64 s[8:9], exec\n	s_mov_b64 exec, 1\n	v_mov_b32_e32 v5, 0\n	s_mov_b64 exec, s[8:9]\n"
            "	v_mov_b32_e32 v6, v5",
            "v5 is read",
        ),
        ("buffer_load_dword v2, v0, s[20:23], 0 offen", "s20 is read"),
        ("s_cbranch_scc0 .LBB0_1\n.LBB0_1:", "scc is read"),
        ("s_cbranch_scc1 .LBB0_1\n.LBB0_1:", "scc is read"),
        ("s_cselect_b32 s9, 1, 2", "scc is read"),
        ("s_cselect_b64 s[10:11], 1, 2", "scc is read"),
        ("s_mov_b32 s9, 1\n	s_cmov_b32 s9, 2", "scc is read"),
        ("s_mov_b32 s9, 1\n	s_cmovk_i32 s9, 2", "scc is read"),
        ("s_addc_u32 s9, 1, 2", "scc is read"),
        ("s_subb_u32 s9, 1, 2", "scc is read"),
        ("v_mov_b32_e32 v2, src_scc", "scc is read"),
    ],
)
def test_reads_of_what_nothing_wrote(body, what):
    e = fault("	" + body)
    assert what in str(e) and e.line > 0 and e.wave == 0


def test_an_argument_that_a_runtime_fills_in_is_not_guessed():
    hidden = "      - .offset: 8\n        .size: 4\n        .value_kind: hidden_block_count_x\n"
    text = kernel_text("	s_load_dword s5, s[0:1], {}", kernargs=16)
    text = text.replace("    .max_flat", hidden + "    .max_flat")
    for offset in (0, 4, 12):
        run(parse(text.format(offset)), "k", Memory(), bytes(16), (1, 1, 1))
    with pytest.raises(ExecutionError, match="byte 8 of 16 of kernargs, which nothing has written"):
        run(parse(text.format(8)), "k", Memory(), bytes(16), (1, 1, 1))


@pytest.mark.parametrize(
    "use, mask",
    [
        ("v_cndmask_b32_e64 v2, 0, 1, {}", "s[6:7]"),
        ("v_cndmask_b32_e64 v2, 0, 1, {}", "vcc"),
        ("v_addc_co_u32_e64 v2, s[8:9], v0, v0, {}", "s[6:7]"),
    ],
)
def test_a_mask_that_another_wave_wrote_and_read(use, mask):
    """Wave 0 writes and reads it, wave 1 jumps there without: what is held of the first is not the second's."""
    use = use.format(mask)
    e = fault(
        f"""	v_readfirstlane_b32 s3, v0
	s_cmp_eq_u32 s3, 0
	s_cbranch_scc0 .LBB0_1
	s_mov_b64 {mask}, -1
	{use}
.LBB0_1:
	{use}""",
        block=128,
    )
    assert e.wave == 1 and e.opcode == use.split()[0] and "is read" in str(e)


def test_unchecked_runs_take_what_is_there():
    execute(PLACE.format(block=64) + "	v_mov_b32_e32 v2, v9" + STORE, checked=False)


@pytest.mark.parametrize(
    "line",
    [
        "s_add_u32 s9, 1, 2", "s_sub_i32 s9, 1, 2", "s_min_u32 s9, 1, 2", "s_lshl2_add_u32 s9, 1, 2",
        "s_and_b32 s9, 1, 2",
        "s_not_b32 s9, 1", "s_cmp_eq_u32 s2, 0", "s_cmpk_eq_u32 s2, 0", "s_bitcmp1_b32 s2, 0",
        "s_and_saveexec_b64 s[8:9], exec", "s_mov_b32 s9, 1\n	s_addk_i32 s9, 2",
    ],
)  # fmt: skip
def test_what_writes_scc(line):
    """Each of these lets the next instruction read SCC, and reads none itself."""
    start("	" + line + "\n	s_cselect_b32 s10, 1, 2", 2)


def test_scc_of_a_wave_that_did_not_write_it():
    """Wave 0 writes it behind a branch that wave 1 takes; workgroups that end first take nothing with them."""
    body = """	v_readfirstlane_b32 s3, v0
	s_mov_b64 vcc, 0
	v_cmp_eq_u32_e32 vcc, 0, v0
	s_cbranch_vccz .LBB0_1
	s_cmp_eq_u32 s3, 0
.LBB0_1:
	s_cselect_b32 s9, 1, 2"""
    e = fault(body, block=128)
    assert e.wave == 1 and e.opcode == "s_cselect_b32" and "scc is read" in str(e)
    start(body, 3)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
