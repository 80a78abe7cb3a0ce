"""The fp8 form's blocks and its columns of x, run by Triton's interpreter, against plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

pytest.importorskip("triton")

CASES = ("random", "one-expert", "holes", "mask", "local-tokens")


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    child = subprocess.run(
        [sys.executable, "-m", "sglang_aiter_moe.testing.fp8_prepare_cases"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return {row["case"]: row for row in map(json.loads, child.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("what", ["blocks", "columns", "cleared"])
def test_prepare(results, name, rows, what):
    assert results[f"{name}-{rows}"][what], results[f"{name}-{rows}"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
