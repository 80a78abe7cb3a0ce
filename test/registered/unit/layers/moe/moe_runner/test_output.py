"""Which object a call's result is in, with its dtype and shape, and what a caller may override of a call."""

import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import (
    AiterRunnerCore,
    AiterRunnerOutput,
    compute,
)
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.fake_graph import OnGpu
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOPK,
    buffer,
    make_info,
    make_input,
    make_plan,
    run,
)

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

UNCOMBINED = MoeRunnerConfig(no_combine=True)
GU_ITLV = "SGLANG_USE_AITER_MOE_GU_ITLV"


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


@pytest.fixture
def writes_output():
    """An AITER that takes ``output`` and writes it."""

    def kernel(hidden_states, output=None, **_):
        result = hidden_states * 2
        return result if output is None else output.copy_(result)

    with fake_aiter.installed(optional=("output", "no_combine"), result=kernel) as fake:
        yield fake


# --- the runner as SGLang sees it -----------------------------------------------------------------------


@pytest.mark.parametrize("sglang", [False, True])
def test_the_backend_is_sglangs_member_where_sglang_is_imported(monkeypatch, sglang):
    name = "sglang.srt.layers.moe.utils"
    monkeypatch.delitem(sys.modules, name, raising=False)
    expected = "aiter"
    if sglang:
        utils = types.ModuleType(name)
        expected = object()
        utils.MoeRunnerBackend = types.SimpleNamespace(AITER=expected)
        monkeypatch.setitem(sys.modules, name, utils)
    for one in (make_input(), AiterRunnerOutput(None), AiterRunnerCore(MoeRunnerConfig())):
        assert one.runner_backend is expected or one.runner_backend == "aiter" == expected


@pytest.mark.parametrize(
    "value, mode",
    [
        (None, "interleave"),
        *((off, "separated") for off in ("0", "false", "False", "NO", "n")),
        *((on, "interleave") for on in ("1", "true", "yes", "off", "")),
    ],
)
def test_what_sglang_did_to_layers_with_a_limit(aiter, monkeypatch, value, mode):
    """SGLang's EnvBool: off for false, 0, no and n in any case."""
    monkeypatch.delenv(GU_ITLV, raising=False)
    if value is not None:
        monkeypatch.setenv(GU_ITLV, value)
    core = AiterRunnerCore(MoeRunnerConfig())
    monkeypatch.setenv(GU_ITLV, "0" if mode == "interleave" else "1")  # after load: too late
    core.run(make_input(), make_info(swiglu_limit=7.0), {})
    assert aiter.call["gate_mode"] == mode


def test_a_caller_states_what_a_limit_stands_for(aiter):
    info = make_info(swiglu_limit=7.0)
    compute(MoeRunnerConfig(), make_input(), info)
    assert aiter.call["gate_mode"] == "interleave"
    compute(MoeRunnerConfig(), make_input(), info, limit_gate_mode="separated")
    assert aiter.call["gate_mode"] == "separated"


def test_extras_give_way_to_what_the_layer_says(aiter):
    extras = {"hidden_pad": 7, "moe_sorting_dispatch_policy": 2}
    compute(MoeRunnerConfig(), make_input(), make_info(hidden_pad=64), extras=extras)
    assert (aiter.call["hidden_pad"], aiter.call["moe_sorting_dispatch_policy"]) == (64, 2)


def test_without_a_state_of_the_permute_step(aiter):
    mask = torch.tensor([1] * EXPERTS + [0], dtype=torch.int32)
    ids = torch.full((TOKENS, TOPK), -1, dtype=torch.int32)
    compute(MoeRunnerConfig(), make_input(topk_ids=ids), make_info(expert_mask=mask))
    assert aiter.call["topk_ids"].unique().tolist() == [EXPERTS]


@pytest.mark.parametrize("plan", [False, True])
def test_without_expert_parallelism_ids_and_weights_go_through_as_they_are(aiter, plan):
    given = make_input()
    run(runner_input=given, info=make_info(plan=make_plan() if plan else None))
    assert aiter.call["topk_ids"] is given.topk_ids
    assert aiter.call["topk_weight"] is given.topk_weights


