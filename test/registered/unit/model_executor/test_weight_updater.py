"""What stands around SGLang's ``WeightUpdater``, on layers without SGLang: checked, told, never half-way."""

import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sglang_aiter_moe.checkpoint.offline import pack_checkpoint
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
from sglang_aiter_moe.srt.model_executor.model_runner_components import weight_updater
from sglang_aiter_moe.testing.loaded_layers import (
    load,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.updated_model import (
    GATE,
    NAME,
    PLAN,
    SPEC,
    Updater,
    half_way,
    never,
    sent,
)

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


@pytest.fixture
def updater():
    yield Updater()
    assert not mxfp4_reload.RUNNING.written and mxfp4_reload.RUNNING.depth == 0


class Runner:
    """SGLang's ``ModelRunner`` up to 0.5.15: the model is an attribute."""

    def __init__(self, updater):
        self.model = updater.whole


def test_a_model_runner_is_checked_as_well(updater):
    unknown = [(f"{NAME}.9.w1.weight_packed", torch.zeros(1, 1, dtype=torch.uint8))]
    success, message = weight_updater.from_tensor(never, Runner(updater), unknown)
    assert not success and f"{NAME}.9" in message and updater.unchanged


@pytest.mark.parametrize(
    "name",
    [f"{NAME}.4.w1.weight_packed", f"{NAME}.0.w1.weight_pack", f"{NAME}.0.w9.weight"],
)
def test_unknown_experts_and_names_are_refused_before_the_first_write(updater, name):
    tensors = [*sent(), (name, sent()[0][1])]
    success, message = weight_updater.from_tensor(never, updater, tensors)
    assert not success and name in message and updater.unchanged


def test_shared_experts_and_layers_that_are_elsewhere_are_left_alone(updater):
    tensors = [
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", torch.zeros(3)),
        ("model.layers.7.mlp.experts.0.w1.weight_packed", torch.zeros(3)),
    ]
    original = lambda *_: (True, "done")  # noqa: E731
    assert weight_updater.from_tensor(original, updater, tensors) == (True, "done")


def test_what_one_rank_did_not_receive_none_loads(updater, monkeypatch):
    """From 0.5.21 on the rank that fails is not asked to load, and the others would wait for it."""
    said = []
    monkeypatch.setattr(weight_updater, "failure_elsewhere", said.append)
    got = [("a", torch.zeros(1))]
    assert weight_updater.receiving(lambda _, *, names: got, updater, names=["a"]) is got

    def lost(*_):
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        weight_updater.receiving(lost, updater)
    assert said == [None, "connection lost"]
    monkeypatch.setattr(weight_updater, "failure_elsewhere", lambda reason: "rank 1: lost")
    with pytest.raises(RuntimeError, match="rank 1: lost"):
        weight_updater.receiving(lambda _: got, updater)
    plain = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    assert weight_updater.receiving(lambda _: got, plain) is got


def test_a_flattened_bucket_is_checked_by_its_metadata(updater):
    part = SimpleNamespace(name=f"{NAME}.0.w1.weight_packed", shape=(1, 2), dtype=torch.uint8)
    success, message = weight_updater.from_tensor(
        never, updater, {"metadata": [part]}, "flattened_bucket"
    )
    assert not success and "(1, 2)" in message


def test_distributed_is_checked_before_anything_is_received(updater):
    success, message = weight_updater.from_distributed(
        never, updater, [f"{NAME}.0.w2.weight_packed"], ["bfloat16"], [(256, 64)], "group"
    )
    assert not success and "bfloat16" in message


def test_files_are_checked_by_their_headers(updater, tmp_path):
    tensors = dict(sent())
    tensors[f"{NAME}.3.w2.weight_packed"] = torch.zeros(256, 63, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    success, message = weight_updater.from_disk(never, updater, str(tmp_path))
    assert not success and "(256, 63)" in message and updater.unchanged


def test_a_filter_that_fails_is_a_refusal_which_the_other_ranks_hear(
    updater, tmp_path, monkeypatch
):
    """They wait for this rank, and SGLang's scheduler ends by what escapes an update."""
    save_file(dict(sent()), tmp_path / "model.safetensors")
    said = []
    monkeypatch.setattr(weight_updater, "failure_elsewhere", said.append)

    def no_filter(name):
        raise LookupError("no such group")

    told = weight_updater.from_disk(never, updater, str(tmp_path), "auto", no_filter)
    assert told == (False, "LookupError: no such group")
    assert said == ["no such group"] and updater.unchanged


def test_a_pre_laid_out_directory_is_no_update(updater, tmp_path):
    save_file(dict(sent()), tmp_path / "model.safetensors")
    pack_checkpoint(tmp_path / "model.safetensors", tmp_path / "out", PLAN)
    success, message = weight_updater.from_disk(never, updater, str(tmp_path / "out"))
    assert not success and "ahead of time" in message


def test_direct_writes_reach_the_raw_form(updater):
    new = random_raw(SPEC, 2)

    def direct(_, named_tensors, load_format):
        for name, tensor in named_tensors:
            getattr(updater.experts, name.rpartition(".")[2]).data.copy_(tensor)
        return True, "done"

    tensors = [(f"{NAME}.{name}", tensor) for name, tensor in new.items()]
    assert weight_updater.from_tensor(direct, updater, tensors, "direct")[0]
    assert same(packed_bytes(updater.experts), packed_bytes(loaded_layer(PLAN, new)))


@pytest.mark.parametrize("staging", ["none", "host"])
def test_a_failure_that_sglang_reports_is_one(updater, monkeypatch, staging):
    monkeypatch.setenv(mxfp4_reload.STAGING, staging)

    def half_way(*_):
        load(updater.experts, random_raw(SPEC, 2), [0])
        return False, "connection lost"

    assert weight_updater.from_received(half_way, updater, []) == (False, "connection lost")
    assert updater.unchanged is (staging == "host")
    state = mxfp4_reload.weights_of(updater.experts)
    assert (state.invalid is None) is (staging == "host")


@pytest.mark.parametrize("experts", [False, True])
def test_other_tensors_are_undone_where_a_copy_exists(updater, monkeypatch, experts):
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    before = updater.gate.clone()
    tensors = [*sent(), (GATE, torch.zeros(2, 2))]
    success, _ = weight_updater.from_tensor(half_way(updater, experts=experts), updater, tensors)
    assert not success and updater.unchanged and torch.equal(updater.gate, before)
    assert torch.equal(updater.model.layers[0].mlp.bias, torch.ones(2))
    mxfp4.moe_quant_info(updater.experts)


def test_other_tensors_that_are_half_way_make_every_call_refuse(updater):
    tensors = [(GATE, torch.zeros(2, 2)), ("model.norm.weight", torch.zeros(2))]
    assert not weight_updater.from_tensor(half_way(updater), updater, tensors)[0]
    with pytest.raises(ContractError, match="2 tensors beside the experts are open"):
        mxfp4.moe_quant_info(updater.experts)
    assert bool((updater.experts.w2_weight_scale == 0xFF).all())  # for captured graphs
    done = lambda *_: (True, "done")  # noqa: E731
    assert weight_updater.from_tensor(done, updater, tensors[:1])[0]
    with pytest.raises(ContractError, match=r"model\.norm\.weight"):
        mxfp4.moe_quant_info(updater.experts)
    # An update of experts alone says nothing about the norm.
    new = random_raw(SPEC, 2)
    load_new = lambda *_: (load(updater.experts, new), (True, "done"))[1]  # noqa: E731
    assert weight_updater.from_tensor(load_new, updater, sent())[0]
    with pytest.raises(ContractError, match=r"model\.norm\.weight"):
        mxfp4.moe_quant_info(updater.experts)
    assert bool((updater.experts.w2_weight_scale == 0xFF).all())
    assert weight_updater.from_tensor(done, updater, tensors[1:])[0]
    mxfp4.moe_quant_info(updater.experts)
    assert same(packed_bytes(updater.experts), packed_bytes(loaded_layer(PLAN, new)))


def test_an_update_without_names_is_healed_by_a_whole_checkpoint(updater, tmp_path):
    done = lambda *_: (True, "done")  # noqa: E731
    assert not weight_updater.from_ipc(half_way(updater), updater, None)[0]
    assert weight_updater.from_tensor(done, updater, [(GATE, torch.zeros(2, 2))])[0]
    with pytest.raises(ContractError, match="without names"):
        mxfp4.moe_quant_info(updater.experts)
    save_file(dict(sent()), tmp_path / "model.safetensors")
    only_experts = lambda name: "experts" in name  # noqa: E731
    assert weight_updater.from_disk(done, updater, str(tmp_path), "auto", only_experts)[0]
    with pytest.raises(ContractError, match="without names"):
        mxfp4.moe_quant_info(updater.experts)
    assert weight_updater.from_disk(done, updater, str(tmp_path), "auto")[0]
    mxfp4.moe_quant_info(updater.experts)
    assert updater.unchanged


def test_a_failed_update_of_experts_alone_leaves_the_others_out(updater):
    assert not weight_updater.from_tensor(lambda *_: (False, "no"), updater, sent())[0]
    mxfp4.moe_quant_info(updater.experts)


@pytest.mark.parametrize("staging", ["none", "host"])
def test_a_failure_before_the_first_write_costs_nothing(updater, monkeypatch, staging):
    monkeypatch.setenv(mxfp4_reload.STAGING, staging)

    def unknown_format(*_):
        raise NotImplementedError("Unknown load_format")

    tensors = [*sent(), (GATE, torch.zeros(2, 2))]
    success, message = weight_updater.from_tensor(unknown_format, updater, tensors, "odd")
    assert not success and "Unknown load_format" in message and updater.unchanged
    mxfp4.moe_quant_info(updater.experts)


def test_an_update_that_writes_around_the_loaders_fails(updater):
    """A custom loader, with views that it took long before."""
    view = updater.experts.w13_weight.data
    mxfp4.moe_quant_info(updater.experts)

    def custom(*_):
        view.copy_(random_raw(SPEC, 2)["w13_weight"])
        return True, "done"

    success, message = weight_updater.from_tensor(custom, updater, sent(), "custom.loader")
    assert not success and "did not come through the weight_loader" in message
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(updater.experts)


def test_a_bad_staging_is_told_before_the_update(updater, monkeypatch):
    monkeypatch.setenv(mxfp4_reload.STAGING, "disk")
    success, message = weight_updater.from_tensor(never, updater, sent())
    assert not success and mxfp4_reload.STAGING in message


def test_a_model_without_such_layers_is_left_to_sglang():
    updater = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    assert weight_updater.from_ipc(lambda *_: (True, "x"), updater, None) == (True, "x")


def test_a_session_is_opened_and_closed(updater):
    new = random_raw(SPEC, 2)
    weight_updater.begin_session(lambda _: mxfp4.restore_raw(updater.experts), updater)
    assert mxfp4_reload.weights_of(updater.experts).opened

    def step(*_):
        load(updater.experts, new)
        return True, "done"

    assert weight_updater.from_tensor(step, updater, [])[0]
    weight_updater.end_session(lambda _: mxfp4.prepare_weights(updater.experts, PLAN), updater)
    assert same(packed_bytes(updater.experts), packed_bytes(loaded_layer(PLAN, new)))


def test_a_step_that_fails_undoes_the_steps_before_it(updater, monkeypatch):
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    new = random_raw(SPEC, 2)
    weight_updater.begin_session(lambda _: mxfp4.restore_raw(updater.experts), updater)

    def first(*_):
        load(updater.experts, {"w13_weight": new["w13_weight"]})
        return True, "done"

    def second(*_):
        load(updater.experts, {"w2_weight": new["w2_weight"]})
        raise OSError("connection lost")

    assert weight_updater.from_tensor(first, updater, []) == (True, "done")
    success, message = weight_updater.from_tensor(second, updater, [])
    assert not success and "connection lost" in message
    weight_updater.end_session(lambda _: mxfp4.prepare_weights(updater.experts, PLAN), updater)
    assert updater.unchanged


def first_step(updater):
    """A session whose first step has written new weights for one parameter and the router."""
    new = random_raw(SPEC, 2)

    def step(*_):
        load(updater.experts, {"w13_weight": new["w13_weight"]})
        updater.gate.data.fill_(7.0)
        return True, "done"

    weight_updater.begin_session(lambda _: mxfp4.restore_raw(updater.experts), updater)
    tensors = [("model.layers.0.mlp.gate.weight", torch.zeros(2, 2))]
    assert weight_updater.from_tensor(step, updater, tensors) == (True, "done")


def refused_step(updater):
    unknown = [(f"{NAME}.9.w1.weight_packed", torch.zeros(1, 1, dtype=torch.uint8))]
    success, message = weight_updater.from_tensor(never, updater, unknown)
    assert not success and f"{NAME}.9" in message


def failed_receiving(updater):
    def lost(*_):
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        weight_updater.receiving(lost, updater)


def not_received_elsewhere(updater):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="rank 1: lost"):
        patch.setattr(weight_updater, "failure_elsewhere", lambda reason: "rank 1: lost")
        weight_updater.receiving(lambda _: [], updater)


def end(updater):
    weight_updater.end_session(lambda _: mxfp4.prepare_weights(updater.experts, PLAN), updater)


@pytest.mark.parametrize("step", [refused_step, failed_receiving, not_received_elsewhere])
def test_a_step_that_is_refused_undoes_the_steps_before_it(updater, monkeypatch, step):
    """It wrote nothing itself, but half of the session's weights would be served with half of the old ones."""
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    gate = updater.gate.clone()
    first_step(updater)
    step(updater)
    success, message = weight_updater.from_tensor(never, updater, sent())
    assert not success and "session" in message and "has failed" in message
    end(updater)
    assert updater.unchanged and torch.equal(updater.gate, gate)
    mxfp4.moe_quant_info(updater.experts)


@pytest.mark.parametrize("step", [refused_step, failed_receiving, not_received_elsewhere])
def test_without_copies_a_refused_step_makes_the_layer_invalid(updater, step):
    first_step(updater)
    step(updater)
    end(updater)
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(updater.experts)


def test_what_another_rank_refuses_in_a_session_is_undone_here(updater, monkeypatch):
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    first_step(updater)
    monkeypatch.setattr(weight_updater, "failure_elsewhere", lambda reason: "rank 1: no")
    assert weight_updater.from_tensor(never, updater, sent()) == (False, "refused: rank 1: no")
    end(updater)
    assert updater.unchanged


def test_a_failed_step_ends_its_session_and_no_other(updater, monkeypatch):
    monkeypatch.setenv(mxfp4_reload.STAGING, "host")
    first_step(updater)
    lost = lambda *_: (False, "connection lost")  # noqa: E731
    assert weight_updater.from_tensor(lost, updater, []) == (False, "connection lost")
    success, message = weight_updater.from_tensor(never, updater, sent())
    assert not success and "connection lost" in message and "has failed" in message
    end(updater)
    assert updater.unchanged
    # Outside of a session each call is an update of its own.
    refused_step(updater)
    assert weight_updater.from_tensor(lambda *_: (True, "done"), updater, []) == (True, "done")
    first_step(updater)
    end(updater)
    assert not updater.unchanged


def test_the_other_ranks_hear_whether_an_update_was_refused(updater, monkeypatch):
    told = []
    monkeypatch.setattr(weight_updater, "failure_elsewhere", told.append)
    assert weight_updater.from_tensor(lambda *_: (True, "done"), updater, [])[0]
    assert told == [None, None]  # before the first write, and before it is packed
    told.clear()
    unknown = [(f"{NAME}.9.w1.weight_packed", torch.zeros(1, 1, dtype=torch.uint8))]
    assert not weight_updater.from_tensor(never, updater, unknown)[0]
    assert len(told) == 1 and f"{NAME}.9" in told[0]


@pytest.mark.parametrize("path", ["", "not_there"])
def test_what_is_not_on_this_disk_yet_is_left_to_sglang(tmp_path, path):
    """An empty directory or none: a name on a hub, or files in another format."""
    assert list(weight_updater._in_files(str(tmp_path / path))) == []


def test_the_other_ranks_hear_why_an_update_did_not_succeed(monkeypatch):
    told = []
    monkeypatch.setattr(weight_updater, "failure_elsewhere", lambda reason: told.append(reason))
    for result in ((True, "done"), (False, "no such file")):
        assert weight_updater._on_all_ranks(lambda result=result: result) == result
    assert told == [None, "no such file"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
