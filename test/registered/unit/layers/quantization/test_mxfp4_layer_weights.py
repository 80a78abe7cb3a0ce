"""The states of one layer's weights, one by one: open, packed, blocked, invalid; and what each lets through."""

import contextlib
import itertools
import logging
import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_layer_weights, mxfp4_reload
from sglang_aiter_moe.srt.layers.quantization.mxfp4_layer_weights import STAGING
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import (
    RUNNING,
    begin_session,
    end_session,
    guarded,
    updating,
    weights_of,
)
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    load,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

SPEC = plans.situv2(2, 1, 256, 128, name="layer 5")
PLAN = plans.plan(SPEC, {plans.A8W4: "1"})
OLD, NEW = random_raw(SPEC, 1), random_raw(SPEC, 2)
SCALES = ("w13_weight_scale", "w2_weight_scale")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(STAGING, raising=False)
    yield
    assert not RUNNING.written and RUNNING.depth == 0


@pytest.fixture
def layer():
    return loaded_layer(PLAN, OLD)


@pytest.fixture(scope="module")
def new_bytes():
    return packed_bytes(loaded_layer(PLAN, NEW))


def nan_scales(layer):
    return [bool((getattr(layer, name) == 0xFF).all()) for name in SCALES]


def fail(layer, names=("w2_weight",), reason="connection lost"):
    with pytest.raises(OSError), updating():
        load(layer, {name: NEW[name] for name in names})
        raise OSError(reason)


# --- staging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, known", [(None, "none"), ("none", "none"), ("host", "host")])
def test_the_staging_that_is_asked_for(monkeypatch, value, known):
    if value is not None:
        monkeypatch.setenv(STAGING, value)
    assert mxfp4_reload.staging() == known


@pytest.mark.parametrize("value", ["", "Host", "1", "disk"])
def test_another_staging_is_told_with_the_known_ones(monkeypatch, value):
    monkeypatch.setenv(STAGING, value)
    with pytest.raises(ContractError, match=f"{STAGING} is {value!r}") as caught:
        mxfp4_reload.staging()
    assert caught.value.allowed == "none, host"


def test_a_copy_that_came_too_late_is_none(layer, monkeypatch):
    """Switched on in the middle of an update: half of what it wrote cannot be undone."""
    with pytest.raises(OSError), updating():
        load(layer, {"w2_weight": NEW["w2_weight"]})
        monkeypatch.setenv(STAGING, "host")
        load(layer, {"w13_weight": NEW["w13_weight"]})
        raise OSError("connection lost")
    with pytest.raises(
        ContractError, match="layer 5 has no valid weights: OSError: connection lost"
    ):
        mxfp4.moe_quant_info(layer)


def test_the_copy_is_of_before_the_first_write(layer, monkeypatch):
    monkeypatch.setenv(STAGING, "host")
    before = packed_bytes(layer)
    with pytest.raises(OSError), updating():
        for seed in (2, 3):
            load(layer, random_raw(SPEC, seed), [0, 1])
        raise OSError
    assert same(packed_bytes(layer), before)


def test_what_is_undone_is_said_and_what_is_lost_too(layer, monkeypatch, caplog):
    monkeypatch.setenv(STAGING, "host")
    fail(layer)
    monkeypatch.setenv(STAGING, "none")
    fail(layer)
    levels = [(record.levelno, record.message) for record in caplog.records]
    assert levels == [
        (logging.WARNING, "layer 5: the update failed and is undone: OSError: connection lost"),
        (logging.ERROR, "layer 5 is invalid until a full update: OSError: connection lost"),
    ]


def test_a_failure_before_the_first_write_changes_no_state(layer):
    with pytest.raises(OSError), updating():
        raise OSError
    state = weights_of(layer)
    assert state.invalid is None and state.is_callable and not state.opened
    state.roll_back("nothing was written")
    assert state.invalid is None and not state.opened


# --- open and closed ----------------------------------------------------------------------------------------


