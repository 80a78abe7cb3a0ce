"""The oracle's routing: orders, repeated and unused slots, no tokens, expert parallelism."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.numerics import RawExperts
from sglang_aiter_moe.numerics.oracle import local_expert_ids
from sglang_aiter_moe.testing.oracle_inputs import IDS, RAW, WEIGHTS, E, H, K, M, X, run
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def test_order_of_tokens_and_slots_does_not_matter():
    order = torch.randperm(M, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        run(x=X[order], ids=IDS[order], weights=WEIGHTS[order]), run()[order]
    )
    torch.testing.assert_close(run(ids=IDS.flip(1), weights=WEIGHTS.flip(1)), run())


def test_an_expert_may_appear_twice_in_a_row():
    twice = IDS.clone()
    twice[:, 1] = twice[:, 0]
    once, weights = IDS.clone(), WEIGHTS.clone()
    once[:, 1] = -1
    weights[:, 0] += weights[:, 1]
    torch.testing.assert_close(run(ids=twice), run(ids=once, weights=weights), rtol=1e-6, atol=1e-6)


def test_unused_slots_contribute_nothing_whatever_they_hold():
    ids, weights = IDS.clone(), WEIGHTS.clone()
    ids[:, 2] = -1
    weights[:, 2] = math.nan
    torch.testing.assert_close(
        run(ids=ids, weights=weights), run(ids=IDS[:, :2], weights=WEIGHTS[:, :2])
    )
    assert not run(ids=torch.full_like(IDS, -1)).any()


@pytest.mark.parametrize("shape", [(0, K), (M, 0), (0, 0)])
def test_nothing_to_do(shape):
    out = run(
        x=X[: shape[0]], ids=IDS[: shape[0], : shape[1]], weights=WEIGHTS[: shape[0], : shape[1]]
    )
    assert out.shape == (shape[0], H) and not out.any()


# --- expert parallelism -----------------------------------------------------------------------------------


def shard(experts: RawExperts, mask: torch.Tensor) -> RawExperts:
    local = {n: getattr(experts, n)[mask.bool()] for n in ("w13", "w13_scale", "w2", "w2_scale")}
    return replace(experts, **local)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_expert_parallel_ranks_add_up(dtype):
    masks = [
        torch.tensor(m, dtype=dtype) for m in ([0, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0])
    ]
    parts = [run(shard(RAW, mask), expert_mask=mask) for mask in masks]
    torch.testing.assert_close(sum(parts), run())
    assert all(part.any() for part in parts)


def test_a_masked_sink_slot_contributes_nothing():
    """Expert parallelism as AITER wants it: one more global expert that is never local."""
    ids = torch.cat((IDS, torch.full((M, 1), E, dtype=torch.int32)), dim=1)
    weights = torch.cat((WEIGHTS, torch.ones(M, 1)), dim=1)
    mask = torch.tensor([1] * E + [0], dtype=torch.int32)
    torch.testing.assert_close(run(ids=ids, weights=weights, expert_mask=mask), run())


def test_local_index_counts_the_local_experts_before():
    mask = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2], [3, 4, -1]])
    assert local_expert_ids(ids, 3, mask).tolist() == [[-1, 0, 1], [-1, 2, -1]]
    assert local_expert_ids(ids, 5).tolist() == ids.tolist()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
