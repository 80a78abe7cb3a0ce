"""Ids that name no expert, by every kind of mask: where they go, what a mask may say, how often it is read."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner import expert_ids
from sglang_aiter_moe.testing.fake_graph import OnGpu
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

EXPERTS = 3
WEIGHTS = torch.tensor([[0.5, 0.25, 0.25]])


def info(mask):
    mask = None if mask is None else torch.tensor(mask, dtype=torch.int32)
    return SimpleNamespace(expert_mask=mask, w13_weight=torch.zeros(EXPERTS, 1))


def rerouted(mask, ids, state=None):
    given = torch.tensor([ids], dtype=torch.int32)
    found, weights = expert_ids.reroute_invalid(given, WEIGHTS, info(mask), state)
    assert found.dtype == torch.int32
    return found.tolist()[0], weights


@pytest.mark.parametrize(
    "mask, slot",
    [
        ([1, 1, 1, 0], 3),  # DeepEP's sink after the experts
        ([0, 0, 0, 0, 1, 1, 1, 0], 0),  # of several masked ones the first
        ([1, 0, 1, 0, 1, 0], 1),
        ([1, 1, 0, 0, 0], 2),  # fewer experts here than weights
        ([2, 3, 4, 0, 0], 3),  # here is whatever is not 0
    ],
)
@pytest.mark.parametrize("state", [None, {}, {"aiter_combine_is_mori": True}, {"other": False}])
def test_negative_ids_go_to_a_masked_slot_and_keep_their_weight(mask, slot, state):
    found, weights = rerouted(mask, [-1, 2, -7], state)
    assert found == [slot, 2, slot]
    assert weights is WEIGHTS
    assert rerouted(mask, [0, -1, 1], state)[0] == [0, slot, 1]  # 0 is an expert


def test_ids_that_sglang_has_replaced_itself_stay():
    found, weights = rerouted([1, 1, 1, 0], [-1, 0, 2], {"aiter_combine_is_mori": False})
    assert found == [-1, 0, 2] and weights is WEIGHTS


def test_without_a_masked_slot_the_ids_stay_for_the_kernel_to_refuse():
    found, weights = rerouted([1, 1, 1], [-1, 0, 2])
    assert found == [-1, 0, 2] and weights is WEIGHTS


@pytest.mark.parametrize("here", [EXPERTS, EXPERTS + 1])
def test_a_mask_marks_at_most_the_experts_that_there_are(here):
    mask = [1] * here + [0] * (6 - here)
    if here == EXPERTS:
        assert rerouted(mask, [-1, 0, 0])[0] == [EXPERTS, 0, 0]
        return
    with pytest.raises(ContractError, match="marks 4 experts as here, and w13_weight holds 3"):
        rerouted(mask, [0, 0, 0])


def test_the_mask_is_read_from_the_device_once_for_each_content(monkeypatch):
    """Each reading waits for the GPU."""
    given, readings = info([0, 1, 1, 1, 0]), []
    read = torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda t: readings.append(1) or read(t))
    ids = torch.tensor([[-1, 0, 0]], dtype=torch.int32)

    def slot():
        return int(expert_ids.reroute_invalid(ids, WEIGHTS, given, None)[0][0, 0])

    assert [slot(), slot(), slot(), len(readings)] == [0, 0, 0, 1]
    given.expert_mask.copy_(torch.tensor([1, 0, 1, 1, 0]))  # the experts moved
    assert [slot(), slot(), len(readings)] == [1, 1, 2]
    given.w13_weight = torch.zeros(EXPERTS - 1, 1)  # another layer with the same mask
    with pytest.raises(ContractError, match="marks 3 experts as here, and w13_weight holds 2"):
        slot()


@pytest.mark.parametrize("kind", [torch.nn.Buffer, lambda t: t])
def test_buffers_and_tensors_can_be_read(kind):
    assert expert_ids._may_read(kind(torch.ones(3)))


class Elsewhere(torch.Tensor):
    """A tensor whose content nobody may ask for, as under tracing."""


@pytest.mark.parametrize("capturing", [False, True])
def test_during_a_capture_nothing_is_read(monkeypatch, capturing):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert expert_ids._may_read(torch.ones(3)), "a mask on the CPU is no part of a capture"
    # A plain tensor on a GPU, where there is none: the class that says so passes for torch's.
    monkeypatch.setattr(expert_ids, "type", lambda _: torch.Tensor, raising=False)
    assert expert_ids._may_read(torch.ones(3).as_subclass(OnGpu)) is not capturing


@pytest.mark.parametrize("mask, slot", [([1, 0, 1, 0, 1], 1), ([1, 1, 1, 1, 1], 0)])
def test_a_mask_that_cannot_be_read_is_looked_up_where_it_is(mask, slot):
    """With no masked expert the slot is expert 0: then the weight of 0 is what makes it nobody's."""
    given = info(mask)
    given.expert_mask = given.expert_mask.as_subclass(Elsewhere)
    ids = torch.tensor([[2, -1, -1]], dtype=torch.int32)
    found, weights = expert_ids.reroute_invalid(ids, WEIGHTS, given, None)
    assert found.tolist() == [[2, slot, slot]] and found.dtype == torch.int32
    assert weights.tolist() == [[0.5, 0.0, 0.0]]
    found, weights = expert_ids.reroute_invalid(torch.tensor([[0, -1, 1]]), WEIGHTS, given, None)
    assert found.tolist() == [[0, slot, 1]] and weights.tolist() == [[0.5, 0.0, 0.25]]
    assert WEIGHTS.tolist() == [[0.5, 0.25, 0.25]], "the caller's weights are not written"


@pytest.mark.parametrize(
    "mask, allowed",
    [
        (None, "0 to 2"),
        ([1, 1, 1, 0], "0 to 3, and negative ids if expert_mask masks at least one slot"),
    ],
)
def test_ids_out_of_range_are_told_with_what_is_allowed(mask, allowed):
    error = expert_ids.out_of_range(torch.tensor([[2, -1], [9, 0]]), info(mask))
    assert "topk_ids has values from -1 to 9" in error.what and error.allowed == allowed


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
