"""What preparing a layer makes of its tensors: row orders, padding, dtypes, identity; what it refuses, by name."""

import sys

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.plans import A4W4, A8W4, KERNEL
from sglang_aiter_moe.testing.raw_layers import k3_like, make_raw_layer
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")
register_amd_ci(est_time=8, stage="stage-b", runner_config="1-gpu-small-amd")


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    for name in (A8W4, A4W4, KERNEL):
        monkeypatch.delenv(name, raising=False)


def plan_for(spec, **env):
    return plans.plan(spec, env)


# --- the bytes ------------------------------------------------------------------------------------------------


def shuffled(raw, experts, interleave):
    """w13, its scale, w2, its scale by AITER's functions as portable has them (golden-tested there)."""
    scales = [s.flatten(0, 1) for s in (raw.w13_scale, raw.w2_scale)]
    return (
        portable.shuffle_weight_a16w4(raw.w13, 16, interleave),
        portable.shuffle_scale_a16w4(scales[0], experts, interleave),
        portable.shuffle_weight_a16w4(raw.w2, 16, False),
        portable.shuffle_scale_a16w4(scales[1], experts, False),
    )


def prepared_tensors(layer):
    return (layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)


@pytest.mark.parametrize("env", [{}, {A8W4: "1"}])
def test_rows_that_alternate_give_the_same_bytes(env):
    """gpt-oss stores g0, u0, g1, u1, ...; the kernels take gate, then up."""
    raw = make_raw_layer(k3_like(), tokens=1)
    expected = raw.module()
    mxfp4.prepare_weights(expected, plan_for(raw.spec, **env))
    layer = raw.module()
    for name in ("w13_weight", "w13_weight_scale"):
        half_first = getattr(layer, name).data
        gate, up = half_first.chunk(2, dim=1)
        getattr(layer, name).data = torch.stack((gate, up), dim=2).flatten(1, 2).contiguous()
    mxfp4.prepare_weights(layer, plan_for(k3_like(gate_up_interleaved=True), **env))
    for ours, theirs in zip(prepared_tensors(layer), prepared_tensors(expected), strict=True):
        assert torch.equal(ours, theirs)
    reference = shuffled(raw.experts, 4, bool(env))
    for ours, theirs in zip(prepared_tensors(layer), reference, strict=True):
        theirs = theirs.view(-1)
        assert torch.equal(ours.reshape(-1)[: theirs.numel()], theirs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("allocated", [False, True], ids=["raw sizes", "padded by the loader"])
def test_padding_is_zero_weights_and_scales_of_one(interleaved, allocated):
    """A loader may allocate the padded sizes or the checkpoint's: the bytes are the same."""
    spec = MoeSpec(
        "swiglu",
        2,
        1,
        192,
        96,
        gate_up_interleaved=interleaved,
        has_bias=True,
        swiglu_limit=7.0,
    )
    raw = make_raw_layer(spec, tokens=1)
    plan = plan_for(spec)
    hidden, inter = plan.padded_hidden_size, plan.padded_intermediate_size
    assert (hidden, inter) == (256, 256)
    halves = [
        t.unflatten(1, (-1, 2)).transpose(1, 2) if interleaved else t.unflatten(1, (2, -1))
        for t in (raw.experts.w13, raw.experts.w13_scale, raw.experts.b13)
    ]
    pad = torch.nn.functional.pad
    w13 = pad(halves[0], (0, 32, 0, 160)).flatten(1, 2)
    w13_scale = pad(halves[1], (0, 2, 0, 160), value=0x7F).flatten(1, 2)
    b13 = pad(halves[2], (0, 160)).flatten(1, 2)
    w2 = pad(raw.experts.w2, (0, 80, 0, 64))
    w2_scale = pad(raw.experts.w2_scale, (0, 5, 0, 64), value=0x7F)
    layer = raw.module()
    if allocated:
        again = [
            t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if interleaved else t.clone()
            for t in (w13, w13_scale, b13)
        ]
        layer.w13_weight.data, layer.w13_weight_scale.data, layer.w13_weight_bias.data = again
        layer.w2_weight.data, layer.w2_weight_scale.data = w2.clone(), w2_scale.clone()
        layer.w2_weight_bias.data = pad(raw.experts.b2, (0, 64))
    mxfp4.prepare_weights(layer, plan)
    ours = (layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale)
    gate_up = plan.w13_layout == "gu_interleaved"
    theirs = (
        portable.shuffle_weight_a16w4(w13, 16, gate_up),
        portable.shuffle_weight(w2, (16, 16)),
        portable.shuffle_scale_a16w4(w13_scale.flatten(0, 1), 2, gate_up),
        portable.shuffle_scale_a16w4(w2_scale.flatten(0, 1), 2, False),
    )
    for mine, reference in zip(ours, theirs, strict=True):
        reference = reference.reshape(-1)
        assert torch.equal(mine.reshape(-1)[: reference.numel()], reference)
        assert (mine.reshape(-1)[reference.numel() :] == 0x7F).all()
    assert torch.equal(layer.w13_weight_bias.data, b13)
    assert torch.equal(layer.w2_weight_bias.data, pad(raw.experts.b2, (0, 64)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e8m0fnu])
def test_byte_dtypes_give_the_same_bytes(dtype):
    raw = make_raw_layer(k3_like(), tokens=1)
    expected, layer = raw.module(), raw.module()
    mxfp4.prepare_weights(expected, plan_for(raw.spec))
    for name in ("w13_weight_scale", "w2_weight_scale"):
        getattr(layer, name).data = getattr(layer, name).data.view(dtype)
    weights = torch.float4_e2m1fn_x2 if dtype is torch.float8_e8m0fnu else dtype
    for name in ("w13_weight", "w2_weight"):
        getattr(layer, name).data = getattr(layer, name).data.view(weights)
    mxfp4.prepare_weights(layer, plan_for(raw.spec))
    for ours, theirs in zip(prepared_tensors(layer), prepared_tensors(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_bf16_biases_become_float32():
    spec = MoeSpec("swiglu", 2, 1, 256, 256, has_bias=True, swiglu_limit=7.0)
    raw = make_raw_layer(spec, tokens=1)
    layer = raw.module()
    for name in ("w13_weight_bias", "w2_weight_bias"):
        getattr(layer, name).data = getattr(layer, name).data.bfloat16()
    mxfp4.prepare_weights(layer, plan_for(spec))
    info = mxfp4.moe_quant_info(layer)
    assert torch.equal(info.b13, raw.experts.b13.bfloat16().float())
    assert torch.equal(info.b2, raw.experts.b2.bfloat16().float())
    assert info.b13.dtype is torch.float32


# --- the parameters ---------------------------------------------------------------------------------------------


def test_parameters_keep_identity_address_and_loader():
    raw = make_raw_layer(k3_like(), tokens=1)
    layer = raw.module()
    before = dict(layer.named_parameters())
    for parameter in before.values():
        parameter.weight_loader = object()
    loaders = {name: p.weight_loader for name, p in before.items()}
    addresses = {name: p.data_ptr() for name, p in before.items()}
    mxfp4.prepare_weights(layer, plan_for(raw.spec, **{A8W4: "1"}))
    for name, parameter in layer.named_parameters():
        assert parameter is before[name]
        assert parameter.weight_loader is loaders[name]
        if name != "w2_weight_scale":  # 4 columns become 8
            assert parameter.data_ptr() == addresses[name], name
    assert layer.w13_weight.is_shuffled is True and layer.w2_weight.is_shuffled is True
    info = mxfp4.moe_quant_info(layer)
    assert info.w13_weight.is_shuffled is True and info.w2_weight.is_shuffled is True
    assert info.w13_weight.data_ptr() == addresses["w13_weight"]
    assert info.w13_weight.dtype is torch.float4_e2m1fn_x2


def test_preparing_twice_changes_nothing_and_another_plan_is_refused():
    """sglang#28963: shuffled bytes were shuffled again."""
    raw = make_raw_layer(k3_like(), tokens=1)
    layer = raw.module()
    mxfp4.prepare_weights(layer, plan_for(raw.spec))
    once = [t.clone() for t in prepared_tensors(layer)]
    mxfp4.prepare_weights(layer, plan_for(raw.spec))
    assert all(map(torch.equal, prepared_tensors(layer), once))
    with pytest.raises(ContractError, match="already laid out as separated"):
        mxfp4.prepare_weights(layer, plan_for(raw.spec, **{A8W4: "1"}))
    assert all(map(torch.equal, prepared_tensors(layer), once))
    assert layer.aiter_moe_plan.w13_layout == "separated"


def test_a_plan_for_another_order_of_the_same_rows_is_refused():
    sizes = {"num_experts": 2, "topk": 1, "hidden_size": 256, "intermediate_size": 256}
    specs = [MoeSpec("swiglu", **sizes, gate_up_interleaved=order) for order in (False, True)]
    layer = make_raw_layer(specs[0], tokens=1).module()
    mxfp4.prepare_weights(layer, plan_for(specs[0]))
    with pytest.raises(ContractError, match="already laid out"):
        mxfp4.prepare_weights(layer, plan_for(specs[1]))


# --- bad input ----------------------------------------------------------------------------------------------


def change(name, function):
    def apply(layer):
        getattr(layer, name).data = function(getattr(layer, name).data)

    return apply


def set_nan(scale):
    scale[1, 5, 3] = 0xFF
    return scale


BAD = {
    "missing tensor": (lambda layer: delattr(layer, "w2_weight"), "no tensor w2_weight"),
    "weight dtype": (
        change("w13_weight", lambda t: t.float()),
        "w13_weight has dtype torch.float32",
    ),
    "scale dtype": (
        change("w2_weight_scale", lambda t: t.to(torch.bfloat16)),
        "w2_weight_scale has dtype torch.bfloat16",
    ),
    "rank": (change("w13_weight", lambda t: t[0]), "w13_weight has shape"),
    "expert count": (change("w2_weight", lambda t: t[:3]), r"w2_weight has shape \(3, 256, 64\)"),
    "scale experts": (change("w13_weight_scale", lambda t: t[:3]), "w13_weight_scale has shape"),
    "scale length": (
        change("w13_weight_scale", lambda t: t[..., :-1]),
        r"w13_weight_scale has shape \(4, 256, 7\)",
    ),
    "rows": (change("w13_weight", lambda t: t[:, :-2]), r"w13_weight has shape \(4, 254, 128\)"),
    "columns": (change("w2_weight", lambda t: t[..., :-16]), r"w2_weight has shape \(4, 256, 48\)"),
    "NaN scale": (change("w13_weight_scale", set_nan), r"w13_weight_scale\[1, 5, 3\] is 0xFF"),
    "transposed weight": (
        change("w2_weight", lambda t: t.mT.contiguous().mT),
        "w2_weight is not contiguous",
    ),
    "transposed scale": (
        change("w2_weight_scale", lambda t: t.mT.contiguous().mT),
        "w2_weight_scale is not contiguous",
    ),
    "missing bias": (lambda layer: delattr(layer, "w13_weight_bias"), "no w13_weight_bias"),
    "bias size": (change("w2_weight_bias", lambda t: t[:, :-1]), "w2_weight_bias is"),
    "bias dtype": (change("w13_weight_bias", lambda t: t.int()), "torch.int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_named_and_nothing_is_changed(name):
    spec = k3_like(has_bias=False)
    if "bias" in name:
        spec = MoeSpec("swiglu", 4, 2, 256, 256, has_bias=True, swiglu_limit=7.0)
    layer = make_raw_layer(spec, tokens=1).module()
    spoil, message = BAD[name]
    spoil(layer)
    before = {n: p.clone() for n, p in layer.named_parameters()}
    with pytest.raises(ContractError, match=message) as caught:
        mxfp4.prepare_weights(layer, plan_for(spec))
    assert caught.value.allowed and caught.value.fix
    for parameter_name, parameter in layer.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[parameter_name].nan_to_num())
    assert not hasattr(layer, "aiter_moe_plan")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
