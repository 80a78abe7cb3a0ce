"""Whole layers against the outputs of AITER's own gfx950 kernels, executed (test/golden/executed)."""

import sys
from pathlib import Path

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.numerics import cosine
from sglang_aiter_moe.portable.backends import cpu
from sglang_aiter_moe.portable.entry import call_of, request_of
from sglang_aiter_moe.testing import executed_vectors as vectors
from sglang_aiter_moe.testing import portable_cases as pc
from sglang_aiter_moe.testing.executed_vectors import CASES, FORM, bf16, rms
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden" / "executed"
ENV = {"a16w4": {}, "a8w4": {"AITER_SITUV2_A8W4": "1"}, "a4w4": {"AITER_SITUV2_A4W4": "1"}}
BETAS = {"beta": 4.0, "linear_beta": 25.0}


def load(shape, mode):
    raw, arrays = vectors.load(GOLDEN, shape, mode)
    ids, weights = (torch.from_numpy(arrays[name]) for name in ("topk_ids", "topk_weights"))
    return raw, pc.Routed(bf16(arrays["x"]), ids, weights), arrays


@pytest.fixture
def mode_env(monkeypatch):
    def choose(mode):
        for name in ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "AITER_CONFIG_FMOE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in ENV[mode].items():
            monkeypatch.setenv(name, value)

    return choose


@pytest.mark.parametrize("shape, mode", CASES)
def test_output(shape, mode, mode_env):
    mode_env(mode)
    raw, routed, arrays = load(shape, mode)
    with portable.installed():
        out = pc.fused_moe(routed, pc.pack(raw, FORM[mode]), "Situv2", **BETAS)
    assert not vectors.output_faults(out, arrays)


@pytest.mark.parametrize("shape, mode", CASES)
def test_stage_1(shape, mode, mode_env):
    mode_env(mode)
    raw, routed, arrays = load(shape, mode)
    with portable.installed() as aiter:
        packed = pc.pack(raw, FORM[mode])
        arguments = {
            "topk_ids": routed.ids,
            "activation": portable.ActivationType.Situv2,
            "expert_mask": None,
            "bias1": None,
            "bias2": None,
            "num_local_tokens": None,
            "doweight_stage1": False,
            "hidden_pad": 0,
            "intermediate_pad": 0,
            **BETAS,
            **packed,
        }
        call = call_of(arguments)
        request = request_of(call, aiter.dispatcher.resolve(call), arguments)
    xq = cpu.quantise_input(request, routed.x)
    decoded = cpu._Experts(request, *(packed[n] for n in ("w1", "w2", "w1_scale", "w2_scale")))
    equal = total = scales_equal = scales = 0
    for expert in range(raw.num_experts):
        tokens, slots = torch.nonzero(routed.ids == expert, as_tuple=True)
        if not len(tokens):
            continue
        weights = routed.weights[tokens, slots].unsqueeze(-1)
        y = cpu.activated(request, expert, xq[tokens].float(), decoded.w13(expert), weights)
        if mode == "a16w4":
            got, want = y.to(torch.bfloat16), bf16(arrays["s1_bf16"])[tokens, slots]
            ulps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
            close = (ulps <= 1) | ((got.float() - want.float()).abs() <= 1e-4)
        else:
            codes, scale = cpu.requantise(request, y)
            dequantise = cpu._DEQUANTISE[request.mode]
            want_codes = torch.from_numpy(arrays["s1_codes"])[tokens, slots]
            want_scale = torch.from_numpy(arrays["s1_scales"])[tokens, slots]
            scales_equal += int((scale == want_scale).sum())
            scales += scale.numel()
            close = dequantise(codes, scale) == dequantise(want_codes, want_scale)
        equal += int(close.sum())
        total += close.numel()
    assert total == routed.ids.numel() * vectors.INTER
    assert equal >= 0.999 * total
    if mode != "a16w4":
        assert scales_equal == scales


@pytest.mark.parametrize("mode", ["a8w4", "a4w4"])
def test_quantised_input(mode, mode_env):
    mode_env(mode)
    _, routed, arrays = load("ragged", mode)
    want = cpu._DEQUANTISE[mode.upper()](
        torch.from_numpy(arrays["xq"]), torch.from_numpy(arrays["xq_scales"])
    )
    resolved = portable.explain(
        activation="situv2",
        tokens=35,
        num_experts=5,
        topk=2,
        hidden_size=vectors.HIDDEN,
        intermediate_size=vectors.INTER,
    )
    got = cpu.quantise_input(resolved, routed.x)
    assert torch.equal(got.float(), want)


@pytest.mark.parametrize("shape, mode", [("ragged", mode) for mode in ENV])
def test_the_other_layout_is_garbage(shape, mode, mode_env):
    mode_env(mode)
    raw, routed, arrays = load(shape, mode)
    wrong = "separated" if FORM[mode] == "gu_interleaved" else "gu_interleaved"
    with portable.installed():
        packed = pc.pack(raw, wrong)
        out = pc.fused_moe(routed, packed, "Situv2", gate_mode="interleave", **BETAS)
        assert abs(cosine(out, bf16(arrays["out"]))) < 0.1
    if mode == "a16w4":
        with portable.installed(a16w4_kernel="gu_interleaved"):
            out = pc.fused_moe(routed, packed, "Situv2", **BETAS)
            assert rms(out, bf16(arrays["out"])) < 4e-3


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
