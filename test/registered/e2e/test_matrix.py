"""The covering part of the matrix on two SGLang releases, and gpt-oss's on two old ones, against the kept results.

The kept results were made in the cells' own order, so that equal answers also show that no cell leaves anything
behind. The controls leave patches out, one at a time, and the matrix has to show the cells of each.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_aiter_moe.matrix import cells, stored
from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.classes import Class
from sglang_aiter_moe.matrix.run import Side, run, run_without, sglang_of
from sglang_aiter_moe.testing.matrix_controls import (
    BEHIND,
    CONTROLS,
    GPT_OSS_CONTROLS,
    control_cells,
    leave_outs,
    shown,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=240, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

DOCS = Path(__file__).resolve().parents[3] / "docs"
GPT_OSS = {"activation": "swiglu", "rows": "interleaved", "tokens": 255}
SIDES = [Side(release, patched) for release in ("0.5.23", "0.5.19") for patched in (True, False)]


class Runs:
    """Processes that run two at a time, each started when it is first asked for or together."""

    def __init__(self, pool):
        self.pool, self.futures = pool, {}

    def start(self, key, function, *arguments, **more):
        if key not in self.futures:
            self.futures[key] = self.pool.submit(function, *arguments, **more)
        return self.futures[key]


@pytest.fixture(scope="session")
def runs():
    covering = cells.covering()
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = Runs(pool)
        for number, side in enumerate(SIDES):
            sglang = sglang_of(side.release)
            started.start(side, run, covering, side, sglang, seed=number, timeout=1800)
        started.start(
            "controls",
            run_without,
            control_cells(),
            Side("0.5.23", True),
            sglang_of("0.5.23"),
            leave_outs(),
            timeout=1800,
        )
        for release, controls in GPT_OSS_CONTROLS.items():
            started.start(
                release,
                run_without,
                cells.gpt_oss(),
                Side(release, True),
                sglang_of(release),
                [None, *controls],
                seed=1,
                timeout=1800,
            )
        yield started.futures


@pytest.fixture(scope="session")
def kept():
    results = stored.load(DOCS / "matrix.json")
    return results, {name: index for index, name in enumerate(results.names)}


@pytest.mark.parametrize("side", [s for s in SIDES if s.patched], ids=lambda s: s.release)
def test_with_the_patch_set_every_cell_is_right_or_refused(runs, side):
    results = runs[side].result()
    assert len(results.outcomes) == len(cells.covering())
    failed = [
        (cell.name, kind.value, results.outcomes[cell])
        for cell, kind in results.classes().items()
        if kind not in (Class.RIGHT, Class.REFUSED)
    ]
    assert not failed


@pytest.mark.parametrize("side", SIDES, ids=lambda s: f"{s.release} {s.name}")
def test_each_cell_is_as_kept_in_whatever_order_it_runs(runs, kept, side):
    results, position = kept
    row = results.letters[side.release][side.name]
    differing = {
        cell.name: (row[position[cell.name]], stored.letter(cell, outcome))
        for cell, outcome in runs[side].result().outcomes.items()
        if row[position[cell.name]] != stored.letter(cell, outcome)
    }
    assert not differing


@pytest.mark.parametrize(
    "cell,expected",
    [
        (Cell(change="set A8W4=1"), Class.REFUSED),
        (Cell(a8w4="1", change="set A4W4=1"), Class.RIGHT),  # A8W4 goes before it
        (Cell(**GPT_OSS, change="set GU_ITLV=0"), Class.RIGHT),  # the plan says what is sent
        (Cell(**GPT_OSS, change="set A8W4=1"), Class.RIGHT),  # SiTUv2's flag
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_an_update_does_not_hide_that_a_flag_has_changed(runs, cell, expected):
    classes = runs["controls"].result()[None].classes()
    found = [kind for one, kind in classes.items() if one.then != "nothing"]
    mine = [k for one, k in classes.items() if replace(one, then="nothing") == cell != one]
    assert len(found) == 4 and mine == [expected]


@pytest.mark.parametrize("name", CONTROLS)
def test_without_a_patch_the_matrix_shows_its_cells_and_no_others(runs, name):
    results = runs["controls"].result()
    whole, without = results[None].classes(), results[name].classes()
    changed = {cell.name for cell in whole if without[cell] is not whole[cell]}
    mine = {cell.name for cell in whole if CONTROLS[name].breaks(cell, whole[cell])}
    assert changed == mine
    worse = {without[cell] for cell in whole if cell.name in changed}
    assert worse <= CONTROLS[name].becomes


def test_the_controls_show_what_the_page_says(runs):
    kept = json.loads((DOCS / "matrix_controls.json").read_text())
    assert shown(runs["controls"].result()) == kept


@pytest.mark.parametrize("name", BEHIND)
def test_a_patch_behind_another_shows_when_that_is_left_out_too(runs, name):
    results = runs["controls"].result()
    front, breaks = BEHIND[name]
    one, both = results[front].classes(), results[f"{front} + {name}"].classes()
    changed = {cell.name for cell in one if both[cell] is not one[cell]}
    assert changed == {cell.name for cell in one if breaks(cell, one[cell])}


@pytest.mark.parametrize("release", GPT_OSS_CONTROLS)
def test_before_0_5_17_each_gpt_oss_cell_is_as_kept_and_right_or_refused(runs, release):
    results = runs[release].result()[None]
    assert set(results.classes().values()) == {Class.RIGHT, Class.REFUSED}
    kept = stored.load(DOCS / "matrix_gpt_oss.json").letters[release]["patched"]
    ran = [stored.letter(cell, results.outcomes[cell]) for cell in cells.gpt_oss()]
    assert "".join(ran) == kept


@pytest.mark.parametrize(
    ("release", "name"),
    [(r, name) for r, controls in GPT_OSS_CONTROLS.items() for name in controls],
)
def test_before_0_5_17_updates_need_their_patch(runs, release, name):
    results = runs[release].result()
    whole, without = results[None].classes(), results[name].classes()
    control = GPT_OSS_CONTROLS[release][name]
    changed = {cell.name for cell in whole if without[cell] is not whole[cell]}
    mine = {cell.name for cell in whole if control.breaks(cell, whole[cell])}
    assert mine and changed == mine
    assert {without[cell] for cell in whole if cell.name in changed} <= control.becomes


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
