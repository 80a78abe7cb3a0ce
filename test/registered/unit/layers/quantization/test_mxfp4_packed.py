"""A layer of a pre-laid-out checkpoint: filled whole, for its rank and plan, or refused."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.checkpoint.files import Checkpoint
from sglang_aiter_moe.checkpoint.offline import pack_checkpoint
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4_packed
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.expert_files import write_experts
from sglang_aiter_moe.testing.loaded_layers import loaded_layer, packed_bytes, random_raw
from sglang_aiter_moe.testing.raw_layers import make_raw_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SPEC = plans.situv2(4, 2, 256, 384)
GPT_OSS = replace(plans.gptoss(1), num_experts=4, topk=2, hidden_size=192, intermediate_size=192)


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A pre-laid-out directory of one layer as SGLang's model path."""
    (tmp_path / "raw").mkdir()
    raw = make_raw_layer(SPEC, 1, seed=1).experts
    file = write_experts(tmp_path / "raw" / "model.safetensors", [raw], "fused")
    pack_checkpoint(file, tmp_path / "out", plans.plan(SPEC))
    monkeypatch.setattr(mxfp4_packed, "_model_path", lambda: str(tmp_path / "out"))
    mxfp4_packed._stored_layers.cache_clear()
    return tmp_path / "out"


def test_the_model_path_is_the_one_that_sglang_was_started_with(monkeypatch):
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: SimpleNamespace(model_path=Path("models/k3"))
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
    assert mxfp4_packed._model_path() == "models/k3"


def test_the_model_path_of_older_releases(monkeypatch):
    """Up to 0.5.14 the arguments are global."""
    older = ModuleType("sglang.srt.server_args")
    older.get_global_server_args = lambda: SimpleNamespace(model_path="models/k3")
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)
    monkeypatch.setitem(sys.modules, older.__name__, older)
    assert mxfp4_packed._model_path() == "models/k3"


@pytest.mark.parametrize("spec", [SPEC, GPT_OSS], ids=["situ", "gpt-oss"])
@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
def test_shapes_and_raw_forms_are_those_of_a_layer_that_was_raw(spec, arch):
    plan = plans.plan(spec, arch=arch)
    raw = random_raw(spec, 1)
    want = packed_bytes(loaded_layer(plan, raw))
    found = mxfp4_packed.packed_tensors(plan, spec.has_bias)
    assert {n: tuple(s) for n, s in found.items()} == {n: tuple(t.shape) for n, t in want.items()}
    forms = mxfp4_packed.raw_forms_of(plan, spec.has_bias)
    assert {n: (f.shape, f.dtype) for n, f in forms.items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in raw.items()
    }


def test_a_layer_is_filled_by_its_loaders_and_checked(packed):
    plan = plans.plan(SPEC)
    layer = SimpleNamespace(layer_id=0)
    stored = mxfp4_packed.stored_for(layer, plan)
    setattr(layer, mxfp4_packed.STORED, stored)
    tensors = {
        n: torch.nn.Parameter(torch.zeros(s, dtype=torch.uint8), requires_grad=False)
        for n, s in mxfp4_packed.packed_tensors(plan, False).items()
    }
    source = next(iter(Checkpoint(packed).layers().values()))
    for number, (name, parameter) in enumerate(tensors.items()):
        with pytest.raises(ContractError, match="got no"):
            stored.check_filled(plan, {n: p.data for n, p in tensors.items()})
        load = mxfp4_packed.filling(layer, name, None)
        load(parameter, source.whole(name))
        assert len(stored.filled) == number + 1
    stored.check_filled(plan, {n: p.data for n, p in tensors.items()})
    tensors["w2_weight"].data[0, 0, 0] ^= 1
    with pytest.raises(ContractError, match="bytes that were packed"):
        stored.check_filled(plan, {n: p.data for n, p in tensors.items()})


