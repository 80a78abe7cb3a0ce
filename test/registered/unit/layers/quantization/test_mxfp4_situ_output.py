"""A layer's way from checkpoint bytes to the published output, in values: portable against the oracle.

On a ROCm machine with AITER the same layers run through the real kernels.
"""

import sys

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.contract import Capabilities, MoeSpec, Target, plan_moe
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import cosine, logits_diff
from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as runner
from sglang_aiter_moe.srt.layers.moe.moe_runner import expert_ids
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore, AiterRunnerInput
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.testing.raw_layers import make_raw_layer
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")
register_amd_ci(est_time=25, stage="stage-b", runner_config="1-gpu-small-amd")

FLAGS = ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4")
MODES = {
    "A16W4": {},
    "A8W4": {"AITER_SITUV2_A8W4": "1"},
    "A4W4": {"AITER_SITUV2_A4W4": "1"},
    "A8W4 wins": {"AITER_SITUV2_A8W4": "1", "AITER_SITUV2_A4W4": "1"},
}
# Against the oracle with the same quantisation; A16W4 only differs by bf16 roundings.
BOUNDS = {"A16W4": 1e-4, "A8W4": 1e-3, "A4W4": 1e-3}
SITU = MoeRunnerConfig(activation="situ")


def has_rocm_aiter():
    return bool(torch.version.hip and portable.registry.real_aiter())


ON_GPU = pytest.param(
    "portable on a GPU",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ],
)


