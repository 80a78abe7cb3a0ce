"""The tile tables: every arch and mode has a choice for every size, and bounds ascend."""

from __future__ import annotations

import math
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.portable.triton import table  # noqa: E402
from sglang_aiter_moe.portable.triton.hopper import table as hopper_table  # noqa: E402

MODES = ("A16W4", "A8W4", "A4W4")


@pytest.mark.parametrize("arch", ["cpu", "gfx942", "gfx950", "gfx1250", "sm80", "sm90", "sm100"])
@pytest.mark.parametrize("mode", MODES)
def test_every_arch_has_a_choice(arch, mode):
    bounds = [bound for bound, _ in table.load(arch)[mode]]
    assert bounds == sorted(bounds) and bounds[-1] == math.inf
    for rows in (0.01, 1, 20, 50, 1e6):
        config = table.choose(arch, mode, rows)
        assert config.m in (16, 32, 64, 128)
        for tile in (config.stage1, config.stage2):
            assert tile.n % 32 == 0 and tile.k % 32 == 0


def test_hopper_bounds_ascend_and_cover_each_mode():
    table_of = hopper_table.load()
    assert set(table_of) == {f"{mode} {size}" for mode in MODES for size in ("short", "long")}
    for group, rows in table_of.items():
        bounds = [bound for bound, _, _ in rows]
        assert bounds == sorted(set(bounds)) and bounds[-1] == math.inf, group


def test_a_row_survives_the_file():
    for rows in hopper_table.load().values():
        for bound, form, config in rows:
            row = hopper_table.row_json(None if bound == math.inf else int(bound), form, config)
            assert hopper_table.FORMS[row["form"]][0](**row["config"]) == config


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
