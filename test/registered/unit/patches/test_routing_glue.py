"""SGLang's router signatures in front of the fused kernel, without SGLang and without a GPU.

The originals stand for SGLang's functions: they report that they were called. Expected routings come from the
float64 reference.
"""

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sglang_aiter_moe.patches import routing_glue
from sglang_aiter_moe.srt.layers.moe.moe_runner import flashinfer_trtllm
from sglang_aiter_moe.srt.layers.moe.topk import TopKConfig
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.routing import assert_routing

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    monkeypatch.setattr(routing_glue, "_on_gpu", lambda tensor: True)
    routing_glue._say.cache_clear()


def sglangs(**names):
    """A function with the globals of SGLang's module."""
    scope = dict(names)
    exec("def original(*args, **kwargs):\n    return 'original', args, kwargs", scope)
    return scope["original"]


def inputs(experts=64, tokens=5):
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(tokens, experts + 8, generator=generator).bfloat16()
    return wide[:, 4 : 4 + experts], torch.randn(experts, generator=generator) * 0.1 + 7


@pytest.mark.parametrize(
    "factor, folded, scale", [(2.5, True, 2.5), (2.5, False, 1.0), (None, True, 1.0)]
)
@pytest.mark.parametrize("groups, kept", [(8, 4), (1, 1), (None, None)])
def test_the_grouped_router_with_strided_bf16_rows(groups, kept, factor, folded, scale):
    logits, bias = inputs()
    weights, ids = routing_glue.biased_grouped_topk(
        sglangs(),
        None,
        logits,
        bias,
        6,
        True,
        groups,
        kept,
        num_fused_shared_experts=0,
        routed_scaling_factor=factor,
        apply_routed_scaling_factor_on_output=folded,
    )
    options = {"num_expert_group": groups or 1, "topk_group": kept or 1}
    assert_routing(weights, ids, logits, bias, 6, routed_scaling_factor=scale, **options)


def test_the_ungrouped_sigmoid_router():
    logits, bias = inputs()
    weights, ids = routing_glue.biased_topk_sigmoid(
        sglangs(),
        hidden_states=None,
        gating_output=logits,
        correction_bias=bias,
        topk=6,
        renormalize=False,
        scoring_func="sigmoid",
        routed_scaling_factor=2.0,
        apply_routed_scaling_factor_on_output=True,
        num_token_non_padded=torch.tensor(2),
    )
    options = {"renormalize": False, "routed_scaling_factor": 2.0}
    assert_routing(weights, ids, logits, bias, 6, **options)


def test_shared_slots_carry_what_sglang_gives_them():
    logits, bias = inputs()
    seen = {}

    def weight_of(**kwargs):
        seen.update(kwargs)
        return 0.4

    weights, ids = routing_glue.biased_grouped_topk(
        sglangs(fused_shared_expert_weight=weight_of),
        None,
        logits,
        bias,
        8,
        True,
        1,
        1,
        num_fused_shared_experts=2,
        routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=False,
    )
    assert seen == {"routed_scaling_factor": 2.5, "fused_in_topk": False}
    assert ids[:, 6:].tolist() == [[64, 65]] * 5 and (weights[:, 6:] == torch.tensor(0.4)).all()
    assert_routing(weights[:, :6], ids[:, :6], logits, bias, 6)


@pytest.mark.parametrize(
    "names, options, logged",
    [
        ({"_use_aiter": True}, {}, ""),
        ({}, {"packed_out": torch.zeros(1)}, "packed ids"),
        ({}, {"router_logits_partials": torch.zeros(1)}, "partial logits"),
        ({}, {"num_fused_shared_experts": 1}, "shared experts at random"),
    ],
)
def test_what_stays_with_sglang_is_passed_on_whole_and_logged_once(names, options, logged, caplog):
    logits, bias = inputs()
    for _ in range(2):
        found = routing_glue.biased_topk_sigmoid(
            sglangs(**names), None, logits, bias, 6, True, "sigmoid", **options
        )
        assert found == ("original", (None, logits, bias, 6, True, "sigmoid"), options)
        found = routing_glue.biased_grouped_topk(
            sglangs(**names), None, logits, bias, 6, True, 4, 2, **options
        )
        assert found == ("original", (None, logits, bias, 6, True, 4, 2), options)
    assert [logged in m for m in caplog.messages] == ([True] if logged else [])


def test_other_score_functions_no_bias_many_experts_and_no_gpu(monkeypatch):
    logits, bias = inputs()
    original = sglangs()
    for changed in ({"scoring_func": "sqrtsoftplus"}, {"correction_bias": None}):
        arguments = {"correction_bias": bias, "topk": 6, "renormalize": True} | changed
        found = routing_glue.biased_topk_sigmoid(original, None, logits, **arguments)
        assert found[0] == "original"
    huge = torch.zeros(1, 4097)
    assert routing_glue.biased_topk_sigmoid(original, None, huge, huge[0], 6, True)[0] == "original"
    monkeypatch.setattr(routing_glue, "_on_gpu", lambda tensor: tensor.is_cuda)
    assert routing_glue.biased_topk_sigmoid(original, None, logits, bias, 6, True)[0] == "original"


# ---- SM100


class Bypassed(NamedTuple):
    topk_config: Any
    standard: str = "chosen experts"

    def to_standard(self, layer_id):
        return f"{self.standard} of layer {layer_id}"


class Dispatched(NamedTuple):
    hidden_states: Any
    topk_output: Any


def sm100(layer, output, activation="situ"):
    method = SimpleNamespace(moe_runner_config=SimpleNamespace(activation=activation))
    seen = lambda method, layer, dispatched: dispatched.topk_output  # noqa: E731
    return flashinfer_trtllm.situ_routing_bias(seen, method, layer, Dispatched(None, output))


def test_a_bias_that_bf16_cannot_hold_is_routed_before_the_kernel():
    layer = SimpleNamespace(layer_id=7, _situ_routing_bias_bf16=None)
    output = Bypassed(TopKConfig(2, correction_bias=torch.tensor([7.01, 7.02])))
    assert sm100(layer, output) == "chosen experts of layer 7"
    assert layer._situ_routing_bias_bf16 is None, "nothing narrow is kept"


def test_a_bf16_bias_is_looked_at_in_every_call():
    config = TopKConfig(2, correction_bias=torch.tensor([7.0, 6.0], dtype=torch.bfloat16))
    layer = SimpleNamespace(layer_id=0, _situ_routing_bias_bf16=torch.zeros(2))
    for values in ([7.0, 6.0], [1.0, 2.0]):
        config.correction_bias = torch.tensor(values, dtype=torch.bfloat16)
        output = Bypassed(config)
        assert sm100(layer, output) is output
        assert layer._situ_routing_bias_bf16 is config.correction_bias
        assert layer._situ_routing_bias_bf16.tolist() == values


@pytest.mark.parametrize(
    "output, activation",
    [
        (Bypassed(TopKConfig(2)), "situ"),
        (Bypassed(TopKConfig(2, correction_bias=torch.ones(2))), "swiglu"),
        ("standard, without a config", "situ"),
    ],
)
def test_everything_else_is_left_alone(output, activation):
    assert sm100(SimpleNamespace(), output, activation) is output


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
