"""Every table row of the AMD targets builds: no spills, scaled matrix instructions, registers within the occupancy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=210, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.portable.triton import table  # noqa: E402

MOST_VGPRS = 256  # two waves a SIMD on CDNA (512 registers), four on gfx1250 (1024)
MOST_LDS = 64 << 10
SCALED = {"gfx950": "v_mfma_scale_f32_", "gfx1250": "v_wmma_scale_f32_"}


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "sglang_aiter_moe.testing.triton_compile", "--k3"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert child.returncode == 0, child.stderr[-3000:]
    return found


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
def test_table_builds_clean(rows, arch):
    mine = [row for row in rows if row["arch"] == arch]
    built = {(r["mode"], r["stage"], r["block_m"], tuple(sorted(r["tile"].items()))) for r in mine}
    assert built == {
        (mode, stage, config.m, tuple(sorted(asdict(tile).items())))
        for mode, configs in table.load(arch).items()
        for _, config in configs
        for stage, tile in ((1, config.stage1), (2, config.stage2))
    }
    for row in mine:
        assert row["vgpr_spills"] == row["sgpr_spills"] == row["scratch"] == 0, row
        assert row["vgprs"] <= MOST_VGPRS and row["lds"] <= MOST_LDS, row
        assert row["matrix"], row


@pytest.mark.parametrize("arch", SCALED)
def test_quantised_modes_use_scaled_instructions(rows, arch):
    mine = [row for row in rows if row["arch"] == arch and row["mode"] != "A16W4"]
    assert {row["mode"] for row in mine} == {"A8W4", "A4W4"}
    for row in mine:
        assert all(name.startswith(SCALED[arch]) for name in row["matrix"]), row


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
