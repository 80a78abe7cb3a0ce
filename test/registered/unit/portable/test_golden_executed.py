"""Whole layers against the outputs of AITER's own gfx950 kernels, executed (test/golden/executed)."""

import functools
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.numerics import cosine
from sglang_aiter_moe.numerics.oracle import RawExperts
from sglang_aiter_moe.portable.backends import cpu
from sglang_aiter_moe.portable.entry import call_of, request_of
from sglang_aiter_moe.testing import portable_cases as pc
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

GOLDEN = Path(__file__).parents[3] / "golden" / "executed"
HIDDEN, INTER = 3584, 384
ENV = {"a16w4": {}, "a8w4": {"AITER_SITUV2_A8W4": "1"}, "a4w4": {"AITER_SITUV2_A4W4": "1"}}
FORM = {"a16w4": "separated", "a8w4": "gu_interleaved", "a4w4": "separated"}
BETAS = {"beta": 4.0, "linear_beta": 25.0}
CASES = [(shape, mode) for shape in ("full", "ragged") for mode in ENV]


def bf16(bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@functools.cache
def experts(seed, count):
    """The weights that the README of the vectors describes."""
    rng = np.random.Generator(np.random.PCG64(seed))
    w13 = rng.integers(0, 256, (count, 2 * INTER, HIDDEN // 2), dtype=np.uint8)
    s13 = rng.integers(117, 123, (count, 2 * INTER, HIDDEN // 32), dtype=np.uint8)
    w2 = rng.integers(0, 256, (count, HIDDEN, INTER // 2), dtype=np.uint8)
    s2 = rng.integers(117, 123, (count, HIDDEN, INTER // 32), dtype=np.uint8)
    return RawExperts(*(torch.from_numpy(a) for a in (w13, s13, w2, s2)))


@functools.cache
def load(shape, mode):
    with np.load(GOLDEN / f"{shape}_{mode}.npz") as golden:
        arrays = {k: golden[k] for k in golden}
    meta = json.loads(str(arrays.pop("meta")))
    raw = experts(meta["seed_weights"], meta["E"])
    for name, tensor in (("w13", raw.w13), ("w2_scale", raw.w2_scale)):
        assert hashlib.sha256(tensor.numpy().tobytes()).hexdigest() == meta["sha256"][name]
    routed = pc.Routed(
        bf16(arrays["x"]),
        torch.from_numpy(arrays["topk_ids"]),
        torch.from_numpy(arrays["topk_weights"]),
    )
    return raw, routed, arrays


@pytest.fixture
def mode_env(monkeypatch):
    def choose(mode):
        for name in ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "AITER_CONFIG_FMOE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in ENV[mode].items():
            monkeypatch.setenv(name, value)

    return choose


def rms(got, want, dim=None):
    difference, want = (got.double() - want.double()).square(), want.double().square()
    if dim is None:
        return float((difference.sum() / want.sum()).sqrt())
    return (difference.sum(dim) / want.sum(dim)).sqrt()


@pytest.mark.parametrize("shape, mode", CASES)
def test_output(shape, mode, mode_env):
    mode_env(mode)
    raw, routed, arrays = load(shape, mode)
    with portable.installed():
        out = pc.fused_moe(routed, pc.pack(raw, FORM[mode]), "Situv2", **BETAS)
    want = bf16(arrays["out"])
    assert rms(out, want) < 4e-3
    assert float(rms(out, want, 1).max()) < 5e-3
    assert cosine(out, want) > 0.99999
    assert float((out.double() - want.double()).abs().max()) <= 1e-2 * float(
        want.double().abs().max()
    )


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
    assert total == routed.ids.numel() * INTER
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
        hidden_size=HIDDEN,
        intermediate_size=INTER,
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
