"""The fp8 form's blocks and its columns of x, run by Triton's interpreter, against plain torch."""

from __future__ import annotations

import sys

import pytest

from sglang_aiter_moe.testing import interpreted
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

pytest.importorskip("triton")

CASES = ("random", "one-expert", "holes", "mask", "local-tokens")


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return interpreted.rows("fp8_prepare_cases")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("what", ["blocks", "columns", "cleared"])
def test_prepare(results, name, rows, what):
    assert results[f"{name}-{rows}"][what], results[f"{name}-{rows}"]


@pytest.mark.parametrize("spread", ["0.5", "4"])
@pytest.mark.parametrize("what", ["exact", "small", "nan"])
def test_one_scale_a_row_keeps_mxfp8_values(results, spread, what):
    assert results[f"by-row-{spread}"][what], results[f"by-row-{spread}"]


def test_what_lies_far_below_a_rows_largest_is_rounded(results):
    assert results["by-row-0.5"]["lossless"] and not results["by-row-4"]["lossless"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
