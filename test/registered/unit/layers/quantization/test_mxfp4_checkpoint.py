"""A raw layer's tensors against its plan: the sizes that each may have, and the bytes of their padding."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4_checkpoint
from sglang_aiter_moe.srt.layers.quantization.mxfp4_checkpoint import (
    check_and_pad,
    padded_tensor,
    refuse_nan,
)
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.raw_layers import make_raw_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SPEC = MoeSpec("swiglu", 2, 1, 192, 96, has_bias=True, swiglu_limit=7.0)
PLAN = plans.plan(SPEC)  # H 192 becomes 256, I 96 becomes 256
PLAIN = plans.situv2(2, 1, 256, 256)


def raw_layer(spec=SPEC):
    return make_raw_layer(spec, tokens=1).module()


def refused(layer, plan=PLAN):
    before = {name: (p.data_ptr(), p.clone()) for name, p in layer.named_parameters()}
    with pytest.raises(ContractError) as caught:
        check_and_pad(layer, plan)
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == before[name][0], name
        assert torch.equal(parameter.nan_to_num(), before[name][1].nan_to_num()), name
    return caught.value


# Rows by columns: each of the two either the model's or padded.
ALLOWED = {
    "w13_weight": "(2, 192, 96) or (2, 192, 128) or (2, 512, 96) or (2, 512, 128)",
    "w13_weight_scale": "(2, 192, 6) or (2, 192, 8) or (2, 512, 6) or (2, 512, 8)",
    "w2_weight": "(2, 192, 48) or (2, 192, 128) or (2, 256, 48) or (2, 256, 128)",
    "w2_weight_scale": "(2, 192, 3) or (2, 192, 8) or (2, 256, 3) or (2, 256, 8)",
    "w13_weight_bias": "(2, 192) or (2, 512)",
    "w2_weight_bias": "(2, 192) or (2, 256)",
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_allowed_sizes_are_told(name):
    layer = raw_layer()
    parameter = getattr(layer, name)
    parameter.data = parameter.data[:, :-1].contiguous()
    error = refused(layer)
    shape = tuple(parameter.shape)
    assert error.what.startswith((f"{name} has shape {shape}", f"{name} is {shape}"))
    assert error.allowed.startswith(ALLOWED[name])
    if "bias" not in name:
        assert error.allowed == ALLOWED[name] + " for 2 experts, I=96, H=192"


@pytest.mark.parametrize(
    "name, allowed", [("w13_weight", "(2, 512, 128)"), ("w2_weight_scale", "(2, 256, 8)")]
)
def test_a_size_without_padding_is_told_once(name, allowed):
    layer = raw_layer(PLAIN)
    getattr(layer, name).data = torch.zeros(2, 1, 1, dtype=torch.uint8)
    assert refused(layer, plans.plan(PLAIN)).allowed.startswith(f"{allowed} for 2 experts")


@pytest.mark.parametrize("missing", [None, "text"])
def test_a_tensor_that_is_none(missing):
    layer = SimpleNamespace(**dict(raw_layer().named_parameters()))
    layer.w2_weight_scale = missing
    with pytest.raises(ContractError) as caught:
        check_and_pad(layer, PLAN)
    kind = type(missing).__name__
    assert caught.value.what == f"the layer has no tensor w2_weight_scale (it is {kind})"


@pytest.mark.parametrize("name", ["w13_weight_bias", "w2_weight_bias"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_a_bias_is_floating_point(name, dtype):
    layer = raw_layer()
    getattr(layer, name).data = getattr(layer, name).data.to(dtype)
    assert f"{name} is (2, 192) {dtype}" in refused(layer).what


@pytest.mark.parametrize("name", ["w13_weight_bias", "w2_weight_bias"])
def test_each_missing_bias_is_named(name):
    layer = raw_layer()
    delattr(layer, name)
    assert f"the layer has no {name}" in refused(layer).what


def test_biases_of_a_plan_without_are_left_alone():
    layer = raw_layer(PLAIN)
    bias = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    layer.w13_weight_bias = layer.w2_weight_bias = bias
    check_and_pad(layer, plans.plan(PLAIN))
    assert layer.w13_weight_bias is bias and bias.dtype == torch.bfloat16


def test_parameters_that_fit_keep_their_memory():
    layer = raw_layer(PLAIN)
    before = {name: p.data_ptr() for name, p in layer.named_parameters()}
    check_and_pad(layer, plans.plan(PLAIN))
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before


@pytest.mark.parametrize("value, bad", [(0xFE, False), (0x00, False), (0xFF, True)])
def test_a_nan_scale_is_named_by_its_place(value, bad):
    scale = torch.full((2, 3, 4), 0x7F, dtype=torch.uint8)
    scale[1, 2, 0] = scale[1, 2, 3] = value
    if bad:
        with pytest.raises(ContractError, match=r"^s\[1, 2, 0\] is 0xFF"):
            refuse_nan(scale, "s")
    else:
        refuse_nan(scale, "s")
    refuse_nan(scale[:0], "s")  # no experts here


def test_nan_is_looked_for_in_scales_alone():
    layer = raw_layer()
    layer.w13_weight.data.fill_(0xFF)  # two codes of -6
    check_and_pad(layer, PLAN)
    layer = raw_layer()
    layer.w2_weight_scale.data[1, 0, 2] = 0xFF
    assert refused(layer).what.startswith("w2_weight_scale[1, 0, 2]")


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("plain", [[1, 2, 9], [3, 4, 9], [9, 9, 9], [9, 9, 9]]),
        ("alternating", [[1, 2, 9], [3, 4, 9], [9, 9, 9], [9, 9, 9]]),
        ("halves", [[1, 2, 9], [9, 9, 9], [3, 4, 9], [9, 9, 9]]),
    ],
)
def test_padding_comes_after_each_part(kind, expected):
    raw = torch.tensor([[[1, 2], [3, 4]]], dtype=torch.uint8)
    assert padded_tensor(raw, (1, 4, 3), kind, 9).tolist() == [expected]
    assert padded_tensor(raw, (1, 2, 2), kind, 9) is raw


@pytest.mark.parametrize("alternating", [False, True])
def test_every_tensor_gets_its_own_fill(alternating):
    """Zero weights and biases, and scales of 1.0."""
    spec = MoeSpec(
        "swiglu", 2, 1, 192, 96, gate_up_interleaved=alternating, has_bias=True, swiglu_limit=7.0
    )
    layer = raw_layer(spec)
    raw = {name: p.clone() for name, p in layer.named_parameters()}
    check_and_pad(layer, plans.plan(spec))
    for name, parameter in layer.named_parameters():
        fill = 0x7F if name.endswith("scale") else 0
        kept, padded = raw[name], parameter.data
        if name.startswith("w13") and not alternating:
            kept, padded = kept.unflatten(1, (2, -1)), padded.unflatten(1, (2, -1))
            kept, padded = kept.flatten(0, 1), padded.flatten(0, 1)
        inside = tuple(slice(n) for n in kept.shape)
        assert torch.equal(padded[inside], kept.to(padded.dtype)), name
        outside = torch.ones_like(padded, dtype=torch.bool)
        outside[inside] = False
        assert outside.any() and (padded[outside] == fill).all(), name


@pytest.mark.parametrize("dtype", mxfp4_checkpoint._BYTE_DTYPES)
def test_bytes_of_any_name_become_uint8(dtype):
    layer = raw_layer(PLAIN)
    before = layer.w2_weight.clone()
    layer.w2_weight.data = layer.w2_weight.data.view(dtype)
    check_and_pad(layer, plans.plan(PLAIN))
    assert layer.w2_weight.dtype == torch.uint8 and torch.equal(layer.w2_weight, before)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
