"""`plan` reads real config fields, and its sizes are the published ones (docs/contract.md section f)."""

import json
import sys

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe import environ
from sglang_aiter_moe.cli import app
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.model_config import example_names, moe_layers, read_config
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in environ.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *arguments, "--json", "-"])
    return result, json.loads(result.stdout) if result.stdout else None


# config, tp, ep -> experts, top-k, hidden, intermediate, activation
SHAPES = {
    ("kimi-k3", 8, 1): (896, 16, 3584, 384, "situv2"),
    ("kimi-k3", 8, 8): (112, 16, 3584, 3072, "situv2"),
    ("gpt-oss-120b", 1, 1): (128, 4, 2880, 2880, "swiglu"),
    ("gpt-oss-120b", 2, 1): (128, 4, 2880, 1440, "swiglu"),
    ("gpt-oss-120b", 4, 1): (128, 4, 2880, 736, "swiglu"),
    ("gpt-oss-120b", 8, 1): (128, 4, 2880, 384, "swiglu"),
    ("gpt-oss-20b", 1, 1): (32, 4, 2880, 2880, "swiglu"),
    ("deepseek-v4", 8, 1): (384, 6, 7168, 384, "silu"),
    ("deepseek-v4", 8, 8): (48, 6, 7168, 3072, "silu"),
    ("qwen3.5-397b", 4, 1): (512, 10, 4096, 256, "silu"),
    ("qwen3.5-397b", 2, 1): (512, 10, 4096, 512, "silu"),
    ("minimax-m3", 8, 1): (128, 4, 6144, 384, "swiglu"),
    ("minimax-m3", 4, 1): (128, 4, 6144, 768, "swiglu"),
}


@pytest.mark.parametrize(("name", "tp", "ep"), SHAPES)
def test_sizes_are_the_published_ones(name, tp, ep):
    spec = moe_layers(read_config(name), tp=tp, ep=ep).spec
    found = (
        spec.num_experts,
        spec.topk,
        spec.hidden_size,
        spec.intermediate_size,
        spec.activation,
    )
    assert found == SHAPES[name, tp, ep]
    assert spec.expert_parallel == (ep > 1)


def test_shared_experts_count_as_routed_ones_where_they_are_fused():
    for name, experts, topk in (("deepseek-v4", 385, 7), ("minimax-m3", 129, 5)):
        spec = moe_layers(read_config(name), tp=8, fuse_shared=True).spec
        assert (spec.num_experts, spec.topk) == (experts, topk)


def test_what_goes_with_the_activation():
    k3 = moe_layers(read_config("kimi-k3"), tp=8).spec
    assert (k3.beta, k3.linear_beta, k3.swiglu_limit) == (4.0, 25.0, None)
    gpt_oss = moe_layers(read_config("gpt-oss-120b")).spec
    assert gpt_oss.has_bias
    assert gpt_oss.gate_up_interleaved
    assert gpt_oss.swiglu_limit == 7.0
    qwen = moe_layers(read_config("qwen3.5-397b")).spec
    assert not qwen.has_bias
    assert not qwen.gate_up_interleaved


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, None),
        ({"num_hidden_layers": 10}, 10),
        ({"num_hidden_layers": 10, "first_k_dense_replace": 3}, 7),
        ({"num_hidden_layers": 10, "moe_layer_freq": 2}, 5),
        ({"num_hidden_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}, 3),
        ({"num_hidden_layers": 4, "mlp_only_layers": [0]}, 3),
        ({"num_hidden_layers": 4, "first_k_dense_replace": None, "moe_layer_freq": None}, 4),
    ],
)
def test_number_of_moe_layers(fields, count):
    assert moe_layers({**read_config("deepseek-v4"), **fields}).count == count


@pytest.mark.parametrize(
    ("flags", "mode", "layout", "gate_mode"),
    [
        ([], "A16W4", "separated", "separated"),
        (["AITER_SITUV2_A8W4=1"], "A8W4", "gu_interleaved", "interleave"),
        (["AITER_SITUV2_A4W4=1"], "A4W4", "separated", "separated"),
    ],
)
def test_k3_by_flag(flags, mode, layout, gate_mode):
    options = [word for flag in flags for word in ("--env", flag)]
    result, report = run("kimi-k3", "--tp", "8", *options)
    assert result.exit_code == 0, result.stderr
    assert report["modes"] == [mode]
    assert (report["w13_layout"], report["gate_mode"]) == (layout, gate_mode)
    assert report["decisions"]
    assert all(decision["reason"] for decision in report["decisions"])
    others = {change["change"] for change in report["changes"]}
    assert others  # each of the three modes names the other two


def test_bytes_are_those_of_the_packed_tensors():
    _, report = run("kimi-k3", "--tp", "8", "--env", "AITER_SITUV2_A8W4=1")
    weights = 896 * (768 * 3584 + 3584 * 384) // 2
    scales = 896 * (768 * 112 + 3584 * 16)  # w2's 12 columns are padded to 16
    assert report["bytes_per_layer"] == weights + scales
    assert report["bytes_per_rank"] is None
    _, report = run("gpt-oss-120b", "--tp", "1")
    weights = 128 * (6144 * 3072 + 3072 * 3072) // 2
    scales = 128 * (6144 * 96 + 3072 * 96)
    biases = 128 * 4 * (6144 + 3072)
    assert report["bytes_per_layer"] == weights + scales + biases
    assert report["bytes_per_rank"] == 36 * report["bytes_per_layer"]


def test_token_ranges_show_the_bound():
    _, report = run("gpt-oss-120b", "--tp", "1")
    modes = {part["first"]: part["mode"] for part in report["ranges"]}
    assert modes[1] == "A16W4"
    assert modes[256] == "A8W4"


