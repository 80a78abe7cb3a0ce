"""Private memory: every lane has its own bytes, in every batch anew."""

import struct
import sys

import numpy as np
import pytest

from sglang_aiter_moe.amdgpu import scratch
from sglang_aiter_moe.amdgpu.assembly import parse
from sglang_aiter_moe.amdgpu.errors import ExecutionError
from sglang_aiter_moe.amdgpu.machine import run
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.testing.amdgpu_wave import kernel_text
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

START = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_lshl_b32 s8, s2, 7
	v_add_u32_e32 v1, s8, v0
	v_mul_u32_u24_e32 v3, 3, v1
	v_lshlrev_b32_e32 v1, 2, v1
	v_mov_b32_e32 v4, 4
	s_mov_b32 s9, 8
"""
END = "\n	global_store_dword v1, v2, s[4:5]\n"


def execute(body, size=32, groups=3, lockstep=64):
    text = kernel_text(START + body + END, block=128).replace(
        "	.amdhsa_kernarg_size",
        f"	.amdhsa_private_segment_fixed_size {size}\n		.amdhsa_kernarg_size",
    )
    memory = Memory()
    out = memory.reserve(512 * groups, "out")
    run(parse(text), "k", memory, struct.pack("<Q", out), (groups, 1, 1), lockstep=lockstep)
    return memory.read(out, np.uint32, 128 * groups)


ITEM = np.arange(3 * 128, dtype=np.uint32)


@pytest.mark.parametrize(
    ("place", "read"),
    [
        ("off, v3, off offset:12", "off, off offset:12"),
        ("v4, v3, off offset:8", "v4, off offset:8"),
        ("v4, v3, s9", "off, s9 offset:4"),
        ("off, v3, s9 offset:-8", "off, off"),
    ],
)
@pytest.mark.parametrize("lockstep", [1, 64])
def test_what_a_lane_stored_it_finds_again(place, read, lockstep):
    got = execute(
        f"	scratch_store_dword {place}\n	scratch_load_dword v2, {read}", lockstep=lockstep
    )
    assert got.tolist() == (3 * ITEM).tolist()


def test_widths():
    body = """
	v_mov_b32_e32 v10, 0x11223344
	v_mov_b32_e32 v11, v3
	v_mov_b32_e32 v12, 7
	v_mov_b32_e32 v13, 9
	scratch_store_dwordx4 off, v[10:13], off offset:16
	scratch_load_dwordx2 v[20:21], off, off offset:20
	scratch_load_ubyte v22, off, off offset:17
	scratch_store_byte off, v12, off offset:18
	scratch_load_sbyte v23, off, off offset:18
	v_add3_u32 v2, v20, v21, v22
	v_add_u32_e32 v2, v2, v23
"""
    assert execute(body).tolist() == (3 * ITEM + 7 + 0x33 + 7).tolist()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("	scratch_load_dword v2, off, off", "nothing has written"),
        ("	scratch_load_dword v2, off, off offset:32", "4 bytes of scratch at 32 of 32"),
        ("	scratch_store_dword v4, v3, off offset:-8", "4 bytes of scratch at -4 of 32"),
        ("	scratch_store_dwordx2 off, v[4:5], off offset:28", "8 bytes of scratch at 28 of 32"),
    ],
)
def test_outside_and_unwritten(body, message):
    with pytest.raises(ExecutionError, match=message):
        execute(body)


def test_the_next_batch_finds_nothing_of_the_one_before():
    body = """
	s_cmp_eq_u32 s2, 0
	s_cbranch_scc0 .LBB0_1
	scratch_store_dword off, v3, off
.LBB0_1:
	scratch_load_dword v2, off, off
"""
    with pytest.raises(ExecutionError, match="nothing has written") as caught:
        execute(body, lockstep=1)
    assert caught.value.workgroup == (1, 0, 0)


def test_a_kernel_that_declares_none_has_none():
    with pytest.raises(ExecutionError, match="scratch at 0 of 0"):
        execute("	scratch_store_dword off, v3, off", size=0)


def test_every_opcode_of_the_table_is_one_of_the_widths_of_memory_ops():
    assert len(scratch.TABLE) == 20 and all(name.startswith("scratch_") for name in scratch.TABLE)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
