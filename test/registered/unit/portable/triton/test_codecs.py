"""Block quantisation of the kernels, run by Triton's interpreter, against ``numerics``: NaN of every maker, Inf, 0."""

from __future__ import annotations

import sys

import pytest

from sglang_aiter_moe.testing import interpreted
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return interpreted.rows("codec_cases")


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("rule", ["epilogue", "roundup", "even"])
def test_scales_and_values_are_those_of_numerics(results, fmt, rule):
    row = results[f"{fmt}-{rule}"]
    assert row["scales"] == row["values"] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
