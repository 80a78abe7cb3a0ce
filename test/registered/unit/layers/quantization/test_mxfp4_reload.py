"""Weight updates of a layer that is laid out: in place, checked, undone or refused, never a mixture."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("hypothesis", reason="SGLang's environments do not have it")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import STAGING, updating, weights_of
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    load,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")


def gpt_oss(experts=4, hidden=192, inter=192):
    return MoeSpec(
        "swiglu",
        experts,
        2,
        hidden,
        inter,
        gate_up_interleaved=True,
        has_bias=True,
        swiglu_limit=7.0,
    )


PLANS = {
    "separated": plans.plan(plans.situv2(4, 2, 256, 128)),
    "interleaved": plans.plan(plans.situv2(4, 2, 256, 128), {plans.A8W4: "1"}),
    "gfx1250": plans.plan(plans.situv2(4, 2, 256, 128), arch="gfx1250"),
    # K3's I per rank: w2's 12 columns of scales become 16, so raw and packed sizes differ.
    "scale padding": plans.plan(plans.situv2(3, 2, 256, 384), {plans.A8W4: "1"}),
    # Rows and columns are padded, gate and up alternate, biases are bf16 in the checkpoint.
    "padding": plans.plan(gpt_oss()),
    "padded halves": plans.plan(MoeSpec("silu", 4, 2, 192, 96), {plans.ITLV: "0"}),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(STAGING, raising=False)
    yield
    assert not mxfp4_reload.RUNNING.written and mxfp4_reload.RUNNING.depth == 0


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]


@pytest.fixture
def simple():
    """A layer without padding, its plan and its raw tensors."""
    plan = PLANS["interleaved"]
    raw = random_raw(plan.spec, 1)
    return loaded_layer(plan, raw), plan, raw


def identity(layer):
    return {
        name: (id(p), p.data_ptr(), p.weight_loader, tuple(p.shape))
        for name, p in layer.named_parameters()
    }


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


def test_calls_share_their_operands_until_the_weights_move(plan):
    layer = loaded_layer(plan, random_raw(plan.spec, 1))
    one, two = mxfp4.moe_quant_info(layer), mxfp4.moe_quant_info(layer)
    assert two.w13_weight is one.w13_weight and two.w2_weight is one.w2_weight
    layer.w13_weight.data = layer.w13_weight.data.clone()
    moved = mxfp4.moe_quant_info(layer)
    assert moved.w13_weight.data_ptr() == layer.w13_weight.data_ptr() != one.w13_weight.data_ptr()


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


def fail_midway(layer, new):
    with updating():
        load(layer, new, [0])
        load(layer, {"w2_weight": new["w2_weight"]}, [1])
        raise OSError("connection lost")


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


def test_a_loader_that_fails_outside_any_update(simple):
    layer, _, _ = simple
    with pytest.raises(RuntimeError):
        load(layer, {"w2_weight": torch.zeros(4, 256, 32, dtype=torch.uint8)})
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(layer)


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


def test_an_unknown_staging_is_refused(simple, monkeypatch):
    layer, _, raw = simple
    monkeypatch.setenv(STAGING, "disk")
    before = packed_bytes(layer)
    with pytest.raises(ContractError, match=STAGING):
        mxfp4_reload.update(layer, {"w2_weight": raw["w2_weight"]})
    assert same(packed_bytes(layer), before)


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(1, 4),
    hidden=st.integers(1, 9).map(lambda n: 32 * n),
    inter=st.integers(1, 9).map(lambda n: 32 * n),
    kind=st.sampled_from(["gpt_oss", "situ", "situ a8w4", "silu"]),
)
def test_there_and_back_for_random_sizes(experts, hidden, inter, kind):
    topk = 1
    if kind == "gpt_oss":
        plan = plans.plan(gpt_oss(experts, hidden, inter) if experts > 1 else PLANS["padding"].spec)
    elif kind == "silu":
        plan = plans.plan(MoeSpec("silu", experts, topk, hidden, inter), {plans.ITLV: "0"})
    else:
        env = {plans.A8W4: "1"} if "a8w4" in kind else {}
        plan = plans.plan(plans.situv2(experts, topk, hidden, inter), env)
    raw = random_raw(plan.spec, experts + hidden + inter)
    layer = loaded_layer(plan, raw)
    before = packed_bytes(layer)
    mxfp4.restore_raw(layer)
    assert same(packed_bytes(layer), raw)
    mxfp4.prepare_weights(layer, plan)
    assert same(packed_bytes(layer), before)


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
    from dataclasses import replace

    plan = plans.plan(replace(plan.spec, **spec), dict(plan.target.env))
    layer = loaded_layer(plan, random_raw(plan.spec, 1, bias_dtype=torch.float32))
    expert = 2 * plan.padded_intermediate_size * plan.padded_hidden_size // 2
    state = weights_of(layer)
    for step in (lambda: state.open(["w13_weight", "w2_weight", "w2_weight_scale"]), state.close):
        with Allocations() as seen:
            step()
        # The index table of a scale layout, 8 bytes an entry, is the largest thing besides.
        assert max(seen.sizes, default=0) <= expert, name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
