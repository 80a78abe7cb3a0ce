"""Which object the result is in: published buffers, uncombined results, no tokens. AITER is a fake."""

import sys
import types

import pytest
import torch

from sglang_aiter_moe.contract import Capabilities, MoeSpec, Target, plan_moe
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import (
    EXPERTS,
    HIDDEN,
    INTER,
    TOKENS,
    TOPK,
    buffer,
    make_info,
    make_input,
    make_plan,
    run,
)

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_amd_ci(est_time=4, stage="stage-b", runner_config="1-gpu-small-amd")


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


# --- no_combine and no tokens ----------------------------------------------------------------------------


def test_no_combine_is_forwarded_where_aiter_has_it():
    with fake_aiter.installed(optional=("no_combine", "output")) as fake:
        output = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        result = run(MoeRunnerConfig(no_combine=True), make_input(output=output))
        assert fake.call["no_combine"] is True
        assert "output" not in fake.call
        assert result is not output


def test_no_combine_is_refused_where_aiter_lacks_it(aiter):
    with pytest.raises(NotImplementedError, match="no_combine=True"):
        run(MoeRunnerConfig(no_combine=True))
    assert not aiter.calls


@pytest.mark.parametrize("plan", [None, make_plan()])
def test_no_tokens_return_before_aiter_is_looked_at(monkeypatch, plan):
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", None)
    runner_input = make_input(tokens=0)
    assert run(runner_input=runner_input, info=make_info(plan=plan)) is runner_input.hidden_states
    result = run(runner_input=make_input(tokens=0, output_dtype=torch.float32))
    assert (result.shape, result.dtype) == ((0, HIDDEN), torch.float32)
    output = torch.empty(0, HIDDEN, dtype=torch.bfloat16)
    assert run(runner_input=make_input(tokens=0, output=output)) is output


def test_no_tokens_keep_the_rank_of_no_combine():
    with fake_aiter.installed(optional=("no_combine",)) as fake:
        result = run(MoeRunnerConfig(no_combine=True), make_input(tokens=0))
        assert result.shape == (0, TOPK, HIDDEN)
        assert not fake.calls


# --- the output buffer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["input", "published"])
def test_the_published_object_is_returned_copied_once(aiter, source):
    runner_input, output = make_input(), buffer()
    expected = runner_input.hidden_states * 2
    version = output._version
    if source == "input":
        runner_input.output = output
        result = run(runner_input=runner_input)
    else:
        with zero_copy_context.set_moe_output(output):
            result = run(runner_input=runner_input)
    assert result is output
    assert torch.equal(output, expected)
    assert output._version == version + 1
    assert "output" not in aiter.call


def test_a_kernel_with_output_writes_the_object():
    writes = []

    def kernel(hidden_states, output, **_):
        writes.append(output)
        return output.copy_(hidden_states * 2)

    output = buffer()
    with fake_aiter.installed(optional=("output",), result=kernel):
        version = output._version
        assert run(runner_input=make_input(output=output)) is output
        assert writes[0] is output
        assert output._version == version + 1, "written by the kernel alone"


@pytest.mark.parametrize("returned", ["alias", "clone", "none"])
def test_whatever_the_kernel_returns_the_object_holds_the_result(returned):
    """sglang#33838: the kernel's wrapper returned a distinct tensor."""

    def kernel(hidden_states, output, **_):
        output.copy_(hidden_states * 2)
        return {"alias": output.view_as(output), "clone": output.clone(), "none": None}[returned]

    output = buffer()
    with fake_aiter.installed(optional=("output",), result=kernel):
        runner_input = make_input(output=output)
        assert run(runner_input=runner_input) is output
        assert torch.equal(output, runner_input.hidden_states * 2)


def test_a_buffer_over_the_input_is_not_written_by_the_kernel():
    """AITER zeroes its output before it reads the input."""

    def kernel(hidden_states, output=None, **_):
        if output is not None:
            output.zero_()
        return hidden_states * 2

    runner_input = make_input()
    expected = runner_input.hidden_states * 2
    runner_input.output = runner_input.hidden_states
    with fake_aiter.installed(optional=("output",), result=kernel):
        assert torch.equal(run(runner_input=runner_input), expected)
    shared = torch.zeros(2 * TOKENS, HIDDEN, dtype=torch.bfloat16)
    runner_input = make_input(hidden_states=shared[:TOKENS], output=shared[TOKENS:])
    with fake_aiter.installed(optional=("output",)) as fake:
        run(runner_input=runner_input)
        assert fake.call["output"] is runner_input.output, "halves of one arena do not overlap"


