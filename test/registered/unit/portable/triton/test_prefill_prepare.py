"""The prefill form's blocks and its order of x, run by Triton's interpreter, against plain torch."""

from __future__ import annotations

import sys

import pytest

from sglang_aiter_moe.testing import interpreted
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

pytest.importorskip("triton")

CASES = ("random", "one-expert", "holes", "mask", "local-tokens")


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return interpreted.rows("prefill_prepare_cases")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["blocks", "counts", "order"])
def test_prepare(results, name, what):
    assert results[name][what], results[name]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
