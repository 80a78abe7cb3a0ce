import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe.portable import moe_sorting
from sglang_aiter_moe.portable.sorting import moe_mxfp4_sort
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden"


def load(i):
    with np.load(GOLDEN / "sort.npz") as golden:
        case = json.loads(str(golden["_cases"]))[i]
        arrays = {
            k[len(f"s{i}_") :]: torch.from_numpy(golden[k])
            for k in golden
            if k.startswith(f"s{i}_")
        }
    mask = None if case["mask"] is None else torch.tensor(case["mask"], dtype=torch.int32)
    return case, arrays, mask


@pytest.mark.parametrize("i", range(3))
def test_matches_golden(i):
    case, a, mask = load(i)
    ids, weights, experts, valid, buffer = moe_sorting(
        a["ids"], a["w"], case["E"], 64, torch.bfloat16, case["BM"], mask
    )
    for ours, name in (
        (ids, "sorted_ids"),
        (weights, "sorted_weights"),
        (experts, "sorted_expert_ids"),
        (valid, "num_tokens_post_pad"),
    ):
        assert ours.dtype == a[name].dtype, name
        assert torch.equal(ours, a[name]), name
    assert buffer.shape == (case["M"], 64) and not buffer.any()


@pytest.mark.parametrize("i", range(3))
def test_scale_sort_matches_golden(i):
    _, a, _ = load(i)
    out = moe_mxfp4_sort(
        a["scale_in"], a["sorted_ids"], a["num_tokens_post_pad"], a["ids"].shape[0]
    )
    assert torch.equal(out, a["scale_sorted"])


def test_every_pair_occurs_once():
    g = torch.Generator().manual_seed(0)
    tokens, experts, topk, block = 77, 11, 3, 32
    ids = torch.rand(tokens, experts, generator=g).topk(topk, -1).indices.to(torch.int32)
    weights = torch.rand(tokens, topk, generator=g)
    sorted_ids, sorted_weights, block_experts, valid, _ = moe_sorting(
        ids, weights, experts, 8, torch.bfloat16, block
    )
    seen = set()
    for row, entry in enumerate(sorted_ids.tolist()):
        token, slot = entry & 0xFFFFFF, entry >> 24
        if token == tokens:
            assert slot == topk and sorted_weights[row] == 0
            continue
        assert int(block_experts[row // block]) == int(ids[token, slot])
        assert sorted_weights[row] == weights[token, slot]
        seen.add((token, slot))
    assert len(seen) == tokens * topk
    assert valid.tolist()[1] == tokens and valid.tolist()[0] % block == 0


def test_num_local_tokens_and_local_ids():
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=torch.int32)
    weights = torch.ones(3, 2)
    mask = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    sorted_ids, _, experts, valid, _, local = moe_sorting(
        ids,
        weights,
        4,
        8,
        torch.bfloat16,
        32,
        mask,
        torch.tensor([2], dtype=torch.int32),
        return_local_topk_ids=True,
    )
    assert valid.tolist() == [64, 2]
    assert experts.tolist()[:2] == [0, 1]
    assert sorted_ids[0] == 1 << 24 and sorted_ids[32] == 1
    assert local.tolist() == [[-1, 0], [1, -1], [0, 1]]


def test_buffer_of_reduce_mode_is_a_placeholder():
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    assert moe_sorting(ids, weights, 1, 8, torch.bfloat16, accumulate=False)[-1].shape == (0, 0)
    mask = torch.ones(1, dtype=torch.int32)
    out = moe_sorting(ids, weights, 1, 8, torch.bfloat16, expert_mask=mask, accumulate=False)[-1]
    assert out.shape == (2, 8)


def test_no_tokens():
    ids, weights = torch.zeros(0, 2, dtype=torch.int32), torch.ones(0, 2)
    sorted_ids, _, experts, valid, buffer = moe_sorting(ids, weights, 4, 8, torch.bfloat16)
    assert valid.tolist() == [0, 0] and buffer.shape == (0, 8)
    assert set(experts.tolist()) == {-1} and set(sorted_ids.tolist()) == {2 << 24}


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_ids_out_of_range(bad, masked):
    ids = torch.tensor([[0, bad]], dtype=torch.int32)
    mask = torch.tensor([1, 0, 0, 1], dtype=torch.int32) if masked else None
    with pytest.raises(IndexError, match=str(bad)):
        moe_sorting(ids, torch.ones(1, 2), 4, 8, torch.bfloat16, expert_mask=mask)


@pytest.mark.parametrize("name", ["flat", "output_aux"])
def test_kernel_private_forms_are_refused(name):
    with pytest.raises(NotImplementedError):
        moe_sorting(
            torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, 1),
            1,
            8,
            torch.bfloat16,
            **{name: True},
        )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