@pytest.fixture(params=["portable", ON_GPU, pytest.param("aiter", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "portable on a GPU":
        with portable.installed(force=True):
            yield torch.device("cuda")
    elif request.param == "aiter":
        if not has_rocm_aiter():
            pytest.skip("needs ROCm and AITER")
        yield torch.device("cuda")
    else:
        with portable.installed(force=True):
            yield torch.device("cpu")


@pytest.fixture(autouse=True)
def flags(monkeypatch):
    def set_flags(env):
        for name in FLAGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    set_flags({})
    return set_flags


def k3_like(**changes):
    sizes = {"num_experts": 8, "topk": 4, "hidden_size": 512, "intermediate_size": 384}
    return MoeSpec("situv2", beta=4.0, linear_beta=25.0, **{**sizes, **changes})


def plan_for(spec, env=None, arch="gfx950"):
    return plan_moe(spec, Target(arch, Capabilities.for_release("0.1.20"), env or {}))


def prepared(raw, plan, device="cpu"):
    layer = raw.module().to(device)
    mxfp4.prepare_weights(layer, plan)
    return layer


def make_input(raw, plan, info, device="cpu", **fields):
    return AiterRunnerInput(
        mxfp4.pad_hidden_states(raw.hidden_states, plan).to(device),
        raw.topk_ids.to(device),
        raw.topk_weights.to(device),
        info.quant_type,
        **fields,
    )


def execute(raw, plan, config=SITU, device="cpu", expert_mask=None, layer=None, **fields):
    layer = layer or prepared(raw, plan, device)
    info = mxfp4.moe_quant_info(layer, expert_mask)
    runner_input = make_input(raw, plan, info, device, **fields)
    return AiterRunnerCore(config).run(runner_input, info, {}).hidden_states


def what_runs(name, tokens, raw, plan, arch="gfx950"):
    """Mode and requantisation rule of the kernel family that AITER picks (contract.md section d)."""
    spec = raw.spec
    found = portable.explain(
        tokens=tokens,
        num_experts=spec.num_experts,
        topk=spec.topk,
        hidden_size=plan.padded_hidden_size,
        intermediate_size=plan.padded_intermediate_size,
        activation=spec.activation.value,
        gate_mode=plan.gate_mode.value,
        has_bias=spec.has_bias,
        env={**plan.target.env, **MODES[name]},
        arch=arch,
        **{k: v for k, v in plan.call_kwargs.items() if k != "gate_mode"},
    )
    # A16W4 requantises nothing; the oracle wants one of its rules all the same.
    oracles = {"roundup_bf16": "roundup", "none": "roundup"}
    return found.mode, oracles.get(found.requantization, found.requantization)


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("name", MODES)
def test_every_mode_agrees_with_the_oracle(device, flags, name, tokens):
    flags(MODES[name])
    raw = make_raw_layer(k3_like(), tokens, seed=tokens)
    plan = plan_for(raw.spec, MODES[name])
    mode, rule = what_runs(name, tokens, raw, plan)
    assert name.startswith(mode) and plan.mode_for(tokens) == mode
    output = torch.full_like(raw.hidden_states, float("nan")).to(device)
    with zero_copy_context.set_moe_output(output):
        result = execute(raw, plan, device=device)
    assert result is output, "the published buffer has to come back"
    assert logits_diff(result.cpu(), raw.expected(mode, requantization=rule)) < BOUNDS[mode]


@pytest.mark.parametrize("force", ["0", "1"])
def test_gfx1250_agrees_with_the_oracle(monkeypatch, force):
    """Its own interleaved form and n32k4 scales; AITER_FORCE_A8W4 alone picks the mode there."""
    monkeypatch.setenv("AITER_FORCE_A8W4", force)
    env = {"AITER_FORCE_A8W4": force}
    raw = make_raw_layer(k3_like(), tokens=5)
    plan = plan_for(raw.spec, env, arch="gfx1250")
    assert (plan.w13_layout, plan.w13_scale_layout, plan.w2_scale_layout) == (
        "gu_interleaved_gfx1250",
        "n32k4_gate_up",
        "n32k4",
    )
    mode = "A8W4" if force == "1" else "A4W4"
    assert plan.mode_for(5) == mode
    with portable.installed(arch="gfx1250", force=True):
        result = execute(raw, plan)
    found, rule = what_runs("A16W4", 5, raw, plan, arch="gfx1250")
    assert found == mode
    assert logits_diff(result, raw.expected(mode, requantization=rule)) < BOUNDS[mode]
    with portable.installed(arch="gfx950", force=True):
        elsewhere = execute(raw, plan)
    assert not cosine(elsewhere, raw.expected(None)) > 0.5  # NaN where a scale is read past its end


@pytest.mark.parametrize("wrong", ["layout", "rows", "unshuffled", "flag"])
@pytest.mark.parametrize("name", ["A16W4", "A8W4", "A4W4"])
def test_control_a_broken_step_collapses(flags, monkeypatch, name, wrong):
    """Each of these is silent in AITER; the comparison above would see it."""
    flags(MODES[name])
    raw = make_raw_layer(k3_like(), tokens=8)
    plan = plan_for(raw.spec, MODES[name])
    if wrong == "layout":
        layer = prepared(raw, plan_for(raw.spec, MODES["A16W4" if name == "A8W4" else "A8W4"]))
        layer.aiter_moe_plan = plan
    elif wrong == "rows":
        layer = prepared(raw, plan_for(k3_like(gate_up_interleaved=True), MODES[name]))
        layer.aiter_moe_plan = plan
    elif wrong == "unshuffled":
        layer = prepared(raw, plan)
        packed_scales = layer.w13_weight_scale.clone(), layer.w2_weight_scale.clone()
        layer.w13_weight.copy_(raw.experts.w13)
        layer.w2_weight.copy_(raw.experts.w2)
        with portable.installed(force=True), pytest.raises(ContractError, match="weight_loader"):
            execute(raw, plan, layer=layer)
        layer.aiter_moe_weights = None  # without that guard
        layer.w13_weight_scale.data = packed_scales[0]
        layer.w2_weight_scale.data = packed_scales[1]
    else:
        layer = prepared(raw, plan)
        flags(MODES["A16W4" if name == "A8W4" else "A8W4"])
        with portable.installed(force=True), pytest.raises(ContractError, match="AITER_SITUV2"):
            execute(raw, plan, layer=layer)
        monkeypatch.setattr(type(plan), "check_still_holds", lambda self: None)
    with portable.installed(force=True):
        result = execute(raw, plan, layer=layer)
    assert cosine(result, raw.expected(None)) < 0.5


GPT_OSS = MoeSpec(
    "swiglu",
    4,
    2,
    hidden_size=448,
    intermediate_size=192,
    gate_up_interleaved=True,
    has_bias=True,
    swiglu_limit=7.0,
)


@pytest.mark.parametrize("tokens", [5, 260])
def test_gpt_oss_like_layers_agree_with_the_oracle(device, tokens):
    """Alternating rows, biases, a limit and pads, on both sides of AITER's bound of 256 tokens."""
    raw = make_raw_layer(GPT_OSS, tokens)
    plan = plan_for(GPT_OSS)
    assert (plan.padded_hidden_size, plan.padded_intermediate_size) == (512, 256)
    mode, rule = what_runs("A16W4", tokens, raw, plan)
    assert plan.mode_for(tokens) == mode
    output = torch.empty(tokens, 448, dtype=torch.bfloat16, device=device)
    with zero_copy_context.set_moe_output(output):
        result = execute(raw, plan, MoeRunnerConfig(activation="silu"), device)
    assert result is output
    assert logits_diff(result.cpu(), raw.expected(mode, requantization=rule)) < BOUNDS[mode]


@pytest.mark.parametrize("tokens", [5, 260])
def test_control_another_gate_mode_collapses(monkeypatch, tokens):
    """gate_mode picks AITER's kernels for SwiGLU, and with them the layout that is read."""
    raw, plan = make_raw_layer(GPT_OSS, tokens), plan_for(GPT_OSS)
    made = runner.call_arguments
    flipped = {"separated": "interleave", "interleave": "separated"}

    def flip(*args):
        arguments = made(*args)
        return {**arguments, "gate_mode": flipped[arguments["gate_mode"]]}

    monkeypatch.setattr(runner, "call_arguments", flip)
    with portable.installed(force=True):
        result = execute(raw, plan, MoeRunnerConfig(activation="silu"))
    assert cosine(result[:, :448], raw.expected(None)) < 0.7


def test_no_tokens():
    raw = make_raw_layer(k3_like(), tokens=0)
    with portable.installed(force=True):
        assert execute(raw, plan_for(raw.spec)).shape == (0, 512)


# --- expert parallel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A8W4", "A4W4"])
@pytest.mark.parametrize("convention", ["global mask", "DeepEP sink"])
def test_expert_parallel_with_unused_slots(device, flags, name, convention):
    flags(MODES[name])
    spec = k3_like(expert_parallel=True)
    if convention == "global mask":
        raw = make_raw_layer(spec, tokens=16, global_experts=16)
        mask = torch.tensor([0] * 4 + [1] * 8 + [0] * 4, dtype=torch.int32)
        oracle_mask = mask
    else:
        raw = make_raw_layer(spec, tokens=16)
        mask = torch.tensor([1] * 8 + [0], dtype=torch.int32)
        oracle_mask = None
    raw.topk_ids[::3, 1] = -1
    plan = plan_for(spec, MODES[name])
    result = execute(raw, plan, device=device, expert_mask=mask.to(device))
    mode, rule = what_runs(name, 16, raw, plan)
    expected = raw.expected(mode, requantization=rule, expert_mask=oracle_mask)
    assert logits_diff(result.cpu(), expected) < BOUNDS[name]
    assert expected.norm() > 0


def test_control_unused_slots_that_are_not_rerouted_are_refused(flags, monkeypatch):
    flags(MODES["A8W4"])
    raw = make_raw_layer(k3_like(expert_parallel=True), tokens=4)
    raw.topk_ids[0, 0] = -1
    plan = plan_for(raw.spec, MODES["A8W4"])
    mask = torch.tensor([1] * 8 + [0], dtype=torch.int32)
    monkeypatch.setattr(expert_ids, "reroute_invalid", lambda ids, weights, *_: (ids, weights))
    with portable.installed(force=True), pytest.raises(ContractError, match="topk_ids"):
        execute(raw, plan, expert_mask=mask)


def test_a_mask_of_more_experts_than_there_are_weights_is_refused(flags):
    """AITER counts the experts of the mask and indexes the weights with the count."""
    flags(MODES["A8W4"])
    raw = make_raw_layer(k3_like(expert_parallel=True), tokens=4, global_experts=16)
    plan = plan_for(raw.spec, MODES["A8W4"])
    mask = torch.tensor([1] * 9 + [0] * 7, dtype=torch.int32)
    with portable.installed(force=True), pytest.raises(ContractError, match="expert_mask marks 9"):
        execute(raw, plan, expert_mask=mask)


def test_a_call_without_the_mask_that_was_planned_is_refused(flags):
    """AITER would take global ids for local ones: other experts, or none."""
    flags(MODES["A8W4"])
    raw = make_raw_layer(k3_like(expert_parallel=True), tokens=4)
    with portable.installed(force=True), pytest.raises(ContractError, match="expert_mask is None"):
        execute(raw, plan_for(raw.spec, MODES["A8W4"]))


@pytest.mark.parametrize("bad", [-1, 8])
def test_ids_out_of_range_without_expert_parallel_are_named(bad):
    raw = make_raw_layer(k3_like(), tokens=4)
    raw.topk_ids[2, 0] = bad
    with portable.installed(force=True), pytest.raises(ContractError, match=f"topk_ids.*{bad}"):
        execute(raw, plan_for(raw.spec))


BAD_INPUT = {
    "float32 tokens": ("hidden_states", lambda t: t.float()),
    "narrow tokens": ("hidden_states", lambda t: t[:, :256]),
    "wide tokens": ("hidden_states", lambda t: torch.cat([t, t], 1)),
    "tokens by expert": ("hidden_states", lambda t: t[None]),
    "fewer ids than tokens": ("topk_ids", lambda t: t[:3]),
    "flat ids": ("topk_ids", lambda t: t[:, 0]),
    "float ids": ("topk_ids", lambda t: t.float()),
    "fewer weights than ids": ("topk_weights", lambda t: t[:, :1]),
    "integer weights": ("topk_weights", lambda t: t.int()),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_input_that_does_not_fit_the_plan_is_named(name):
    field, spoil = BAD_INPUT[name]
    raw = make_raw_layer(k3_like(), tokens=4)
    plan = plan_for(raw.spec)
    info = mxfp4.moe_quant_info(prepared(raw, plan))
    given = make_input(raw, plan, info)
    setattr(given, field, spoil(getattr(given, field)))
    with portable.installed(force=True), pytest.raises(ContractError, match=f"^{field} is"):
        AiterRunnerCore(SITU).run(given, info, {})


# --- the output object -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extensions", [(), ("output",)], ids=["copied once", "written by the kernel"]
)
@pytest.mark.parametrize("source", ["input", "published"])
def test_the_output_object_comes_back(extensions, source):
    raw = make_raw_layer(k3_like(), tokens=5)
    plan = plan_for(raw.spec)
    output = torch.full_like(raw.hidden_states, float("nan"))
    with portable.installed(force=True, extensions=extensions):
        expected = execute(raw, plan)
        if source == "input":
            result = execute(raw, plan, output=output)
        else:
            with zero_copy_context.set_moe_output(output):
                result = execute(raw, plan)
    assert result is output
    assert torch.equal(output, expected)


def test_no_combine_adds_up_to_the_combined_result():
    raw = make_raw_layer(k3_like(), tokens=5)
    plan = plan_for(raw.spec)
    with portable.installed(force=True, extensions=("no_combine",)):
        parts = execute(raw, plan, MoeRunnerConfig(activation="situ", no_combine=True))
        whole = execute(raw, plan)
    assert parts.shape == (5, 4, 512)
    assert logits_diff(parts.double().sum(1), whole.double()) < 1e-4


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
