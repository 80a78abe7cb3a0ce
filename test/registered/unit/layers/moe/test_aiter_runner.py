"""The runner's call: which keywords, one gate mode, which output object. AITER is a recording fake."""

import itertools
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_aiter_moe.contract import Capabilities, MoeSpec, Target, plan_moe
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner
from sglang_aiter_moe.srt.layers.moe.moe_runner import call_arguments, dispatch
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import (
    AiterQuantType,
    AiterRunnerCore,
    compute,
)
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.fake_aiter import ActivationType, QuantType
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

register_cpu_ci(est_time=20, suite="base-a-test-cpu")
register_amd_ci(est_time=20, stage="stage-b", runner_config="1-gpu-small-amd")


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


# --- gate_mode ---------------------------------------------------------------------------------------


def test_mx_layers_without_any_writer_say_separated(aiter):
    run()
    assert aiter.call["gate_mode"] == "separated"


@pytest.mark.parametrize("limit", [0.0, 7.0])
@pytest.mark.parametrize("mode", ["separated", "interleave"])
def test_plan_states_the_mode_with_and_without_a_limit(aiter, monkeypatch, mode, limit):
    a8w4 = "1" if mode == "interleave" else "0"
    monkeypatch.setenv("AITER_SITUV2_A8W4", a8w4)
    plan = make_plan(env={"AITER_SITUV2_A8W4": a8w4})
    assert plan.gate_mode == mode
    run(info=make_info(plan=plan, swiglu_limit=limit))
    assert aiter.call["gate_mode"] == mode


@pytest.mark.parametrize("limit", [0.0, 7.0])
@pytest.mark.parametrize("mode", ["separated", "interleave"])
def test_fused_moe_kwargs_state_the_mode(aiter, mode, limit):
    kwargs = {"gate_mode": mode, "block_size_M": 64}
    run(info=make_info(fused_moe_kwargs=kwargs, swiglu_limit=limit))
    assert aiter.call["gate_mode"] == mode
    assert aiter.call["block_size_M"] == 64
    assert kwargs == {"gate_mode": mode, "block_size_M": 64}, "the layer's dictionary was changed"


def test_a_limit_alone_means_interleave(aiter):
    """SGLang #26208: DeepSeek-V4."""
    run(info=make_info(swiglu_limit=10.0))
    assert aiter.call["gate_mode"] == "interleave"
    assert aiter.call["swiglu_limit"] == 10.0


