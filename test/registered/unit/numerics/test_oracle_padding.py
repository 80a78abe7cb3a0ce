"""The oracle reads no declared padding, whatever it holds and wherever it ends."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.numerics import RawExperts, relative_error
from sglang_aiter_moe.testing.oracle_inputs import BIASED, H, I, M, X, run
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def padded(
    experts: RawExperts, hidden_pad: int, inter_pad: int, fill: int, scale: int
) -> RawExperts:
    """``experts`` in larger tensors whose padding is filled with bytes."""
    h, i = experts.hidden_size, experts.intermediate_size
    big_h, big_i = h + hidden_pad, i + inter_pad

    def grow(tensor, value, *shape):
        return torch.full((experts.num_experts, *shape), value, dtype=tensor.dtype)

    w13, w13_scale = (
        grow(experts.w13, fill, 2 * big_i, big_h // 2),
        grow(experts.w13_scale, scale, 2 * big_i, big_h // 32),
    )
    for half in (0, 1):
        rows = slice(half * big_i, half * big_i + i)
        w13[:, rows, : h // 2] = experts.w13[:, half * i : (half + 1) * i]
        w13_scale[:, rows, : h // 32] = experts.w13_scale[:, half * i : (half + 1) * i]
    w2, w2_scale = (
        grow(experts.w2, fill, big_h, big_i // 2),
        grow(experts.w2_scale, scale, big_h, big_i // 32),
    )
    w2[:, :h, : i // 2], w2_scale[:, :h, : i // 32] = experts.w2, experts.w2_scale
    b13, b2 = grow(experts.b13, math.nan, 2 * big_i), grow(experts.b2, math.nan, big_h)
    for half in (0, 1):
        b13[:, half * big_i : half * big_i + i] = experts.b13[:, half * i : (half + 1) * i]
    b2[:, :h] = experts.b2
    return RawExperts(w13, w13_scale, w2, w2_scale, b13, b2)


@pytest.mark.parametrize("mode", [None, "A16W4", "A8W4", "A4W4"])
@pytest.mark.parametrize(("hidden_pad", "inter_pad"), [(32, 64), (0, 32), (64, 0)])
def test_padding_is_never_read(mode, hidden_pad, inter_pad):
    experts = padded(BIASED, hidden_pad, inter_pad, fill=0x77, scale=0xFF)  # NaN everywhere
    x = torch.cat((X, X.new_full((M, hidden_pad), math.nan)), dim=1)
    out = run(experts, x=x, mode=mode, hidden_pad=hidden_pad, intermediate_pad=inter_pad)
    torch.testing.assert_close(out[:, :H], run(BIASED, mode=mode))
    assert not out[:, H:].any()
    assert x[:, H:].isnan().all()  # the caller's tensor is left alone
    if hidden_pad:
        assert run(experts, x=x, mode=mode, intermediate_pad=inter_pad).isnan().any()
    if inter_pad:
        assert run(experts, x=x, mode=mode, hidden_pad=hidden_pad).isnan().any()


@pytest.mark.parametrize("mode", [None, "A8W4", "A4W4"])
def test_padding_may_end_within_a_block(mode):
    """gpt-oss at TP8: 360 columns in blocks of 32. Padding that holds zeros anyway may be declared or not."""
    inter_pad = 24
    w13, b13 = BIASED.w13.clone(), BIASED.b13.clone()
    for half in (0, 1):
        end = (half + 1) * I
        w13[:, end - inter_pad : end], b13[:, end - inter_pad : end] = 0, 0
    clean = replace(BIASED, w13=w13, b13=b13)
    declared = run(BIASED, mode=mode, activation="silu", intermediate_pad=inter_pad)
    torch.testing.assert_close(declared, run(clean, mode=mode, activation="silu"))
    assert relative_error(declared, run(BIASED, mode=mode, activation="silu")) > 0.1


@pytest.mark.parametrize("mode", [None, "A8W4", "A4W4"])
def test_input_padding_within_a_block_does_not_reach_its_scale(mode):
    hidden_pad = 24
    zeros, dirty = X.clone(), X.clone()
    zeros[:, H - hidden_pad :] = 0
    dirty[:, H - hidden_pad :] = math.nan
    expected = run(x=zeros, mode=mode)
    expected[:, H - hidden_pad :] = 0
    torch.testing.assert_close(run(x=dirty, mode=mode, hidden_pad=hidden_pad), expected)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
