"""The routing's dtype: scores and correction bias meet in the wider of the two, and which configs that concerns."""

import sys

import pytest
import torch

from sglang_aiter_moe.srt.layers.moe.topk import (
    TopKConfig,
    aligned_routing_inputs,
    routing_dtype,
    select_experts_inputs,
)
from sglang_aiter_moe.testing.fake_graph import make
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")
register_cuda_ci(est_time=5, stage="base-a", runner_config="1-gpu-small")
register_amd_ci(est_time=5, stage="stage-a", runner_config="1-gpu-small-amd")


@pytest.mark.parametrize(
    "logits, bias, wide",
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
    ],
)
def test_routing_dtype_is_never_narrower(logits, bias, wide):
    assert routing_dtype(logits, bias) == wide
    a, b = aligned_routing_inputs(torch.ones(1, 2, dtype=logits), torch.ones(2, dtype=bias))
    assert a.dtype == b.dtype == wide


def test_select_experts_never_asks_for_a_narrower_bias():
    config = make([6.9, 7.0], torch.float32)
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    widened = select_experts_inputs(logits, config)
    assert widened.dtype == torch.float32
    # What SGLang's select_experts asks for next:
    assert config.correction_bias_for_dtype(widened.dtype) is config.correction_bias


def test_select_experts_inputs_leaves_alone_what_needs_nothing():
    config = make([6.9, 7.0], torch.bfloat16)
    logits = torch.zeros(3, 2)
    assert select_experts_inputs(logits, config) is logits
    assert select_experts_inputs(logits, TopKConfig(top_k=1)) is logits
    buffer = torch.zeros(3, 2, dtype=torch.bfloat16)
    wide = make([6.9, 7.0], torch.float32)
    partials = torch.zeros(2, 3, 2)
    assert select_experts_inputs(buffer, wide, router_logits_partials=partials) is buffer
    gating = TopKConfig(top_k=1, correction_bias=torch.ones(2), scoring_func="sqrtsoftplus")
    assert select_experts_inputs(buffer, gating) is buffer
    strided = torch.zeros(2, 4)[:, ::2]
    assert select_experts_inputs(strided, TopKConfig(top_k=1)) is strided, "no bias, no business"


@pytest.mark.parametrize("torch_native, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_sqrtsoftplus_is_widened_where_torch_computes_it(torch_native, dtype):
    config = TopKConfig(
        top_k=1,
        correction_bias=torch.ones(2),
        scoring_func="sqrtsoftplus",
        torch_native=torch_native,
    )
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    assert select_experts_inputs(logits, config).dtype == dtype


def test_a_custom_routing_function_reads_no_bias_and_gets_its_logits():
    config = TopKConfig(top_k=1, correction_bias=torch.ones(2))
    config.custom_routing_function = lambda **kwargs: None
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    assert select_experts_inputs(logits, config) is logits
    config.use_grouped_topk = True  # SGLang asks this first
    assert select_experts_inputs(logits, config).dtype == torch.float32


def test_select_experts_inputs_takes_a_per_token_bias():
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    config = make([0.0, 0.0], torch.bfloat16)
    widened = select_experts_inputs(logits, config, dynamic_expert_bias=torch.zeros(3, 2))
    assert widened.dtype == torch.float32


def test_strided_rows_are_made_contiguous_for_kernels_that_need_it():
    front = torch.randn(4, 10)
    logits = front[:, 2:8]  # K3's fused front hands over such a slice
    config = TopKConfig(top_k=2, use_grouped_topk=True, correction_bias=torch.zeros(6))
    assert select_experts_inputs(logits, config).is_contiguous()
    assert select_experts_inputs(logits, config, strided_rows=True) is logits


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
