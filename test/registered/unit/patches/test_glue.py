"""What stands between SGLang's signatures and ours, without SGLang."""

import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from sglang_aiter_moe.patches import glue
from sglang_aiter_moe.srt.layers import zero_copy_context
from sglang_aiter_moe.srt.layers.moe.moe_runner import flashinfer_trtllm
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class CombineInput(NamedTuple):
    hidden_states: object


class DispatchOutput(NamedTuple):
    hidden_states: torch.Tensor


X = DispatchOutput(torch.zeros(3, 8, dtype=torch.bfloat16))
OTHER = torch.ones(3, 8, dtype=torch.bfloat16)


@pytest.fixture
def buffer():
    out = torch.full((3, 8), 5.0, dtype=torch.bfloat16)
    with zero_copy_context.set_moe_output(out):
        yield out


def runner_of(result):
    return lambda dispatch_output, quant_info, config: CombineInput(result)


def test_flashinfers_runner_returns_the_published_buffer_unchanged(buffer):
    # The kernel has written the buffer through its output argument; what it returns is another tensor.
    found = flashinfer_trtllm.fused_experts(runner_of(OTHER), X, None, None)
    assert found.hidden_states is buffer
    assert (buffer == 5).all()


def test_without_publication_the_result_is_handed_through():
    assert flashinfer_trtllm.fused_experts(runner_of(OTHER), X, None, None).hidden_states is OTHER


@pytest.mark.parametrize("shape, dtype", [((4, 8), torch.bfloat16), ((3, 8), torch.float32)])
def test_a_buffer_that_does_not_fit_is_left_alone(shape, dtype):
    with zero_copy_context.set_moe_output(torch.zeros(shape, dtype=dtype)):
        assert (
            flashinfer_trtllm.fused_experts(runner_of(OTHER), X, None, None).hidden_states is OTHER
        )


def test_a_deferred_finalize_is_handed_through(buffer):
    deferred = object()
    assert (
        flashinfer_trtllm.fused_experts(runner_of(deferred), X, None, None).hidden_states
        is deferred
    )


@pytest.mark.parametrize("uses_flashinfer", [True, False])
def test_mxfp4_apply_before_0_5_20(buffer, uses_flashinfer):
    method = SimpleNamespace(use_flashinfer=uses_flashinfer)
    found = flashinfer_trtllm.apply(lambda *args: CombineInput(OTHER), method, None, X)
    assert (found.hidden_states is buffer) == uses_flashinfer


def test_select_experts_widens_the_logits_and_passes_the_rest_on():
    seen = {}

    def original(hidden_states, router_logits, topk_config, **kwargs):
        seen.update(kwargs, dtype=router_logits.dtype)
        return "result"

    config = glue.bias_policy.TopKConfig(
        top_k=2, correction_bias=torch.zeros(4), scoring_func="sigmoid", use_grouped_topk=True
    )
    logits = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert glue.select_experts(original, None, logits, config, layer_id=3) == "result"
    assert seen == {"layer_id": 3, "dtype": torch.float32}
    assert glue.select_experts(original, None, router_logits=logits, topk_config=config) == "result"


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("create_weights", (8, 256, 128, torch.bfloat16)),
        ("create_moe_runner", ("config",)),
        ("process_weights_after_loading", ()),
        ("apply", ("dispatch output",)),
    ],
)
def test_layers_that_are_not_ours_stay_with_sglangs_method(monkeypatch, name, arguments, ours):
    called = []
    method = glue.mxfp4_method
    monkeypatch.setattr(method, "takes_aiter_path", lambda _: ours)
    monkeypatch.setattr(method, "is_planned", lambda _: ours)
    monkeypatch.setattr(method, name, lambda *given: called.append(("ours", *given)))
    getattr(glue, name)(lambda *given: called.append(("SGLang's", *given)), 1, 2, *arguments)
    assert called == [("ours" if ours else "SGLang's", 1, 2, *arguments)]


def test_the_dataclasses_keep_name_base_and_order_of_fields():
    @dataclass
    class AiterMoeQuantInfo:
        w13_weight: object
        swiglu_limit: float = 0.0

    wider = glue.quant_info_with_plan(AiterMoeQuantInfo)
    assert issubclass(wider, AiterMoeQuantInfo)
    assert (wider.__name__, wider.__module__) == ("AiterMoeQuantInfo", __name__)
    assert [f.name for f in fields(wider)] == ["w13_weight", "swiglu_limit", "gate_mode", "plan"]
    assert wider(1, 2.0).gate_mode == "separated"
    given = glue.runner_input_with_output(AiterMoeQuantInfo)
    assert given(1).output is None


def test_biases_are_refreshed_after_an_update(monkeypatch):
    order = []
    monkeypatch.setattr(
        glue.bias_policy, "refresh_correction_biases", lambda: order.append("refresh")
    )
    update = lambda *args, **kwargs: order.append((args, kwargs)) or "done"  # noqa: E731
    assert glue.bias_policy.refresh_biases_after(update, 1, two=2) == "done"
    assert order == [((1,), {"two": 2}), "refresh"]


def test_nothing_is_refreshed_while_memory_is_released(monkeypatch):
    order = []
    monkeypatch.setattr(
        glue.bias_policy, "refresh_correction_biases", lambda: order.append("refresh")
    )
    manager = SimpleNamespace(offload_tags={"kv_cache", "weights"})

    def resume(manager, tag):
        manager.offload_tags.remove(tag)

    glue.bias_policy.refresh_biases_after(resume, manager, "weights")
    assert order == []
    glue.bias_policy.refresh_biases_after(resume, manager, "kv_cache")
    assert order == ["refresh"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
