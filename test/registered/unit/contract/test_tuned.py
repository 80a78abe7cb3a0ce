"""Tuned rows: docs/contract.md sections b.2 and f."""

import itertools
import sys

import pytest

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.contract.tuned import padded_tokens, tier_starts
from sglang_aiter_moe.testing.plans import A4W4, A8W4, BOUND, ITLV, K3, MINIMAX, plan
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


K3_COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def test_k3_tuned_rows():
    for tokens in K3_COUNTS:
        assert plan(K3, {A4W4: "1"}).tuned_for(tokens) is True
        assert plan(K3, {A8W4: "1"}).tuned_for(tokens) is True
        assert plan(K3).tuned_for(tokens) is (tokens <= 16384)
    padded = MoeSpec("situv2", 896, 16, 3584, 512, beta=4.0, linear_beta=25.0)
    assert plan(padded, {A4W4: "1"}).tuned_for(1) is False
    assert "384, not 512" in plan(padded, {A4W4: "1"}).range_for(1).reason
    assert plan(padded, {A8W4: "1"}).tuned_for(1) is True
    assert plan(K3, {A4W4: "1", "AITER_CONFIG_FMOE": "/t.csv"}).tuned_for(1) is None


@pytest.mark.parametrize(
    "tokens, key",
    [
        (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (255, 256), (256, 256), (257, 512), (16385, 32768),
        (32767, 32768), (32768, 32768), (131071, 32768), (131072, 131072), (2**24 - 1, 131072),
    ],
)  # fmt: skip
def test_padded_tokens(tokens, key):
    """Section b.2: of K3's 17 counts, 3 is not reachable (it is padded to 4)."""
    assert padded_tokens(tokens) == key


def test_tiers_begin_where_the_key_changes():
    starts = tier_starts()
    assert starts[0] == 1 and list(starts) == sorted(starts)
    for start in starts[1:]:
        assert padded_tokens(start) != padded_tokens(start - 1)
    for first, after in itertools.pairwise(starts):
        assert padded_tokens(first) == padded_tokens(after - 1)


def test_the_largest_tier_falls_back():
    """Section b.2: 131072 tokens have no row of their own and take that of 32768."""
    assert plan(K3, {A4W4: "1"}).tuned_for(131072) is True
    assert plan(K3).tuned_for(131072) is False  # A16W4's rows end at 16384


def test_expert_parallel_rows_are_looked_up_with_one_slot_less():
    """dsv4_fp8fp4 has 48 experts top-6: with a mask, top-7 finds it, and top-6 may find others."""
    for topk in (6, 7):
        spec = MoeSpec("silu", 48, topk, 7168, 384, expert_parallel=True)
        assert plan(spec, {BOUND: "0"}).tuned_for(1) is True
    assert plan(MoeSpec("silu", 48, 7, 7168, 384), {BOUND: "0"}).tuned_for(1) is False


def test_tuned_rows_can_be_set_aside():
    spec = MoeSpec("swiglu", 384, 8, 7168, 512)
    made = plan(spec, {ITLV: "0", "AITER_BYPASS_TUNE_CONFIG": "1"})
    assert made.family_for(256) == "flydsl_a4w4" and made.tuned_for(256) is False


def test_tuned_rows_that_interleaving_misses_are_named():
    note = [d for d in plan(MINIMAX).decisions if "minimax_m3_fp4" in d.value]
    assert note and f"export {ITLV}=0" in note[0].reason


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