# --- uncombined results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("said", [True, False, None])
def test_what_a_caller_knows_of_no_combine_goes_before_the_signature(has, said):
    with fake_aiter.installed(optional=("no_combine",) if has else ()) as fake:
        call = lambda: compute(UNCOMBINED, make_input(), make_info(), no_combine_supported=said)  # noqa: E731
        if said is False or (said is None and not has):
            with pytest.raises(NotImplementedError, match="no keyword `no_combine`"):
                call()
            assert not fake.calls
        elif has:
            call()
            assert fake.call["no_combine"] is True
        else:
            with pytest.raises(TypeError):  # it was asked for, and AITER says no
                call()


def test_combined_calls_do_not_say_no_combine(writes_output):
    run()
    assert "no_combine" not in writes_output.call


def test_an_uncombined_result_is_not_put_into_the_published_buffer(writes_output):
    published = buffer()
    with zero_copy_context.set_moe_output(published):
        assert run(UNCOMBINED) is not published
    assert published.isnan().all() and "output" not in writes_output.call


# --- no tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("uncombined", [False, True])
def test_no_tokens_have_the_results_shape_and_dtype(writes_output, dtype, uncombined):
    tokens = torch.zeros(0, HIDDEN + 8, dtype=torch.bfloat16)
    given = make_input(tokens=0, hidden_states=tokens, output_dtype=dtype)
    result = run(UNCOMBINED if uncombined else None, given)
    assert result.dtype == (dtype or torch.bfloat16) and not writes_output.calls
    if uncombined:
        assert result.shape == (0, TOPK, HIDDEN + 8)
    elif dtype == torch.float16:
        assert result.shape == (0, HIDDEN)  # of w2, which computes it
    else:
        assert result is tokens


# --- the buffer ----------------------------------------------------------------------------------------


def test_the_result_has_the_output_dtype_and_so_has_its_buffer(writes_output):
    wide = buffer().float()
    assert run(runner_input=make_input(output_dtype=torch.float32, output=wide)) is wide
    with pytest.raises(ContractError) as caught:
        run(runner_input=make_input(output_dtype=torch.float32, output=buffer()))
    assert "is (3, 256) torch.bfloat16" in caught.value.what
    assert caught.value.allowed.startswith("(3, 256) torch.float32")
    for published, taken in ((wide, True), (buffer(), False)):
        with zero_copy_context.set_moe_output(published):
            result = run(runner_input=make_input(output_dtype=torch.float32))
        assert (result is published) is taken


@pytest.mark.parametrize("published", [False, True])
def test_the_inputs_own_output_goes_before_a_published_one(aiter, published):
    own, other = buffer(), buffer()
    with zero_copy_context.set_moe_output(other if published else own):
        assert run(runner_input=make_input(output=own)) is own
    assert other.isnan().all()


def test_a_buffer_of_the_models_width_is_copied_into(writes_output):
    """The kernel writes padded rows; a narrower buffer can only be copied into."""
    plan = make_plan("swiglu", hidden_size=HIDDEN - 64, swiglu_limit=7.0)
    narrow, given = buffer(width=HIDDEN - 64), make_input()
    with zero_copy_context.set_moe_output(narrow):
        assert run(runner_input=given, info=make_info(plan=plan)) is narrow
    assert "output" not in writes_output.call
    assert torch.equal(narrow, given.hidden_states[:, : HIDDEN - 64] * 2)
    with zero_copy_context.set_moe_output(narrow):  # not the width of a layer without padding
        assert run(info=make_info(plan=make_plan())) is not narrow
        assert run() is not narrow


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("how", ["eager", "fake", "compiled"])
def test_the_kernel_gets_the_buffer_unless_it_still_reads_it(writes_output, monkeypatch, how, same):
    """AITER zeroes its output before it reads the input."""

    def call():
        given = make_input()
        given.output = given.hidden_states if same else buffer()
        return run(runner_input=given), given.output

    if how == "fake":
        with FakeTensorMode():
            result, output = call()
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: how == "compiled")
        result, output = call()
    assert result is output and ("output" in writes_output.call) is not same


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fake", "compiled", "cuda"])
def test_what_runs_once_to_be_replayed(monkeypatch, kind, captured):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: kind == "compiled")
    tensor = torch.ones(1)
    if kind == "fake":
        with FakeTensorMode() as mode:
            tensor = mode.from_tensor(tensor)
    elif kind == "cuda":
        tensor = tensor.as_subclass(OnGpu)
    expected = kind in ("fake", "compiled") or (kind == "cuda" and captured)
    assert runner.is_traced_or_captured(tensor) is expected


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