def test_what_aiter_is_told_of_each_parameter(layer):
    state = weights_of(layer)
    for _ in range(2):
        for name, parameter in layer.named_parameters():
            shuffled = getattr(parameter, "is_shuffled", False)
            assert shuffled is (name in ("w13_weight", "w2_weight")), name
        state.open()
        assert not any(p.is_shuffled for p in layer.parameters())
        state.close()


def test_an_open_parameter_stays_open_with_what_was_written(layer):
    state = weights_of(layer)
    state.open(["w2_weight"])
    layer.w2_weight.data.copy_(NEW["w2_weight"])
    state.open()
    state.open(["w2_weight"])
    assert torch.equal(layer.w2_weight.data, NEW["w2_weight"])
    assert list(state.opened) == ["w2_weight", "w13_weight", *SCALES]
    state.close()
    assert not state.opened


def test_each_open_parameter_is_named_in_a_refusal(layer):
    state = weights_of(layer)
    state.open(["w13_weight", "w2_weight_scale"])
    message = r"layer 5 is being updated: w13_weight, w2_weight_scale are in raw form"
    with pytest.raises(ContractError, match=message):
        mxfp4.moe_quant_info(layer)
    state.close()
    mxfp4.moe_quant_info(layer)


def test_a_written_layer_is_part_of_the_update_once_and_no_longer_than_it(layer):
    other = loaded_layer(PLAN, OLD)
    with updating():
        load(layer, NEW, [0, 1])
        load(other, NEW)
        assert RUNNING.written == [weights_of(layer), weights_of(other)]
        weights_of(layer).close()  # SGLang closes layer by layer; the update goes on
        assert RUNNING.written == [weights_of(layer), weights_of(other)]
    assert RUNNING.written == []


def test_a_layer_that_is_closed_outside_any_update_is_forgotten(layer):
    load(layer, NEW)
    assert RUNNING.written == [weights_of(layer)]
    mxfp4.prepare_weights(layer, PLAN)
    assert RUNNING.written == []
    RUNNING.forget([weights_of(layer)])  # of a layer that is no part of it


def test_the_fingerprint_is_of_what_was_packed_last(layer, new_bytes):
    state = weights_of(layer)
    first = state.fingerprint
    state.close()
    assert state.fingerprint is first, "nothing was open"
    with updating():
        load(layer, NEW)
    assert state.fingerprint != first
    assert state.fingerprint == weights_of(loaded_layer(PLAN, NEW)).fingerprint


def test_no_fingerprint_is_taken_of_an_invalid_layer(layer):
    state = weights_of(layer)
    first = state.fingerprint
    fail(layer)
    assert state.fingerprint is first


# --- callable, and what else there is -----------------------------------------------------------------------


@pytest.mark.parametrize("what", [None, "opened", "invalid", "blocked", "notes", "version"])
def test_each_thing_alone_speaks_against_a_call(layer, what):
    state = weights_of(layer)
    if what == "opened":
        state.opened["w2_weight"] = layer.w2_weight
    elif what == "notes":
        state.notes.add("w2_weight")
    elif what == "version":
        with torch.no_grad():
            layer.w2_weight.zero_()
    elif what is not None:
        setattr(state, what, "a reason")
    assert state.is_callable is (what is None)


def test_a_version_that_nobody_saw_is_looked_at_once(layer):
    """Writing the same bytes is no foreign write."""
    state = weights_of(layer)
    with torch.no_grad():
        layer.w2_weight.copy_(layer.w2_weight.clone())
    assert not state.is_callable
    mxfp4.moe_quant_info(layer)
    assert state.is_callable


@pytest.mark.parametrize("names", [["w2_weight"], ["w13_weight", "w2_weight_scale"]])
def test_only_what_was_written_around_the_loaders_is_named(layer, names, caplog):
    for name in names:
        getattr(layer, name).data.view(-1)[0] ^= 1
    state = weights_of(layer)
    with pytest.raises(ContractError) as caught:
        state.verify()
    said = f"{', '.join(names)}: bytes were written that did not come through the weight_loader"
    assert caught.value.what.startswith(f"layer 5 has no valid weights: {said}")
    assert caplog.records[-1].levelno == logging.ERROR and nan_scales(layer) == [True, True]
    state.verify()  # what is known already is for refuse_call to say
    with pytest.raises(ContractError, match="no valid weights"):
        state.refuse_call()


