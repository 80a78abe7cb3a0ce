"""Biased grouped top-k against a reference that loops in Python floats (float64)."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.routing import biased_grouped_topk, biased_topk
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.routing import (
    DTYPES,
    assert_routing,
    offset_bias_case,
    reference_routing,
    rows_that_differ,
    special_rows,
)

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

INF, NAN = math.inf, math.nan


def draw(tokens, experts, logits_dtype=torch.float32, bias_dtype=torch.float32, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) * 2
    bias = torch.randn(experts, generator=generator) * 0.1 + offset
    return logits.to(logits_dtype), bias.to(bias_dtype)


@pytest.mark.parametrize("logits_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_any_mix_of_dtypes(logits_dtype, bias_dtype):
    logits, bias = draw(9, 64, logits_dtype, bias_dtype, offset=3.0)
    weights, ids = biased_topk(logits, bias, 6)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert_routing(weights, ids, logits, bias, 6)


@pytest.mark.parametrize(
    "experts, topk, groups, kept",
    [
        (896, 16, 1, 1),  # Kimi-K3
        (256, 8, 8, 4),  # DeepSeek-V3
        (384, 8, 1, 1),  # Kimi-K2
        (128, 4, 1, 1),
        (1, 1, 1, 1),  # one expert
        (7, 7, 1, 1),  # k = number of experts
        (896, 896, 1, 1),
        (160, 6, 8, 3),
        (8, 4, 8, 4),  # one expert a group
        (12, 4, 3, 1),  # k = experts of the kept groups
        (8, 3, 4, 4),  # every group kept
    ],
)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.827])
def test_shapes(experts, topk, groups, kept, renormalize, scale):
    logits, bias = draw(5, experts, seed=experts)
    options = {
        "num_expert_group": groups,
        "topk_group": kept,
        "renormalize": renormalize,
        "routed_scaling_factor": scale,
    }
    weights, ids = biased_topk(logits, bias, topk, **options)
    assert_routing(weights, ids, logits, bias, topk, **options)


def test_an_fp32_bias_far_from_zero_moves_no_row():
    """Public report: fp32 bias in [6.8, 7.06], bf16 logits; rounding the bias moves half the rows."""
    logits, bias = offset_bias_case()
    weights, ids = biased_topk(logits, bias, 8)
    expected = [row for row, _ in reference_routing(logits, bias, 8)]
    assert rows_that_differ(ids, expected) == 0
    assert_routing(weights, ids, logits, bias, 8)
    _, rounded = biased_topk(logits, bias.bfloat16(), 8)
    assert rows_that_differ(rounded, expected) >= 20, "the case must show the fault"


def test_the_bias_chooses_and_does_not_weigh():
    logits = torch.zeros(1, 4)
    weights, ids = biased_topk(logits, torch.tensor([0.0, 100.0, 0.0, 50.0]), 2, renormalize=False)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_ties_go_to_the_lowest_expert_and_group():
    _, ids = biased_topk(torch.zeros(2, 8), torch.zeros(8), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    _, ids = biased_topk(torch.zeros(1, 8), torch.zeros(8), 2, num_expert_group=4, topk_group=1)
    assert ids.tolist() == [[0, 1]]


def test_a_group_is_ranked_by_its_best_two():
    choice = torch.tensor([[0.9, -9, -9, 0.6, 0.6, -9, 0.1, 0.1, 0.1]])
    logits = torch.full_like(choice, -30.0)  # scores of about 0: the bias is the choice
    _, ids = biased_topk(logits, choice[0], 2, num_expert_group=3, topk_group=1)
    assert ids.tolist() == [[3, 4]]


def test_strided_logits_bias_and_outputs():
    wide = torch.randn(6, 100)
    logits, bias = wide[:, 10:74], torch.randn(128)[::2]
    assert not logits.is_contiguous() and not bias.is_contiguous()
    weights = torch.full((6, 20), NAN)[:, 3:9]
    ids = torch.full((6, 20), -7, dtype=torch.int32)[:, 3:9]
    biased_topk(logits, bias, 6, out=(weights, ids))
    assert_routing(weights, ids, logits, bias, 6)
    transposed = torch.randn(64, 6).t()
    assert_routing(*biased_topk(transposed, bias, 6), transposed, bias, 6)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("real", [0, 1, 3, 5])
def test_padded_rows(real, as_tensor):
    logits, bias = draw(5, 32)
    logits[real:] = NAN
    count = torch.tensor([real], dtype=torch.int32) if as_tensor else real
    weights, ids = biased_topk(logits, bias, 4, num_tokens=count)
    assert_routing(weights[:real], ids[:real], logits[:real], bias, 4)
    assert not weights[real:].any() and not ids[real:].any()
    _, ids = biased_topk(logits, bias, 4, num_tokens=count, padded_id=-1)
    assert (ids[real:] == -1).all()


def test_shared_slots():
    logits, bias = draw(5, 32)
    weights, ids = biased_topk(
        logits, bias, 4, num_shared_slots=2, shared_weight=0.4, routed_scaling_factor=2.5
    )
    assert ids[:, 4:].tolist() == [[32, 33]] * 5
    assert torch.equal(weights[:, 4:], torch.full((5, 2), 0.4))
    assert_routing(weights[:, :4], ids[:, :4], logits, bias, 4, routed_scaling_factor=2.5)
    weights, ids = biased_topk(logits, bias, 4, num_shared_slots=1, num_tokens=2)
    assert not weights[2:].any() and not ids[2:].any()


def test_a_bias_for_each_token():
    logits, _ = draw(5, 32)
    bias = torch.randn(5, 32)
    weights, ids = biased_topk(logits, bias, 4)
    for row in range(5):
        assert_routing(
            weights[row : row + 1], ids[row : row + 1], logits[row : row + 1], bias[row], 4
        )


def test_zero_tokens():
    weights, ids = biased_topk(torch.empty(0, 8), torch.zeros(8), 2)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 2)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_rows_of_nan_and_inf(groups, kept, renormalize):
    logits, bias = special_rows(), torch.linspace(-0.1, 0.1, 8)
    options = {"num_expert_group": groups, "topk_group": kept, "renormalize": renormalize}
    weights, ids = biased_topk(logits, bias, 4, **options)
    assert_routing(weights, ids, logits, bias, 4, **options)
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert weights[0].isnan().all()
    assert not weights[3].any() and not weights[7].any()


def test_the_weights_of_special_rows_are_the_documented_ones():
    weights, ids = biased_topk(special_rows(), torch.zeros(8), 4)
    assert ids[1].tolist() == [6, 7, 0, 1]
    assert weights[1][:2].tolist() == [0.0, 0.0] and weights[1][2:].isnan().all()
    assert 3 not in ids[2].tolist() and weights[2].tolist() == [0.25] * 4
    assert ids[5].tolist() == [2, 0, 1, 3]


def test_a_bias_of_inf_or_nan():
    bias = torch.tensor([0.0, INF, NAN, -INF, 0.0, INF])
    weights, ids = biased_topk(torch.zeros(1, 6), bias, 6, renormalize=False)
    assert ids.tolist() == [[1, 5, 0, 4, 2, 3]]
    assert weights.tolist() == [[0.5] * 6]


@pytest.mark.parametrize("scale", [1.0, 2.5, 1e30])
def test_weights_of_extreme_logits_stay_in_range(scale):
    # The sum of the first row's scores is so small that scale / sum is infinite even in float64.
    logits = torch.tensor([[-709.0, -709.5, -709.7, -1000.0], [-90.0, -91.0, -200.0, -300.0]])
    weights, ids = biased_topk(logits.double(), torch.zeros(4), 2, routed_scaling_factor=scale)
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert weights.isfinite().all() and (weights <= scale * 1.000001).all()
    total = weights.double().sum(dim=1) / scale
    torch.testing.assert_close(total, torch.ones(2).double(), rtol=1e-6, atol=0)


def test_saturated_logits_are_told_apart_as_float64_does():
    logits = torch.full((1, 896), 30.0)
    logits[0, 5::60] = 32.0
    _, ids = biased_topk(logits, torch.zeros(896), 15)
    assert ids[0].tolist() == list(range(5, 896, 60))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    groups=st.integers(1, 5),
    per_group=st.integers(1, 9),
    tokens=st.integers(1, 3),
    renormalize=st.booleans(),
)
def test_any_values(data, groups, per_group, tokens, renormalize):
    experts = groups * per_group
    kept = data.draw(st.integers(1, groups))
    topk = data.draw(st.integers(1, kept * per_group))
    value = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, -1.0, NAN, INF, -INF]))
    logits = torch.tensor(
        data.draw(st.lists(value, min_size=tokens * experts, max_size=tokens * experts))
    ).view(tokens, experts)
    bias = torch.tensor(data.draw(st.lists(value, min_size=experts, max_size=experts)))
    options = {"num_expert_group": groups, "topk_group": kept, "renormalize": renormalize}
    weights, ids = biased_topk(logits, bias, topk, **options)
    assert_routing(weights, ids, logits, bias, topk, **options)


# ---- AITER's name for it


def aiter_call(logits, bias, topk=4, groups=1, kept=1, renorm=True, scale=1.0):
    weights = torch.full((logits.shape[0], topk), NAN)
    ids = torch.full((logits.shape[0], topk), -7, dtype=torch.int32)
    assert biased_grouped_topk(logits, bias, weights, ids, groups, kept, renorm, scale) is None
    return weights, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_aiter_name_writes_in_place_and_folds_the_scale(dtype):
    logits, bias = draw(5, 256, dtype, dtype)
    weights, ids = aiter_call(logits, bias, 8, 8, 4, True, 2.5)
    options = {"num_expert_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    assert_routing(weights, ids, logits, bias, 8, **options)


def test_the_aiter_name_takes_the_keywords_that_sglang_passes():
    logits, bias = draw(2, 16)
    weights, ids = torch.empty(2, 4), torch.empty(2, 4, dtype=torch.int32)
    biased_grouped_topk(
        logits, bias, weights, ids, num_expert_group=1, topk_group=1, need_renorm=False
    )
    assert_routing(weights, ids, logits, bias, 4, renormalize=False)


@pytest.mark.parametrize(
    "logits_dtype, bias_dtype",
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_the_aiter_name_raises_on_mixed_dtypes(logits_dtype, bias_dtype):
    logits, bias = draw(2, 16, logits_dtype, bias_dtype)
    with pytest.raises(ContractError, match=r"correction_bias is .*gating_output is"):
        aiter_call(logits, bias)


@pytest.mark.parametrize(
    "bias, message",
    [
        (torch.zeros(32)[::2], r"strides \(2,\)"),
        (torch.zeros(1).expand(16), r"strides \(0,\)"),
        (torch.zeros(4, 16), r"shape \(4, 16\)"),
        (torch.zeros(16).double(), "correction_bias is torch.float64"),
    ],
    ids=["strided", "expanded", "for each token", "float64"],
)
def test_the_aiter_name_raises_on_a_bias_that_aiter_would_misread(bias, message):
    with pytest.raises(ContractError, match=message):
        aiter_call(torch.zeros(4, 16), bias)


def test_the_aiter_name_raises_on_float64():
    with pytest.raises(ContractError, match=r"are torch\.float64"):
        aiter_call(torch.zeros(4, 16).double(), torch.zeros(16).double())


def test_the_aiter_name_raises_where_aiter_does():
    logits, bias = draw(4, 12)
    with pytest.raises(ContractError, match="stride"):
        aiter_call(torch.randn(12, 4).t(), bias)
    with pytest.raises(ContractError, match="num_expert_group is 3"):
        aiter_call(logits, bias, groups=3)
    with pytest.raises(ContractError, match="topk_group is 3"):
        aiter_call(logits, bias, groups=2, kept=3)
    with pytest.raises(ContractError, match=r"topk_ids is torch\.int64"):
        biased_grouped_topk(
            logits, bias, torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64), 1, 1, True
        )
    with pytest.raises(ContractError, match="strides"):
        biased_grouped_topk(
            logits, bias, torch.empty(4, 9)[:, :2], torch.empty(4, 2, dtype=torch.int32), 1, 1, True
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(8)}, "logits has shape"),
        ({"logits": torch.zeros(2, 0)}, "logits has shape"),
        ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, "logits is torch.int32"),
        ({"bias": torch.zeros(7)}, "bias has shape"),
        ({"bias": torch.zeros(1, 8)}, "bias has shape"),
        ({"bias": torch.zeros(8, dtype=torch.int64)}, "bias is torch.int64"),
        ({"bias": torch.zeros(8, device="meta")}, "bias is on meta"),
        ({"topk": 0}, "topk is 0"),
        ({"topk": 9}, "topk is 9"),
        ({"topk": 5, "num_expert_group": 4, "topk_group": 2}, "topk is 5"),
        ({"num_expert_group": 3}, "num_expert_group is 3"),
        ({"num_expert_group": 0}, "num_expert_group is 0"),
        ({"topk_group": 2}, "topk_group is 2"),
        ({"topk_group": 0}, "topk_group is 0"),
        ({"num_shared_slots": -1}, "num_shared_slots is -1"),
        ({"num_tokens": torch.tensor([1, 2])}, "num_tokens is"),
        ({"num_tokens": torch.tensor(1.0)}, "num_tokens is"),
        ({"backend": "hip"}, "backend is 'hip'"),
        ({"out": (torch.empty(2, 3), torch.empty(2, 2, dtype=torch.int32))}, "topk_weights is"),
        ({"out": (torch.empty(2, 2), torch.empty(2, 2))}, "topk_ids is"),
    ],
)
def test_bad_input(change, message):
    arguments = {"logits": torch.zeros(2, 8), "bias": torch.zeros(8), "topk": 2} | change
    with pytest.raises(ContractError, match=message):
        biased_topk(**arguments)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
