"""Weight updates of a layer that is laid out, for each layout: whole, of some experts or tensors, in steps."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import (
    RUNNING,
    STAGING,
    updating,
    weights_of,
)
from sglang_aiter_moe.testing.loaded_layers import (
    PLANS,
    identity,
    load,
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


@pytest.fixture
def simple():
    """A layer without padding, its plan and its raw tensors."""
    plan = PLANS["interleaved"]
    raw = random_raw(plan.spec, 1)
    return loaded_layer(plan, raw), plan, raw


@pytest.mark.parametrize("staging", ["none", "host"])
def test_a_full_update_ends_as_a_fresh_load(plan, monkeypatch, staging):
    monkeypatch.setenv(STAGING, staging)
    layer = loaded_layer(plan, random_raw(plan.spec, 1))
    were, new = identity(layer), random_raw(plan.spec, 2)
    with updating():
        load(layer, new)
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, new)))
    assert identity(layer) == were
    mxfp4.moe_quant_info(layer)


@pytest.mark.parametrize(
    "name", ["separated", "interleaved", "gfx1250", "scale padding", "padded halves"]
)
@pytest.mark.parametrize("experts", [[0], [1, 2]])
def test_an_update_of_some_experts(name, experts):
    plan = PLANS[name]
    old, new = random_raw(plan.spec, 1), random_raw(plan.spec, 2)
    layer = loaded_layer(plan, old)
    with updating():
        load(layer, new, experts)
    merged = {n: t.clone() for n, t in old.items()}
    for n in merged:
        merged[n][experts] = new[n][experts]
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, merged)))


def test_a_loader_names_experts_of_the_whole_model():
    of_rank_1 = SimpleNamespace(_map_global_expert_id_to_local_expert_id=lambda expert: expert - 4)
    assert mxfp4_reload._local(of_rank_1, 5) == 1
    assert mxfp4_reload._local(of_rank_1, None) is None  # a tensor of all experts
    assert mxfp4_reload._local(SimpleNamespace(), 5) == 5


@pytest.mark.parametrize("only", ["w13_weight_scale", "w2_weight_scale", "w2_weight"])
def test_an_update_of_one_tensor_opens_nothing_else(plan, only):
    old, new = random_raw(plan.spec, 1), random_raw(plan.spec, 2)
    layer = loaded_layer(plan, old)
    with updating():
        load(layer, {only: new[only]})
        assert list(weights_of(layer).opened) == [only]
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, {**old, only: new[only]})))


def test_an_update_without_loaders():
    plan = PLANS["scale padding"]
    old, new = random_raw(plan.spec, 1), random_raw(plan.spec, 2)
    layer = loaded_layer(plan, old)
    mxfp4_reload.update(layer, {n: t[1:2] for n, t in new.items()}, experts=slice(1, 2))
    mxfp4_reload.update(layer, {"w2_weight": new["w2_weight"][[0]]}, experts=[0])
    merged = {n: t.clone() for n, t in old.items()}
    for n in merged:
        merged[n][1] = new[n][1]
    merged["w2_weight"][0] = new["w2_weight"][0]
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, merged)))


def test_exponents_may_come_as_float8_e8m0fnu(simple):
    layer, plan, raw = simple
    new = random_raw(plan.spec, 2)
    scales = {n: t.view(torch.float8_e8m0fnu) for n, t in new.items() if n.endswith("scale")}
    mxfp4_reload.update(layer, scales)
    expected = {**raw, **{n: new[n] for n in scales}}
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, expected)))


def test_calls_refuse_while_an_update_runs(simple):
    layer, _, raw = simple
    with updating():
        load(layer, {"w2_weight": raw["w2_weight"]}, [0])
        with pytest.raises(ContractError, match="w2_weight are in raw form"):
            mxfp4.moe_quant_info(layer)
    mxfp4.moe_quant_info(layer)


def test_a_session_of_several_steps_is_one_update(simple, monkeypatch):
    monkeypatch.setenv(STAGING, "host")
    layer, plan, _ = simple
    before, new = packed_bytes(layer), random_raw(plan.spec, 2)
    mxfp4_reload.begin_session()
    mxfp4.restore_raw(layer)
    with updating():
        load(layer, {"w13_weight": new["w13_weight"]})
    assert weights_of(layer).opened
    with pytest.raises(OSError), updating():
        load(layer, {"w2_weight": new["w2_weight"]})
        raise OSError("connection lost")
    mxfp4.prepare_weights(layer, plan)
    mxfp4_reload.end_session()
    assert same(packed_bytes(layer), before)  # the first step is undone as well
    mxfp4.moe_quant_info(layer)


def test_an_unknown_staging_is_refused(simple, monkeypatch):
    layer, _, raw = simple
    monkeypatch.setenv(STAGING, "disk")
    before = packed_bytes(layer)
    with pytest.raises(ContractError, match=STAGING):
        mxfp4_reload.update(layer, {"w2_weight": raw["w2_weight"]})
    assert same(packed_bytes(layer), before)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