def test_what_is_open_or_withheld_is_not_looked_at(layer):
    state = weights_of(layer)
    state.open(["w2_weight"])
    layer.w2_weight.data.zero_()
    state.block("the norm is half-way", poison=True)
    state.verify()
    assert state.invalid is None
    layer.w13_weight.data.zero_()
    with pytest.raises(ContractError, match="norm is half-way"):
        state.verify()  # the model's reason is said first
    assert state.invalid.startswith("w13_weight: bytes")


# --- blocked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [False, True])
def test_a_blocked_layer(layer, poison):
    state, before = weights_of(layer), packed_bytes(layer)
    state.block("the norm is half-way", poison=poison)
    message = "the model has no valid weights: the norm is half-way"
    with pytest.raises(ContractError, match=message) as caught:
        mxfp4.moe_quant_info(layer)
    assert caught.value.allowed == "calls after a full update of the model"
    assert nan_scales(layer) == [poison, poison]
    state.unblock()
    mxfp4.moe_quant_info(layer)
    assert same(packed_bytes(layer), before)


def test_a_poisoned_layer_is_updated_and_stays_poisoned(layer, new_bytes):
    state = weights_of(layer)
    state.block("the norm is half-way", poison=True)
    with updating():
        load(layer, NEW, [0])
        load(layer, NEW, [1])
    assert nan_scales(layer) == [True, True] and state.invalid is None
    state.unblock()
    assert same(packed_bytes(layer), new_bytes)
    mxfp4.moe_quant_info(layer)


def test_a_layer_that_is_blocked_twice_still_has_its_scales(layer):
    state, before = weights_of(layer), packed_bytes(layer)
    for reason in ("the norm is half-way", "the head is too"):
        state.block(reason, poison=True)
        assert nan_scales(layer) == [True, True] and state.blocked == reason
    state.unblock()
    assert same(packed_bytes(layer), before)


def test_opening_a_poisoned_layer_gives_its_raw_scales(layer):
    state = weights_of(layer)
    state.block("the norm is half-way", poison=True)
    state.open()
    assert same(packed_bytes(layer), OLD)
    state.unblock()
    assert same(packed_bytes(layer), OLD), "open parameters are not touched"
    state.close()


def test_a_blocked_and_invalid_layer_stays_refused_by_the_other_reason(layer):
    fail(layer)
    state = weights_of(layer)
    state.block("the norm is half-way", poison=True)
    with pytest.raises(ContractError, match="the model has no valid weights"):
        state.refuse_call()
    state.unblock()
    assert nan_scales(layer) == [True, True]
    with pytest.raises(ContractError, match="layer 5 has no valid weights") as caught:
        state.refuse_call()
    assert caught.value.allowed == "calls after a full update of this layer"


# --- until every part has been written again -----------------------------------------------------------------

PARTS = [
    (name, expert, shard)
    for name in OLD
    for expert in range(2)
    for shard in (("w1", "w3") if name.startswith("w13") else ("w2",))
]


@pytest.mark.parametrize("missing", [None, *PARTS], ids=str)
def test_every_part_has_to_come_again(layer, new_bytes, missing):
    fail(layer, OLD)
    with updating():
        for name, expert, shard in PARTS:
            if (name, expert, shard) == missing:
                continue
            parameter, part = getattr(layer, name), NEW[name][expert]
            if shard != "w2":
                part = part.chunk(2)[shard == "w3"]
            parameter.weight_loader(parameter, part, name, shard, expert)
    assert (weights_of(layer).invalid is None) is (missing is None)
    assert nan_scales(layer) == [missing is not None] * 2
    if missing is None:
        assert same(packed_bytes(layer), new_bytes)


