"""FlashInfer's kernel: whose buffer comes back, and which routing reads which bias."""

import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import flashinfer_trtllm
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class Dispatched(NamedTuple):
    hidden_states: torch.Tensor
    topk_output: object = None


class Combined(NamedTuple):
    hidden_states: object
    more: str = "kept"


TOKENS = Dispatched(torch.zeros(3, 8, dtype=torch.bfloat16))
RESULT = torch.ones(3, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize("result", ["another", "published", "deferred"])
@pytest.mark.parametrize("published", [True, False])
def test_the_published_buffer_takes_the_place_of_another_tensor(published, result):
    buffer = torch.zeros(3, 8, dtype=torch.bfloat16)
    returned = {"another": RESULT, "published": buffer, "deferred": object()}[result]
    combined = Combined(returned)
    seen = []

    def original(*arguments):
        seen.append(arguments)
        return combined

    def run():
        return flashinfer_trtllm.fused_experts(original, TOKENS, "info", "config")

    if published:
        with zero_copy_context.set_moe_output(buffer):
            found = run()
    else:
        found = run()
    assert seen == [(TOKENS, "info", "config")] and found.more == "kept"
    if published and result == "another":
        assert found.hidden_states is buffer
    else:
        assert found is combined


@pytest.mark.parametrize("flashinfer", [True, False])
def test_before_0_5_20_the_method_says_whether_it_is_flashinfers(flashinfer):
    buffer = torch.zeros(3, 8, dtype=torch.bfloat16)
    method, seen = SimpleNamespace(use_flashinfer=flashinfer), []

    def original(*arguments):
        seen.append(arguments)
        return Combined(RESULT)

    with zero_copy_context.set_moe_output(buffer):
        found = flashinfer_trtllm.apply(original, method, "layer", TOKENS)
    assert seen == [(method, "layer", TOKENS)]
    assert found.hidden_states is (buffer if flashinfer else RESULT)


def test_a_buffer_is_asked_for_by_tokens_and_width(monkeypatch):
    asked = []
    monkeypatch.setattr(
        zero_copy_context, "get_moe_output_spec", lambda *arguments: asked.append(arguments)
    )
    tokens = Dispatched(torch.zeros(3, 2, 8, dtype=torch.uint8))  # quantised, in two planes
    flashinfer_trtllm.fused_experts(lambda *_: Combined(RESULT), tokens, None, None)
    assert asked == [((3, 8), torch.bfloat16, torch.device("cpu"))]


class Routed:
    """SGLang's output of a router that has not chosen yet."""

    def __init__(self, bias):
        self.topk_config = SimpleNamespace(correction_bias=bias)

    def to_standard(self, layer_id):
        return f"chosen for layer {layer_id}"


@pytest.mark.parametrize(
    "dtype, activation, chosen, kept",
    [
        (torch.float32, "situ", True, False),
        (torch.float16, "situ", True, False),
        (torch.bfloat16, "situ", False, True),
        (torch.float32, "silu", False, False),
        (None, "situ", False, False),
    ],
)
def test_a_bias_that_bf16_cannot_hold_does_not_reach_the_kernel(dtype, activation, chosen, kept):
    bias = None if dtype is None else torch.ones(4, dtype=dtype)
    method = SimpleNamespace(moe_runner_config=SimpleNamespace(activation=activation))
    layer, routed, seen = SimpleNamespace(layer_id=7), Routed(bias), []

    def original(*arguments):
        seen.append(arguments)
        return "result"

    dispatched = TOKENS._replace(topk_output=routed)
    found = flashinfer_trtllm.situ_routing_bias(original, method, layer, dispatched)
    ((got_method, got_layer, got),) = seen
    assert (found, got_method, got_layer) == ("result", method, layer)
    assert got.topk_output == ("chosen for layer 7" if chosen else routed)
    assert getattr(layer, "_situ_routing_bias_bf16", None) is (bias if kept else None)


@pytest.mark.parametrize("method", [SimpleNamespace(), SimpleNamespace(moe_runner_config=None)])
def test_a_method_without_a_runner_is_left_alone(method):
    dispatched = TOKENS._replace(topk_output=Routed(torch.ones(2)))
    found = flashinfer_trtllm.situ_routing_bias(lambda *args: args, method, 1, dispatched)
    assert found == (method, 1, dispatched)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
