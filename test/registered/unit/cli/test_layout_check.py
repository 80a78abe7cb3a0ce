"""`layout --check`: told with evidence, contradicted, or unknown; never guessed."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sglang_aiter_moe.checkpoint.check import PLAN_KEY
from sglang_aiter_moe.cli import app
from sglang_aiter_moe.contract import SCALE_LAYOUTS, WEIGHT_LAYOUTS, MoeSpec
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.expert_files import FORMATS, PREFIX, write_experts
from sglang_aiter_moe.testing.raw_layers import make_raw_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SPEC = MoeSpec("situv2", 4, 2, 256, 128, beta=4.0, linear_beta=25.0)
CONFIG = {
    "hidden_act": "situ",
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
}
# w13, w13 scale, w2, w2 scale
PACKED = {
    "separated": ("separated", "separated", "separated", "separated"),
    "gu_interleaved": ("gu_interleaved", "a16w4_gate_up", "separated", "a16w4"),
    "gu_interleaved_gfx1250": ("gu_interleaved_gfx1250", "n32k4_gate_up", "separated", "n32k4"),
}


@pytest.fixture(scope="module")
def layers():
    return [make_raw_layer(SPEC, 1, seed=seed).experts for seed in (1, 2)]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def write_packed(path, layers, forms, **metadata):
    tensors = {}
    for number, raw in enumerate(layers):
        prefix = PREFIX.format(number)
        parts = (raw.w13, raw.w13_scale, raw.w2, raw.w2_scale)
        names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
        for name, part, form in zip(names, parts, forms, strict=True):
            layout = (SCALE_LAYOUTS if name.endswith("scale") else WEIGHT_LAYOUTS)[form]
            tensors[f"{prefix}.{name}"] = layout.pack(part)
    save_file(tensors, path, metadata=metadata or None)
    return path


def run(*arguments):
    result = CliRunner().invoke(app, ["layout", *map(str, arguments), "--json", "-"])
    found = json.loads(result.stdout) if result.stdout else None
    refused = found is None or "refused" in found
    return result.exit_code, result.stderr if refused else found


@pytest.mark.parametrize("layout", PACKED)
def test_packed_files_are_told_against_raw_weights(tmp_path, config, layers, layout):
    file = write_packed(tmp_path / "packed.safetensors", layers, PACKED[layout])
    raw = write_experts(tmp_path / "raw.safetensors", layers, "compressed_tensors")
    status, found = run("--check", file, "--config", config, "--against", raw)
    assert status == 0
    assert [v["layout"] for v in found["layers"]] == [layout, layout]
    assert {v["evidence"] for v in found["layers"]} == {"against"}


@pytest.mark.parametrize("kind", FORMATS)
def test_raw_files_of_every_format_are_told_as_raw(tmp_path, config, layers, kind):
    file = write_experts(tmp_path / "a.safetensors", layers, kind)
    raw = write_experts(tmp_path / "raw.safetensors", layers, "fused", e8m0=True)
    status, found = run("--check", file, "--config", config, "--against", raw)
    assert status == 0
    expected = "raw_alternating" if kind == "gpt_oss" else "raw"
    assert {v["layout"] for v in found["layers"]} == {expected}


def test_without_evidence_the_answer_is_unknown(tmp_path, config, layers):
    file = write_packed(tmp_path / "packed.safetensors", layers, PACKED["separated"])
    status, found = run("--check", file, "--config", config)
    assert status == 2
    assert {(v["layout"], v["evidence"]) for v in found["layers"]} == {("unknown", "")}


@pytest.mark.parametrize("layout", ["separated", "gu_interleaved"])
def test_a_plan_in_the_metadata_tells_what_was_packed(tmp_path, config, layers, layout):
    env = {plans.A8W4: "1"} if layout == "gu_interleaved" else {}
    plan = plans.plan(SPEC, env)
    forms = (plan.w13_layout, plan.w13_scale_layout, plan.w2_layout, plan.w2_scale_layout)
    said = {PLAN_KEY: plan.to_json()}
    file = write_packed(tmp_path / "packed.safetensors", layers, forms, **said)
    status, found = run("--check", file, "--config", config)
    assert status == 0
    assert {(v["layout"], v["evidence"]) for v in found["layers"]} == {(layout, "plan")}
    assert all("no fingerprint" in v["detail"] for v in found["layers"])
    # Content, where there is any to compare with, counts for more.
    raw = write_experts(tmp_path / "raw.safetensors", layers, "compressed_tensors")
    other = write_packed(tmp_path / "other.safetensors", layers, PACKED["separated"], **said)
    status, found = run("--check", other, "--config", config, "--against", raw)
    assert status == (0 if layout == "separated" else 1)
    assert {v["layout"] for v in found["layers"]} == {"separated"}


def test_a_plan_of_other_shapes_tells_nothing(tmp_path, config, layers):
    plan = plans.plan(MoeSpec("situv2", 4, 2, 256, 256, beta=4.0, linear_beta=25.0))
    said = {PLAN_KEY: plan.to_json()}
    file = write_packed(tmp_path / "packed.safetensors", layers, PACKED["separated"], **said)
    status, found = run("--check", file, "--config", config)
    assert status == 2
    assert {v["layout"] for v in found["layers"]} == {"unknown"}
    assert all("not the shape of w13_weight" in v["detail"] for v in found["layers"])


def test_other_raw_weights_are_no_evidence(tmp_path, config, layers):
    file = write_packed(tmp_path / "packed.safetensors", layers, PACKED["separated"])
    other = write_experts(tmp_path / "raw.safetensors", layers[::-1], "fused")
    status, found = run("--check", file, "--config", config, "--against", other)
    assert status == 2
    assert {v["layout"] for v in found["layers"]} == {"unknown"}
    assert "w13_weight" in found["layers"][0]["detail"]


def test_raw_beside_packed_is_mixed(tmp_path, config, layers):
    file = write_packed(tmp_path / "packed.safetensors", layers, PACKED["separated"])
    raw = write_experts(tmp_path / "raw.safetensors", layers, "fused")
    from safetensors.torch import load_file

    tensors = load_file(file)
    tensors[PREFIX.format(1) + ".w2_weight"] = layers[1].w2.clone()
    save_file(tensors, file)
    status, found = run("--check", file, "--config", config, "--against", raw)
    assert status == 1
    assert [v["layout"] for v in found["layers"]] == ["separated", "mixed"]


def test_ambiguous_bytes_are_unknown(tmp_path, config, layers):
    """All bytes equal: raw and every layout are the same bytes, so nothing is known."""
    from dataclasses import replace

    raw = replace(layers[0], w13=torch.full_like(layers[0].w13, 0x22))
    file = write_experts(tmp_path / "a.safetensors", [raw], "fused")
    status, found = run("--check", file, "--config", config, "--against", file)
    assert status == 2
    assert "w13_weight" in found["layers"][0]["detail"]


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_bad_config_is_refused(tmp_path, layers, content):
    file = write_experts(tmp_path / "a.safetensors", layers[:1], "fused")
    config = tmp_path / "bad.json"
    if content is not None:
        config.write_text(content)
    status, message = run("--check", file, "--config", config)
    assert status == 2
    assert "bad.json" in message


def test_a_file_without_experts_is_refused(tmp_path, config):
    file = tmp_path / "none.safetensors"
    save_file({"lm_head.weight": torch.zeros(2)}, file)
    status, message = run("--check", file, "--config", config)
    assert status == 2 and "no MXFP4 expert" in message


def test_usage_errors_name_what_is_missing(tmp_path, layers):
    file = write_experts(tmp_path / "a.safetensors", layers[:1], "fused")
    assert run("--check", file)[0] == 2
    assert run("separated", "--rows", 64)[0] == 2


@pytest.mark.parametrize(
    ("ep_rank", "spoilt", "layout"),
    [(1, 0, "separated"), (0, 0, "unknown"), (1, 1, "unknown")],
)
def test_experts_of_an_expert_parallel_rank_keep_all_their_columns(
    tmp_path, config, layers, ep_rank, spoilt, layout
):
    """The ranks that share an expert's columns are --tp / --ep, here one: its last column counts too."""
    from dataclasses import replace

    raw = write_experts(tmp_path / "raw.safetensors", layers[:1], "fused")
    names = ("w13", "w13_scale", "w2", "w2_scale")
    mine = replace(layers[0], **{n: getattr(layers[0], n)[2:].clone() for n in names})
    mine.w2[:, :, -1] ^= spoilt
    file = write_packed(tmp_path / "packed.safetensors", [mine], PACKED["separated"])
    options = ("--against", raw, "--tp", 2, "--ep", 2, "--ep-rank", ep_rank)
    _, found = run("--check", file, "--config", config, *options)
    assert [v["layout"] for v in found["layers"]] == [layout]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tp", 2, "--tp-rank", 2), "--tp-rank is 2"),
        (("--tp", 2, "--ep", 2, "--tp-rank", 1), "--tp-rank is 1"),
        (("--tp", 2, "--ep", 2, "--ep-rank", 2), "--ep-rank is 2"),
        (("--tp", 1, "--ep", 2), "--ep 2"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(tmp_path, config, layers, options, named):
    file = write_experts(tmp_path / "a.safetensors", layers[:1], "fused")
    status, message = run("--check", file, "--config", config, *options)
    assert status == 2 and named in message


@pytest.mark.parametrize("name", ["kimi-k3", "minimax-m3"])
def test_the_configs_of_plan_are_taken(tmp_path, name):
    """minimax-m3 says `swigluoai`, which only the reader of `plan` knew."""
    file = tmp_path / "none.safetensors"
    save_file({"lm_head.weight": torch.zeros(2)}, file)
    status, message = run("--check", file, "--config", name)
    assert status == 2 and "no MXFP4 expert" in message


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
