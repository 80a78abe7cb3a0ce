"""The same inputs through the installed SGLang's own runner and through ours: equal calls of AITER.

Needs SGLang. AITER is a recording fake.
"""

import dataclasses
import sys

import pytest
import torch

from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter as ours
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")
pytestmark = pytest.mark.sglang

EXPERTS, HIDDEN, INTER, TOKENS, TOPK = 4, 256, 128, 3, 2


@pytest.fixture(scope="module")
def upstream():
    module = pytest.importorskip("sglang.srt.layers.moe.moe_runner.aiter")
    if module.AiterRunnerCore.run.__module__ != module.__name__:
        pytest.skip(
            "the installed SGLang is patched: there is no runner of its own to compare with"
        )
    return module


def config_class():
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    return MoeRunnerConfig


def make_input(upstream, quant_type, **fields):
    values = {
        "hidden_states": torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(TOKENS, TOPK, dtype=torch.int32),
        "topk_weights": torch.ones(TOKENS, TOPK),
        "quant_type": getattr(upstream.AiterQuantType, quant_type),
    }
    return upstream.AiterRunnerInput(**{**values, **fields})


def make_info(upstream, quant_type, **fields):
    return upstream.AiterMoeQuantInfo(
        w13_weight=torch.zeros(EXPERTS, 2 * INTER, HIDDEN // 2, dtype=torch.uint8),
        w2_weight=torch.zeros(EXPERTS, HIDDEN, INTER // 2, dtype=torch.uint8),
        quant_type=getattr(upstream.AiterQuantType, quant_type),
        **fields,
    )


def extras(upstream):
    policy = getattr(upstream, "_MOE_SORTING_DISPATCH_POLICY", None)
    return {} if policy is None else {"moe_sorting_dispatch_policy": policy}


def assert_same_call(call, expected):
    assert call.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert call[name] is value, name
        else:
            assert call[name] == value, name


SINK = torch.tensor([1] * EXPERTS + [0], dtype=torch.int32)
KINDS = {
    "bf16": ("NONE", {}, {}),
    "fp8 per token": ("PER_TOKEN", {"w13_scale": SINK, "w2_scale": SINK}, {}),
    "fp8 block": ("PER_128X128", {"w13_scale": SINK, "w2_scale": SINK}, {}),
    "deepseek-v4 fp8": ("PER_128X128", {"swiglu_limit": 10.0, "intermediate_pad": 128}, {}),
    "deepseek-v4 fp4": (
        "PER_1X32",
        {"swiglu_limit": 10.0, "fused_moe_kwargs": {"gate_mode": "interleave"}},
        {},
    ),
    "quark": ("PER_1X32", {"fused_moe_kwargs": {"gate_mode": "separated"}}, {}),
    "gelu": ("NONE", {}, {"activation": "gelu"}),
    "weights first": ("NONE", {"doweight_stage1": True}, {}),
    "deepep": ("PER_128X128", {"expert_mask": SINK}, {}),
    "situ": ("PER_1X32", {}, {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_without_a_plan_are_sglangs(upstream, kind):
    quant_type, fields, config = KINDS[kind]
    config = config_class()(**config)
    runner_input = make_input(upstream, quant_type)
    info = make_info(upstream, quant_type, **fields)
    state = {"aiter_combine_is_mori": False} if kind == "deepep" else {}
    with fake_aiter.installed() as fake:
        try:
            upstream.AiterRunnerCore(config).run(runner_input, info, dict(state))
        except TypeError as error:
            if "gate_mode" not in str(error):
                raise
            pytest.skip(f"this SGLang release passes gate_mode twice: {error}")
        ours.compute(config, runner_input, info, state, extras=extras(upstream))
        theirs, mine = fake.calls
    if kind == "quark" and "gate_mode" not in theirs:
        theirs["gate_mode"] = "separated"  # AITER's default, said aloud
    assert_same_call(mine, theirs)


def test_a_stated_gate_mode_reaches_aiter_through_the_patched_runner(upstream):
    """Without a limit the released runner sends none (sglang#30993); unstated, it is called as it is."""
    from sglang_aiter_moe.patches import glue

    cls = glue.quant_info_with_plan(upstream.AiterMoeQuantInfo)
    core = upstream.AiterRunnerCore(config_class()(activation="silu"))
    runner_input, info = make_input(upstream, "PER_1X32"), make_info(upstream, "PER_1X32")
    fields = {f.name: getattr(info, f.name) for f in dataclasses.fields(info)}
    run = glue.run(upstream.AiterRunnerCore.run)
    with fake_aiter.installed() as fake:
        run(core, runner_input, cls(**fields), {})
        run(core, runner_input, cls(**fields, gate_mode="interleave"), {})
        assert [call.get("gate_mode") for call in fake.calls] == [None, "interleave"]


def test_fields_are_sglangs_and_two_more(upstream):
    """In SGLang's order, so that positional arguments keep their meaning."""
    for name, new in (("AiterMoeQuantInfo", ["gate_mode", "plan"]), ("AiterRunnerInput", [])):
        mine = [f.name for f in dataclasses.fields(getattr(ours, name))]
        theirs = [f.name for f in dataclasses.fields(getattr(upstream, name))]
        later = [field for field in mine if field not in theirs]
        assert set(new) <= set(later) <= {*new, "fp8_activations", "output"}
        assert [field for field in mine if field in theirs] == theirs


def test_sglangs_published_buffer_comes_back(upstream):
    from sglang.srt.layers import zero_copy_context

    latent = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    runner_input, info = make_input(upstream, "PER_1X32"), make_info(upstream, "PER_1X32")
    with fake_aiter.installed(), zero_copy_context.set_moe_output(latent):
        assert ours.compute(config_class()(), runner_input, info) is latent
    assert torch.equal(latent, runner_input.hidden_states * 2)


def test_the_backend_is_sglangs(upstream):
    theirs = upstream.AiterRunnerOutput(torch.empty(0)).runner_backend
    assert ours.AiterRunnerOutput(torch.empty(0)).runner_backend is theirs


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
