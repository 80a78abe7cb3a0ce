"""Whole programs of the AMD interpreter, from the lines between the prologue of a test kernel and its end."""

from __future__ import annotations

import struct

import numpy as np

from sglang_aiter_moe.amdgpu.assembly import parse
from sglang_aiter_moe.amdgpu.errors import ExecutionError
from sglang_aiter_moe.amdgpu.machine import run
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.testing.amdgpu_wave import kernel_text

PLACE = """
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_and_b32_e32 v0, 0x3ff, v0
	s_mul_i32 s8, s2, {block}
	v_add_u32_e32 v1, s8, v0
	v_lshlrev_b32_e32 v1, 2, v1
"""
"""v1 = 4 * (index of the work-item among all); s[4:5] = the output's address."""
STORE = "\n	global_store_dword v1, v2, s[4:5]\n"


def execute(body, groups=1, *, block=64, grid=None, lockstep=64, count=None, args=b"", **options):
    """The output: a uint32 for each work-item."""
    run_options = {
        k: options.pop(k)
        for k in ("max_instructions", "max_seconds", "checked", "lds_bytes")
        if k in options
    }
    text = kernel_text(body, block=block, **options)
    memory = Memory()
    n = count or groups * block
    out = memory.reserve(4 * n, "out")
    statistics = run(
        parse(text),
        "k",
        memory,
        struct.pack("<Q", out) + args,
        grid or (groups, 1, 1),
        lockstep=lockstep,
        **run_options,
    )
    return memory.read(out, np.uint32, n), statistics


def start(body, groups=1, **options):
    """Runs what writes nothing."""
    run(parse(kernel_text(body)), "k", Memory(), bytes(8), (groups, 1, 1), **options)


def fault(body, **options) -> ExecutionError:
    """The error that a body ends in."""
    try:
        execute(body, **options)
    except ExecutionError as error:
        return error
    raise AssertionError("nothing was reported")
