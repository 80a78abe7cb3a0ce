"""Every row of the AMD tables and every option, compiled and executed, against the oracle."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=170, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.amdgpu.layer import run_layer  # noqa: E402
from sglang_aiter_moe.docsite import executed  # noqa: E402
from sglang_aiter_moe.portable.triton import table  # noqa: E402
from sglang_aiter_moe.testing import amd_cases  # noqa: E402
from sglang_aiter_moe.testing.packing import pack_scale, pack_weight  # noqa: E402
from sglang_aiter_moe.testing.triton_cases import (  # noqa: E402
    CASES,
    Case,
    raw_experts,
    request,
    routing,
)

LAYERS = amd_cases.layers()
OPTIONS = [
    name for name in CASES if not name.endswith("no-tokens")
]  # no tokens: nothing is launched
SEED = 1


@pytest.mark.parametrize("name", LAYERS)
def test_matches_the_oracle(name):
    arch, case = LAYERS[name]
    row = amd_cases.execute(arch, case, SEED)
    assert row["finite"] and row["guards"], row
    assert row["rel_err"] < amd_cases.LIMIT[case.mode], row
    assert row["cpu_err"] < amd_cases.LIMIT[case.mode], row
    kernels = [launch["kernel"] for launch in row["launches"]]
    quantise = [] if case.mode == "A16W4" else ["quantize_input_kernel"]
    sort = ["count_kernel", "place_kernel"]
    assert kernels == [*sort, *quantise, "stage1_kernel", "stage2_kernel", "combine_kernel"]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    """Layouts, activations, masks, padding, unused slots and the other options of a call, on gfx950."""
    case = CASES[name]
    row = amd_cases.execute("gfx950", case, SEED)
    assert row["finite"] and row["guards"] and row["same_bits"], row
    assert max(row["rel_err"], row["cpu_err"]) < amd_cases.LIMIT[case.mode], row


def test_tokens_that_the_host_leaves_out():
    """``num_local_tokens`` as a number gives what the fewer tokens give, and zeros."""
    case = Case("local", tokens=5, hidden=128, inter=64)
    g = torch.Generator().manual_seed(SEED)
    experts = raw_experts(case, g)
    x = torch.randn(5, 128, generator=g).bfloat16()
    ids, weights = routing(case, g)
    packed = [pack_weight(t, "separated") for t in (experts.w13, experts.w2)]
    packed += [pack_scale(t, "separated") for t in (experts.w13_scale, experts.w2_scale)]
    whole, part = torch.ones_like(x), torch.ones_like(x[:3])
    left_out = dataclasses.replace(request(case, experts, "cpu"), num_local_tokens=3)
    run_layer("gfx950", left_out, x, *packed, weights, ids, whole)
    run_layer("gfx950", request(case, experts, "cpu"), x[:3], *packed, weights[:3], ids[:3], part)
    assert torch.equal(whole[:3], part) and not whole[3:].any() and part.any()


def test_covers_the_tables():
    """Every row of both tables; every layer takes the row that it is named after."""
    expected = {
        (arch, mode, config.m)
        for arch in ("gfx942", "gfx950")
        for mode, rows in table.load(arch).items()
        for _, config in rows
    }
    assert len(expected) == 14
    for shape in ("k3", "gpt-oss"):
        mine = {n: layer for n, layer in LAYERS.items() if f"-{shape}-" in n}
        assert {(arch, case.mode, case.tokens) for arch, case in mine.values()} == expected
    for arch, case in LAYERS.values():
        rows = case.tokens * case.topk / case.experts
        assert table.choose(arch, case.mode, rows).m == rows == case.tokens


def test_the_page_shows_each_of_them():
    """docs/amd-execution.md is written from this file."""
    shown = {row["case"]: row for row in executed.layer_rows()}
    assert list(shown) == list(LAYERS)
    assert all(amd_cases.right(row) and row["right"] for row in shown.values())


def test_the_comparison_bites():
    """A product with the wrong sign in stage 1 is out of the tolerance (how much is noticed: test_mutation.py)."""

    def edit(name: str, text: str) -> str:
        return text.replace("v_pk_mul_f32", "v_pk_add_f32") if name == "stage1_kernel" else text

    arch, case = LAYERS["gfx950-A4W4-k3-16"]
    row = amd_cases.execute(arch, case, SEED, edit=edit)
    assert not amd_cases.right(row | {"mode": case.mode})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
