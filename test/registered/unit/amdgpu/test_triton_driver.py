"""A launch on CPU tensors compiles what the same launch compiles on the GPU, and its arguments arrive in order."""

from __future__ import annotations

import struct
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

triton = pytest.importorskip("triton")

from sglang_aiter_moe.amdgpu.triton_driver import Driver, Scalar, active  # noqa: E402
from sglang_aiter_moe.testing.amd_kernels import scale_rows  # noqa: E402


def launched(arch, *values, grid=(3,), **constants):
    calls = []
    with active(Driver(arch, calls.append)):
        scale_rows[grid](*values, **constants)
    return calls


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_call(arch):
    x, y = torch.zeros(48, 64), torch.zeros(48, 64)
    (call,) = launched(arch, x, y, 0.5, 48, COLUMNS=64, num_warps=2)
    assert call.name == "scale_rows" and call.grid == (3, 1, 1) and call.warps == 2
    assert list(call.arguments) == ["x_ptr", "y_ptr", "factor", "rows"]
    assert call.arguments["x_ptr"] is x and call.arguments["y_ptr"] is y
    assert call.arguments["factor"] == Scalar(struct.pack("<f", 0.5), 0.5)
    assert call.arguments["rows"] == Scalar(struct.pack("<i", 48), 48)
    assert f'-{arch}"' in call.assembly.splitlines()[0]
    # The size of a tensor is known, so its accesses are buffer instructions, as on the GPU.
    assert "buffer_load" in call.assembly


def test_specialised_as_on_the_gpu():
    """An argument of 1 is a constant, and an unaligned tensor gives other code."""
    x = torch.zeros(49 * 64)
    aligned, unaligned = x[:64].view(1, 64), x[1:65].view(1, 64)
    (one,) = launched("gfx950", aligned, aligned, 0.5, 1, COLUMNS=64)
    assert list(one.arguments) == ["x_ptr", "y_ptr", "factor"]
    (two,) = launched("gfx950", aligned, aligned, 0.5, 2, COLUMNS=64)
    (odd,) = launched("gfx950", unaligned, aligned, 0.5, 2, COLUMNS=64)
    assert two.assembly != odd.assembly


def test_puts_back_the_driver():
    before = triton.runtime.driver._active
    with pytest.raises(ZeroDivisionError), active(Driver("gfx950", print)):
        assert triton.runtime.driver.active.get_current_target().arch == "gfx950"
        raise ZeroDivisionError
    assert triton.runtime.driver._active is before


def test_refuses_other_targets():
    with pytest.raises(ContractError, match="gfx1250"):
        Driver("gfx1250", print)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
