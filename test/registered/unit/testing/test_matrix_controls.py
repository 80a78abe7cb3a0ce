"""Every patch has its control in the matrix, or a test elsewhere and the reason why no cell shows it."""

import sys
from pathlib import Path

import pytest

from sglang_aiter_moe.matrix.classes import Class
from sglang_aiter_moe.patches.table import GUARD, PATCHES
from sglang_aiter_moe.testing.matrix_controls import BEHIND, CONTROLS, OUTSIDE, control_cells
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

UNIT = Path(__file__).resolve().parents[1]


def test_every_patch_is_controlled_here_or_tested_elsewhere():
    assert not set(CONTROLS) & set(OUTSIDE)
    assert set(CONTROLS) | set(OUTSIDE) == {patch.name for patch in (GUARD, *PATCHES)}
    assert all((UNIT / test).is_file() for test in OUTSIDE.values())


def test_what_a_patch_behind_another_is_for():
    cells = control_cells()
    assert len(set(cells)) == len(cells)
    for front, breaks in BEHIND.values():
        assert CONTROLS[front].becomes  # its own control shows cells
        shown = [cell for cell in cells if breaks(cell, Class.RIGHT)]
        assert 0 < len(shown) < len(cells) / 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
