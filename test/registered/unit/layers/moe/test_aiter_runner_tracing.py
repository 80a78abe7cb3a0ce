"""The runner under ``torch.compile``, on fake tensors and in a graph capture."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import (
    HIDDEN,
    TOKENS,
    TOPK,
    buffer,
    make_info,
    make_input,
    make_plan,
    run,
)

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_amd_ci(est_time=10, stage="stage-b", runner_config="1-gpu-small-amd")


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


def traceable_fused_moe(
    hidden_states,
    w1,
    w2,
    topk_weight,
    topk_ids,
    quant_type,
    *,
    expert_mask=None,
    activation=None,
    doweight_stage1=False,
    w1_scale=None,
    w2_scale=None,
    a1_scale=None,
    a2_scale=None,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
    gate_mode="separated",
    swiglu_limit=None,
    beta=None,
    linear_beta=None,
):
    """Depends on every kind of argument, so that a wrong one changes the result."""
    factor = (beta or 1.0) + (0.5 if gate_mode == "interleave" else 0.0)
    return hidden_states * factor + (topk_ids * topk_weight).sum(-1, keepdim=True).bfloat16()


@pytest.fixture
def traceable(aiter):
    sys.modules["aiter.fused_moe"].fused_moe = traceable_fused_moe
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


MASK = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.int32)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all local", "expert parallel"])
@pytest.mark.parametrize("destination", ["none", "input", "published"])
def test_the_runner_traces_without_a_break(traceable, monkeypatch, mask, destination):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    plan = make_plan(env={"AITER_SITUV2_A8W4": "1"}, expert_parallel=mask is not None)
    topk_ids = torch.tensor([[1, 3], [2, 0], [3, -1 if mask is not None else 1]], dtype=torch.int32)
    topk_weights = torch.rand(TOKENS, TOPK)
    core = AiterRunnerCore(MoeRunnerConfig(activation="situ"))
    info = make_info(plan=plan, expert_mask=mask)
    output = buffer() if destination != "none" else None
    given = output if destination == "input" else None
    # Small values, so that bfloat16 does not swallow what the routing adds.
    hidden_states = torch.rand(TOKENS, HIDDEN).bfloat16()
    given = {"hidden_states": hidden_states, "output": given}
    runner_input = make_input(topk_ids=topk_ids, topk_weights=topk_weights, **given)
    # Under tracing the masked slot is the first, with the weight 0; eagerly it keeps its weight.
    reference = make_input(
        topk_ids=topk_ids.clamp_min(0),
        topk_weights=topk_weights.clone(),
        hidden_states=hidden_states,
    )
    reference.topk_weights[topk_ids < 0] = 0.0
    unmasked = make_info(plan=make_plan(env={"AITER_SITUV2_A8W4": "1"}))
    expected = core.run(reference, unmasked, {}).hidden_states
    without_routing = hidden_states * 4.5  # beta, and 0.5 for interleave
    assert not torch.equal(expected, without_routing)

    def call():
        return core.run(runner_input, info, {}).hidden_states

    traced = torch.compile(call, fullgraph=True, backend="eager")
    if destination == "published":
        with zero_copy_context.set_moe_output(output):
            result = traced()
    else:
        result = traced()
    assert torch.equal(result, expected)
    if output is not None:
        assert result is output


def test_a_traced_call_reads_no_environment(traceable, monkeypatch):
    plan = make_plan()
    info, core = make_info(plan=plan), AiterRunnerCore(MoeRunnerConfig(activation="situ"))
    runner_input = make_input()
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")  # an eager call would refuse
    torch.compile(core.run, fullgraph=True, backend="eager")(runner_input, info, {})
    with pytest.raises(ContractError, match="AITER_SITUV2_A8W4"):
        core.run(runner_input, info, {})


@pytest.mark.parametrize("mask", [None, MASK], ids=["all local", "expert parallel"])
def test_the_runner_runs_on_fake_tensors(traceable, mask):
    plan = make_plan(env={"AITER_SITUV2_A8W4": "1"}, expert_parallel=mask is not None)
    with FakeTensorMode():
        fake_mask = None if mask is None else torch.ones(6).int()
        info = make_info(plan=plan, expert_mask=fake_mask)
        runner_input = make_input(output=buffer())
        result = run(MoeRunnerConfig(activation="situ"), runner_input, info)
        assert result is runner_input.output
        assert run(info=info).shape == (TOKENS, HIDDEN)


def test_a_captured_call_reads_no_environment(aiter, monkeypatch):
    """The same decision as in a graph capture, which needs a GPU: see test_cuda_graph."""
    monkeypatch.setattr(runner, "is_traced_or_captured", lambda tensor: True)
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    run(info=make_info(plan=make_plan()))
    assert len(aiter.calls) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graph(traceable, monkeypatch):
    plan = make_plan()
    info = make_info(plan=plan)
    runner_input = make_input()
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        setattr(runner_input, name, getattr(runner_input, name).cuda())
    runner_input.output = buffer().cuda()
    core = AiterRunnerCore(MoeRunnerConfig(activation="situ"))
    expected = core.run(runner_input, info, {}).hidden_states.clone()
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = core.run(runner_input, info, {}).hidden_states
    runner_input.output.zero_()
    graph.replay()
    assert result is runner_input.output
    assert torch.equal(result, expected)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
