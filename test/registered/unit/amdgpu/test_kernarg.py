"""The kernarg segment follows the kernel's metadata, and a value that does not fit is refused."""

from __future__ import annotations

import dataclasses
import struct
import sys

import pytest

from sglang_aiter_moe.amdgpu.assembly import Argument, Kernel
from sglang_aiter_moe.amdgpu.kernarg import pack
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

POINTER, VALUE = "global_buffer", "by_value"
KERNEL = Kernel(
    name="k", entry=0, target="gfx950", vgprs=1, agprs=0, sgprs=1, lds_bytes=0, scratch_bytes=0, workgroup_size=64,
    wavefront_size=64, kernarg_size=40,
    arguments=(
        Argument(0, 8, POINTER), Argument(8, 4, VALUE), Argument(16, 8, POINTER), Argument(24, 8, POINTER),
        Argument(32, 8, "hidden_global_offset_x"),
    ),
    user_sgprs=(), kernarg_preload=(0, 0), workgroup_ids=(True, False, False), workitem_ids=0,
)  # fmt: skip
SEVEN = struct.pack("<i", 7)


def test_offsets_of_the_metadata():
    got = pack(KERNEL, [0x1122334455667788, SEVEN, 2, 3])
    assert got == struct.pack("<QiiQQQ", 0x1122334455667788, 7, 0, 2, 3, 0)


def test_scratch_pointers_at_the_end_are_null():
    assert pack(KERNEL, [1, SEVEN]) == struct.pack("<QiiQQQ", 1, 7, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "values, named",
    [
        ([1], "given 1 arguments"),
        ([1, SEVEN, 2, 3, 4], "given 5 arguments"),
        ([1, 7, 2, 3], "argument b of k is given an address"),
        ([1, b"12345678", 2, 3], "argument b of k is given 8 bytes"),
        ([b"12345678", SEVEN, 2, 3], "argument a of k is given 8 bytes"),
    ],
)
def test_refuses_what_does_not_fit(values, named):
    with pytest.raises(ContractError, match=named):
        pack(KERNEL, values, ["a", "b", "c", "d"])


def test_a_number_is_never_left_out():
    numbers = tuple(Argument(8 * i, 8, VALUE) for i in range(3))
    with pytest.raises(ContractError, match="given 2 arguments"):
        pack(dataclasses.replace(KERNEL, arguments=numbers), [1, 2])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
