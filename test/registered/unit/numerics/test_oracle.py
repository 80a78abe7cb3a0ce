import ast
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_aiter_moe import numerics
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics import RawExperts, relative_error, routed_moe
from sglang_aiter_moe.numerics.oracle import local_expert_ids, requantize
from sglang_aiter_moe.testing.moe_reference import moe_by_hand, rows_by_hand
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

E, H, I, M, K = 5, 96, 64, 7, 3


def make_experts(seed=0, experts=E, hidden=H, inter=I, bias=False) -> RawExperts:
    rng = np.random.default_rng(seed)

    def draw(low, high, *shape):
        return torch.from_numpy(rng.integers(low, high, shape, dtype=np.uint8))

    biases = {}
    if bias:
        biases = {
            "b13": torch.from_numpy(rng.standard_normal((experts, 2 * inter), dtype=np.float32)),
            "b2": torch.from_numpy(rng.standard_normal((experts, hidden), dtype=np.float32)),
        }
    return RawExperts(
        draw(0, 256, experts, 2 * inter, hidden // 2),
        draw(120, 125, experts, 2 * inter, hidden // 32),
        draw(0, 256, experts, hidden, inter // 2),
        draw(120, 125, experts, hidden, inter // 32),
        **biases,
    )


def make_tokens(seed=1, tokens=M, hidden=H):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((tokens, hidden), dtype=np.float32)).bfloat16()
    ids = np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
    weights = torch.from_numpy(rng.random((tokens, K), dtype=np.float32))
    return x, torch.from_numpy(ids), weights


X, IDS, WEIGHTS = make_tokens()
RAW = make_experts()
BIASED = make_experts(bias=True)


def interleaved(experts: RawExperts) -> RawExperts:
    """The same experts with rows g0, u0, g1, u1, ..."""
    inter = experts.intermediate_size
    order = [half * inter + i for i in range(inter) for half in (0, 1)]
    pick = {n: getattr(experts, n)[:, order] for n in ("w13", "w13_scale")}
    if experts.b13 is not None:
        pick["b13"] = experts.b13[:, order]
    return replace(experts, gate_up_interleaved=True, **pick)


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
        for rule in ("epilogue", "roundup", "roundup_fp32")
        if rule != "epilogue"  # differs from roundup_fp32 in rare values only: see below
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


def run(experts=RAW, x=X, ids=IDS, weights=WEIGHTS, **kwargs):
    return routed_moe(x, experts, ids, weights, **({"activation": "situv2"} | kwargs))


@pytest.mark.parametrize("mode", [None, "A16W4", "A8W4", "A4W4"])
def test_float32_is_close(mode):
    # A code may flip where float32 rounds the other way.
    assert relative_error(run(mode=mode, dtype=torch.float32), run(mode=mode)) < 1e-2
    assert run(mode=mode, dtype=torch.float32).dtype == torch.float32
    if mode is None:
        assert relative_error(run(dtype=torch.float32), run()) < 1e-5


def test_row_orders_give_the_same_and_a_wrong_one_does_not():
    mixed = interleaved(BIASED)
    assert torch.equal(run(mixed, mode="A8W4"), run(BIASED, mode="A8W4"))
    assert relative_error(run(replace(mixed, gate_up_interleaved=False)), run(BIASED)) > 0.3


def test_a16w4_rounds_wide_input_to_16_bits():
    x = X.float() * 1.001
    assert torch.equal(run(x=x, mode="A16W4"), run(x=x.bfloat16(), mode="A16W4"))
    assert not torch.equal(run(x=x), run(x=x.bfloat16()))
    half = X.half()
    assert torch.equal(run(x=half, mode="A16W4"), run(x=half.float(), mode="A16W4"))  # X fits both


# --- routing


def test_order_of_tokens_and_slots_does_not_matter():
    order = torch.randperm(M, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        run(x=X[order], ids=IDS[order], weights=WEIGHTS[order]), run()[order]
    )
    torch.testing.assert_close(run(ids=IDS.flip(1), weights=WEIGHTS.flip(1)), run())


def test_an_expert_may_appear_twice_in_a_row():
    twice = IDS.clone()
    twice[:, 1] = twice[:, 0]
    once, weights = IDS.clone(), WEIGHTS.clone()
    once[:, 1] = -1
    weights[:, 0] += weights[:, 1]
    torch.testing.assert_close(run(ids=twice), run(ids=once, weights=weights), rtol=1e-6, atol=1e-6)


def test_unused_slots_contribute_nothing_whatever_they_hold():
    ids, weights = IDS.clone(), WEIGHTS.clone()
    ids[:, 2] = -1
    weights[:, 2] = math.nan
    torch.testing.assert_close(
        run(ids=ids, weights=weights), run(ids=IDS[:, :2], weights=WEIGHTS[:, :2])
    )
    assert not run(ids=torch.full_like(IDS, -1)).any()


@pytest.mark.parametrize("shape", [(0, K), (M, 0), (0, 0)])
def test_nothing_to_do(shape):
    out = run(
        x=X[: shape[0]], ids=IDS[: shape[0], : shape[1]], weights=WEIGHTS[: shape[0], : shape[1]]
    )
    assert out.shape == (shape[0], H) and not out.any()


def shard(experts: RawExperts, mask: torch.Tensor) -> RawExperts:
    local = {n: getattr(experts, n)[mask.bool()] for n in ("w13", "w13_scale", "w2", "w2_scale")}
    return replace(experts, **local)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_expert_parallel_ranks_add_up(dtype):
    masks = [
        torch.tensor(m, dtype=dtype) for m in ([0, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0])
    ]
    parts = [run(shard(RAW, mask), expert_mask=mask) for mask in masks]
    torch.testing.assert_close(sum(parts), run())
    assert all(part.any() for part in parts)


def test_a_masked_sink_slot_contributes_nothing():
    """Expert parallelism as AITER wants it: one more global expert that is never local."""
    ids = torch.cat((IDS, torch.full((M, 1), E, dtype=torch.int32)), dim=1)
    weights = torch.cat((WEIGHTS, torch.ones(M, 1)), dim=1)
    mask = torch.tensor([1] * E + [0], dtype=torch.int32)
    torch.testing.assert_close(run(ids=ids, weights=weights, expert_mask=mask), run())


def test_local_index_counts_the_local_experts_before():
    mask = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2], [3, 4, -1]])
    assert local_expert_ids(ids, 3, mask).tolist() == [[-1, 0, 1], [-1, 2, -1]]
    assert local_expert_ids(ids, 5).tolist() == ids.tolist()


