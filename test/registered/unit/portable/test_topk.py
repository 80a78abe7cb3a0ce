import math
import sys

import pytest
import torch

from sglang_aiter_moe.portable import fused_topk
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def by_hand(row, topk, renormalize):
    scores = [math.exp(v - max(row)) for v in row]
    scores = [s / sum(scores) for s in scores]
    ids = sorted(range(len(row)), key=lambda e: (-row[e], e))[:topk]
    weights = [scores[e] for e in ids]
    return [w / sum(weights) for w in weights] if renormalize else weights, ids


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_plain_floats(renormalize, dtype):
    logits = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0] = 0  # all equal: lower ids first
    weights, ids = fused_topk(torch.empty(9, 4), logits, 6, renormalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for i, row in enumerate(logits.tolist()):
        want, chosen = by_hand(row, 6, renormalize)
        assert ids[i].tolist() == chosen
        assert weights[i].tolist() == pytest.approx(want, rel=1e-5)


def test_writes_into_given_buffers():
    ids, weights = torch.empty(4, 2, dtype=torch.int32), torch.empty(4, 2)
    got = fused_topk(torch.empty(3, 8), torch.randn(3, 5), 2, True, ids, weights)
    assert got[0].data_ptr() == weights.data_ptr() and got[1].data_ptr() == ids.data_ptr()
    assert got[0].shape == (3, 2)


def test_token_counts_must_match():
    with pytest.raises(AssertionError, match="Number of tokens mismatch"):
        fused_topk(torch.empty(3, 8), torch.empty(2, 5), 2, True)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
