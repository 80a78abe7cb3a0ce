"""A checkpoint laid out ahead of time: the same bytes, loaded as they are, refused elsewhere."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from sglang_aiter_moe.checkpoint.files import Checkpoint
from sglang_aiter_moe.checkpoint.offline import PLAN_KEY, load_packed, pack_checkpoint
from sglang_aiter_moe.checkpoint.rank import rank_tensors
from sglang_aiter_moe.cli import app
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.expert_files import PREFIX, write_experts
from sglang_aiter_moe.testing.loaded_layers import loaded_layer, packed_bytes, same
from sglang_aiter_moe.testing.raw_layers import make_raw_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

GPT_OSS = replace(plans.gptoss(1), num_experts=4, topk=2, hidden_size=192, intermediate_size=192)
SITU = plans.situv2(4, 2, 256, 384)
CASES = {
    "A16W4": (SITU, {}, "compressed_tensors"),
    "A8W4": (SITU, {plans.A8W4: "1"}, "quark"),
    "gpt-oss": (GPT_OSS, {}, "gpt_oss"),
}


@pytest.fixture
def source(tmp_path):
    """Writes two layers, a norm and a config; returns the directory."""

    def write(spec, kind):
        folder = tmp_path / "raw"
        folder.mkdir()
        halves = replace(spec, gate_up_interleaved=False)
        layers = [make_raw_layer(halves, 1, seed=s).experts for s in (1, 2)]
        file = write_experts(folder / "model.safetensors", layers, kind)
        save_file({**load_file(file), "model.norm.weight": torch.ones(3)}, file)
        config = {
            "model_type": "gpt_oss" if kind == "gpt_oss" else "kimi_k3",
            "hidden_act": "silu" if kind == "gpt_oss" else "situ",
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_local_experts": spec.num_experts,
            "num_experts_per_tok": spec.topk,
            "swiglu_limit": spec.swiglu_limit,
            "activation_situ_beta": spec.beta,
            "activation_situ_linear_beta": spec.linear_beta,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.mark.parametrize("case", CASES)
def test_it_loads_without_transformation(tmp_path, source, case, monkeypatch):
    spec, env, kind = CASES[case]
    plan = plans.plan(spec, env)
    folder = source(spec, kind)
    pack_checkpoint(folder, tmp_path / "out", plan)
    raw_layers, packed_layers = (Checkpoint(p).layers() for p in (folder, tmp_path / "out"))
    assert list(raw_layers) == list(packed_layers) == [PREFIX.format(0), PREFIX.format(1)]
    expected = [
        packed_bytes(loaded_layer(plan, rank_tensors(layer, spec))) for layer in raw_layers.values()
    ]

    def transform(*_, **__):
        raise AssertionError("the bytes were transformed")

    from sglang_aiter_moe.contract.layouts import WeightLayout
    from sglang_aiter_moe.contract.scale_layouts import ScaleLayout

    monkeypatch.setattr(WeightLayout, "pack", transform)
    monkeypatch.setattr(ScaleLayout, "pack", transform)
    for layer, want in zip(packed_layers.values(), expected, strict=True):
        module = torch.nn.Module()
        load_packed(module, layer, plan)
        assert same(packed_bytes(module), want)
        mxfp4.moe_quant_info(module)


def test_what_is_no_expert_comes_along(tmp_path, source):
    spec, env, kind = CASES["A16W4"]
    pack_checkpoint(source(spec, kind), tmp_path / "out", plans.plan(spec, env))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = index["weight_map"]
    for name, file in names.items():
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert torch.equal(
        load_file(tmp_path / "out" / names["model.norm.weight"])["model.norm.weight"], torch.ones(3)
    )
    assert (tmp_path / "out" / "config.json").exists()
    assert not any(".w1." in name for name in names)


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        (SITU, (SITU, {plans.A8W4: "1"}, "gfx950"), "w13_layout"),
        (SITU, (SITU, {}, "gfx1250"), "w13_layout"),
        (SITU, (replace(SITU, num_experts=8), {}, "gfx950"), "num_experts"),
        (SITU, (plans.situv2(4, 2, 256, 128), {}, "gfx950"), "intermediate_size"),
    ],
)
def test_another_plan_is_refused(tmp_path, source, then, now, named):
    pack_checkpoint(source(then, "fused"), tmp_path / "out", plans.plan(then))
    spec, env, arch = now
    layer = next(iter(Checkpoint(tmp_path / "out").layers().values()))
    module = torch.nn.Module()
    with pytest.raises(ContractError, match=named):
        load_packed(module, layer, plans.plan(spec, env, arch))
    assert not list(module.parameters())


def test_a_raw_file_is_not_taken_for_a_packed_one(source):
    layer = next(iter(Checkpoint(source(SITU, "fused")).layers().values()))
    with pytest.raises(ContractError, match="carries no plan"):
        load_packed(torch.nn.Module(), layer, plans.plan(SITU))


def test_edited_bytes_are_refused(tmp_path, source):
    plan = plans.plan(SITU)
    files = pack_checkpoint(source(SITU, "fused"), tmp_path / "out", plan)
    with safe_open(files[0], "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(files[0])
    tensors[PREFIX.format(0) + ".w2_weight"][0, 0, 0] ^= 1
    save_file(tensors, files[0], metadata=metadata)
    layer = next(iter(Checkpoint(tmp_path / "out").layers().values()))
    with pytest.raises(ContractError, match="bytes that were packed"):
        load_packed(torch.nn.Module(), layer, plan)


def test_packing_twice_or_into_something_is_refused(tmp_path, source):
    plan = plans.plan(SITU)
    folder = source(SITU, "fused")
    pack_checkpoint(folder, tmp_path / "out", plan)
    with pytest.raises(ContractError, match="already laid out"):
        pack_checkpoint(tmp_path / "out", tmp_path / "again", plan)
    with pytest.raises(ContractError, match="not empty"):
        pack_checkpoint(folder, tmp_path / "out", plan)


def run(*arguments):
    result = CliRunner().invoke(app, ["layout", *map(str, arguments), "--json", "-"])
    found = json.loads(result.stdout) if result.stdout else None
    refused = found is None or "refused" in found
    return result.exit_code, result.stderr if refused else found


def test_the_command_packs_and_the_check_tells_it_by_fingerprint(tmp_path, source, monkeypatch):
    monkeypatch.setenv(plans.A8W4, "1")
    folder, out = source(SITU, "compressed_tensors"), tmp_path / "out"
    status, made = run(
        "--pack", folder, "--out", out, "--config", folder, "--arch", "gfx950", "--aiter", "0.1.20"
    )
    assert (status, made["w13_layout"]) == (0, "gu_interleaved")
    status, found = run("--check", out, "--config", folder)
    assert status == 0
    assert {(v["layout"], v["evidence"], v["agrees"]) for v in found["layers"]} == {
        ("gu_interleaved", "fingerprint", True)
    }
    assert run("--check", out, "--config", folder, "--against", folder)[0] == 0


def test_the_command_takes_a_plan_from_a_file(tmp_path, source):
    plan = tmp_path / "plan.json"
    plan.write_text(plans.plan(SITU, arch="gfx1250").to_json())
    status, made = run("--pack", source(SITU, "quark"), "--out", tmp_path / "out", "--plan", plan)
    assert (status, made["w13_layout"]) == (0, "gu_interleaved_gfx1250")


def test_the_command_takes_what_plan_wrote_wherever_it_runs(tmp_path, source, monkeypatch):
    folder, file = source(SITU, "quark"), tmp_path / "plan.json"
    options = ["--arch", "gfx950", "--env", f"{plans.A8W4}=1", "--json", file]
    planned = CliRunner().invoke(app, ["plan", *map(str, (folder, *options))])
    assert planned.exit_code == 0, planned.output
    monkeypatch.delenv(plans.A8W4, raising=False)
    files = {}
    for name, more in {
        "planned": ("--plan", file),
        "flag": ("--config", folder, "--arch", "gfx950", "--aiter", "0.1.20"),
    }.items():
        if name == "flag":
            monkeypatch.setenv(plans.A8W4, "1")
        status, made = run("--pack", folder, "--out", tmp_path / name, *more)
        assert (status, made["w13_layout"]) == (0, "gu_interleaved")
        files[name] = [load_file(tmp_path / name / file) for file in made["files"]]
    assert len(files["flag"]) >= 2
    for one, other in zip(files["planned"], files["flag"], strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{}", id="empty"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"plan", id="no JSON"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b'{"config": "kimi-k3", "refused": {"what": "tp"}}', id="refused"),
        pytest.param(b'{"plan": null}', id="null"),
        pytest.param(None, id="no file"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_command_that_writes_one(tmp_path, source, content):
    folder, file = source(SITU, "quark"), tmp_path / "plan.json"
    if content is not None:
        file.write_bytes(content)
    arguments = ["layout", "--pack", folder, "--out", tmp_path / "out", "--plan", file]
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 2, done.output
    assert "sglang-aiter-moe plan CONFIG" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more", [("--config", "kimi-k3"), ("--aiter", "0.1.20"), ("--tp", 2), ("--tp", 2, "--ep", 2)]
)
def test_what_a_plan_says_already_is_not_ignored_beside_it(tmp_path, source, more):
    folder, file = source(SITU, "quark"), tmp_path / "plan.json"
    file.write_text(plans.plan(SITU).to_json())
    status, said = run("--pack", folder, "--out", tmp_path / "out", "--plan", file, *more)
    assert status == 2 and all(option in said for option in more[::2])
    assert not (tmp_path / "out").exists()


def test_a_file_whose_plan_is_wrong_is_contradicted(tmp_path, source):
    """The bytes say separated, the plan in the metadata says interleaved."""
    files = pack_checkpoint(source(SITU, "fused"), tmp_path / "out", plans.plan(SITU))
    with safe_open(files[0], "pt") as opened:
        metadata = opened.metadata()
    metadata[PLAN_KEY] = plans.plan(SITU, {plans.A8W4: "1"}).to_json()
    save_file(load_file(files[0]), files[0], metadata=metadata)
    status, found = run("--check", files[0], "--config", tmp_path / "raw")
    assert status == 1
    assert found["layers"][0]["layout"] == "separated" and found["layers"][0]["agrees"] is False


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
