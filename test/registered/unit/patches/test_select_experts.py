"""``select_experts`` of the plugin: graphs and compiled code read the bias that stays up to date.

Graph capture is simulated on the CPU (``capture``).
"""

import sys

import pytest
import torch

from sglang_aiter_moe.patches import glue
from sglang_aiter_moe.srt.layers.moe.topk import (
    correction_bias_of,
    refresh_correction_biases,
)
from sglang_aiter_moe.testing.fake_graph import capture, make
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.routing import BIAS_CHANGES

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


CHANGES = list(BIAS_CHANGES)


NEW = torch.tensor([7.015625, -2.0, 0.5, 1.0])


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_reads_the_new_bias_through_select_experts(change):
    # What SGLang's function reads of the config, in every release and on every path.
    config = make([1.0, 2.0, 3.0, 4.0], torch.float32)
    seen = []

    def original(hidden_states, router_logits, topk_config, **kwargs):
        seen.append((router_logits.dtype, topk_config.correction_bias))
        assert topk_config.correction_bias_for_dtype(router_logits.dtype) is seen[-1][1]

    parameter = config.correction_bias
    with capture():
        glue.select_experts(original, None, torch.zeros(2, 4, dtype=torch.bfloat16), config)
    assert config.correction_bias is parameter, "the config carries the copy during the call alone"
    ((dtype, held),) = seen
    assert dtype == held.dtype == torch.float32 and held is not parameter
    BIAS_CHANGES[change](config, NEW)
    refresh_correction_biases()
    assert held.tolist() == NEW.tolist()


def test_the_config_gets_its_bias_back_when_select_experts_fails():
    config = make([1.0, 2.0], torch.float32)
    parameter = config.correction_bias

    def original(*args, **kwargs):
        raise ZeroDivisionError

    with capture(), pytest.raises(ZeroDivisionError):
        glue.select_experts(original, None, torch.zeros(1, 2), config)
    assert config.correction_bias is parameter


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_around_compiled_code_follows_a_replaced_storage(dtype, backend):
    config = make([1.0, 2.0, 3.0, 4.0], dtype)

    def original(hidden_states, router_logits, topk_config, **kwargs):
        bias = topk_config.correction_bias_for_dtype(router_logits.dtype)
        return router_logits + bias

    @torch.compile(backend=backend, fullgraph=True)
    def forward(logits):
        return glue.select_experts(original, None, logits, config)

    logits = torch.zeros(1, 4)
    assert forward(logits).tolist() == [[1.0, 2.0, 3.0, 4.0]]
    with capture():
        forward(logits)
    held = correction_bias_of(config)._copies[torch.float32]
    assert held.held, "the capture must be known to the owner"
    assert isinstance(config.correction_bias, torch.nn.Parameter)
    BIAS_CHANGES["swap_data"](config, NEW)
    refresh_correction_biases()
    assert held.tensor.tolist() == NEW.to(dtype).float().tolist()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
