"""The oracle against numbers by hand: modes, requantisation rules, dtypes, row orders, NaN and stage 1."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe.numerics import RawExperts, relative_error, routed_moe
from sglang_aiter_moe.numerics.oracle import requantize
from sglang_aiter_moe.testing.moe_reference import moe_by_hand, rows_by_hand
from sglang_aiter_moe.testing.oracle_inputs import (
    BIASED,
    IDS,
    RAW,
    WEIGHTS,
    H,
    I,
    K,
    M,
    X,
    interleaved,
    make_experts,
    run,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


@pytest.mark.parametrize("mode", [None, "A16W4", "A8W4", "A4W4"])
@pytest.mark.parametrize(
    ("activation", "limit", "bias", "weight_on_input", "order"),
    [
        ("silu", None, False, False, "halves"),
        ("silu", 1.5, True, True, "interleaved"),
        ("swiglu", None, True, False, "interleaved"),
        ("swiglu", 0.75, False, True, "halves"),
        ("situv2", None, False, False, "halves"),
        ("situv2", 2.0, True, False, "halves"),
    ],
)
def test_against_numbers_by_hand(mode, activation, limit, bias, weight_on_input, order):
    experts = BIASED if bias else RAW
    experts = interleaved(experts) if order == "interleaved" else experts
    args = (X[:3], experts, IDS[:3], WEIGHTS[:3])
    kwargs = {"mode": mode, "limit": limit, "weight_on_input": weight_on_input}
    expected = moe_by_hand(*args, activation, **kwargs)
    got = routed_moe(*args, activation=activation, **kwargs)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


# --- modes and requantisation rules -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["A8W4", "A4W4"])
@pytest.mark.parametrize(
    ("requantization", "rule"), [("roundup", "up_from_bf16"), ("roundup_fp32", "up")]
)
def test_requantisation_rules(mode, requantization, rule):
    args = (X[:3], RAW, IDS[:3], WEIGHTS[:3])
    expected = moe_by_hand(*args, "situv2", mode=mode, rule=rule)
    got = routed_moe(*args, activation="situv2", mode=mode, requantization=requantization)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_the_rules_and_modes_are_told_apart():
    """Each pair differs by far more than the tolerance above, or the tests above could not tell them apart."""
    outputs = {
        (mode, rule): routed_moe(
            X, RAW, IDS, WEIGHTS, activation="situv2", mode=mode, requantization=rule
        )
        for mode in ("A8W4", "A4W4")
        for rule in ("roundup", "roundup_fp32")  # "epilogue" differs in rare values only: see below
    }
    for mode in (None, "A16W4"):
        outputs[mode] = routed_moe(X, RAW, IDS, WEIGHTS, activation="situv2", mode=mode)
    names = list(outputs)
    close = [
        (a, b)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if relative_error(outputs[a], outputs[b]) < 1e-6
    ]
    assert close == []


def test_where_the_epilogue_differs_from_roundup():
    """A4W4: an amax of exactly 6. A8W4: an amax of mantissa 1.5 to 1.75 over values that the format barely holds."""
    y = torch.zeros(1, 32, dtype=torch.float64)
    y[0, :2] = torch.tensor([6.0, 5.0])
    assert requantize(y, "A4W4", "roundup_fp32")[0, :2].tolist() == [6.0, 4.0]  # 5 is a tie
    assert requantize(y, "A4W4", "epilogue")[0, :2].tolist() == [6.0, 4.0]  # 2 * 2.5, a tie too
    y[0, :3] = torch.tensor([6.0, 5.5, 1.5])
    assert requantize(y, "A4W4", "roundup_fp32")[0, :3].tolist() == [6.0, 6.0, 1.5]
    assert requantize(y, "A4W4", "epilogue")[0, :3].tolist() == [6.0, 6.0, 2.0]
    y[0, :2] = torch.tensor([400.0, 0.005])
    step = 2.0**-9
    assert requantize(y, "A8W4", "roundup_fp32")[0, :2].tolist() == [384.0, 3 * step]
    assert requantize(y, "A8W4", "epilogue")[0, :2].tolist() == [384.0, 1 * 2 * step]


def test_roundup_starts_from_bfloat16_and_roundup_fp32_does_not():
    y = torch.zeros(1, 32, dtype=torch.float64)
    y[0, :2] = torch.tensor([6.0, 3.501])  # 3.5, a tie, in bfloat16
    y[0, 2] = 2.501
    assert requantize(y, "A4W4", "roundup")[0, :3].tolist() == [6.0, 4.0, 2.0]
    assert requantize(y, "A4W4", "roundup_fp32")[0, :3].tolist() == [6.0, 4.0, 3.0]
    assert requantize(y, "A16W4", "roundup")[0, :3].tolist() == [6.0, 3.5, 2.5]
    assert requantize(y, None, "roundup") is y


def test_a16w4_rounds_wide_input_to_16_bits():
    x = X.float() * 1.001
    assert torch.equal(run(x=x, mode="A16W4"), run(x=x.bfloat16(), mode="A16W4"))
    assert not torch.equal(run(x=x), run(x=x.bfloat16()))
    half = X.half()
    assert torch.equal(run(x=half, mode="A16W4"), run(x=half.float(), mode="A16W4"))  # X fits both


@pytest.mark.parametrize("mode", [None, "A16W4", "A8W4", "A4W4"])
def test_float32_is_close(mode):
    # A code may flip where float32 rounds the other way.
    assert relative_error(run(mode=mode, dtype=torch.float32), run(mode=mode)) < 1e-2
    assert run(mode=mode, dtype=torch.float32).dtype == torch.float32
    if mode is None:
        assert relative_error(run(dtype=torch.float32), run()) < 1e-5


# --- weights, NaN, stage 1, progress ----------------------------------------------------------------------


def test_row_orders_give_the_same_and_a_wrong_one_does_not():
    mixed = interleaved(BIASED)
    assert torch.equal(run(mixed, mode="A8W4"), run(BIASED, mode="A8W4"))
    assert relative_error(run(replace(mixed, gate_up_interleaved=False)), run(BIASED)) > 0.3


def test_weights_may_have_any_strides():
    """Also one expert shown as many, which would not fit in memory if it were copied."""
    one = make_experts(experts=1)
    names = ("w13", "w13_scale", "w2", "w2_scale")
    many = RawExperts(*(getattr(one, n).expand(100_000, -1, -1) for n in names))
    ids = torch.tensor([[0, 99_999, 500]] * M)
    torch.testing.assert_close(
        run(many, ids=ids), run(one, ids=torch.zeros_like(ids)), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("mode", [None, "A16W4", "A8W4", "A4W4"])
def test_nan_reaches_exactly_the_tokens_that_use_it(mode):
    x = X.clone()
    x[2, 5] = math.nan
    assert run(x=x, mode=mode).isnan().any(1).tolist() == [i == 2 for i in range(M)]
    scale = RAW.w2_scale.clone()
    scale[3, 10, 1] = 0xFF
    bad = run(replace(RAW, w2_scale=scale), mode=mode).isnan()
    assert bad.any(1).tolist() == (IDS == 3).any(1).tolist()
    assert bad.any(0).tolist() == [h == 10 for h in range(H)]


@pytest.mark.parametrize("mode", [None, "A16W4", "A8W4", "A4W4"])
def test_stage1_holds_what_stage2_multiplies_with(mode):
    ids = IDS.clone()
    ids[1, 1] = -1
    stage1 = torch.full((M, K, I), 9.0, dtype=torch.float64)
    out = run(ids=ids, mode=mode, stage1=stage1)
    assert (stage1[1, 1] == 9.0).all()
    for token in range(M):
        total = torch.zeros(H, dtype=torch.float64)
        for slot, e in enumerate(ids[token].tolist()):
            if e >= 0:
                w2 = torch.tensor(rows_by_hand(RAW.w2[e], RAW.w2_scale[e]), dtype=torch.float64)
                total += WEIGHTS[token, slot].double() * (w2 @ stage1[token, slot])
        torch.testing.assert_close(out[token], total)


def test_progress_counts_active_experts():
    seen = []
    run(ids=torch.tensor([[0, 3, -1]] * M), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
