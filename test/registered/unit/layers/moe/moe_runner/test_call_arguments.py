"""The keywords of a call one by one: which writer each has, what is left out, and what is refused by name."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner import call_arguments
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterQuantType
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing import fake_aiter, plans
from sglang_aiter_moe.testing.fake_aiter import ActivationType, GateMode
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import (
    EXPERTS,
    HIDDEN,
    TOKENS,
    TOPK,
    make_info,
    make_input,
    make_plan,
    run,
)

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

SITU = MoeRunnerConfig(activation="situ", gemm1_alpha=4, gemm1_clamp_limit=25)


@pytest.fixture
def aiter():
    with fake_aiter.installed() as fake:
        yield fake


# --- tokens and routing -----------------------------------------------------------------------------


def planned(**fields):
    given = make_input(**fields)
    call_arguments.check_planned_input(given, make_plan(), given.hidden_states.shape)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hidden_states": torch.zeros(TOKENS, HIDDEN, dtype=torch.float16)},
        {"topk_ids": torch.zeros(TOKENS, TOPK, dtype=torch.int64)},
        {"topk_weights": torch.zeros(TOKENS, TOPK, dtype=torch.bfloat16)},
        # Tokens that the dispatcher has quantised are two codes a byte, beside their scale.
        {
            "hidden_states": torch.zeros(TOKENS, HIDDEN // 2, dtype=torch.uint8),
            "a1_scale": torch.zeros(TOKENS, HIDDEN // 32, dtype=torch.uint8),
        },
    ],
)
def test_tokens_that_the_plan_takes(fields):
    planned(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"hidden_states": torch.zeros(TOKENS, HIDDEN)},
            f"hidden_states is ({TOKENS}, {HIDDEN}) torch.float32",
        ),
        (
            {"hidden_states": torch.zeros(TOKENS, HIDDEN + 1).half()},
            f"hidden_states is ({TOKENS}, {HIDDEN + 1}) torch.float16",
        ),
        (
            {"hidden_states": torch.zeros(TOKENS, HIDDEN, 1).half()},
            f"hidden_states is ({TOKENS}, {HIDDEN}, 1) torch.float16",
        ),
        (
            {"topk_ids": torch.zeros(TOKENS, TOPK, 1, dtype=torch.int32)},
            f"topk_ids is ({TOKENS}, {TOPK}, 1) torch.int32 for {TOKENS} tokens",
        ),
        (
            {"topk_ids": torch.zeros(TOKENS + 1, TOPK, dtype=torch.int32)},
            f"topk_ids is ({TOKENS + 1}, {TOPK}) torch.int32 for {TOKENS} tokens",
        ),
        (
            {"topk_ids": torch.zeros(TOKENS, TOPK, dtype=torch.int16)},
            f"topk_ids is ({TOKENS}, {TOPK}) torch.int16 for {TOKENS} tokens",
        ),
        (
            {"topk_weights": torch.zeros(TOKENS, TOPK + 1)},
            f"topk_weights is ({TOKENS}, {TOPK + 1}) torch.float32 beside topk_ids ({TOKENS}, {TOPK})",
        ),
        (
            {"topk_weights": torch.zeros(TOKENS, TOPK, dtype=torch.int32)},
            f"topk_weights is ({TOKENS}, {TOPK}) torch.int32 beside topk_ids ({TOKENS}, {TOPK})",
        ),
    ],
)
def test_each_thing_that_does_not_fit_is_named_with_its_shape_and_dtype(fields, message):
    with pytest.raises(ContractError, match=f"^{re.escape(message)}"):
        planned(**fields)


def test_a_plan_with_padding_takes_padded_tokens():
    plan = make_plan("swiglu", hidden_size=192, swiglu_limit=7.0)
    given = make_input()
    call_arguments.check_planned_input(given, plan, given.hidden_states.shape)
    given = make_input(hidden_states=given.hidden_states[:, :192])
    with pytest.raises(ContractError, match=r"hidden_states is \(3, 192\)"):
        call_arguments.check_planned_input(given, plan, given.hidden_states.shape)


# --- the activation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation, alpha, beta, name",
    [
        ("silu", None, None, "silu"),
        ("silu", None, 3.0, "silu"),  # without an alpha the addend says nothing
        ("gelu", None, None, "gelu"),
        ("gelu", 2.0, None, "gelu"),  # only SwiGLU has the constants
        ("silu", 1.702, None, "swiglu"),
        ("silu", 1.702, 1.0, "swiglu"),
        ("swiglu", 1.702, 1.0, "swiglu"),
        ("swiglu", None, None, "swiglu"),
        ("situ", 4.0, None, "situ"),
        ("situv2", 4.0, None, "situv2"),
        ("silu", 1.7, 1.0, None),
        ("swiglu", 1.702, 2.0, None),
        ("relu", None, None, None),
    ],
)
def test_the_activation_by_the_config(activation, alpha, beta, name):
    config = MoeRunnerConfig(activation=activation, gemm1_alpha=alpha, gemm1_beta=beta)
    if name is None:
        said = f"gemm1_alpha={alpha}, gemm1_beta={beta}" if alpha else "activation='relu'"
        with pytest.raises(ContractError, match=said):
            call_arguments.activation_name(config, None)
    else:
        assert call_arguments.activation_name(config, None) == name
        assert call_arguments.activation_name(config, make_plan("silu")) == "silu"


def test_an_older_config_without_a_beta():
    """SGLang before 0.5.21 has no gemm1_beta."""
    config = SimpleNamespace(activation="silu", gemm1_alpha=1.702)
    assert call_arguments.activation_name(config, None) == "swiglu"


@pytest.mark.parametrize("bad", [None, 0.0, -1.0, float("nan")])
@pytest.mark.parametrize(
    "field, keyword", [("gemm1_alpha", "beta"), ("gemm1_clamp_limit", "linear_beta")]
)
def test_situs_constants_are_positive_numbers(aiter, field, keyword, bad):
    config = MoeRunnerConfig(
        activation="situ", **{"gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0, field: bad}
    )
    with pytest.raises(ContractError, match=f"{field}={bad!r}") as caught:
        run(config)
    assert f"SiTUv2's {keyword}" in caught.value.allowed and not aiter.calls


# --- keywords that are there only if somebody says them ------------------------------------------------


def test_what_nobody_says_is_not_sent(aiter):
    run()
    optional = {"num_local_tokens", "dtype", "swiglu_limit", "beta", "linear_beta", "quant_dtype_a"}
    assert not optional & aiter.call.keys()


def test_the_dispatchers_scale_goes_before_the_layers(aiter):
    static, dynamic = torch.ones(1), torch.ones(2)
    run(info=make_info(a13_scale=static, a2_scale=dynamic))
    assert aiter.call["a1_scale"] is static and aiter.call["a2_scale"] is dynamic
    run(runner_input=make_input(a1_scale=dynamic), info=make_info(a13_scale=static))
    assert aiter.call["a1_scale"] is dynamic and aiter.call["a2_scale"] is None


def test_situ_has_betas_and_no_limit(aiter):
    run(SITU, info=make_info(swiglu_limit=7.0))
    assert "swiglu_limit" not in aiter.call and aiter.call["gate_mode"] == "separated"
    assert [type(aiter.call[name]) for name in ("beta", "linear_beta")] == [float, float]


@pytest.mark.parametrize("limit, sent", [(0.0, False), (0.5, True), (1.0, True), (7.0, True)])
def test_any_positive_limit_is_one(aiter, limit, sent):
    run(info=make_info(swiglu_limit=limit))
    assert aiter.call.get("swiglu_limit") == (limit if sent else None)
    assert aiter.call["gate_mode"] == ("interleave" if sent else "separated")


def test_a_plans_limit_is_the_one_that_is_sent(aiter):
    plan = make_plan("swiglu", swiglu_limit=7.0)
    run(info=make_info(plan=plan, swiglu_limit=9.0, gate_mode=plan.gate_mode.value))
    assert aiter.call["swiglu_limit"] == 7.0


# --- gate_mode of layers that are not MX -----------------------------------------------------------------

FP8 = AiterQuantType.PER_128X128


@pytest.mark.parametrize(
    "fields, mode",
    [
        ({}, None),
        ({"swiglu_limit": 7.0}, "interleave"),
        ({"gate_mode": "interleave"}, "interleave"),
        ({"fused_moe_kwargs": {"gate_mode": "separated"}}, "separated"),
        ({"fused_moe_kwargs": {"gate_mode": GateMode.INTERLEAVE}}, "interleave"),
        ({"gate_mode": GateMode.INTERLEAVE}, "interleave"),
        ({"gate_mode": GateMode.SEPARATED}, None),
        ({"fused_moe_kwargs": {"block_size_M": 64}}, None),
    ],
)
def test_a_gate_mode_goes_out_where_somebody_states_one(aiter, fields, mode):
    run(runner_input=make_input(quant_type=FP8), info=make_info(FP8, **fields))
    assert aiter.call.get("gate_mode") == mode
    assert type(aiter.call.get("gate_mode", "")) is str


@pytest.mark.parametrize("field", ["separated", "interleave"])
def test_a_plan_and_a_field_that_agree_and_that_do_not(aiter, monkeypatch, field):
    monkeypatch.delenv(plans.A8W4, raising=False)
    plan = make_plan()
    assert plan.gate_mode.value == "separated"
    if field == "separated":
        run(info=make_info(plan=plan, gate_mode=field))
        assert aiter.call["gate_mode"] == "separated"
        return
    with pytest.raises(
        ContractError,
        match=r"plan.gate_mode says 'separated', AiterMoeQuantInfo.gate_mode says 'interleave'",
    ):
        run(info=make_info(plan=plan, gate_mode=field))


def test_a_field_that_says_what_an_interleaved_plan_says(aiter, monkeypatch):
    monkeypatch.setenv(plans.A8W4, "1")
    plan = make_plan(env={plans.A8W4: "1"})
    for field in ("separated", "interleave"):  # the first is what the field says by default
        run(info=make_info(plan=plan, gate_mode=field))
        assert aiter.call["gate_mode"] == "interleave"


@pytest.mark.parametrize(
    "plan, writer", [(None, "fused_moe_kwargs['gate_mode']"), ("separated", "plan.gate_mode")]
)
def test_the_writer_that_differs_is_named(plan, writer):
    kwargs = None if plan else "separated"
    with pytest.raises(ContractError, match=f"^{re.escape(writer)} says 'separated', Aiter"):
        call_arguments.resolve_gate_mode(plan=plan, kwargs=kwargs, limit=None, field="interleave")
    with pytest.raises(ContractError, match=r"^plan.gate_mode says 'a', fused_moe_kwargs\["):
        call_arguments.resolve_gate_mode(plan="a", kwargs="b", limit=None, field="separated")


# --- what the plan was made for ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hidden_pad", "intermediate_pad"])
def test_a_pad_is_the_plans_or_unsaid(aiter, name):
    plan = make_plan("swiglu", hidden_size=192, intermediate_size=96, swiglu_limit=7.0)
    planned_pad = getattr(plan, name)
    assert planned_pad > 0
    for given in (0, planned_pad):
        run(info=make_info(plan=plan, **{name: given}))
        assert aiter.call[name] == planned_pad
    other = planned_pad + 32
    with pytest.raises(ContractError) as caught:
        run(info=make_info(plan=plan, **{name: other}))
    assert f"'{name}={planned_pad}', AiterMoeQuantInfo says '{name}={other}'" in str(caught.value)


def test_biases_of_a_plan_with_biases(aiter):
    plan = make_plan("swiglu", has_bias=True, swiglu_limit=7.0)
    b13, b2 = torch.ones(1), torch.ones(2)
    run(info=make_info(plan=plan, b13=b13, b2=b2))
    assert aiter.call["bias1"] is b13 and aiter.call["bias2"] is b2


@pytest.mark.parametrize("name", ["b13", "b2", "doweight_stage1", "expert_mask"])
def test_what_was_not_planned_is_named_with_the_layer(aiter, name):
    value = True if name == "doweight_stage1" else torch.ones(EXPERTS, dtype=torch.int32)
    with pytest.raises(ContractError, match=f"AiterMoeQuantInfo.{name} is given, but layer 7 was"):
        run(info=make_info(plan=make_plan(name="layer 7"), **{name: value}))


# --- the caller's own keywords ------------------------------------------------------------------------


@pytest.mark.parametrize("name", call_arguments.OPERANDS)
def test_no_operand_of_a_call_can_be_replaced(aiter, name):
    with pytest.raises(ContractError, match=f"the runner says .*fused_moe_kwargs: {name} says"):
        run(info=make_info(fused_moe_kwargs={name: 1}))
    assert not aiter.calls


def test_a_keyword_that_is_unset_or_says_the_same(aiter):
    scale, bias = torch.ones(1), torch.ones(1)
    kwargs = {"w1_scale": scale, "bias1": bias, "hidden_pad": 64, "doweight_stage1": True}
    run(info=make_info(w13_scale=scale, hidden_pad=64, fused_moe_kwargs=kwargs))
    for name, value in kwargs.items():  # bias1 was None, doweight_stage1 False
        assert aiter.call[name] is value, name


@pytest.mark.parametrize(
    "fields, kwargs",
    [
        ({"w13_scale": torch.ones(1)}, {"w1_scale": torch.ones(1)}),
        ({"w13_scale": torch.ones(1)}, {"w1_scale": 1.0}),
        ({"hidden_pad": 1}, {"hidden_pad": torch.ones(1)}),
    ],
)
def test_another_tensor_is_another_value(aiter, fields, kwargs):
    (name,) = kwargs
    with pytest.raises(ContractError, match=f"{name}=<tensor>.*{name}=<another>"):
        run(info=make_info(**fields, fused_moe_kwargs=kwargs))


def test_two_values_are_both_told(aiter):
    info = make_info(hidden_pad=64, fused_moe_kwargs={"hidden_pad": 128})
    with pytest.raises(
        ContractError, match=r"hidden_pad=64.*fused_moe_kwargs says.*hidden_pad=128"
    ):
        run(info=info)


def test_an_activation_keyword_beside_a_plan(aiter):
    plan = make_plan()
    kwargs = {"activation": ActivationType.Situv2, "block_size_M": 32}
    run(info=make_info(plan=plan, fused_moe_kwargs=kwargs))
    assert aiter.call["activation"] is ActivationType.Situv2 and aiter.call["block_size_M"] == 32
    run(info=make_info(plan=plan, fused_moe_kwargs={"activation": None}))
    assert aiter.call["activation"] is ActivationType.Situv2


# --- MXFP8 activations ------------------------------------------------------------------------------------


def test_mxfp8_activations_are_asked_for_once_and_for_bf16_tokens(monkeypatch):
    monkeypatch.setenv(plans.A8W4, "1")
    fields = {"fp8_activations": True, "gate_mode": "interleave"}
    with fake_aiter.installed(optional=("quant_dtype_a",)) as fake:
        half = make_input(hidden_states=torch.zeros(TOKENS, HIDDEN, dtype=torch.float16))
        run(runner_input=half, info=make_info(**fields))
        assert "quant_dtype_a" not in fake.call
        own = {"quant_dtype_a": torch.uint8}
        run(info=make_info(**fields, fused_moe_kwargs=own))
        assert fake.call["quant_dtype_a"] is torch.uint8
        plan = make_plan(env={plans.A8W4: "1"})
        run(info=make_info(**fields, plan=plan))
        assert fake.call["quant_dtype_a"] is torch.float8_e4m3fn


def test_an_aiter_that_cannot_take_them_is_asked_nothing_for_fp16_tokens(aiter):
    half = make_input(hidden_states=torch.zeros(TOKENS, HIDDEN, dtype=torch.float16))
    run(runner_input=half, info=make_info(fp8_activations=True, gate_mode="interleave"))
    assert len(aiter.calls) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