def test_a_raw_tensor_among_packed_ones_is_refused(packed):
    stored = mxfp4_packed.stored_for(SimpleNamespace(layer_id=0), plans.plan(SPEC))
    parameter = torch.zeros(4 * 256, 16, dtype=torch.uint8)
    with pytest.raises(ContractError, match="w2_weight_scale"):
        stored.fill("w2_weight_scale", parameter, torch.zeros(4, 256, 12, dtype=torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 9, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.int8)],
    ids=["shape", "dtype"],
)
def test_shape_and_dtype_of_a_packed_tensor_both_count(packed, tensor):
    stored = mxfp4_packed.stored_for(SimpleNamespace(layer_id=0), plans.plan(SPEC))
    parameter = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ContractError) as caught:
        stored.fill("w2_weight", parameter, tensor)
    assert f"is {tuple(tensor.shape)} {tensor.dtype}" in caught.value.what
    assert caught.value.allowed == "(4, 8) torch.uint8"
    assert not stored.filled and parameter.data.all()
    stored.fill("w2_weight", parameter, torch.zeros(4, 8, dtype=torch.uint8))
    assert stored.filled == {"w2_weight"} and not parameter.data.any()


def test_every_tensor_that_did_not_come_is_named(packed):
    plan = plans.plan(replace(SPEC, name="layer 0"))
    stored = mxfp4_packed.stored_for(SimpleNamespace(layer_id=0), plan)
    stored.filled = {"w13_weight", "w2_weight"}
    tensors = dict.fromkeys(mxfp4_packed.packed_tensors(plan, False))
    with pytest.raises(ContractError, match="layer 0 got no w13_weight_scale, w2_weight_scale"):
        stored.check_filled(plan, tensors)


@pytest.mark.parametrize("state", ["raw checkpoint", "to be filled", "laid out"])
def test_whose_loader_it_is(packed, state):
    """SGLang's, but for the first bytes of a layer that comes laid out."""
    layer = SimpleNamespace()
    if state != "raw checkpoint":
        setattr(layer, mxfp4_packed.STORED, mxfp4_packed.Stored(None))
    if state == "laid out":
        layer.aiter_moe_weights = object()

    def sglangs(param, loaded, *args, **kwargs):
        return args, kwargs

    load = mxfp4_packed.filling(layer, "w2_weight", sglangs)
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    result = load(parameter, torch.ones(2), "w1", expert_id=3)
    assert result == (None if state == "to be filled" else (("w1",), {"expert_id": 3}))
    assert parameter.tolist() == ([1.0, 1.0] if state == "to be filled" else [0.0, 0.0])
    assert load.__name__ == "sglangs"


@pytest.mark.parametrize("rank", [{"moe_tp_rank": 1}, {"moe_ep_rank": 2}])
def test_another_rank_is_refused(packed, rank):
    with pytest.raises(ContractError, match="was packed for rank"):
        mxfp4_packed.stored_for(SimpleNamespace(layer_id=0, **rank), plans.plan(SPEC))


def test_another_plan_is_refused(packed):
    with pytest.raises(ContractError, match="w13_layout"):
        mxfp4_packed.stored_for(SimpleNamespace(layer_id=0), plans.plan(SPEC, {plans.A8W4: "1"}))


def test_a_raw_checkpoint_and_an_unknown_layer_are_none(packed, monkeypatch):
    assert mxfp4_packed.stored_for(SimpleNamespace(layer_id=1), plans.plan(SPEC)) is None
    monkeypatch.setattr(mxfp4_packed, "_model_path", lambda: str(packed.parent / "raw"))
    assert mxfp4_packed.stored_for(SimpleNamespace(layer_id=0), plans.plan(SPEC)) is None


def test_a_directory_is_read_once(packed, monkeypatch):
    layer = SimpleNamespace(layer_id=0)
    first = mxfp4_packed.stored_for(layer, plans.plan(SPEC))
    monkeypatch.setattr(Path, "glob", None)
    again = mxfp4_packed.stored_for(layer, plans.plan(SPEC))
    assert again is not first and again.layer is first.layer


def test_files_of_that_name_without_a_plan_are_raw(packed):
    """Any checkpoint may call its files so."""
    raw = packed.parent / "raw" / "model.safetensors"
    other = packed.parent / "other"
    other.mkdir()
    (other / "experts-1.safetensors").write_bytes(raw.read_bytes())
    assert mxfp4_packed._stored_layers(str(other)) == {}
    assert list(mxfp4_packed._stored_layers(str(packed))) == [0]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