def test_what_came_before_a_second_failure_does_not_count(layer):
    fail(layer, OLD)
    with updating():
        load(layer, NEW, [0])
    fail(layer, OLD, "again")
    with updating():
        load(layer, NEW, [1])
    assert weights_of(layer).invalid == "OSError: again"


@pytest.mark.parametrize("staging", ["none", "host"])
def test_an_invalid_layer_has_nothing_to_go_back_to(layer, monkeypatch, staging):
    fail(layer, OLD)
    monkeypatch.setenv(STAGING, staging)
    fail(layer, OLD, "again")
    assert weights_of(layer).invalid == "OSError: again" and nan_scales(layer) == [True, True]
    with updating():
        load(layer, NEW)
    mxfp4.moe_quant_info(layer)


def test_writes_to_a_valid_layer_are_not_counted(layer):
    with updating():
        load(layer, NEW)
    fail(layer)
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(layer)


@pytest.mark.parametrize("name", SCALES)
def test_a_nan_that_would_be_packed_is_told_before_it_is(layer, name):
    state = weights_of(layer)
    state.check_written()
    with pytest.raises(ContractError, match=rf"{name}\[1, 0, 3\] is 0xFF"), updating():
        scale = NEW[name].clone()
        scale[1, 0, 3] = 0xFF
        load(layer, {name: scale})
        with pytest.raises(ContractError, match=rf"{name}\[1, 0, 3\] is 0xFF"):
            state.check_written()
        assert name in state.opened, "nothing was packed by asking"
    assert f"{name}[1, 0, 3]" in state.invalid


# --- loaders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, kwargs, wrote",
    [
        ((), {}, (None, None)),
        (("name",), {}, (None, None)),
        (("name", "w1"), {}, ("w1", None)),
        (("name", "w1", 1), {}, ("w1", 1)),
        (("name",), {"shard_id": "w3", "expert_id": 0}, ("w3", 0)),
        (("name", "w3"), {"expert_id": 1}, ("w3", 1)),
    ],
)
def test_what_a_loader_wrote_by_its_arguments(layer, args, kwargs, wrote):
    fail(layer)
    state = weights_of(layer)
    given = []
    loader = guarded(layer, "w2_weight", lambda *a, **k: given.append((a[2:], k)) or "result")
    with updating():
        assert loader(layer.w2_weight, NEW["w2_weight"], *args, **kwargs) == "result"
        assert given == [(args, kwargs)]
        assert state._rewritten == {("w2_weight", *wrote)}


def test_loaders_of_a_layer_that_is_raw_are_sglangs():
    layer = torch.nn.Module()
    loader = guarded(layer, "w2_weight", lambda *args, **kwargs: (args, kwargs))
    assert loader(1, 2, 3, expert_id=4) == ((1, 2, 3), {"expert_id": 4})


@pytest.mark.parametrize("staging", ["none", "host"])
@pytest.mark.parametrize("around", ["nothing", "update", "session"])
def test_a_loader_that_fails_ends_what_it_is_alone(layer, monkeypatch, around, staging):
    """What is undone stays open until the update ends; what is lost is refused at once."""
    monkeypatch.setenv(STAGING, staging)
    state, before = weights_of(layer), packed_bytes(layer)

    def write():
        load(layer, {"w13_weight": NEW["w13_weight"]})
        with pytest.raises(ContractError, match=r"layer 5 w2_weight has dtype torch\.float32"):
            load(layer, {"w2_weight": torch.zeros(2, 256, 64)})
        assert bool(state.opened) is (around != "nothing" and staging == "host")

    if around == "session":
        begin_session()
        write()
        end_session()
    else:
        with updating() if around == "update" else contextlib.nullcontext():
            write()
    assert not state.opened
    if staging == "host":
        assert state.invalid is None and same(packed_bytes(layer), before)
    else:
        assert state.invalid.startswith("w2_weight: layer 5 w2_weight has")


# --- updates within updates -----------------------------------------------------------------------------------


