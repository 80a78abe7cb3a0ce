"""The states of one layer's weights, one by one: open, packed, blocked, invalid; and what each lets through."""

import itertools
import logging
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_layer_weights
from sglang_aiter_moe.srt.layers.quantization.mxfp4_layer_weights import STAGING
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import RUNNING, updating, weights_of
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    TWO_EXPERTS,
    failed_update,
    load,
    loaded_layer,
    nan_scales,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

PLAN = TWO_EXPERTS
OLD, NEW = random_raw(PLAN.spec, 1), random_raw(PLAN.spec, 2)


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
    assert list(state.opened) == ["w2_weight", "w13_weight", "w13_weight_scale", "w2_weight_scale"]
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
    other = loaded_layer(PLAN, OLD)
    load(layer, NEW)
    assert RUNNING.written == [weights_of(layer)]
    load(other, NEW)
    mxfp4.prepare_weights(layer, PLAN)
    assert RUNNING.written == [weights_of(other)]
    RUNNING.forget([weights_of(layer)])  # of a layer that is no part of it
    assert RUNNING.written == [weights_of(other)]
    mxfp4.prepare_weights(other, PLAN)
    assert RUNNING.written == []


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
    failed_update(layer, {"w2_weight": NEW["w2_weight"]})
    assert state.fingerprint is first


def test_the_names_of_the_layout_are_in_the_order_of_the_tensors():
    assert mxfp4_layer_weights._layout_names(PLAN) == plans.INTERLEAVED


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
    failed_update(layer, {"w2_weight": NEW["w2_weight"]})
    state = weights_of(layer)
    state.block("the norm is half-way", poison=True)
    with pytest.raises(ContractError, match="the model has no valid weights"):
        state.refuse_call()
    state.unblock()
    assert nan_scales(layer) == [True, True]
    with pytest.raises(ContractError, match="layer 5 has no valid weights") as caught:
        state.refuse_call()
    assert caught.value.allowed == "calls after a full update of this layer"


# --- invalid until every part has been written again ---------------------------------------------------------


PARTS = [
    (name, expert, shard)
    for name in OLD
    for expert in range(2)
    for shard in (("w1", "w3") if name.startswith("w13") else ("w2",))
]


@pytest.mark.parametrize("missing", [None, *PARTS], ids=str)
def test_every_part_has_to_come_again(layer, new_bytes, missing):
    failed_update(layer, NEW)
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
    failed_update(layer, NEW)
    with updating():
        load(layer, NEW, [0])
    failed_update(layer, NEW, "again")
    with updating():
        load(layer, NEW, [1])
    assert weights_of(layer).invalid == "OSError: again"


@pytest.mark.parametrize("staging", ["none", "host"])
def test_an_invalid_layer_has_nothing_to_go_back_to(layer, monkeypatch, staging):
    failed_update(layer, NEW)
    monkeypatch.setenv(STAGING, staging)
    failed_update(layer, NEW, "again")
    assert weights_of(layer).invalid == "OSError: again" and nan_scales(layer) == [True, True]
    with updating():
        load(layer, NEW)
    mxfp4.moe_quant_info(layer)


def test_writes_to_a_valid_layer_are_not_counted(layer):
    with updating():
        load(layer, NEW)
    failed_update(layer, {"w2_weight": NEW["w2_weight"]})
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(layer)


@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale"])
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


def test_every_state_lets_a_full_update_through(layer, new_bytes):
    """In any order of what can happen before."""
    happen = {
        "failed": lambda: failed_update(layer, NEW),
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
