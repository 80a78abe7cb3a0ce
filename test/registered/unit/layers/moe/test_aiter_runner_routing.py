"""Expert ids and weights on their way from the dispatcher to AITER, which is a recording fake."""

import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner import dispatch
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import EXPERTS, HIDDEN, make_info, make_input, run

register_cpu_ci(est_time=3, suite="base-a-test-cpu")
register_amd_ci(est_time=3, stage="stage-b", runner_config="1-gpu-small-amd")


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


# --- ids that name no expert ------------------------------------------------------------------------------


def ids(*values):
    return torch.tensor([values], dtype=torch.int32)


def one_token(topk_ids):
    return make_input(tokens=1, topk_ids=topk_ids)


def test_deepep_ids_go_to_the_slot_after_the_experts(aiter):
    mask = torch.tensor([1] * EXPERTS + [0], dtype=torch.int32)
    run(runner_input=one_token(ids(2, -1)), info=make_info(expert_mask=mask))
    assert aiter.call["topk_ids"].tolist() == [[2, EXPERTS]]
    assert aiter.call["topk_ids"].dtype is torch.int32


def test_global_ids_go_to_a_masked_expert(aiter):
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.int32)
    info = make_info(expert_mask=mask)
    run(runner_input=one_token(ids(-1, 7)), info=info)
    assert aiter.call["topk_ids"].tolist() == [[4, 7]]
    mask.copy_(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.int32))  # experts moved
    run(runner_input=one_token(ids(-1, 7)), info=info)
    assert aiter.call["topk_ids"].tolist() == [[0, 7]]


@pytest.mark.parametrize("mask, slot", [([1] * EXPERTS + [0], EXPERTS), ([1, 1, 1, 1, 0, 0], 4)])
def test_expert_0_is_an_expert(aiter, mask, slot):
    """Only negative ids name none; AITER counts experts from 0."""
    info = make_info(expert_mask=torch.tensor(mask, dtype=torch.int32))
    run(runner_input=one_token(ids(0, -1)), info=info)
    assert aiter.call["topk_ids"].tolist() == [[0, slot]]


def test_ids_that_sglang_has_replaced_are_left_alone(aiter):
    mask = torch.tensor([1] * EXPERTS + [0], dtype=torch.int32)
    given = ids(2, EXPERTS)
    run(
        runner_input=one_token(given),
        info=make_info(expert_mask=mask),
        state={"aiter_combine_is_mori": False},
    )
    assert aiter.call["topk_ids"] is given
    run(
        runner_input=one_token(ids(2, -1)),
        info=make_info(expert_mask=mask),
        state={"aiter_combine_is_mori": True},  # MoRI does not replace them (aiter#4636)
    )
    assert aiter.call["topk_ids"].tolist() == [[2, EXPERTS]]


def test_an_index_error_of_the_kernel_names_the_ids():
    def out_of_range(**call):
        raise IndexError("index -1 is out of bounds")

    with (
        fake_aiter.installed(result=out_of_range),
        pytest.raises(ContractError, match="topk_ids has values from -1 to 9"),
    ):
        run(runner_input=one_token(ids(-1, 9)))


# --- dispatch formats ------------------------------------------------------------------------------------


def dispatch_outputs(hidden_states, topk_ids, topk_weights):
    rest = (hidden_states, None)
    return [
        dispatch.StandardDispatchOutput(*rest, dispatch.StandardTopKOutput(topk_weights, topk_ids)),
        dispatch.DeepEPNormalDispatchOutput(*rest, topk_ids, topk_weights, [1]),
        dispatch.DeepEPLLDispatchOutput(*rest, topk_ids, topk_weights, torch.tensor([1]), 1),
    ]


def test_all_dispatch_formats_take_one_way(aiter):
    hidden_states = make_input(tokens=1).hidden_states
    mask = torch.tensor([1] * EXPERTS + [0], dtype=torch.int32)
    info, config = make_info(expert_mask=mask), MoeRunnerConfig()
    routing = torch.tensor([[3, -1]]), torch.tensor([[0.5, 0.5]], dtype=torch.bfloat16)
    for output in dispatch_outputs(hidden_states, *routing):
        run(config, dispatch.runner_input_from(output, info, config), info)
    calls = aiter.calls
    assert len(calls) == 3
    for call in calls:
        assert call["topk_ids"].tolist() == [[3, EXPERTS]]
        assert call["topk_ids"].dtype is torch.int32
        assert call["topk_weight"].dtype is torch.float32
        assert call["hidden_states"] is hidden_states
        assert call.keys() == calls[0].keys()


def test_the_weight_goes_on_the_input_of_top_1_routing():
    info, config = make_info(), MoeRunnerConfig(apply_router_weight_on_input=True)
    hidden_states = make_input(tokens=1).hidden_states
    for output in dispatch_outputs(hidden_states, torch.tensor([[3]]), torch.tensor([[0.25]])):
        given = dispatch.runner_input_from(output, info, config)
        assert torch.equal(given.hidden_states, hidden_states * 0.25)
        assert given.topk_weights.tolist() == [[1.0]]
        stage1 = dispatch.runner_input_from(output, make_info(doweight_stage1=True), config)
        assert stage1.hidden_states is hidden_states
        assert stage1.topk_weights.tolist() == [[0.25]]
    for output in dispatch_outputs(hidden_states, torch.tensor([[3, 1]]), torch.ones(1, 2)):
        with pytest.raises(ContractError, match="top-2"):
            dispatch.runner_input_from(output, info, config)


def test_bad_dispatch_outputs_are_refused():
    info, config = make_info(), MoeRunnerConfig()
    topk = torch.tensor([[3]]), torch.tensor([[1.0]])
    grouped = torch.zeros(EXPERTS, 2, HIDDEN, dtype=torch.bfloat16)
    for output in dispatch_outputs(grouped, *topk):
        with pytest.raises(ContractError, match="hidden_states is"):
            dispatch.runner_input_from(output, info, config)
    for output in dispatch_outputs(make_input(tokens=1).hidden_states, *topk):
        output = output._replace(hidden_states_scale=torch.ones(1, 2))
        with pytest.raises(ContractError, match="hidden_states_scale"):
            dispatch.runner_input_from(output, info, config)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
