"""What the dispatchers deliver as the runner's input, and each thing that cannot be one, by name."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner import dispatch
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.runner_inputs import make_info

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PLAIN = MoeRunnerConfig()
ON_INPUT = MoeRunnerConfig(apply_router_weight_on_input=True)


def output(tokens=(2, 8), ids=(2, 3), scale=None):
    return SimpleNamespace(
        hidden_states=torch.ones(tokens, dtype=torch.bfloat16),
        hidden_states_scale=scale,
        topk_ids=torch.ones(ids, dtype=torch.int64),
        topk_weights=torch.full(ids, 0.5, dtype=torch.bfloat16),
    )


@pytest.mark.parametrize(
    "shapes",
    [
        {"tokens": (2, 8, 1)},
        {"tokens": (2,)},
        {"ids": (2,)},
        {"ids": (2, 3, 1)},
        {"ids": (3, 3)},
        {"tokens": (1, 8)},
    ],
)
def test_shapes_that_are_not_tokens_and_their_routing(shapes):
    with pytest.raises(ContractError, match=r"hidden_states is .*, topk_ids ") as caught:
        dispatch.runner_input_from(output(**shapes), make_info(), PLAIN)
    for shape in shapes.values():
        assert str(shape) in caught.value.what


def test_tokens_that_the_dispatcher_has_quantised():
    given = output(scale=torch.ones(2, 4))
    with pytest.raises(ContractError, match=r"hidden_states_scale is \(2, 4\)"):
        dispatch.runner_input_from(given, make_info(), PLAIN)


def test_types_are_those_that_aiter_takes_and_nothing_else_changes():
    given, info = output(), make_info()
    made = dispatch.runner_input_from(given, info, PLAIN)
    assert made.hidden_states is given.hidden_states
    assert (made.topk_ids.dtype, made.topk_weights.dtype) == (torch.int32, torch.float32)
    assert made.topk_ids.tolist() == given.topk_ids.tolist()
    assert made.topk_weights.unique().tolist() == [0.5]
    assert made.quant_type is info.quant_type
    assert (made.a1_scale, made.num_local_tokens, made.output_dtype, made.output) == (None,) * 4


def test_a_weight_on_the_input_keeps_the_inputs_dtype():
    made = dispatch.runner_input_from(output(ids=(2, 1)), make_info(), ON_INPUT)
    assert made.hidden_states.dtype == torch.bfloat16
    assert made.hidden_states.unique().tolist() == [0.5]
    assert made.topk_weights.unique().tolist() == [1.0] and made.topk_weights.shape == (2, 1)


def test_a_weight_on_the_input_needs_one_expert_a_token():
    with pytest.raises(ContractError, match="apply_router_weight_on_input with top-3 routing"):
        dispatch.runner_input_from(output(), make_info(), ON_INPUT)
    # Where the kernel weights the input itself, it weights it for each expert.
    made = dispatch.runner_input_from(output(), make_info(doweight_stage1=True), ON_INPUT)
    assert made.topk_weights.unique().tolist() == [0.5]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
