"""The portable form under Triton's interpreter against the oracle: every mode, layout, activation and option."""

from __future__ import annotations

import sys

import pytest

from sglang_aiter_moe.testing import interpreted
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.triton_cases import CASES

register_cpu_ci(est_time=150, suite="base-a-test-cpu")

pytest.importorskip("triton")

# One bf16 rounding of the output is 1.7e-3; a rounding of each of the top-k parts adds as much again.
LIMIT = {"A16W4": 4e-3, "A8W4": 6e-3, "A4W4": 1.5e-2}


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return interpreted.rows("triton_cases", timeout=500)


@pytest.mark.parametrize("name", [*CASES, "form-tokens", "form-list"])
def test_matches_oracle_and_cpu_backend(results, name):
    row = results[name]
    limit = LIMIT[CASES[name].mode if name in CASES else "A16W4"]
    assert row["finite"], row
    assert row["rel_err"] < limit, row
    # Two results, each within the limit of the oracle and rounded on its own.
    assert row["cpu_err"] < limit * 2**0.5, row
    assert row["same_bits"], row
    assert row["guards"], row


def test_compares_with_something_else(results):
    """The comparison bites: other weights give other outputs (the cases' seeds differ from run to run)."""
    assert all(row["rel_err"] > 0 for name, row in results.items() if "no-tokens" not in name)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
