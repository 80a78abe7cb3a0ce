"""Hopper forms of layers with NaN, Inf, 0 and 255 in tokens, scales, biases and paddings, executed instruction by
instruction on a CPU (``nvptx``), and the one-launch form where its counter wraps and where its slots are many."""

from __future__ import annotations

import sys

import pytest
import torch

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=145, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.portable.triton import workspace  # noqa: E402
from sglang_aiter_moe.testing import hopper_cases  # noqa: E402

LAYERS = hopper_cases.layers()
HOSTILE = (
    "list/A16W4/hostile-columns",
    "fp8/A16W4/hostile-experts",
    "fp8/A16W4/hostile-tokens",
    "fp8/A8W4/hostile-experts",
    "fp8-row/A8W4/hostile-experts",
    "whole/A16W4/hostile-tokens",
    "whole/A16W4/hostile-experts",
    "whole/A16W4/hostile-slots",
    "whole-halves/A16W4/hostile-tokens",
    "whole-halves/A16W4/hostile-experts",
    "whole-narrow/A16W4/hostile-tokens",
    "whole-narrow/A16W4/hostile-experts",
    "whole-narrow/A16W4/hostile-slots",
    "prefill/A4W4/hostile-tokens",
    "mx_prefill/A4W4/hostile-tokens",
    "shared_prefill/A8W4/hostile-experts",
    "shared_prefill/A4W4/hostile-tokens",
    "wide/A8W4/hostile-tokens",
    "wide-two/A4W4/hostile-experts",
)
"""Each was wrong once, but those of one scale a row, of halves, of tiles of 16 rows and of the last two forms."""


def execute(name: str) -> dict:
    form, case = LAYERS[name]
    return hopper_cases.execute(form, case, seed=2, multiprocessors=3)


@pytest.mark.parametrize("name", HOSTILE)
def test_not_a_number_where_the_oracle_has_none_and_the_same_elsewhere(name):
    row = execute(name)
    assert row["right"], row


@pytest.mark.parametrize("name", ["many-slots"])
def test_more_slots_than_registers_hold(name):
    row = execute(f"whole-2-slots/A16W4/{name}")
    assert row["right"], row


@pytest.mark.parametrize("start", [2**31 - 1024, -1024])
def test_programs_meet_where_their_counter_wraps(monkeypatch, start):
    made = []

    def zeros(device, size):
        made.append(torch.full((size,), start, dtype=torch.int32))
        return made[-1]

    monkeypatch.setattr(workspace, "_zeros", zeros)
    row = execute("whole/A16W4/small")  # runs twice
    assert row["right"] and len(row["launches"]) == 2, row
    (counter,) = made
    assert (counter.item() - start - 2 * 1024) % 2**32 == 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