def test_the_outermost_update_closes(layer, new_bytes):
    state = weights_of(layer)
    with updating():
        with updating():
            load(layer, NEW)
        assert state.opened and RUNNING.depth == 1
    assert not state.opened and same(packed_bytes(layer), new_bytes)


def test_an_inner_failure_that_is_caught_is_one_of_the_whole(layer):
    state = weights_of(layer)
    with updating():
        load(layer, {"w13_weight": NEW["w13_weight"]})
        with pytest.raises(OSError), updating():
            load(layer, {"w2_weight": NEW["w2_weight"]})
            raise OSError("inner")
        assert state.invalid == "OSError: inner"
    assert not state.opened and state.invalid == "OSError: inner"


@pytest.mark.parametrize("staging", ["none", "host"])
def test_a_failure_that_passes_through_several_updates_is_said_once(
    layer, monkeypatch, caplog, staging
):
    monkeypatch.setenv(STAGING, staging)
    with pytest.raises(OSError), updating(), updating():
        load(layer, NEW)
        raise OSError("lost")
    assert len(caplog.records) == 1 and caplog.records[0].message.endswith("OSError: lost")


@pytest.mark.parametrize("begun", [1, 2])
def test_a_session_is_one_however_often_it_begins(layer, begun, new_bytes):
    for _ in range(begun):
        begin_session()
    with updating():
        load(layer, NEW)
    assert weights_of(layer).opened and RUNNING.depth == 1
    end_session()
    assert RUNNING.depth == 0 and same(packed_bytes(layer), new_bytes)


def test_a_session_within_an_update_is_a_part_of_it(layer):
    with updating():
        begin_session()
        assert RUNNING.depth == 1


def test_a_session_that_cannot_be_packed_still_ends(layer):
    begin_session()
    scale = NEW["w2_weight_scale"].clone()
    scale[0, 0, 0] = 0xFF
    load(layer, {"w2_weight_scale": scale})
    with pytest.raises(ContractError, match="is 0xFF"):
        end_session()
    assert RUNNING.depth == 0 and not RUNNING.written


# --- updates without loaders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [slice(None), [0, 1], [1], 0, torch.tensor([1, 0])], ids=str)
def test_a_direct_update_counts_the_experts_that_it_writes(layer, new_bytes, experts):
    fail(layer, OLD)
    mxfp4_reload.update(layer, {n: t[experts] for n, t in NEW.items()}, experts=experts)
    whole = torch.zeros(2)[experts].numel() == 2
    assert (weights_of(layer).invalid is None) is whole
    if whole:
        assert same(packed_bytes(layer), new_bytes)


def test_a_direct_update_needs_a_layer_that_is_laid_out():
    with pytest.raises(ContractError, match="the layer is not laid out"):
        mxfp4_reload.update(torch.nn.Module(), {})


def test_a_direct_update_of_biases_is_converted():
    spec = replace(plans.gptoss(1), num_experts=2, topk=1, hidden_size=192, intermediate_size=192)
    plan, old = plans.plan(spec), random_raw(spec, 1)
    layer, new = loaded_layer(plan, old), random_raw(spec, 2)
    biases = {n: t.float() for n, t in new.items() if n.endswith("bias")}
    mxfp4_reload.update(layer, biases)
    expected = old | {n: new[n] for n in biases}
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(plan, expected)))


def test_every_state_lets_a_full_update_through(layer, new_bytes):
    """In any order of what can happen before."""
    happen = {
        "failed": lambda: fail(layer, OLD),
        "opened": lambda: weights_of(layer).open(["w2_weight"]),
        "foreign": lambda: layer.w13_weight.data.zero_(),
    }
    for order in itertools.permutations(happen):
        for name in order:
            happen[name]()
        with updating():
            load(layer, NEW)
        mxfp4.moe_quant_info(layer)
        assert same(packed_bytes(layer), new_bytes), order


def test_the_names_of_the_layout_are_in_the_order_of_the_tensors():
    assert mxfp4_layer_weights._layout_names(PLAN) == plans.INTERLEAVED


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
