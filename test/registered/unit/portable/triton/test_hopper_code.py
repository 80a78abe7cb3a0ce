"""What the compiler made of the Hopper forms, without a GPU: nothing exchanged between lanes, nothing staged, few
instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

triton = pytest.importorskip("triton")

STAGING = ("LDS", "STS", "LDSM", "STSM", "SHFL", "BAR")
# Fragments straight from global memory are the compiler's choice in the bf16 forms; Triton after 3.6 makes another one.
PLAIN_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6)
BF16 = {"bf16 stage 1 list": 3.2, "bf16 stage 1 tokens": 3.3, "bf16 stage 2 list, K 2880": 3.4}
FP8 = {
    "fp8 stage 1": 2.2,
    "fp8 stage 1 gui": 2.2,
    "fp8 stage 1 A8W4": 2.5,
    "fp8 stage 2, K 2880": 2.4,
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "sglang_aiter_moe.testing.hopper_compile"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    rows = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert rows, child.stderr[-3000:]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("name", FP8)
def test_fp8_loop_has_no_staging_and_few_instructions(results, name):
    row = results[name]
    assert not [op for op in STAGING if op in row["mix"]], row
    assert row["mix"]["QGMMA"] == 8 and row["spills"] == 0, row
    assert row["instructions_per_weight"] <= FP8[name], row


@pytest.mark.skipif(
    not PLAIN_TRITON, reason="Triton after 3.6 stages the bf16 fragments through shared memory"
)
@pytest.mark.parametrize("name", BF16)
def test_bf16_loop_has_no_staging_and_few_instructions(results, name):
    row = results[name]
    assert not [op for op in STAGING if op in row["mix"]], row
    assert row["mix"]["HMMA"] and row["spills"] == 0, row
    assert row["instructions_per_weight"] <= BF16[name], row


def test_prefill_weights_never_touch_shared_memory(results):
    """Tokens arrive by cp.async (LDGSTS) and leave through wgmma's descriptors: no load or store of shared memory."""
    mix = results["prefill stage 1"]["mix"]
    assert mix["HGMMA"] == 8 and "LDGSTS" in mix, mix
    assert not [op for op in ("LDS", "STS", "LDSM", "STSM", "SHFL") if op in mix], mix


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
