"""Tuned rows: docs/contract.md sections b.2 and f."""

import itertools
import sys
from dataclasses import replace

import pytest

from sglang_aiter_moe.contract import Capabilities, MoeSpec
from sglang_aiter_moe.contract.tuned import padded_tokens, tier_starts
from sglang_aiter_moe.testing.plans import A4W4, A8W4, BOUND, ITLV, K3, MINIMAX, gptoss, plan
from sglang_aiter_moe.testing.registration import register_cpu_ci

SEPARATED_FP4 = {ITLV: "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "0"}

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


@pytest.mark.parametrize(
    "spec, env, tuned, neighbour",
    [
        # docs/contract.md section f: (experts, top-k) and I of each table, and a shape next to it
        (MoeSpec("silu", 384, 6, 7168, 384), {BOUND: "0"}, 384, 640),
        (MoeSpec("silu", 385, 7, 7168, 512), {BOUND: "0"}, 512, 640),
        (MoeSpec("silu", 48, 6, 7168, 1536), {BOUND: "0"}, 1536, 3072),
        (MoeSpec("silu", 256, 6, 4096, 256), {BOUND: "0"}, 256, 512),
        (MoeSpec("swiglu", 129, 5, 6144, 768), SEPARATED_FP4, 768, 1536),
        (MoeSpec("swiglu", 128, 4, 2880, 2880), SEPARATED_FP4, 3072, 768),
        (MoeSpec("swiglu", 128, 4, 2880, 1440), SEPARATED_FP4, 1536, 768),
        (MoeSpec("swiglu", 128, 4, 2880, 384), SEPARATED_FP4, 512, 768),
        (MoeSpec("silu", 512, 10, 4096, 256), {}, 256, None),
        (MoeSpec("silu", 513, 11, 4096, 512), {}, 512, None),
    ],
    ids=lambda v: f"{v.activation}-{v.num_experts}" if isinstance(v, MoeSpec) else None,
)
def test_tables(spec, env, tuned, neighbour):
    made = plan(spec, env)
    assert made.padded_intermediate_size == tuned and made.tuned_for(4096) is True
    if neighbour:
        other = plan(replace(spec, intermediate_size=neighbour), env)
        assert other.tuned_for(4096) is False
        assert f"{tuned}" in other.range_for(4096).reason
    other = plan(replace(spec, num_experts=spec.num_experts + 96), env)
    assert other.tuned_for(4096) is False and "no table" in other.range_for(4096).reason


def test_shapes_that_may_have_rows():
    """Kimi K2's and GLM-5's rows are known by H and E alone: perhaps tuned, and SiLU alone."""
    for spec in (MoeSpec("silu", 385, 9, 7168, 256), MoeSpec("silu", 257, 8, 6144, 512)):
        made = plan(spec, {ITLV: "0"})
        assert made.tuned_for(1) is None and made.family_for(1) == "flydsl_a4w4"


def test_reasons():
    assert "not these token counts" in plan(K3).range_for(20000).reason
    assert plan(K3).range_for(1).reason == "kimik3_fp4 has rows for it"
    assert "may have rows" in plan(MoeSpec("silu", 385, 9, 7168, 256)).range_for(1).reason


def test_rows_for_flydsl_kernels_need_flydsl():
    without = Capabilities.for_release("0.1.20").with_flydsl(None, available=False)
    assert plan(gptoss(1)).family_for(4096) == "flydsl_a8w4"
    assert plan(gptoss(1), aiter=without).family_for(4096) == "cktile"


def test_rows_came_with_what_they_need():
    for aiter, tuned in (("0.1.17", False), ("0.1.18", True)):
        assert plan(MINIMAX, {ITLV: "0"}, aiter=aiter).tuned_for(4096) is tuned


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
