"""Which keywords the runner's call has, by the layer, its config and its plan. AITER is a recording fake."""

import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterQuantType, compute
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.fake_aiter import ActivationType, QuantType
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import (
    EXPERTS,
    TOKENS,
    buffer,
    make_info,
    make_input,
    make_plan,
    run,
)

register_cpu_ci(est_time=5, suite="base-a-test-cpu")
register_amd_ci(est_time=5, stage="stage-b", runner_config="1-gpu-small-amd")


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


# --- the call that SGLang makes -------------------------------------------------------------------------


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


def test_a_config_that_says_nothing_is_sglangs():
    """sglang 0.5.23's MoeRunnerConfig: a gated SiLU layer whose results are weighted and summed."""
    config = MoeRunnerConfig()
    stated = {name: value for name, value in vars(config).items() if value is not None}
    assert stated == {
        "activation": "silu", "is_gated": True, "apply_router_weight_on_input": False,
        "no_combine": False, "gate_up_interleaved": True,
    }  # fmt: skip


# --- activation and betas -------------------------------------------------------------------------------


def test_situ_always_passes_both_betas(aiter):
    """AITER's defaults are 1/1 or 4/25, by kernel (docs/contract.md section c)."""
    run(MoeRunnerConfig(activation="situ", gemm1_alpha=4, gemm1_clamp_limit=25))
    assert (aiter.call["beta"], aiter.call["linear_beta"]) == (4.0, 25.0)
    assert aiter.call["activation"] is ActivationType.Situv2
    assert "swiglu_limit" not in aiter.call
    for missing in ({"gemm1_alpha": 4.0}, {"gemm1_clamp_limit": 25.0}, {}):
        with pytest.raises(ContractError, match="beta"):
            run(MoeRunnerConfig(activation="situ", **missing))


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


# --- what the plan says ---------------------------------------------------------------------------------


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


def test_a_flag_flipped_after_load_is_refused(aiter, monkeypatch):
    monkeypatch.delenv("AITER_SITUV2_A8W4", raising=False)
    info = make_info(plan=make_plan())
    run(info=info)
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    with pytest.raises(ContractError, match="AITER_SITUV2_A8W4"):
        run(info=info)
    assert len(aiter.calls) == 1


# --- the other keywords, and who looks AITER up -----------------------------------------------------------


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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
