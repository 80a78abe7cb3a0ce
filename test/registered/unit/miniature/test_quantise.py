"""The rounding of training is the rounding of the formats: `numerics`, which golden vectors check."""

import sys

import pytest
import torch

from sglang_aiter_moe.miniature import quantise
from sglang_aiter_moe.numerics.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from sglang_aiter_moe.numerics.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def values(dtype):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(256, 64, generator=generator) * torch.exp2(
        torch.randint(-12, 13, (256, 1), generator=generator).float()
    )
    x[0] = 0.0
    x[1, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)  # ties
    x[2, :32] = 6.0 * 2.0**5  # amax at the very edge of a scale
    x[3, 0] = 448.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4(dtype):
    x = values(dtype)
    want = dequantize_mxfp4(*quantize_mxfp4(x), torch.float32)
    assert torch.equal(quantise.round_mxfp4(x).float(), want)
    assert not torch.equal(x.float(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8(dtype):
    x = values(dtype)
    want = dequantize_mxfp8(*quantize_mxfp8(x), torch.float32)
    assert torch.equal(quantise.round_mxfp8(x).float(), want)
    assert not torch.equal(x.float(), want)


@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_the_gradient_passes_straight_through(mode):
    x = torch.randn(4, 32, requires_grad=True)
    y = quantise.fake_activation(x, mode)
    (y * torch.arange(128.0).view(4, 32)).sum().backward()
    assert torch.equal(x.grad, torch.arange(128.0).view(4, 32))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
