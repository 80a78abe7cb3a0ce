"""What one update is, on one layer: its copies, its loaders, updates within updates, sessions, direct writes."""

import contextlib
import logging
import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
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
    TWO_EXPERTS,
    failed_update,
    load,
    loaded_layer,
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


# --- staging: copies to go back to ---------------------------------------------------------------------------


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
            load(layer, random_raw(PLAN.spec, seed), [0, 1])
        raise OSError
    assert same(packed_bytes(layer), before)


def test_what_is_undone_is_said_and_what_is_lost_too(layer, monkeypatch, caplog):
    monkeypatch.setenv(STAGING, "host")
    failed_update(layer, {"w2_weight": NEW["w2_weight"]})
    monkeypatch.setenv(STAGING, "none")
    failed_update(layer, {"w2_weight": NEW["w2_weight"]})
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
    failed_update(layer, {"w2_weight": NEW["w2_weight"]})
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
    failed_update(layer, NEW)
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
