"""AITER's own ``fused_moe`` signature reaches the Triton backend, and it agrees with the CPU backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

pytest.importorskip("triton")


def test_fused_moe_agrees_between_backends():
    child = subprocess.run(
        [sys.executable, "-m", "sglang_aiter_moe.testing.triton_entry"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    rows = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert {row["mode"] for row in rows} == {"A16W4", "A8W4", "A4W4"}
    for row in rows:
        assert 0 < row["rel_err"] < 8e-3, row


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
