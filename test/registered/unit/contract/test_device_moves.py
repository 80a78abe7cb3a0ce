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
    assert len(found) >= 90
    wrong = [row["case"] for row in found if not (row["packed"] and row["restored"])]
    assert not wrong
    assert all(row["by_kernel"] == 2 for row in found)  # pack and unpack


def test_interpreted():
    judge(rows("device_moves_cases", TRITON_INTERPRET="1", OMP_NUM_THREADS="1"))


def test_the_code_for_gfx950_and_h200():
    """A kernel that works in place reads all before it writes; whole 16-byte pieces; no spills."""
    found = rows("device_moves_compile")
    assert {row["arch"] for row in found} == {"gfx950", "sm_90"}
    for row in found:
        assert row["spills"] == 0 and row["barrier_before_store"], row
        assert row["shared"] <= 16, (
            row
        )  # no detour: one word, to tell a program that the others have come
        if row["kernel"].startswith("tiles"):
            wide = [n for n in row["stores"] if "x4" in n or ".v4" in n]
            assert wide == list(row["stores"]), row
            assert any("x4" in n or ".v4" in n for n in row["loads"]), row


def test_programs_that_wait_for_each_other_are_launched_as_such(monkeypatch):
    """Where tiles cross in place and an expert needs several programs; with fewer if they do not fit at once."""
    from sglang_aiter_moe.contract import device_moves

    monkeypatch.setattr(device_moves, "_processors", lambda device: 10)
    raw = torch.zeros(40, 768, 1792, dtype=torch.uint8)
    order = tuple(torch.arange(768).view(2, -1, 16).transpose(0, 1).reshape(-1).tolist())
    limits = device_moves.Limits(64 << 10, 8, 4)
    monkeypatch.setitem(device_moves.TOGETHER, 16, limits)
    seen = []

    def launch(_, __, part):
        seen.append((part.members, part.groups, part.options["launch_cooperative_grid"]))
        if len(seen) == 1:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    work = device_moves._Work(raw, raw, order, 16, 16, 112, 16, True)
    assert work._run_together(launch)
    assert seen == [(24, 1, True), (24, 1, True)]  # 40, then 30 programs at once
    monkeypatch.setattr(device_moves, "_processors", lambda device: 5)
    assert not device_moves._Work(raw, raw, order, 16, 16, 112, 16, True)._run_together(launch)


def test_another_error_of_a_launch_is_not_swallowed(monkeypatch):
    from sglang_aiter_moe.contract import device_moves

    monkeypatch.setattr(device_moves, "_processors", lambda device: 132)
    raw = torch.zeros(2, 768, 1792, dtype=torch.uint8)
    order = tuple(reversed(range(768)))

    def launch(*_):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        device_moves._Work(raw, raw, order, 16, 16, 112, 16, True).run(launch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    judge(rows("device_moves_cases"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_reads_updated_weights():
    (found,) = rows("graph_reload")
    assert found["before"] and found["after"] and found["differs"] and found["same_addresses"], (
        found
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
