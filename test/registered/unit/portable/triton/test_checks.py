"""Wrong operands are refused before any launch, by a message that names the operand and its value."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.portable.triton.checks import check
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

E, H, I, M, K = 2, 64, 32, 3, 2
REQUEST = KernelRequest(
    mode="A16W4",
    family="test",
    num_experts=E,
    hidden_size=H,
    intermediate_size=I,
    w13_layout="separated",
    w13_scale_layout="separated",
    w2_layout="separated",
    w2_scale_layout="separated",
    activation="silu",
)
OPERANDS = {
    "hidden_states": torch.zeros(M, H, dtype=torch.bfloat16),
    "w1": torch.zeros(E, 2 * I, H // 2, dtype=torch.uint8),
    "w2": torch.zeros(E, H, I // 2, dtype=torch.uint8),
    "w1_scale": torch.zeros(E * 2 * I, 8, dtype=torch.uint8),
    "w2_scale": torch.zeros(E * H, 8, dtype=torch.uint8),
    "topk_weights": torch.zeros(M, K),
    "topk_ids": torch.zeros(M, K, dtype=torch.int32),
    "out": torch.zeros(M, H, dtype=torch.bfloat16),
}


def run(request=REQUEST, **changed):
    check(request, *(OPERANDS | changed).values())


def test_right_operands_pass():
    run()
    run(out=torch.zeros(M, K, H, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_states", torch.zeros(M, H)),
        ("hidden_states", torch.zeros(M, H + 32, dtype=torch.bfloat16)),
        ("hidden_states", torch.zeros(M, 2 * H, dtype=torch.bfloat16)[:, ::2]),
        ("hidden_states", torch.zeros(1, M, H, dtype=torch.bfloat16)),
        ("w1", torch.zeros(E, 2 * I, H, dtype=torch.uint8)),
        ("w1", torch.zeros(E, 2 * I, H // 2)),
        ("w2", torch.zeros(E, H, I, dtype=torch.uint8)),
        ("w2_scale", torch.zeros(E * H, 8)),
        ("topk_ids", torch.zeros(M, K, dtype=torch.int64)),
        ("topk_weights", torch.zeros(M, K, dtype=torch.bfloat16)),
        ("topk_weights", torch.zeros(M, K + 1)),
        ("out", torch.zeros(M, H, dtype=torch.int32)),
        ("out", torch.zeros(M + 1, H, dtype=torch.bfloat16)),
        ("out", torch.zeros(H, M, dtype=torch.bfloat16).T),
    ],
)
def test_wrong_operand(name, value):
    with pytest.raises(ContractError, match=name):
        run(**{name: value})


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("mode", "A2W4", "mode"),
        ("w13_layout", "n32k4", "w13_layout"),
        ("w2_layout", "gu_interleaved", "w2_layout"),
        ("w2_scale_layout", "gu_interleaved", "w2_scale_layout"),
        ("activation", "relu", "activation"),
        ("requantization", "epilogue", "requantization"),
        ("hidden_skip_k", H, "hidden_skip_k"),
        ("bias13", torch.zeros(E, I), "bias13"),
        ("bias2", torch.zeros(E, H, dtype=torch.bfloat16), "bias2"),
        ("expert_mask", torch.zeros(4), "expert_mask"),
        ("expert_mask", torch.ones(3, dtype=torch.int32), "expert_mask names 3 local experts"),
        ("intermediate_size", 40, "intermediate_size"),
    ],
)
def test_wrong_request(field, value, names):
    with pytest.raises(ContractError, match=names):
        run(replace(REQUEST, **{field: value}))


def test_a_mask_with_fewer_experts_than_weights_passes():
    run(replace(REQUEST, expert_mask=torch.tensor([0, 1, 0, 1], dtype=torch.int32)))
    run(replace(REQUEST, expert_mask=torch.tensor([0, 1, 0, 0], dtype=torch.int32)))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