# --- padding


def padded(
    experts: RawExperts, hidden_pad: int, inter_pad: int, fill: int, scale: int
) -> RawExperts:
    """``experts`` in larger tensors whose padding is filled with bytes."""
    h, i = experts.hidden_size, experts.intermediate_size
    big_h, big_i = h + hidden_pad, i + inter_pad

    def grow(tensor, value, *shape):
        return torch.full((experts.num_experts, *shape), value, dtype=tensor.dtype)

    w13, w13_scale = (
        grow(experts.w13, fill, 2 * big_i, big_h // 2),
        grow(experts.w13_scale, scale, 2 * big_i, big_h // 32),
    )
    for half in (0, 1):
        rows = slice(half * big_i, half * big_i + i)
        w13[:, rows, : h // 2] = experts.w13[:, half * i : (half + 1) * i]
        w13_scale[:, rows, : h // 32] = experts.w13_scale[:, half * i : (half + 1) * i]
    w2, w2_scale = (
        grow(experts.w2, fill, big_h, big_i // 2),
        grow(experts.w2_scale, scale, big_h, big_i // 32),
    )
    w2[:, :h, : i // 2], w2_scale[:, :h, : i // 32] = experts.w2, experts.w2_scale
    b13, b2 = grow(experts.b13, math.nan, 2 * big_i), grow(experts.b2, math.nan, big_h)
    for half in (0, 1):
        b13[:, half * big_i : half * big_i + i] = experts.b13[:, half * i : (half + 1) * i]
    b2[:, :h] = experts.b2
    return RawExperts(w13, w13_scale, w2, w2_scale, b13, b2)


@pytest.mark.parametrize("mode", [None, "A16W4", "A8W4", "A4W4"])
@pytest.mark.parametrize(("hidden_pad", "inter_pad"), [(32, 64), (0, 32), (64, 0)])
def test_padding_is_never_read(mode, hidden_pad, inter_pad):
    experts = padded(BIASED, hidden_pad, inter_pad, fill=0x77, scale=0xFF)  # NaN everywhere
    x = torch.cat((X, X.new_full((M, hidden_pad), math.nan)), dim=1)
    out = run(experts, x=x, mode=mode, hidden_pad=hidden_pad, intermediate_pad=inter_pad)
    torch.testing.assert_close(out[:, :H], run(BIASED, mode=mode))
    assert not out[:, H:].any()
    assert x[:, H:].isnan().all()  # the caller's tensor is left alone
    if hidden_pad:
        assert run(experts, x=x, mode=mode, intermediate_pad=inter_pad).isnan().any()
    if inter_pad:
        assert run(experts, x=x, mode=mode, hidden_pad=hidden_pad).isnan().any()


@pytest.mark.parametrize("mode", [None, "A8W4", "A4W4"])
def test_padding_may_end_within_a_block(mode):
    """gpt-oss at TP8: 360 columns in blocks of 32. Padding that holds zeros anyway may be declared or not."""
    inter_pad = 24
    w13, b13 = BIASED.w13.clone(), BIASED.b13.clone()
    for half in (0, 1):
        end = (half + 1) * I
        w13[:, end - inter_pad : end], b13[:, end - inter_pad : end] = 0, 0
    clean = replace(BIASED, w13=w13, b13=b13)
    declared = run(BIASED, mode=mode, activation="silu", intermediate_pad=inter_pad)
    torch.testing.assert_close(declared, run(clean, mode=mode, activation="silu"))
    assert relative_error(declared, run(BIASED, mode=mode, activation="silu")) > 0.1


@pytest.mark.parametrize("mode", [None, "A8W4", "A4W4"])
def test_input_padding_within_a_block_does_not_reach_its_scale(mode):
    hidden_pad = 24
    zeros, dirty = X.clone(), X.clone()
    zeros[:, H - hidden_pad :] = 0
    dirty[:, H - hidden_pad :] = math.nan
    expected = run(x=zeros, mode=mode)
    expected[:, H - hidden_pad :] = 0
    torch.testing.assert_close(run(x=dirty, mode=mode, hidden_pad=hidden_pad), expected)


# --- NaN, stage 1, progress, memory


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


def test_weights_may_have_any_strides():
    """Also one expert shown as many, which would not fit in memory if it were copied."""
    one = make_experts(experts=1)
    names = ("w13", "w13_scale", "w2", "w2_scale")
    many = RawExperts(*(getattr(one, n).expand(100_000, -1, -1) for n in names))
    ids = torch.tensor([[0, 99_999, 500]] * M)
    torch.testing.assert_close(
        run(many, ids=ids), run(one, ids=torch.zeros_like(ids)), rtol=1e-12, atol=1e-12
    )


# --- refusals


def raw(**changes):
    return replace(BIASED, **changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: raw(w13=BIASED.w13.float()), "w13 has dtype torch.float32"),
        (lambda: raw(w13=BIASED.w13[0]), r"w13 has shape \[128, 48\]"),
        (lambda: raw(w13=BIASED.w13[:, :-2]), r"w13 has shape \[5, 126, 48\]"),
        (lambda: raw(w13=BIASED.w13[:, :, :-8]), r"w13 has shape \[5, 128, 40\]"),
        (lambda: raw(w13_scale=BIASED.w13_scale[:, :, :-1]), r"w13_scale has shape \[5, 128, 2\]"),
        (lambda: raw(w13_scale=BIASED.w13_scale.float()), "w13_scale has dtype torch.float32"),
        (lambda: raw(w2=BIASED.w2[:-1]), r"w2 has shape \[4, 96, 32\]"),
        (lambda: raw(w2_scale=BIASED.w2_scale[:, :-1]), r"w2_scale has shape \[5, 95, 2\]"),
        (lambda: raw(b13=BIASED.b13[:, :I]), r"b13 has shape \[5, 64\]"),
        (lambda: raw(b2=BIASED.b2.int()), "b2 has dtype torch.int32"),
        (lambda: run(x=X[:, :-32]), r"x has shape \[7, 64\]"),
        (lambda: run(x=X.int()), "x has dtype torch.int32"),
        (lambda: run(x=X[0]), r"x has shape \[96\]"),
        (lambda: run(ids=IDS[:-1]), r"topk_ids has shape \[6, 3\]"),
        (lambda: run(ids=IDS[:-1], weights=WEIGHTS[:-1]), r"topk_ids has shape \[6, 3\]"),
        (lambda: run(weights=WEIGHTS[:, :-1]), r"topk_weights \[7, 2\]"),
        (lambda: run(ids=IDS.float()), "topk_ids has dtype torch.float32"),
        (lambda: run(ids=IDS + 1), "topk_ids holds ids from 1 to 5"),
        (lambda: run(ids=IDS - 2), "topk_ids holds ids from -2 to 2"),
        (
            lambda: run(expert_mask=torch.ones(4, dtype=torch.int32)),
            "topk_ids holds ids from 0 to 4",
        ),
        (lambda: run(expert_mask=torch.tensor([1, 1, 0, 1, 1])), "expert_mask marks 4 of 5"),
        (lambda: run(expert_mask=torch.tensor([0, 1, 2, 3, 4])), "expert_mask of shape"),
        (lambda: run(expert_mask=torch.tensor([0, 1, -1, 2, -1])), "global-to-local map"),
        (lambda: run(mode="a4w4"), "mode is 'a4w4'"),
        (lambda: run(requantization="even"), "requantization is 'even'"),
        (lambda: run(dtype=torch.bfloat16), "dtype is torch.bfloat16"),
        (lambda: run(hidden_pad=H), "hidden_pad is 96"),
        (lambda: run(intermediate_pad=-1), "intermediate_pad is -1"),
        (lambda: run(activation="relu"), "activation is 'relu'"),
        (lambda: run(beta=None), "beta is None"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ContractError, match=message):
        call()


def test_numerics_import_nothing_of_what_they_check():
    """Read from the syntax tree: torch, the standard library, errors, and each other."""
    package = Path(numerics.__file__).parent
    for source in sorted(package.glob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"relative import in {source.name}"
                names = [node.module]
            for name in names:
                own = (
                    name.startswith("sglang_aiter_moe.numerics.")
                    or name == "sglang_aiter_moe.errors"
                )
                assert own or name.split(".")[0] in {"torch", *sys.stdlib_module_names}, (
                    source.name,
                    name,
                )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
