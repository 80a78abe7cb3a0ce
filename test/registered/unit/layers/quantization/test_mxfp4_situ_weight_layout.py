"""Which layout SiTUv2 takes under which flags, and that a prepared layer of K3 has AITER's bytes."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import cosine
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore, AiterRunnerInput
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.plans import A4W4, A8W4, KERNEL
from sglang_aiter_moe.testing.raw_layers import k3_like, make_raw_layer
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_amd_ci(est_time=15, stage="stage-b", runner_config="1-gpu-small-amd")

# Beside the tests, or beside this file where it was placed in SGLang's tree.
GOLDEN = next(p / "golden" for p in Path(__file__).parents if (p / "golden").is_dir())


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    for name in (A8W4, A4W4, KERNEL):
        monkeypatch.delenv(name, raising=False)


def plan_for(spec, **env):
    return plans.plan(spec, env)


# --- the selector ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a8w4", "a4w4", "interleaved"),
    [
        (
            None,
            None,
            False,
        ),  # other than sglang#33838: no release's A16W4 kernel reads them interleaved
        ("0", "0", False),
        ("0", "1", False),
        (None, "1", False),
        ("1", None, True),
        ("1", "0", True),
        ("1", "1", True),
    ],
)
def test_layout_follows_the_activation_mode(monkeypatch, a8w4, a4w4, interleaved):
    for name, value in ((A8W4, a8w4), (A4W4, a4w4)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert mxfp4._aiter_situ_uses_gu_interleaved_weights() is interleaved


@pytest.mark.parametrize("kernel", ["separated", "gu_interleaved"])
@pytest.mark.parametrize("mode", [None, A8W4, A4W4])
def test_a_stated_a16w4_kernel_changes_a16w4_only(monkeypatch, kernel, mode):
    monkeypatch.setenv(KERNEL, kernel)
    if mode:
        monkeypatch.setenv(mode, "1")
    expected = {None: kernel == "gu_interleaved", A8W4: True, A4W4: False}[mode]
    assert mxfp4._aiter_situ_uses_gu_interleaved_weights() is expected


def test_an_unknown_kernel_is_refused(monkeypatch):
    monkeypatch.setenv(KERNEL, "interleaved")
    with pytest.raises(ContractError, match=KERNEL):
        mxfp4._aiter_situ_uses_gu_interleaved_weights()


SPELLINGS = [None, "0", "1", "", "true", "True", "yes", "on", " 1", "01", "2"]


def executed_cosine(plan, raw, kernel="separated"):
    """The layer as portable executes it under the environment as it is, against the oracle."""
    layer = raw.module()
    mxfp4.prepare_weights(layer, plan)
    info = mxfp4.moe_quant_info(layer)
    info.plan = None  # execute whatever the bytes are: the plan would refuse a changed flag
    runner_input = AiterRunnerInput(
        raw.hidden_states, raw.topk_ids, raw.topk_weights, info.quant_type
    )
    config = MoeRunnerConfig(activation="situ", gemm1_alpha=4.0, gemm1_clamp_limit=25.0)
    with portable.installed(a16w4_kernel=kernel, force=True):
        result = AiterRunnerCore(config).run(runner_input, info, {}).hidden_states
    return cosine(result, raw.expected(None))


@pytest.mark.parametrize("kernel", ["separated", "gu_interleaved"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("flag", [A8W4, A4W4])
def test_the_selected_layout_is_the_one_that_the_kernel_reads(monkeypatch, flag, spelling, kernel):
    """By execution: for every spelling the selected layout is near 1, the other one near 0."""
    raw = make_raw_layer(k3_like(), tokens=4)
    plans = {
        "separated": plan_for(raw.spec),
        "gu_interleaved": plan_for(raw.spec, **{A8W4: "1"}),
    }
    assert {name: plan.w13_layout for name, plan in plans.items()} == {n: n for n in plans}
    monkeypatch.setenv(KERNEL, kernel)
    if spelling is not None:
        monkeypatch.setenv(flag, spelling)
    interleaved = mxfp4._aiter_situ_uses_gu_interleaved_weights()
    chosen, other = ("separated", "gu_interleaved")[:: -1 if interleaved else 1]
    assert executed_cosine(plans[chosen], raw, kernel) > 0.95  # A4W4 against no quantisation: 0.97
    assert executed_cosine(plans[other], raw, kernel) < 0.5


def test_control_sglangs_published_rule_collapses(monkeypatch):
    """What the test above is for: "interleaved unless A4W4" is wrong in the default mode, and in no other."""
    raw = make_raw_layer(k3_like(), tokens=4)
    found = {}
    for mode in (None, A8W4, A4W4):
        published = {A8W4: "1"} if mode != A4W4 else {}
        with monkeypatch.context() as patch:
            if mode:
                patch.setenv(mode, "1")
            found[mode] = executed_cosine(plan_for(raw.spec, **published), raw)
    assert found[None] < 0.5
    assert found[A8W4] > 0.95 and found[A4W4] > 0.95


# --- a prepared layer's bytes -----------------------------------------------------------------------------


def golden_cases(file):
    with np.load(GOLDEN / file) as data:
        return {(c["name"], c["form"]): c for c in json.loads(str(data["_cases"]))}


def golden_raw_scale(name, shape):
    with np.load(GOLDEN / "scale_layouts.npz") as data:
        if f"{name}__raw" in data.files:
            return torch.from_numpy(data[f"{name}__raw"]).view(shape)
        generator = np.random.Generator(np.random.PCG64(int(data[f"{name}__raw_seed"])))
    return torch.from_numpy(generator.integers(1, 255, shape, dtype=np.uint8))


def golden_raw_weight(case):
    generator = np.random.Generator(np.random.PCG64(case["seed"]))
    shape = (case["E"], case["N"], case["Kbytes"])
    return torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8))


def sha256(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("env", "weight_form", "scale_form"),
    [
        ({}, "sep", "sep"),
        ({A4W4: "1"}, "sep", "sep"),
        ({A8W4: "1"}, "a16w4_gu1", "gui_gu1"),
        ({A8W4: "1", A4W4: "1"}, "a16w4_gu1", "gui_gu1"),
    ],
)
def test_a_prepared_k3_layer_is_aiters_bytes(env, weight_form, scale_form):
    """One expert of K3 at TP8: w13, w2 and both scales against AITER's own functions' results."""
    weights, scales = golden_cases("weight_layouts.npz"), golden_cases("scale_layouts.npz")
    w13, w2 = weights["k3_w13_tp8", weight_form], weights["k3_w2_tp8", "sep"]
    layer = torch.nn.Module()
    for name, tensor in {
        "w13_weight": golden_raw_weight(w13),
        "w2_weight": golden_raw_weight(w2),
        "w13_weight_scale": golden_raw_scale("k3_w13", (1, 768, 112)),
        "w2_weight_scale": golden_raw_scale("k3_w2_k12", (1, 3584, 12)),
    }.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    spec = k3_like(num_experts=1, topk=1, hidden_size=3584, intermediate_size=384)
    mxfp4.prepare_weights(layer, plan_for(spec, **env))
    assert sha256(layer.w13_weight) == w13["sha256_out"]
    assert sha256(layer.w2_weight) == w2["sha256_out"]
    assert sha256(layer.w13_weight_scale) == scales["k3_w13", scale_form]["sha256_defined"]
    # 12 columns become 16; the padded form with 0x7F is the only one that AITER defines.
    assert sha256(layer.w2_weight_scale) == scales["k3_w2_k12", "gui_gu0"]["sha256_defined"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
