"""Whole layers of every Hopper form: compiled for sm_90a, their PTX executed, against the oracle.

The forms are written for Triton 3.6; what the installed Triton compiles is executed (docs/kernel-notes.md, "Cautions").
``python -m sglang_aiter_moe.testing.hopper_cases`` executes all forms on all shapes.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=140, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.nvptx.layer import run_layer  # noqa: E402
from sglang_aiter_moe.portable.triton.hopper import table  # noqa: E402
from sglang_aiter_moe.testing import hopper_cases  # noqa: E402
from sglang_aiter_moe.testing.packing import pack_scale, pack_weight  # noqa: E402
from sglang_aiter_moe.testing.triton_cases import (  # noqa: E402
    Case,
    raw_experts,
    request,
    routing,
    run_case,
)

LAYERS = hopper_cases.layers()
SEED = 1
EXECUTED = [
    "tokens/A16W4/silu",
    "tokens-ragged/A16W4/small",
    "list/A16W4/k3-like",
    "list/A16W4/oss-like",
    "fp8/A16W4/oss-like",
    "fp8/A16W4/gui",
    "fp8/A8W4/k3-like",
    "fp8/A8W4/oss-gui",
    "fp8-8-warps/A16W4/oss-gui",
    "fp8-8-warps/A8W4/oss-like",
    "fp8-queue/A16W4/k3-like",
    "fp8-queue/A8W4/oss-gui",
    "fp8-queue-row/A8W4/oss-like",
    "fp8-row/A8W4/k3-like",
    "fp8-row-8/A8W4/oss-like",
    "prefill/A16W4/k3-like",
    "prefill/A16W4/oss-gui",
    "prefill/A8W4/oss-like",
    "prefill-4-warps/A4W4/gui",
    "prefill-256-rows/A16W4/silu",
    "whole/A16W4/oss-gui",
    "whole-2-slots/A16W4/silu",
    "whole-halves/A16W4/oss-like",
    "whole-halves/A16W4/oss-gui",
    "whole-narrow/A16W4/oss-gui",
    "whole-narrow/A16W4/steps",
    "whole-narrow-2-slots/A16W4/oss-like",
    "mx_prefill/A8W4/oss-gui",
    "mx_prefill/A4W4/k3-like",
    "mx_prefill-4-warps/A8W4/gui",
    "mx_prefill-wide/A4W4/small",
    "shared_prefill/A8W4/oss-gui",
    "shared_prefill-wide/A4W4/k3-like",
    "shared_prefill-4-loaders/A8W4/gui",
    "shared_prefill-3-groups/A8W4/oss-like",
    "shared_prefill-4-groups/A4W4/k3-like",
    "wide/A8W4/k3-like",
    "wide-two/A4W4/oss-gui",
    "wide-4-warps/A8W4/gui",
]
"""Each form, mode, layout and shape (K3's, gpt-oss's) at least once."""


@pytest.mark.parametrize("name", EXECUTED)
def test_matches_the_oracle(name):
    form, case = LAYERS[name]
    row = hopper_cases.execute(form, case, SEED, multiprocessors=16)
    assert row["right"], row


def test_a_row_for_every_form_and_mode():
    wanted = {(form, mode) for form in hopper_cases.FORMS for mode in hopper_cases.modes(form)}
    got = {tuple(name.split("/")[:2]) for name in EXECUTED}
    assert {form for form, _ in wanted} == {form for form, _ in got}
    assert {mode for _, mode in wanted} == {mode for _, mode in got}


def test_sums_of_fp8_products_with_as_few_bits_as_hardware():
    """Still within the bound, and not what exact sums give."""
    form, case = LAYERS["fp8/A8W4/small"]
    rows = [hopper_cases.execute(form, case, SEED, fp8_bits=bits) for bits in (None, 13, 3)]
    assert rows[0]["right"] and rows[1]["right"] and not rows[2]["right"]
    assert rows[0]["rel_err"] != rows[1]["rel_err"]


@pytest.mark.parametrize(
    ("name", "processors"),
    [
        ("fp8/A16W4/one-expert", 1),
        ("fp8/A16W4/one-expert", 3),
        ("shared_prefill/A8W4/mask", 2),
        ("wide-two/A8W4/one-expert", 3),
    ],
)
def test_persistent_programs_that_take_several_turns(name, processors):
    """A ring that goes round, and blocks of several experts in one program."""
    form, case = LAYERS[name]
    assert hopper_cases.execute(form, case, SEED, multiprocessors=processors)["right"]


@pytest.mark.parametrize(("mode", "tokens"), [("A16W4", 1), ("A16W4", 6), ("A8W4", 2), ("A4W4", 3)])
def test_what_the_table_takes(mode, tokens):
    """The entry that ``portable.triton.run`` has on an H200, with the form that the table chooses there."""
    launches = []
    case = Case("table", mode, tokens=tokens, hidden=512, inter=128, experts=8, topk=4)
    row = run_case(
        case, "cpu", SEED,
        lambda r, *o: launches.extend(run_layer(r, *o, multiprocessors=16)),
    ) | {"mode": mode}  # fmt: skip
    assert hopper_cases.right("mx_prefill", row), row
    assert table.load()[f"{mode} short"] and launches
    assert "count_kernel" not in [launch.kernel for launch in launches]  # not the portable form


def test_tokens_that_the_host_leaves_out_are_zero():
    case = Case("local", tokens=5, hidden=256, inter=64)
    g = torch.Generator().manual_seed(SEED)
    experts = raw_experts(case, g)
    x = torch.randn(5, case.hidden, generator=g).bfloat16()
    ids, weights = routing(case, g)
    packed = [pack_weight(t, "separated") for t in (experts.w13, experts.w2)]
    packed += [pack_scale(t, "separated") for t in (experts.w13_scale, experts.w2_scale)]
    whole, part = torch.ones_like(x), torch.ones_like(x[:3])
    r = request(case, experts, "cpu")
    left_out = dataclasses.replace(r, num_local_tokens=3)
    form = hopper_cases.FORMS["fp8"]
    run_layer(left_out, x, *packed, weights, ids, whole, form=form, multiprocessors=4)
    run_layer(r, x[:3], *packed, weights[:3], ids[:3], part, form=form, multiprocessors=4)
    assert torch.equal(whole[:3], part) and not whole[3:].any() and part.any()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
