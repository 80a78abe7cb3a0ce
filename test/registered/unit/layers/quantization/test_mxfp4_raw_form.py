"""Packed bytes back to the raw form and again, in the same memory, for each layout."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import RUNNING, STAGING, weights_of
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    PLANS,
    identity,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(STAGING, raising=False)
    yield
    assert not RUNNING.written and RUNNING.depth == 0


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]


def test_processing_twice_changes_nothing(plan):
    layer = loaded_layer(plan, random_raw(plan.spec, 1))
    before, were = packed_bytes(layer), identity(layer)
    mxfp4.prepare_weights(layer, plan)
    assert same(packed_bytes(layer), before) and identity(layer) == were


def test_restoring_gives_the_raw_form_where_it_was(plan):
    raw = random_raw(plan.spec, 1)
    layer = loaded_layer(plan, raw)
    before, were = packed_bytes(layer), identity(layer)
    mxfp4.restore_raw(layer)
    mxfp4.restore_raw(layer)  # idempotent
    assert same(packed_bytes(layer), raw)
    for name, parameter in layer.named_parameters():
        assert (id(parameter), parameter.weight_loader) == (were[name][0], were[name][2])
        if not name.endswith("bias"):
            assert parameter.data_ptr() == were[name][1] and parameter.is_shuffled is False
    mxfp4.prepare_weights(layer, plan)
    assert layer.w13_weight.is_shuffled is True
    assert same(packed_bytes(layer), before) and identity(layer) == were


def test_a_parameter_of_float8_e8m0fnu_is_restored_in_that_dtype(plan):
    raw = random_raw(plan.spec, 1)
    wanted = packed_bytes(loaded_layer(plan, raw))
    scales = [name for name in raw if name.endswith("scale")]
    typed = raw | {name: raw[name].view(torch.float8_e8m0fnu) for name in scales}
    layer = loaded_layer(plan, typed)
    for name in scales:
        held = getattr(layer, name).data
        assert torch.equal(held.view(torch.uint8), wanted[name].view(torch.uint8))
    mxfp4.restore_raw(layer)
    for name, tensor in typed.items():
        held = getattr(layer, name).data
        assert (held.dtype, held.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(held.view(torch.uint8), tensor.view(torch.uint8))


def test_the_layout_of_a_live_layer_is_told_by_its_content(plan):
    raw = random_raw(plan.spec, 1)
    layer = loaded_layer(plan, raw)
    state = weights_of(layer)
    scale = {"separated": ("separated", "a16w4"), "a16w4": ("separated", "a16w4")}
    found = state.layout()
    assert found["w13_weight"] == plan.w13_layout and found["w2_weight"] == plan.w2_layout
    for name, claimed in (
        ("w13_weight_scale", plan.w13_scale_layout),
        ("w2_weight_scale", plan.w2_scale_layout),
    ):
        assert found[name] in scale.get(claimed, (claimed,))
    state.open()
    raw_name = "raw_alternating" if plan.spec.gate_up_interleaved else "raw"
    assert state.layout()["w13_weight"] == raw_name
    state.close()
    layer.w13_weight.data[0, 0, 0] ^= 1
    assert state.layout()["w13_weight"] is None


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of each storage that operations create."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            storage = result.untyped_storage()
            if storage.data_ptr() not in given:
                self.sizes.append(storage.nbytes())
        return result


@pytest.mark.parametrize("name", ["interleaved", "scale padding", "padding"])
def test_no_step_allocates_more_than_an_expert(name):
    plan = PLANS[name]
    spec = {"num_experts": 64, "topk": 2}
    plan = plans.plan(replace(plan.spec, **spec), dict(plan.target.env))
    layer = loaded_layer(plan, random_raw(plan.spec, 1, bias_dtype=torch.float32))
    expert = 2 * plan.padded_intermediate_size * plan.padded_hidden_size // 2
    state = weights_of(layer)
    for step in (lambda: state.open(["w13_weight", "w2_weight", "w2_weight_scale"]), state.close):
        with Allocations() as seen:
            step()
        # The index table of a scale layout, 8 bytes an entry, is the largest thing besides.
        assert 0 < max(seen.sizes) <= expert, name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
