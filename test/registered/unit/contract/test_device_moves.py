"""The GPU moves of the layouts, by Triton's interpreter and on a GPU, against the closed forms."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sglang_aiter_moe.testing.registration import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-a", runner_config="1-gpu-small")

pytest.importorskip("triton")


def rows(module, **environment):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    child = subprocess.run(
        [sys.executable, "-m", f"sglang_aiter_moe.testing.{module}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]


def judge(found):
    assert len(found) >= 70
    wrong = [row["case"] for row in found if not (row["packed"] and row["restored"])]
    assert not wrong


def test_interpreted():
    judge(rows("device_moves_cases", TRITON_INTERPRET="1", OMP_NUM_THREADS="1"))


def test_the_code_for_gfx950_and_h200():
    """A kernel that works in place reads all before it writes; whole 16-byte pieces; no spills."""
    found = rows("device_moves_compile")
    assert {row["arch"] for row in found} == {"gfx950", "sm_90"}
    for row in found:
        assert row["spills"] == 0, row
        if row["kernel"] in ("rotate", "rotate back", "permute"):
            assert row["barrier_before_store"], row
        if row["kernel"] in ("rotate", "rotate back", "copy"):
            wide = [n for n in row["stores"] if "x4" in n or ".v4" in n]
            assert wide == list(row["stores"]), row
            assert any("x4" in n or ".v4" in n for n in row["loads"]), row


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    judge(rows("device_moves_cases"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_reads_updated_weights():
    (found,) = rows("graph_reload")
    assert found["before"] and found["after"] and found["differs"] and found["same_addresses"], (
        found
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