def test_a_limit_alone_means_separated_where_sglang_loads_separated(aiter, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_AITER_MOE_GU_ITLV", "0")
    run(info=make_info(swiglu_limit=10.0))
    assert aiter.call["gate_mode"] == "separated"


def test_the_field_states_the_mode_of_an_unclamped_layer(aiter):
    """sglang#30993: without a limit no gate_mode went out, over interleaved bytes."""
    run(info=make_info(gate_mode="interleave"))
    assert aiter.call["gate_mode"] == "interleave"


def test_every_combination_of_writers_gives_one_mode_or_an_error():
    """Against the order of the rule, written out a second time."""
    modes = (None, "separated", "interleave")
    errors = 0
    for plan, kwargs, limit, field in itertools.product(modes, modes, modes, modes[1:]):
        statements = {m for m in (plan, kwargs, field if field != "separated" else None) if m}
        arguments = {"plan": plan, "kwargs": kwargs, "limit": limit, "field": field}
        if len(statements) > 1:
            errors += 1
            with pytest.raises(ContractError, match="says"):
                call_arguments.resolve_gate_mode(**arguments)
            continue
        expected = statements.pop() if statements else (limit or field)
        assert call_arguments.resolve_gate_mode(**arguments) == expected, arguments
    assert errors == 21  # of 54: 9 plan/kwargs pairs x 2 fields, times 3 limits


@pytest.mark.parametrize("mode", [None, "", "interleaved", "INTERLEAVE"])
def test_a_word_that_is_no_gate_mode_is_refused(aiter, mode):
    with pytest.raises(ContractError, match="gate_mode"):
        run(info=make_info(gate_mode=mode))
    assert not aiter.calls


def test_two_writers_of_another_keyword_are_refused(aiter):
    """The kind behind `got multiple values for keyword argument` (sglang#25580 with #26208)."""
    info = make_info(hidden_pad=64, fused_moe_kwargs={"hidden_pad": 128})
    with pytest.raises(ContractError, match="hidden_pad"):
        run(info=info)
    info = make_info(fused_moe_kwargs={"topk_ids": torch.zeros(1)})
    with pytest.raises(ContractError, match="topk_ids"):
        run(info=info)
    plan = make_plan()
    with pytest.raises(ContractError, match="beta"):
        run(info=make_info(plan=plan, fused_moe_kwargs={"beta": 1.0}))
    with pytest.raises(ContractError, match="activation"):
        run(info=make_info(plan=plan, fused_moe_kwargs={"activation": ActivationType.Silu}))
    with pytest.raises(ContractError, match="hidden_pad"):
        run(info=make_info(plan=plan, hidden_pad=64))
    assert not aiter.calls


def test_control_a_runner_that_drops_the_mode_is_seen(aiter, monkeypatch):
    """Shows that the checks above bite: without the write they would find no gate_mode."""
    monkeypatch.setattr(call_arguments, "_write_gate_mode", lambda *_: None)
    run(info=make_info(gate_mode="interleave"))
    assert "gate_mode" not in aiter.call


def test_aiter_without_gate_mode_runs_separated_layers_only():
    with fake_aiter.installed(without=("gate_mode",)) as fake:
        run()
        assert "gate_mode" not in fake.call
        run(info=make_info(fused_moe_kwargs={"gate_mode": "separated"}))
        assert "gate_mode" not in fake.call
        with pytest.raises(ContractError, match="does not know"):
            run(info=make_info(gate_mode="interleave"))


# --- the other keywords -------------------------------------------------------------------------------


def upstream_kwargs(runner_input, info, activation, quant_type, **more):
    """What SGLang 0.5.17 passes for these inputs, read off its source."""
    return {
        "hidden_states": runner_input.hidden_states,
        "w1": info.w13_weight,
        "w2": info.w2_weight,
        "topk_weight": runner_input.topk_weights,
        "topk_ids": runner_input.topk_ids,
        "quant_type": quant_type,
        "activation": activation,
        "w1_scale": info.w13_scale,
        "w2_scale": info.w2_scale,
        "a1_scale": info.a13_scale,
        "a2_scale": info.a2_scale,
        "bias1": info.b13,
        "bias2": info.b2,
        "expert_mask": info.expert_mask,
        "doweight_stage1": info.doweight_stage1,
        "hidden_pad": info.hidden_pad,
        "intermediate_pad": info.intermediate_pad,
        **more,
    }


def assert_same_call(call, expected):
    assert call.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert call[name] is value, name
        else:
            assert call[name] == value, name


def test_deepseek_v4_fp8_kwargs_are_sglangs(aiter):
    """SGLang #26208."""
    info = make_info(
        AiterQuantType.PER_128X128,
        w13_scale=torch.ones(1),
        w2_scale=torch.ones(1),
        swiglu_limit=10.0,
        intermediate_pad=128,
    )
    runner_input = make_input(quant_type=AiterQuantType.PER_128X128)
    run(MoeRunnerConfig(activation="silu"), runner_input, info)
    expected = upstream_kwargs(
        runner_input,
        info,
        ActivationType.Silu,
        QuantType.per_128x128,
        gate_mode="interleave",
        swiglu_limit=10.0,
    )
    assert_same_call(aiter.call, expected)


@pytest.mark.parametrize(
    ("kind", "quant_type"),
    [
        (AiterQuantType.NONE, QuantType.No),
        (AiterQuantType.PER_TOKEN, QuantType.per_Token),
        (AiterQuantType.PER_128X128, QuantType.per_128x128),
    ],
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu"])
def test_other_quantisations_are_called_as_sglang_calls_them(aiter, kind, quant_type, activation):
    info = make_info(kind, doweight_stage1=True, b13=torch.ones(1), b2=torch.ones(1))
    runner_input = make_input(quant_type=kind)
    run(MoeRunnerConfig(activation=activation), runner_input, info)
    expected = upstream_kwargs(
        runner_input, info, getattr(ActivationType, activation.title()), quant_type
    )
    assert_same_call(aiter.call, expected)


def test_situ_always_passes_both_betas(aiter):
    """AITER's defaults are 1/1 or 4/25, by kernel (docs/contract.md section c)."""
    run(MoeRunnerConfig(activation="situ", gemm1_alpha=4, gemm1_clamp_limit=25))
    assert (aiter.call["beta"], aiter.call["linear_beta"]) == (4.0, 25.0)
    assert aiter.call["activation"] is ActivationType.Situv2
    assert "swiglu_limit" not in aiter.call
    for missing in ({"gemm1_alpha": 4.0}, {"gemm1_clamp_limit": 25.0}, {}):
        with pytest.raises(ContractError, match="beta"):
            run(MoeRunnerConfig(activation="situ", **missing))


def test_the_plan_names_activation_betas_and_pads(aiter):
    plan = make_plan(beta=3.0, linear_beta=20.0)
    config = MoeRunnerConfig(activation="silu")  # what the model said has been planned already
    run(config, info=make_info(plan=plan))
    assert aiter.call["activation"] is ActivationType.Situv2
    assert (aiter.call["beta"], aiter.call["linear_beta"]) == (3.0, 20.0)
    assert (aiter.call["hidden_pad"], aiter.call["intermediate_pad"]) == (
        plan.hidden_pad,
        plan.intermediate_pad,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"expert_mask": torch.ones(EXPERTS, dtype=torch.int32)},
        {"b13": torch.zeros(1)},
        {"b2": torch.zeros(1)},
        {"doweight_stage1": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_the_plan_was_not_made_for_is_refused(aiter, fields):
    """A16W4 SiTUv2 raises for each of these at AITER's first forward; plan_moe does at load."""
    with pytest.raises(ContractError, match=next(iter(fields))):
        run(info=make_info(plan=make_plan(), **fields))
    assert not aiter.calls


def test_silu_with_swiglu_oais_constants_is_swiglu(aiter):
    run(MoeRunnerConfig(activation="silu", gemm1_alpha=1.702, gemm1_clamp_limit=7.0))
    assert aiter.call["activation"] is ActivationType.Swiglu
    run(MoeRunnerConfig(activation="silu"))
    assert aiter.call["activation"] is ActivationType.Silu


@pytest.mark.parametrize(
    "constants", [{"gemm1_alpha": 1.0}, {"gemm1_alpha": 1.702, "gemm1_beta": 0.0}]
)
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_constants_that_aiter_has_not_built_in_are_refused(aiter, activation, constants):
    with pytest.raises(ContractError, match="gemm1_alpha"):
        run(MoeRunnerConfig(activation=activation, gemm1_clamp_limit=7.0, **constants))


def test_an_activation_that_aiter_lacks_is_refused(aiter):
    with pytest.raises(ContractError, match="relu2"):
        run(MoeRunnerConfig(activation="relu2"))


def test_fused_moe_kwargs_may_name_the_activation(aiter):
    """SGLang 0.5.21's MXFP8 layers do."""
    run(info=make_info(fused_moe_kwargs={"activation": ActivationType.Swiglu}))
    assert aiter.call["activation"] is ActivationType.Swiglu


def test_dispatcher_scale_tokens_and_dtype_are_forwarded(aiter):
    scale, tokens = torch.ones(TOKENS, 8), torch.tensor([2], dtype=torch.int32)
    runner_input = make_input(a1_scale=scale, num_local_tokens=tokens, output_dtype=torch.bfloat16)
    run(runner_input=runner_input, info=make_info(a13_scale=torch.ones(1)))
    assert aiter.call["a1_scale"] is scale
    assert aiter.call["num_local_tokens"] is tokens
    assert aiter.call["dtype"] is torch.bfloat16


def test_extras_of_a_release_are_sent(aiter):
    compute(MoeRunnerConfig(), make_input(), make_info(), extras={"moe_sorting_dispatch_policy": 2})
    assert aiter.call["moe_sorting_dispatch_policy"] == 2


def test_fp8_activations_need_an_aiter_that_takes_them(aiter):
    info = make_info(fp8_activations=True, gate_mode="interleave")
    with pytest.raises(ContractError, match="quant_dtype_a"):
        run(info=info)
    run(info=make_info(fp8_activations=True))  # separated: as SGLang, not requested
    with fake_aiter.installed(optional=("quant_dtype_a",)) as fake:
        run(info=info)
        assert fake.call["quant_dtype_a"] is torch.float8_e4m3fn


def test_a_missing_aiter_is_named(monkeypatch):
    for name in ("aiter", "aiter.fused_moe"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ContractError, match="SGLANG_AITER_MOE_BACKEND=portable"):
        run()


def test_a_wrapper_installed_later_is_called(aiter, monkeypatch):
    """SGLang's start-up wraps aiter.fused_moe.fused_moe after the first lookup."""
    run()
    later = fake_aiter.FakeFusedMoe(optional=("output",))
    monkeypatch.setattr(sys.modules["aiter.fused_moe"], "fused_moe", later.fused_moe)
    run(runner_input=make_input(output=buffer()))
    assert (len(aiter.calls), len(later.calls)) == (1, 1)
    assert "output" in later.call, "its signature was looked at again"
    with fake_aiter.installed() as other:
        run()
    assert (len(aiter.calls), len(later.calls), len(other.calls)) == (1, 1, 1)


# --- no_combine and no tokens -------------------------------------------------------------------------


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


# --- the plan is checked at each call ------------------------------------------------------------------


def test_a_flag_flipped_after_load_is_refused(aiter, monkeypatch):
    monkeypatch.delenv("AITER_SITUV2_A8W4", raising=False)
    info = make_info(plan=make_plan())
    run(info=info)
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    with pytest.raises(ContractError, match="AITER_SITUV2_A8W4"):
        run(info=info)
    assert len(aiter.calls) == 1


# --- ids that name no expert ---------------------------------------------------------------------------


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


# --- the output buffer ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("optional", [(), ("output",), ("no_combine",), ("output", "no_combine")])
def test_the_probes_tell_what_aiter_names(optional):
    with fake_aiter.installed(optional=optional):
        assert runner._aiter_fused_moe_supports_output() is ("output" in optional)
        assert runner._aiter_fused_moe_supports_no_combine() is ("no_combine" in optional)


def test_a_config_that_says_nothing_is_sglangs():
    """sglang 0.5.23's MoeRunnerConfig: a gated SiLU layer whose results are weighted and summed."""
    config = MoeRunnerConfig()
    stated = {name: value for name, value in vars(config).items() if value is not None}
    assert stated == {
        "activation": "silu", "is_gated": True, "apply_router_weight_on_input": False,
        "no_combine": False, "gate_up_interleaved": True,
    }  # fmt: skip


def test_who_states_what_the_bytes_are():
    assert not runner.is_stated(make_info()) and not runner.is_stated(object())
    assert runner.is_stated(make_info(plan=make_plan()))
    assert runner.is_stated(make_info(gate_mode="interleave"))


# --- dispatch formats ----------------------------------------------------------------------------------


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


# --- tracing -------------------------------------------------------------------------------------------


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
    from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner

    monkeypatch.setattr(runner, "is_traced_or_captured", lambda tensor: True)
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    run(info=make_info(plan=make_plan()))
    assert len(aiter.calls) == 1


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
