"""The torch backend against the oracle, which shares neither layouts nor dispatch with it."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.numerics import relative_error
from sglang_aiter_moe.numerics.oracle import routed_moe
from sglang_aiter_moe.portable import backends
from sglang_aiter_moe.portable.backends import cpu
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.testing import portable_cases as pc
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

E, H, I, K, M = 6, 256, 128, 2, 9
RAW = pc.random_experts(E, H, I, bias=True)
ROUTED = pc.random_routing(M, E, K, H)
REQUANT = {"epilogue": "epilogue", "roundup_bf16": "roundup", "roundup_fp32": "roundup_fp32"}


def request(mode, **fields):
    base = {
        "mode": mode,
        "family": "test",
        "num_experts": E,
        "hidden_size": H,
        "intermediate_size": I,
        "w13_layout": "raw",
        "w13_scale_layout": "raw",
        "w2_layout": "raw",
        "w2_scale_layout": "raw",
        "activation": "silu",
    }
    return KernelRequest(**{**base, **fields})


def run(req, routed=ROUTED, raw=RAW, out=None):
    if out is None:
        out = torch.full((routed.x.shape[0], H), float("nan"), dtype=torch.float32)
    cpu.run(
        req, routed.x, raw.w13, raw.w2, raw.w13_scale, raw.w2_scale, routed.weights, routed.ids, out
    )
    return out


def oracle(mode, routed=ROUTED, raw=RAW, **kwargs):
    no_bias = replace(raw, b13=None, b2=None)
    experts = raw if kwargs.pop("bias", False) else no_bias
    return routed_moe(
        routed.x, experts, routed.ids, routed.weights, mode=mode, dtype=torch.float32, **kwargs
    )


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu", "situv2"])
@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_activations_and_modes(activation, mode):
    limit = 7.0 if activation == "swiglu" else None
    req = request(mode, activation=activation, limit=limit, requantization="epilogue")
    assert relative_error(run(req), oracle(mode, activation=activation)) < 1e-5


@pytest.mark.parametrize("rule", REQUANT)
@pytest.mark.parametrize("mode", ["A8W4", "A4W4"])
def test_requantisation_rules(mode, rule):
    out = run(request(mode, requantization=rule), out=torch.empty(M, H, dtype=torch.bfloat16))
    want = oracle(mode, activation="silu", requantization=REQUANT[rule])
    assert relative_error(out, want) < 3e-3
    others = [r for r in REQUANT.values() if r != REQUANT[rule]]
    if mode == "A4W4" and rule == "roundup_bf16":  # from float32 some codes differ
        assert all(
            relative_error(out, oracle(mode, activation="silu", requantization=r)) > 3e-3
            for r in others
        )


def test_even_rounding_is_another_rule():
    up = run(request("A4W4", requantization="roundup_bf16"))
    even = run(request("A4W4", requantization="even_bf16", input_rounding="even"))
    assert 0.01 < relative_error(even, up) < 0.5


def test_biases_limit_and_betas():
    req = request(
        "A16W4",
        activation="situv2",
        limit=2.0,
        beta=3.0,
        linear_beta=11.0,
        bias13=RAW.b13,
        bias2=RAW.b2,
    )
    want = oracle("A16W4", activation="situv2", limit=2.0, beta=3.0, linear_beta=11.0, bias=True)
    assert relative_error(run(req), want) < 1e-5
    assert relative_error(run(replace(req, limit=None)), want) > 0.05
    assert relative_error(run(replace(req, bias13=None)), want) > 0.01


def test_weight_on_input():
    req = request("A16W4", weight_on_input=True, weight_on_output=False)
    assert relative_error(run(req), oracle("A16W4", activation="silu", weight_on_input=True)) < 1e-5


@pytest.mark.parametrize("mode", ["A16W4", "A4W4"])
def test_skipped_columns(mode):
    req = request(
        mode,
        hidden_skip_k=64,
        hidden_skip_n=64,
        intermediate_skip_n=32,
        intermediate_skip_k=32,
        requantization="epilogue",
    )
    routed = pc.Routed(ROUTED.x.clone(), ROUTED.ids, ROUTED.weights)
    routed.x[:, -64:] = float("nan")  # never read
    out = run(req, routed)
    assert not out[:, -64:].any()
    want = oracle(mode, activation="silu", hidden_pad=64, intermediate_pad=32)
    assert relative_error(out, want) < 1e-5


def test_expert_mask_and_num_local_tokens():
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 1, 1, 0], dtype=torch.int32)  # 9 global, 6 local
    routed = pc.random_routing(M, 9, 3, H, seed=2)
    out = run(request("A16W4", expert_mask=mask), routed)
    want = oracle("A16W4", routed, activation="silu", expert_mask=mask)
    assert relative_error(out, want) < 1e-5
    for count in (4, torch.tensor([4], dtype=torch.int32)):
        part = run(request("A16W4", expert_mask=mask, num_local_tokens=count), routed)
        assert relative_error(part[:4], out[:4]) < 1e-5 and not part[4:].any()


def test_all_experts_masked():
    req = request("A16W4", expert_mask=torch.zeros(E, dtype=torch.int32))
    assert not run(req).any()


@pytest.mark.parametrize("bad", [-1, E])
def test_ids_out_of_range(bad):
    ids = ROUTED.ids.clone()
    ids[3, 1] = bad
    with pytest.raises(IndexError, match=str(bad)):
        run(request("A16W4"), pc.Routed(ROUTED.x, ids, ROUTED.weights))


def test_per_slot_output():
    slots = run(request("A16W4"), out=torch.empty(M, K, H, dtype=torch.float32))
    assert relative_error(slots.sum(1), run(request("A16W4"))) < 1e-6


def test_many_rows_of_one_expert(monkeypatch):
    whole = run(request("A4W4", requantization="epilogue"))
    monkeypatch.setattr(cpu, "MAX_ROWS", 2)
    assert relative_error(run(request("A4W4", requantization="epilogue")), whole) < 1e-6


def test_only_active_experts_are_decoded(monkeypatch):
    decoded = []
    original = cpu._Experts.w13
    monkeypatch.setattr(cpu._Experts, "w13", lambda s, e: (decoded.append(e), original(s, e))[1])
    run(request("A16W4"))
    assert sorted(decoded) == sorted(set(ROUTED.ids.reshape(-1).tolist()))


def test_nan_scale_and_infinite_input_reach_the_output():
    raw = replace(RAW, w2_scale=RAW.w2_scale.clone())
    raw.w2_scale[int(ROUTED.ids[0, 0]), 0, 0] = 0xFF
    out = run(request("A16W4"), raw=raw)
    assert out[0, 0].isnan() and not out[:, 1:].isnan().any()


def test_selection():
    assert backends.select(torch.device("cpu")) is cpu
    with backends.forced("cpu"):
        assert backends.select(torch.device("cuda")) is cpu
    with pytest.raises(ValueError, match="unknown backend"), backends.forced("rocm"):
        pass
    assert portable.current().machine.arch == "gfx950"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
