"""The front door: CPU tensors in, an interpreted launch, CPU tensors out."""

from __future__ import annotations

import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.amdgpu.errors import ExecutionError  # noqa: E402
from sglang_aiter_moe.amdgpu.launch import Device  # noqa: E402
from sglang_aiter_moe.testing.amd_kernels import scale_rows  # noqa: E402


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_result_and_record(arch):
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    y = torch.full((48, 64), float("nan"))
    with Device(arch) as device:
        scale_rows[(3,)](x, y, 0.25, 40, COLUMNS=64)
    assert torch.equal(y[:40], x * 0.25) and y[40:].isnan().all()
    (launch,) = device.launches
    assert launch.kernel == "scale_rows" and launch.grid == (3, 1, 1) and launch.workgroups == 3
    assert launch.arguments["y_ptr"] is y and launch.arguments["rows"] == 40
    assert launch.statistics.wave_instructions > 3 * launch.warps * 10


def test_sees_what_the_host_wrote_between_launches():
    x, y = torch.ones(16, 64), torch.zeros(16, 64)
    with Device("gfx950"):
        scale_rows[(1,)](x, y, 2.0, 16, COLUMNS=64)
        x.fill_(5.0)
        scale_rows[(1,)](x, y, 2.0, 16, COLUMNS=64)
    assert (y == 10).all()


def test_scratch_is_read_only_after_it_was_written():
    x, y, z = torch.ones(16, 64), torch.zeros(16, 64), torch.zeros(16, 64)
    with Device("gfx950", scratch=lambda t: t is y):
        scale_rows[(1,)](x, y, 2.0, 16, COLUMNS=64)
        scale_rows[(1,)](y, z, 2.0, 16, COLUMNS=64)
    assert (z == 4).all()
    with pytest.raises(ExecutionError, match="x_ptr"), Device("gfx950", scratch=lambda t: t is y):
        scale_rows[(1,)](y, z, 2.0, 16, COLUMNS=64)


def test_rows_past_the_end_are_an_error():
    x = torch.ones(16, 64)
    with pytest.raises(ExecutionError), Device("gfx950"):
        scale_rows[(2,)](x, torch.zeros(16, 64), 2.0, 32, COLUMNS=64)


def test_refuses_arguments_that_overlap_in_part_or_are_strided():
    x = torch.zeros(32, 64)
    with pytest.raises(ContractError, match="overlaps"), Device("gfx950"):
        scale_rows[(1,)](x[:16], x[8:24], 2.0, 16, COLUMNS=64)
    with pytest.raises(ContractError, match="strides"), Device("gfx950"):
        scale_rows[(1,)](x.T, x, 2.0, 16, COLUMNS=64)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
