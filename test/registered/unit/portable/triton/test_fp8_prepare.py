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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
