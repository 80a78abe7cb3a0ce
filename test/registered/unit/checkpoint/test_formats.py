"""The same weights in four formats, as real files: equal packed buffers and equal outputs."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.checkpoint.files import Checkpoint
from sglang_aiter_moe.checkpoint.names import parse
from sglang_aiter_moe.checkpoint.rank import rank_tensors
from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import cosine
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore, AiterRunnerInput
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.expert_files import FORMATS, PREFIX, write_experts
from sglang_aiter_moe.testing.loaded_layers import loaded_layer, packed_bytes, same
from sglang_aiter_moe.testing.raw_layers import make_raw_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

SPEC = plans.situv2(4, 2, 256, 128)


@pytest.fixture(scope="module")
def raw():
    return make_raw_layer(SPEC, tokens=5, seed=7)


def output(raw, layer):
    info = mxfp4.moe_quant_info(layer)
    runner_input = AiterRunnerInput(
        raw.hidden_states, raw.topk_ids, raw.topk_weights, info.quant_type
    )
    config = MoeRunnerConfig(activation="situ", gemm1_alpha=4.0, gemm1_clamp_limit=25.0)
    with portable.installed(force=True):
        return AiterRunnerCore(config).run(runner_input, info, {}).hidden_states


@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("env", [{}, {plans.A8W4: "1"}], ids=["A16W4", "A8W4"])
def test_four_files_one_result(tmp_path, raw, env, e8m0, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = {}
    for kind in FORMATS:
        file = write_experts(tmp_path / f"{kind}.safetensors", [raw.experts], kind, e8m0=e8m0)
        (layer,) = Checkpoint(file).layers().values()
        plan = plans.plan(SPEC, env)
        prepared = loaded_layer(plan, rank_tensors(layer, SPEC))
        found[kind] = packed_bytes(prepared), output(raw, prepared)
    first, want = found["compressed_tensors"]
    for kind, (packed, got) in found.items():
        assert same(packed, first), kind
        assert torch.equal(got, want), kind
    assert cosine(want, raw.expected(None)) > 0.99


def test_alternating_rows_and_biases_of_gpt_oss(tmp_path):
    """A layer whose own raw form alternates gets the same packed bytes from a file with halves."""
    halves = MoeSpec("swiglu", 4, 2, 192, 192, has_bias=True, swiglu_limit=7.0)
    made = make_raw_layer(halves, 1, seed=3).experts
    found = []
    for kind in ("gpt_oss", "fused"):
        file = write_experts(tmp_path / f"{kind}.safetensors", [made], kind)
        (layer,) = Checkpoint(file).layers().values()
        assert layer.alternating is (kind == "gpt_oss")
        for interleaved in (False, True):
            spec = replace(halves, gate_up_interleaved=interleaved)
            plan = plans.plan(replace(spec, gate_up_interleaved=True))
            plan = replace(plan, spec=spec)
            found.append(packed_bytes(loaded_layer(plan, rank_tensors(layer, spec))))
    assert all(same(packed, found[0]) for packed in found)


@pytest.mark.parametrize(
    ("name", "expert", "parameter"),
    [
        ("model.layers.3.mlp.experts.12.w1.weight_packed", 12, "w13_weight"),
        ("model.layers.3.block_sparse_moe.experts.0.w3.weight_scale", 0, "w13_weight_scale"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", 7, "w2_weight"),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", None, "w13_weight"),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", None, "w13_weight_bias"),
        ("model.layers.3.mlp.experts.down_proj_scales", None, "w2_weight_scale"),
        ("model.layers.3.mlp.experts.w13_weight_scale", None, "w13_weight_scale"),
        ("model.layers.3.mlp.experts.w2_weight_bias", None, "w2_weight_bias"),
    ],
)
def test_names(name, expert, parameter):
    what = parse(name)
    assert (what.layer, what.expert, what.parameter) == (3, expert, parameter)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.experts.1.w4.weight_packed",
        "model.layers.3.mlp.experts.1.w1.input_scale",
        "lm_head.weight",
    ],
)
def test_names_of_other_tensors(name):
    assert parse(name) is None


def test_an_incomplete_checkpoint_is_refused(tmp_path, raw):
    from safetensors.torch import load_file, save_file

    file = write_experts(tmp_path / "a.safetensors", [raw.experts], "compressed_tensors")
    tensors = load_file(file)
    del tensors[PREFIX.format(0) + ".2.w3.weight_scale"]
    save_file(tensors, file)
    (layer,) = Checkpoint(file).layers().values()
    with pytest.raises(ContractError, match=r"experts\.2 has no w3 scale"):
        rank_tensors(layer, SPEC)


def test_files_of_several_shards_are_one_checkpoint(tmp_path, raw):
    from safetensors.torch import load_file, save_file

    whole = write_experts(tmp_path / "a.safetensors", [raw.experts], "quark")
    tensors = sorted(load_file(whole).items())
    folder = tmp_path / "sharded"
    folder.mkdir()
    for number, part in enumerate((tensors[::2], tensors[1::2])):
        save_file(dict(part), folder / f"model-{number}.safetensors")
    (one,), (many,) = (Checkpoint(p).layers().values() for p in (whole, folder))
    assert same(rank_tensors(one, SPEC), rank_tensors(many, SPEC))


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
    file = tmp_path / "a.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ContractError, match="safetensors"):
        Checkpoint(file)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