@pytest.mark.parametrize(
    "unfit",
    [
        buffer(tokens=TOKENS + 1),
        buffer(width=HIDDEN - 1),
        buffer().float(),
        buffer(width=2 * HIDDEN)[:, :HIDDEN],
    ],
    ids=["tokens", "width", "dtype", "strided"],
)
def test_a_published_buffer_that_does_not_fit_is_not_used(aiter, unfit):
    with zero_copy_context.set_moe_output(unfit):
        result = run()
    assert result is not unfit
    assert torch.isnan(unfit.float()).all()


def test_the_models_width_fits_a_padded_result(aiter):
    """gpt-oss: 2880 columns of 3072."""
    spec = MoeSpec("swiglu", EXPERTS, TOPK, HIDDEN - 64, INTER, swiglu_limit=7.0)
    plan = plan_moe(spec, Target("gfx950", Capabilities.for_release("0.1.20"), {}))
    assert plan.padded_hidden_size == HIDDEN
    output, runner_input = buffer(width=HIDDEN - 64), make_input()
    with zero_copy_context.set_moe_output(output):
        assert run(runner_input=runner_input, info=make_info(plan=plan)) is output
    assert torch.equal(output, runner_input.hidden_states[:, : HIDDEN - 64] * 2)


def test_an_output_of_another_shape_or_dtype_is_refused(aiter):
    for output in (buffer(tokens=TOKENS + 1), buffer().float()):
        with pytest.raises(ContractError, match=r"AiterRunnerInput\.output"):
            run(runner_input=make_input(output=output))


def test_a_caller_with_its_own_destination_keeps_it():
    with fake_aiter.installed(optional=("output", "stage2_scatter")) as fake:
        mine = buffer()
        with zero_copy_context.set_moe_output(buffer()):
            run(info=make_info(fused_moe_kwargs={"output": mine}))
            assert fake.call["output"] is mine
            scatter = torch.zeros(1)
            run(info=make_info(fused_moe_kwargs={"stage2_scatter": scatter}))
            assert "output" not in fake.call


@pytest.mark.parametrize("optional", [(), ("output",), ("no_combine",), ("output", "no_combine")])
def test_the_probes_tell_what_aiter_names(optional):
    with fake_aiter.installed(optional=optional):
        assert runner._aiter_fused_moe_supports_output() is ("output" in optional)
        assert runner._aiter_fused_moe_supports_no_combine() is ("no_combine" in optional)


# --- who publishes it -------------------------------------------------------------------------------------


def test_publishing_ends_with_the_block(aiter):
    output = buffer()
    with zero_copy_context.set_moe_output(output):
        pass
    assert run() is not output


def test_sglangs_context_is_read_where_sglang_is_imported(aiter, monkeypatch):
    """A fake of sglang.srt.layers.zero_copy_context, by its two names that are used."""
    context = types.ModuleType("sglang.srt.layers.zero_copy_context")
    output = buffer()
    context.ctx = types.SimpleNamespace(moe_output=None)
    asked = []

    def get_moe_output_spec(shape, dtype, device):
        asked.append((tuple(shape), dtype, device))
        return context.ctx.moe_output

    context.get_moe_output_spec = get_moe_output_spec
    monkeypatch.setitem(sys.modules, context.__name__, context)
    assert run() is not output
    assert asked == []
    context.ctx.moe_output = output
    assert run() is output
    assert asked == [((TOKENS, HIDDEN), torch.bfloat16, torch.device("cpu"))]


def returned(result, runner_input=None):
    """What becomes of what SGLang's own call has returned."""
    output = types.SimpleNamespace(hidden_states=result)
    assert runner.delivered(output, runner_input or make_input()) is output
    return output.hidden_states


def test_what_sglangs_own_call_returns_is_delivered_too(monkeypatch):
    result, published = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16), buffer()
    assert returned(result) is result
    with zero_copy_context.set_moe_output(published):
        assert returned(result) is published and torch.equal(published, result)
        assert returned(published) is published
        assert returned(None) is None  # a result that is finished later
        own = make_input(output=buffer())
        assert returned(result, own) is result
        monkeypatch.setenv("SGLANG_AITER_MOE_ENABLE", "0")
        assert returned(result) is result
    with zero_copy_context.set_moe_output(buffer(tokens=TOKENS + 1)):
        assert returned(result) is result


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
