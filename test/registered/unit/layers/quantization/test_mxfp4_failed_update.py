"""A weight update that fails, for each layout: undone, or refused until a full one; never a mixture."""

import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import RUNNING, STAGING, updating
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


def fail_midway(layer, new):
    with updating():
        load(layer, new, [0])
        load(layer, {"w2_weight": new["w2_weight"]}, [1])
        raise OSError("connection lost")


# --- undone, where a copy exists -----------------------------------------------------------------------------


def test_a_failed_update_is_undone_where_a_copy_exists(plan, monkeypatch):
    monkeypatch.setenv(STAGING, "host")
    layer = loaded_layer(plan, random_raw(plan.spec, 1))
    before, were, new = packed_bytes(layer), identity(layer), random_raw(plan.spec, 2)
    with pytest.raises(OSError), updating():
        load(layer, {"w13_weight": new["w13_weight"], "w2_weight_scale": new["w2_weight_scale"]})
        raise OSError("connection lost")
    assert same(packed_bytes(layer), before) and identity(layer) == were
    mxfp4.moe_quant_info(layer)


def test_an_undone_update_leaves_what_an_earlier_one_wrote(plan, monkeypatch):
    monkeypatch.setenv(STAGING, "host")
    layer = loaded_layer(plan, random_raw(plan.spec, 1))
    new, failed = random_raw(plan.spec, 2), random_raw(plan.spec, 3)
    with updating():
        load(layer, new)
    with pytest.raises(OSError), updating():
        load(layer, {"w13_weight": failed["w13_weight"]})
        raise OSError("connection lost")
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, new)))
    mxfp4.moe_quant_info(layer)


def test_all_layers_of_a_failed_update_are_undone(monkeypatch):
    monkeypatch.setenv(STAGING, "host")
    plan = PLANS["interleaved"]
    layers = [loaded_layer(plan, random_raw(plan.spec, seed)) for seed in (1, 2)]
    before = [packed_bytes(layer) for layer in layers]
    with pytest.raises(ContractError, match="dtype"), updating():
        load(layers[0], random_raw(plan.spec, 3))
        mxfp4.prepare_weights(
            layers[0], plan
        )  # as SGLang does, layer by layer, before the next fails
        load(layers[1], {"w2_weight": torch.zeros(4, 256, 64)})
    assert [same(packed_bytes(a), b) for a, b in zip(layers, before, strict=True)] == [True, True]


# --- refused until a full update ------------------------------------------------------------------------------


def test_without_a_copy_every_call_refuses_until_a_full_update(simple):
    layer, plan, _ = simple
    new = random_raw(plan.spec, 2)
    with pytest.raises(OSError):
        fail_midway(layer, new)
    with pytest.raises(ContractError, match="connection lost"):
        mxfp4.moe_quant_info(layer)
    # A captured graph asks nobody: what it reads gives NaN.
    assert bool((layer.w13_weight_scale == 0xFF).all())
    assert bool((layer.w2_weight_scale == 0xFF).all())
    with updating():
        load(layer, new, [0, 1, 2])
        load(layer, {n: t for n, t in new.items() if n != "w2_weight"}, [3])
    with pytest.raises(ContractError, match="no valid weights"):  # expert 3's w2 is missing
        mxfp4.moe_quant_info(layer)
    # Its new scales are there, but a captured graph still must not compute with the old w2.
    assert bool((layer.w13_weight_scale == 0xFF).all())
    with updating():
        load(layer, {"w2_weight": new["w2_weight"]}, [3])
    mxfp4.moe_quant_info(layer)
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, new)))


def test_a_whole_tensor_update_makes_an_invalid_layer_valid():
    plan = PLANS["padding"]
    layer, new = loaded_layer(plan, random_raw(plan.spec, 1)), random_raw(plan.spec, 2)
    with pytest.raises(OSError), updating():
        load(layer, {"w2_weight": new["w2_weight"]})
        raise OSError("connection lost")
    with updating():
        load(layer, new)
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, new)))
    mxfp4.moe_quant_info(layer)


@pytest.mark.parametrize("staging", ["none", "host"])
def test_a_rank_whose_loaders_leave_columns_alone_recovers(monkeypatch, staging):
    """gpt-oss's last rank has fewer columns than its parameters: no update ever writes the rest."""
    monkeypatch.setenv(STAGING, staging)
    plan = PLANS["padding"]
    old, new = random_raw(plan.spec, 1), random_raw(plan.spec, 2)

    def corner(tensor):
        """The first columns of w2 and the first rows of w13; a bias of w2 has no such columns."""
        if tensor.dim() == 3 and tensor.shape[1] == plan.spec.hidden_size:
            return tensor[:, :, : tensor.shape[2] // 2]
        return tensor[:, : tensor.shape[1] // 2]

    def write(param, loaded, *_):
        target = corner(param.data)
        target.copy_(loaded)

    layer = loaded_layer(plan, old)
    for name, parameter in layer.named_parameters():
        parameter.weight_loader = mxfp4_reload.guarded(layer, name, write)
    with pytest.raises(OSError), updating():
        load(layer, {"w13_weight_scale": corner(new["w13_weight_scale"])})
        raise OSError("connection lost")
    if staging == "none":
        assert bool((layer.w2_weight_scale == 0xFF).all())
        with pytest.raises(ContractError, match="no valid weights"):
            mxfp4.moe_quant_info(layer)
    with updating():
        load(layer, {name: corner(tensor) for name, tensor in new.items()})
    mxfp4.moe_quant_info(layer)
    for name, tensor in old.items():
        corner(tensor).copy_(corner(new[name]))
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, old)))


def test_a_loader_that_fails_outside_any_update(simple):
    layer, _, _ = simple
    with pytest.raises(RuntimeError):
        load(layer, {"w2_weight": torch.zeros(4, 256, 32, dtype=torch.uint8)})
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(layer)


# --- scales of NaN --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["none", "host"])
def test_a_nan_scale_fails_the_update(simple, monkeypatch, staging):
    monkeypatch.setenv(STAGING, staging)
    layer, plan, _ = simple
    before, new = packed_bytes(layer), random_raw(plan.spec, 2)
    new["w2_weight_scale"][1, 2, 3] = 0xFF
    with pytest.raises(ContractError, match=r"w2_weight_scale\[1, 2, 3\]"), updating():
        load(layer, new)
    if staging == "host":
        assert same(packed_bytes(layer), before)
        mxfp4.moe_quant_info(layer)
    else:
        with pytest.raises(ContractError, match="no valid weights"):
            mxfp4.moe_quant_info(layer)


def test_a_nan_scale_written_past_the_loaders_is_found(simple):
    layer, plan, _ = simple
    mxfp4.restore_raw(layer)
    layer.w2_weight_scale.data[0, 0, 0] = 0xFF
    with pytest.raises(ContractError, match="w2_weight_scale"):
        mxfp4.prepare_weights(layer, plan)
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(layer)


def test_a_nan_scale_does_not_heal_an_invalid_layer(simple):
    layer, plan, _ = simple
    new = random_raw(plan.spec, 2)
    with pytest.raises(OSError):
        fail_midway(layer, new)
    broken = {n: t.clone() for n, t in new.items()}
    broken["w13_weight_scale"][2, 0, 0] = 0xFF
    with pytest.raises(ContractError, match=r"w13_weight_scale\[2, 0, 0\]"), updating():
        load(layer, broken)
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(layer)
    with updating():
        load(layer, new)
    mxfp4.moe_quant_info(layer)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
