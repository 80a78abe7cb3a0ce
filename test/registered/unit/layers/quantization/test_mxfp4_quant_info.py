"""What the runner is told of a prepared layer, and when a layer's state is looked at before a call."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterQuantType
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_raw_form
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import updating, weights_of
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    PLANS,
    load,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.raw_layers import k3_like, make_raw_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

GPT_OSS = MoeSpec(
    "swiglu", 2, 1, 192, 96, gate_up_interleaved=True, has_bias=True, swiglu_limit=7.0
)
SITU = plans.situv2(2, 1, 256, 128, name="layer 5")


def prepared(spec=SITU, env=None):
    plan = plans.plan(spec, env)
    return loaded_layer(plan, random_raw(spec, 1)), plan


@pytest.mark.parametrize(
    "spec, limit",
    [
        (GPT_OSS, 7.0),
        (SITU, 0.0),
        (MoeSpec("silu", 2, 1, 256, 256, swiglu_limit=10.0), 10.0),
        (MoeSpec("silu", 2, 1, 256, 256), 0.0),
    ],
    ids=["gpt-oss", "situ", "deepseek", "silu"],
)
@pytest.mark.parametrize("masked", [False, True])
def test_every_field_is_the_layers_or_the_plans(spec, limit, masked):
    layer, plan = prepared(spec)
    mask = torch.ones(2, dtype=torch.int32) if masked else None
    info = mxfp4.moe_quant_info(layer, mask)
    assert info.quant_type is AiterQuantType.PER_1X32
    assert info.plan is plan and info.expert_mask is mask
    assert info.w13_weight.data_ptr() == layer.w13_weight.data_ptr()
    assert info.w2_weight.data_ptr() == layer.w2_weight.data_ptr()
    assert info.w13_scale is layer.w13_weight_scale and info.w2_scale is layer.w2_weight_scale
    assert (info.b13, info.b2) == (
        (layer.w13_weight_bias, layer.w2_weight_bias) if spec.has_bias else (None, None)
    )
    assert (info.hidden_pad, info.intermediate_pad) == (plan.hidden_pad, plan.intermediate_pad)
    assert (info.swiglu_limit, info.gate_mode) == (limit, plan.gate_mode.value)
    assert info.doweight_stage1 is False and info.fp8_activations is False
    assert info.a13_scale is info.a2_scale is info.fused_moe_kwargs is None


def test_a_layer_with_unplanned_biases_is_called_without():
    layer, _ = prepared()
    layer.w13_weight_bias = layer.w2_weight_bias = torch.ones(2)
    info = mxfp4.moe_quant_info(layer)
    assert info.b13 is None and info.b2 is None


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight"])
@pytest.mark.parametrize("watched", [True, False])
def test_operands_follow_each_weight_that_moves(name, watched):
    layer, _ = prepared()
    first = mxfp4.moe_quant_info(layer)
    if not watched:
        layer.aiter_moe_weights = None
    parameter = getattr(layer, name)
    parameter.data = parameter.data.clone()
    info = mxfp4.moe_quant_info(layer)
    assert info.w13_weight.data_ptr() == layer.w13_weight.data_ptr()
    assert info.w2_weight.data_ptr() == layer.w2_weight.data_ptr()
    assert (getattr(info, name) is getattr(first, name)) is False
    assert getattr(info, name).is_shuffled is True
    again = mxfp4.moe_quant_info(layer)
    assert again.w13_weight is info.w13_weight and again.w2_weight is info.w2_weight


@pytest.mark.parametrize("captured", [False, True])
def test_bytes_are_looked_at_before_eager_calls_alone(monkeypatch, captured):
    """A look at all bytes cannot be part of a graph; the eager call before has looked."""
    layer, _ = prepared()
    layer.w2_weight.data.view(-1)[0] ^= 1
    monkeypatch.setattr(mxfp4, "is_traced_or_captured", lambda tensor: captured)
    if captured:
        mxfp4.moe_quant_info(layer)
        return
    with pytest.raises(ContractError, match="did not come through the weight_loader"):
        mxfp4.moe_quant_info(layer)


def test_weights_that_move_during_a_capture_are_left_where_they_were(monkeypatch):
    layer, _ = prepared()
    first = mxfp4.moe_quant_info(layer)
    layer.w2_weight.data = layer.w2_weight.data.clone()
    monkeypatch.setattr(mxfp4, "is_traced_or_captured", lambda tensor: True)
    assert mxfp4.moe_quant_info(layer).w2_weight is first.w2_weight


@pytest.mark.parametrize("captured", [False, True])
def test_a_layer_that_is_open_is_not_captured_either(monkeypatch, captured):
    layer, plan = prepared()
    mxfp4.restore_raw(layer)
    monkeypatch.setattr(mxfp4, "is_traced_or_captured", lambda tensor: captured)
    with pytest.raises(ContractError, match="are in raw form"):
        mxfp4.moe_quant_info(layer)
    mxfp4.prepare_weights(layer, plan)


def test_another_plan_of_the_same_bytes_takes_over():
    layer, plan = prepared()
    before = packed_bytes(layer)
    renamed = plans.plan(replace(SITU, name="layer 6"))
    mxfp4.prepare_weights(layer, renamed)
    assert layer.aiter_moe_plan is weights_of(layer).plan is renamed
    assert mxfp4.moe_quant_info(layer).plan is renamed
    assert same(packed_bytes(layer), before)
    layer.aiter_moe_weights = None  # laid out by somebody who keeps no state
    mxfp4.prepare_weights(layer, plan)
    assert layer.aiter_moe_plan is plan


def test_a_layer_that_nobody_laid_out_has_nothing_to_restore():
    layer = torch.nn.Module()
    mxfp4.restore_raw(layer)
    assert not list(layer.parameters())


@pytest.mark.parametrize("width, allowed", [(191, False), (192, True), (255, False), (256, True)])
def test_the_two_widths_that_tokens_may_have(width, allowed):
    plan = plans.plan(GPT_OSS)
    tokens = torch.ones(3, width)
    if allowed:
        padded = mxfp4.pad_hidden_states(tokens, plan)
        assert padded.shape == (3, 256) and padded.sum() == 3 * width
        return
    with pytest.raises(ContractError, match=f"hidden_states has {width} columns") as caught:
        mxfp4.pad_hidden_states(tokens, plan)
    assert caught.value.allowed == "192, or 256 with the padding"


def test_a_stated_kernel_is_told_with_the_known_ones(monkeypatch):
    for name in (plans.A8W4, plans.A4W4):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(plans.KERNEL, "other")
    with pytest.raises(ContractError, match=f"{plans.KERNEL} is 'other'") as caught:
        mxfp4._aiter_situ_uses_gu_interleaved_weights()
    assert caught.value.allowed == "separated, gu_interleaved"


# --- raw forms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [GPT_OSS, SITU], ids=["gpt-oss", "situ"])
def test_the_raw_forms_are_what_the_loader_filled(spec):
    raw = random_raw(spec, 1)
    layer = torch.nn.Module()
    for name, tensor in raw.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    forms = mxfp4_raw_form.raw_forms(layer, plans.plan(spec))
    assert {n: (f.name, f.shape, f.dtype) for n, f in forms.items()} == {
        n: (n, tuple(t.shape), t.dtype) for n, t in raw.items()
    }
    kinds = {n: (f.is_bias, f.is_scale) for n, f in forms.items()}
    assert kinds == {n: (n.endswith("bias"), n.endswith("scale")) for n in raw}
    layer.w2_weight = None
    assert "w2_weight" not in mxfp4_raw_form.raw_forms(layer, plans.plan(spec))


def test_biases_that_are_not_planned_have_no_raw_form():
    layer = torch.nn.Module()
    layer.w13_weight_bias = torch.ones(1)
    assert not mxfp4_raw_form.raw_forms(layer, plans.plan(SITU))


@pytest.mark.parametrize("name", ["scale padding", "gpt-oss", "halves"])
def test_packing_into_other_memory_is_the_same_bytes(name):
    """As after the CPU offload: the packed storage is new, and its padding is not there yet."""
    spec, env = {
        "scale padding": (plans.situv2(2, 1, 256, 384), {plans.A8W4: "1"}),
        "gpt-oss": (GPT_OSS, None),
        "halves": (MoeSpec("silu", 2, 1, 192, 96), {plans.ITLV: "0"}),
    }[name]
    layer, plan = prepared(spec, env)
    raw, forms = random_raw(spec, 1), weights_of(layer).forms
    for parameter_name, packed in packed_bytes(layer).items():
        home = torch.full_like(packed, 3)
        mxfp4_raw_form.pack(forms[parameter_name], raw[parameter_name], home, plan)
        assert torch.equal(home, packed), parameter_name
        back = mxfp4_raw_form.unpacked(forms[parameter_name], home, plan)
        assert torch.equal(back, raw[parameter_name]), parameter_name
        is_view = back.data_ptr() == home.data_ptr()
        assert is_view is not parameter_name.endswith("bias"), parameter_name


def test_a_layer_that_comes_back_from_elsewhere_is_packed_there(monkeypatch):
    """The CPU offload moves open parameters: their packed storage is where they are now."""
    layer, _ = prepared()
    before, state = packed_bytes(layer), weights_of(layer)
    with updating():
        load(layer, random_raw(SITU, 1))
        homes = {name: home.data_ptr() for name, home in state.opened.items()}
        state.opened = {name: home.to("meta") for name, home in state.opened.items()}
    assert same(packed_bytes(layer), before)
    assert all(getattr(layer, name).data_ptr() != place for name, place in homes.items())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_calls_share_their_operands_until_the_weights_move(plan):
    layer = loaded_layer(plan, random_raw(plan.spec, 1))
    one, two = mxfp4.moe_quant_info(layer), mxfp4.moe_quant_info(layer)
    assert two.w13_weight is one.w13_weight and two.w2_weight is one.w2_weight
    layer.w13_weight.data = layer.w13_weight.data.clone()
    moved = mxfp4.moe_quant_info(layer)
    assert moved.w13_weight.data_ptr() == layer.w13_weight.data_ptr() != one.w13_weight.data_ptr()


def test_operands_follow_a_parameter_whose_data_is_replaced():
    raw = make_raw_layer(k3_like(), tokens=1)
    layer = raw.module()
    mxfp4.prepare_weights(layer, plans.plan(raw.spec))
    layer.w13_weight.data = layer.w13_weight.data.clone()
    info = mxfp4.moe_quant_info(layer)
    assert info.w13_weight.data_ptr() == layer.w13_weight.data_ptr()
    assert info.w13_weight.is_shuffled is True


def test_a_layer_that_is_not_prepared_has_no_quant_info():
    layer = make_raw_layer(k3_like(), tokens=1).module()
    with pytest.raises(ContractError, match="no plan"):
        mxfp4.moe_quant_info(layer)


def test_hidden_states_are_padded_to_the_kernels_width():
    spec = MoeSpec("swiglu", 2, 1, 192, 256, swiglu_limit=7.0)
    plan = plans.plan(spec)
    given = torch.randn(3, 192).bfloat16()
    padded = mxfp4.pad_hidden_states(given, plan)
    assert padded.shape == (3, 256)
    assert torch.equal(padded[:, :192], given) and not padded[:, 192:].any()
    assert mxfp4.pad_hidden_states(padded, plan) is padded
    with pytest.raises(ContractError, match="200 columns"):
        mxfp4.pad_hidden_states(torch.zeros(3, 200), plan)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