def test_a_refusal_says_what_would_give_a_plan():
    result, report = run("kimi-k3", "--tp", "8", "--ep", "8")
    assert result.exit_code == 2
    assert "expert mask" in report["refused"]["what"]
    changes = [change["change"] for change in report["would_plan"]]
    assert "AITER_SITUV2_A8W4=1" in changes
    assert "to fix:" in result.stderr
    flag, value = changes[0].split("=")
    again, _ = run("kimi-k3", "--tp", "8", "--ep", "8", "--env", f"{flag}={value}")
    assert again.exit_code == 0


def test_the_environment_is_taken_and_options_go_on_top(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    assert run("kimi-k3", "--tp", "8")[1]["modes"] == ["A8W4"]
    assert run("kimi-k3", "--tp", "8", "--env", "AITER_SITUV2_A8W4=0")[1]["modes"] == ["A16W4"]


def test_an_unclean_flag_is_refused_with_the_line_to_type(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "true")
    result, _ = run("kimi-k3", "--tp", "8")
    assert result.exit_code == 2
    assert "export AITER_SITUV2_A8W4=1" in result.stderr


def test_directories_and_files_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(read_config("gpt-oss-20b")))
    for source in (tmp_path, tmp_path / "config.json"):
        result, report = run(str(source))
        assert result.exit_code == 0
        assert report["experts"] == 32


def test_examples_are_named():
    result = CliRunner().invoke(app, ["plan", "--examples"])
    assert result.stdout.split() == example_names()
    assert len(example_names()) == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_routed_experts": None}, "num_local_experts"),
        ({"n_routed_experts": "many"}, "n_routed_experts is 'many'"),
        ({"n_routed_experts": 100}, "100 experts on 8"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"hidden_act": "situ"}, "activation_situ_beta"),
        ({"moe_intermediate_size": 100}, "100"),
        ({"hidden_act": ["silu"]}, "hidden_act is"),
        ({"text_config": "inner"}, "text_config is a str"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": 4, "moe_layer_freq": 0}, "every 0 layers"),
        ({"num_hidden_layers": 4, "moe_layer_freq": "2"}, "moe_layer_freq is '2'"),
        ({"num_hidden_layers": 4, "mlp_only_layers": 3}, "mlp_only_layers is 3"),
    ],
)
def test_configs_that_do_not_fit_are_refused_by_name(change, named):
    config = {**read_config("deepseek-v4"), **change}
    with pytest.raises(ContractError, match=named):
        moe_layers(config, tp=8, ep=8)


@pytest.mark.parametrize(("tp", "ep"), [(7, 1), (10**12, 1), (14, 2)])
def test_ranks_that_do_not_divide_the_width_are_refused(tp, ep):
    # SGLang 0.5.23, fused_moe_triton/layer.py: assert intermediate_size % moe_tp_size == 0.
    with pytest.raises(ContractError, match=f"3072 on {tp // ep} ranks"):
        moe_layers(read_config("kimi-k3"), tp=tp, ep=ep)


def test_a_refusal_is_what_json_holds(tmp_path):
    result = CliRunner().invoke(app, ["plan", "nowhere", "--json", "-"])
    assert result.exit_code == 2
    refused = json.loads(result.stdout)["refused"]
    assert refused["what"] == "nowhere: No such file or directory"
    assert "kimi-k3" in refused["allowed"] and refused["fix"] in result.stderr
    target = tmp_path / "plan.json"  # of an earlier run
    target.write_text('{"modes": ["A8W4"]}')
    assert CliRunner().invoke(app, ["plan", "nowhere", "--json", str(target)]).exit_code == 2
    assert json.loads(target.read_text()).keys() == {"refused"}
    # What the plan refuses holds the settings that would do as well, once.
    result = CliRunner().invoke(app, ["plan", "kimi-k3", "--tp", "8", "--ep", "8", "--json", "-"])
    assert json.loads(result.stdout).keys() == {"config", "refused", "would_plan"}
    # Nothing is left over for the next command.
    result = CliRunner().invoke(app, ["plan", "nowhere"])
    assert result.stdout == ""


@pytest.mark.parametrize("target", ["", "nowhere/x.json", "."])
def test_a_json_target_that_cannot_be_written_is_refused_first(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", "nowhere", "--json", target])
    assert result.exit_code == 2 and "cannot be" in result.stderr
    assert "No such file" not in result.stderr and "standard output" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        ["kimi-k3", "--tp", "8", "--ep", "3"],
        ["kimi-k3", "--arch", "gfx90a"],
        ["kimi-k3", "--aiter", "next"],
        ["kimi-k3", "--env", "AITER_SITUV2_A8W4"],
        [],
    ],
)
def test_bad_options_exit_with_2(arguments):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_file_that_is_no_config_is_refused(tmp_path):
    for text in ("{", "[]"):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(ContractError, match=r"config\.json"):
            read_config(path)


def test_a_misspelt_variable_is_refused_and_the_right_one_named():
    result = CliRunner().invoke(app, ["plan", "kimi-k3", "--env", "AITER_SITUV2_A8W=1"])
    assert result.exit_code == 2 and "AITER_SITUV2_A8W4?" in result.stderr


def test_our_own_gpt_oss_checkpoints_are_gpt_oss():
    config = {**read_config("gpt-oss-20b"), "model_type": "llama", "carrier_block": "gpt_oss"}
    spec = moe_layers(config).spec
    assert spec.activation.value == "swiglu" and spec.has_bias and spec.gate_up_interleaved


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
