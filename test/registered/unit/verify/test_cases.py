"""The case table covers what it promises, and its batches are cuts of one stream."""

import sys
from fnmatch import fnmatchcase

import pytest
import torch

from sglang_aiter_moe.numerics.metrics import logits_diff
from sglang_aiter_moe.numerics.oracle import RawExperts
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.verify import cases, controls
from sglang_aiter_moe.verify.batches import expert_mask, make_batch, oracle_output
from sglang_aiter_moe.verify.layers import K3, K3_FULL_WIDTH, gpt_oss_120b
from sglang_aiter_moe.verify.weights import read_checkpoint, write_checkpoint

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

ALL = list(cases.all_cases())
K3_TABLE = [2**n for n in range(16)] + [3]


def test_names_are_unique():
    names = [case.name for case in ALL] + [control.name for control in controls.all_controls()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_k3_runs_at_its_real_size_at_all_seventeen_token_counts(mode):
    found = [case for case in ALL if fnmatchcase(case.name, f"k3/{mode}/m*")]
    assert sorted(case.tokens for case in found) == sorted(K3_TABLE)
    for case in found:
        shape = case.layer.shape
        assert (shape.experts, shape.hidden, shape.intermediate) == (896, 3584, 384)
        assert case.layer.topk == 16
        assert case.full == (case.tokens > 256)


def test_a_reduced_number_of_experts_is_in_the_name():
    real = {"k3": 896, "k3-i3072": 896, "deepseek-v4-like": 384, "qwen3.5-397b": 512}
    real |= {"minimax-m3": 129, **{f"gpt-oss-120b-tp{tp}": 128 for tp in (1, 2, 4, 8)}}
    for case in ALL:
        held = case.layer.global_experts or case.layer.shape.experts
        name = case.layer.name.partition("-ep")[0]
        if name in real:
            assert held == real[name], case.name
        else:
            model, _, experts = name.rpartition("-e")
            assert model in real, case.name
            assert held == int(experts) < real[model], case.name


def test_the_promised_kinds_are_there_without_full():
    default = [case for case in ALL if not case.full]

    def some(condition):
        return any(condition(case) for case in default)

    for tp, columns in ((1, 2880), (2, 1440), (4, 736), (8, 384)):
        name = f"gpt-oss-120b-tp{tp}-e8"
        assert some(
            lambda c, name=name, columns=columns: (
                c.layer.name == name
                and c.layer.shape.bias
                and c.layer.shape.intermediate == columns
            )
        ), name
    for tokens in (255, 256, 257):
        for layout in (cases.SEPARATED, cases.INTERLEAVED):
            assert some(
                lambda c, t=tokens, x=layout: (
                    (c.tokens, c.layout) == (t, x) and c.layer.activation == "swiglu"
                )
            )
    assert some(lambda c: c.unused_slots and c.layer.global_experts)
    assert some(lambda c: c.tokens == 0)
    assert some(lambda c: c.arch == "gfx1250")
    assert some(lambda c: c.arch == "gfx942")
    assert some(lambda c: c.a16w4_kernel == cases.INTERLEAVED)
    assert some(
        lambda c: c.layer.activation == "silu" and c.layer.limit and c.layout == cases.INTERLEAVED
    )
    assert some(lambda c: c.layer.activation == "silu" and c.layout == cases.SEPARATED)
    assert some(lambda c: "minimax" in c.name and c.mode == "A4W4")


def test_every_control_is_made_in_a_case_that_has_to_pass():
    default = {(c.layer, c.mode, c.layout, c.arch): c for c in ALL if not c.full}
    for control in controls.all_controls():
        case = control.case
        same = default.get((case.layer, case.mode, case.layout, case.arch))
        assert same is not None, control.name
    kinds = {control.name.rpartition("/")[2] for control in controls.all_controls()}
    assert kinds >= {
        "wrong-layout",
        "gate-up-swapped",
        "flag-flipped-after-load",
        "unshuffled-bytes",
        "scale-form-mixed-up",
        "beta-missing",
    }


def test_selection():
    assert [c.name for c in cases.select("k3/A16W4/m32768")] == ["k3/A16W4/m32768"]
    assert cases.select("k3/A16W4/m3276*") == []
    assert len(cases.select("k3/A16W4/m*", full=True)) == 17
    assert cases.select("nothing*") == []
    assert controls.select("control/A8W4/*")
    assert controls.select("k3*") == []


def test_a_longer_batch_begins_with_the_shorter_one():
    layer = K3.with_experts(32)
    short, long = make_batch(layer, 5, unused_slots=3), make_batch(layer, 2100, unused_slots=3)
    cut = long.first(5)
    assert torch.equal(short.hidden_states, cut.hidden_states)
    assert torch.equal(short.topk_ids, cut.topk_ids)
    assert torch.equal(short.topk_weights, cut.topk_weights)


def test_routing_is_legal():
    layer = K3.with_experts(32)
    batch = make_batch(layer, 64)
    assert batch.topk_ids.dtype == torch.int32
    assert batch.topk_ids.shape == (64, 16)
    assert all(len(set(row)) == 16 for row in batch.topk_ids.tolist())
    assert batch.topk_ids.min() >= 0
    assert batch.topk_ids.max() < 32
    assert torch.allclose(batch.topk_weights.sum(1), torch.ones(64))
    assert (make_batch(layer, 64, unused_slots=5).topk_ids == -1).sum() == -(-64 * 16 // 5)


def test_expert_parallel_ranks_hold_what_the_mask_says():
    layer = K3_FULL_WIDTH.with_experts(32).with_expert_parallel(4, rank=3)
    mask = expert_mask(layer)
    assert mask.nonzero().flatten().tolist() == [12, 13, 14, 15]
    batch = make_batch(layer, 24)
    local = ((batch.topk_ids >= 12) & (batch.topk_ids < 16)).sum(1)
    assert local.min() < local.max()  # some tokens have more work here than others
    assert expert_mask(K3) is None


def test_the_oracle_of_a_cut_is_the_cut_of_the_oracle(tmp_path):
    layer = gpt_oss_120b(8).with_experts(8)
    write_checkpoint(layer.shape, tmp_path / "layer")
    tensors = read_checkpoint(tmp_path / "layer")
    experts = RawExperts(
        tensors["w13_weight"],
        tensors["w13_weight_scale"],
        tensors["w2_weight"],
        tensors["w2_weight_scale"],
        tensors["w13_weight_bias"],
        tensors["w2_weight_bias"],
        gate_up_interleaved=True,
    )
    batch = make_batch(layer, 12)
    for mode in (None, "A16W4", "A8W4", "A4W4"):
        long = oracle_output(layer, experts, batch, mode, "roundup")
        short = oracle_output(layer, experts, batch.first(3), mode, "roundup")
        assert logits_diff(long[:3], short) < 1e-12, mode


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
