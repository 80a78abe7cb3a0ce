"""What each rank loads and what its kernel takes: real columns survive, padding weighs nothing."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.checkpoint.files import Checkpoint
from sglang_aiter_moe.checkpoint.rank import rank_tensors
from sglang_aiter_moe.contract import shard
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import relative_error
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore, AiterRunnerInput
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.expert_files import write_experts
from sglang_aiter_moe.testing.loaded_layers import loaded_layer
from sglang_aiter_moe.testing.raw_layers import make_raw_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

I_FULL = 2880  # gpt-oss-120b
HIDDEN = 96  # padded to 256, as 2880 is to 3072


def gpt_oss(inter):
    return replace(
        plans.gptoss(1), num_experts=2, topk=1, hidden_size=HIDDEN, intermediate_size=inter
    )


def run(spec, raw, layer):
    info = mxfp4.moe_quant_info(layer)
    hidden = mxfp4.pad_hidden_states(raw.hidden_states, info.plan)
    config = MoeRunnerConfig(activation="silu", gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    runner_input = AiterRunnerInput(hidden, raw.topk_ids, raw.topk_weights, info.quant_type)
    with portable.installed(force=True):
        return AiterRunnerCore(config).run(runner_input, info, {}).hidden_states[:, :HIDDEN]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The layer on one rank, its last real column large, as a gpt-oss file."""
    halves = replace(gpt_oss(I_FULL), gate_up_interleaved=False)
    raw = make_raw_layer(halves, tokens=3, seed=11)
    experts = raw.experts
    experts.w13[:, [I_FULL - 1, 2 * I_FULL - 1]] = 0x22  # 1.0: gate and up of the last column
    experts.w13_scale[:, [I_FULL - 1, 2 * I_FULL - 1]] = 127
    experts.w2[:, :, -1] = (experts.w2[:, :, -1] & 0x0F) | 0x70  # 6.0 in the high nibble
    experts.w2_scale[:, :, -1] = 127
    raw.hidden_states.abs_()  # so that gate and up do not cancel
    file = tmp_path_factory.mktemp("rank") / "gpt_oss.safetensors"
    (layer,) = Checkpoint(write_experts(file, [experts], "gpt_oss")).layers().values()
    return raw, layer


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_last_real_column_survives_on_every_number_of_ranks(whole, tp):
    raw, layer = whole
    spec = gpt_oss(shard(I_FULL, tp))
    plan = plans.plan(spec)
    assert plan.spec.intermediate_size == {1: 2880, 2: 1440, 4: 736, 8: 384}[tp]
    total = torch.zeros(3, HIDDEN, dtype=torch.float64)
    for rank in range(tp):
        prepared = loaded_layer(plan, rank_tensors(layer, spec, tp_rank=rank))
        total += run(spec, raw, prepared).double()
    expected = raw.expected(None)
    assert relative_error(total, expected) < 0.02
    # Control: without that column the result is another one.
    kept = raw.experts.w2[:, :, -1].clone()
    raw.experts.w2[:, :, -1] &= 0x0F
    without = raw.expected(None)
    raw.experts.w2[:, :, -1] = kept
    assert relative_error(without, expected) > 0.5
    assert relative_error(total, without) > 0.5


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_stated_pads_never_cover_real_columns(tp):
    plan = plans.plan(plans.gptoss(tp))
    real = min(shard(I_FULL, tp), I_FULL)
    assert plan.padded_intermediate_size - plan.intermediate_pad >= real


def test_columns_beyond_the_last_rank_weigh_nothing(whole):
    _, layer = whole
    found = rank_tensors(layer, gpt_oss(shard(I_FULL, 8)), tp_rank=7)
    real = I_FULL - 7 * 384
    assert real == 192
    assert not found["w13_weight"][:, 2 * real :].any()
    assert bool((found["w13_weight_scale"][:, 2 * real :] == 0x7F).all())
    assert not found["w2_weight"][:, :, real // 2 :].any()
    assert not found["w13_weight_bias"][:, 2 * real :].any()
    assert not found["w2_weight_bias"].any()  # added once, by rank 0


def test_k3_stays_384_on_eight_ranks(tmp_path):
    full = plans.situv2(2, 1, 256, 3072)
    raw = make_raw_layer(full, 1, seed=5).experts
    file = write_experts(tmp_path / "k3.safetensors", [raw], "compressed_tensors")
    (layer,) = Checkpoint(file).layers().values()
    spec = replace(plans.K3, num_experts=2, topk=1, hidden_size=256)
    for rank in (0, 7):
        plan = plans.plan(spec, {plans.A4W4: "1"})
        prepared = loaded_layer(plan, rank_tensors(layer, spec, tp_rank=rank))
        assert prepared.w13_weight.shape == (2, 768, 128)
        mxfp4.restore_raw(prepared)
        rows = slice(384 * rank, 384 * (rank + 1))
        gate, up = raw.w13.chunk(2, dim=1)
        assert torch.equal(prepared.w13_weight, torch.cat([gate[:, rows], up[:, rows]], dim=1))
        assert torch.equal(prepared.w2_weight, raw.w2[:, :, 192 * rank : 192 * (rank + 1)])
    assert plans.plan(plans.K3).padded_intermediate_size == 384


@pytest.mark.parametrize("kind", ["compressed_tensors", "fused"])
def test_expert_parallel_ranks_take_their_experts(tmp_path, kind):
    full = plans.situv2(6, 2, 256, 128)
    raw = make_raw_layer(full, 1, seed=5).experts
    (layer,) = Checkpoint(write_experts(tmp_path / "a.safetensors", [raw], kind)).layers().values()
    spec = replace(full, num_experts=2, expert_parallel=True)
    whole = loaded_layer(plans.plan(full, {plans.A8W4: "1"}), rank_tensors(layer, full))
    for rank in range(3):
        plan = plans.plan(spec, {plans.A8W4: "1"})
        part = loaded_layer(plan, rank_tensors(layer, spec, ep_rank=rank))
        mine = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(part.w13_weight, whole.w13_weight[mine])
        assert torch.equal(part.w2_weight, whole.w2_weight[mine])
        scales = whole.w2_weight_scale.unflatten(0, (6, -1))[mine].flatten(0, 1)
        assert torch.equal(part.w2_weight_scale, scales)


@pytest.mark.parametrize(
    ("change", "rank"),
    [({"num_experts": 4}, {}), ({"num_experts": 2}, {"ep_rank": 3}), ({"hidden_size": 512}, {})],
)
def test_ranks_that_do_not_divide_are_refused(tmp_path, change, rank):
    full = plans.situv2(6, 2, 256, 128)
    file = write_experts(tmp_path / "a.safetensors", [make_raw_layer(full, 1).experts], "fused")
    (layer,) = Checkpoint(file).layers().values()
    with pytest.raises(ContractError):
        rank_tensors(layer, replace(full, **change), **rank)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
