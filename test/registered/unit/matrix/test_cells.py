"""The cells: every axis is there, none comes twice, and the covering part covers."""

import itertools
import sys
from dataclasses import astuple, fields

import pytest

from sglang_aiter_moe.matrix import cells
from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")


@pytest.fixture(scope="module")
def full():
    return cells.full()


@pytest.fixture(scope="module")
def covering():
    return cells.covering()


def pairs(chosen):
    names = [field.name for field in fields(Cell)]
    found = set()
    for cell in chosen:
        values = list(zip(names, astuple(cell), strict=True))
        found.update(itertools.combinations(values, 2))
    return found


def test_no_cell_and_no_name_comes_twice(full):
    assert len(set(full)) == len({cell.name for cell in full}) == len(full)


def test_the_default_run_has_a_thousand_cells_and_the_covering_ones(covering):
    default = cells.default()
    assert 1000 <= len(default) < 3000
    assert set(covering) <= set(default)
    assert set(default) <= set(cells.full())


def test_the_covering_part_has_every_pair_that_the_whole_has(full, covering):
    assert pairs(covering) == pairs(full)
    assert len(covering) < 600


def test_the_order_is_always_the_same(full, covering):
    assert cells.full.__wrapped__() == full
    assert cells.covering.__wrapped__() == covering
    assert [cell for cell in full if cell in set(covering)] == list(covering)


@pytest.mark.parametrize("arch", cells.ARCHES)
@pytest.mark.parametrize("aiter", cells.AITER)
def test_every_spelling_of_both_flags_meets_every_machine(full, arch, aiter):
    here = [c for c in full if (c.arch, c.aiter, c.activation) == (arch, aiter, "situv2")]
    spellings = {None, "", "0", "1", "true", "True", "yes", "on", " 1", "01", "junk"}
    assert {c.a8w4 for c in here} == {c.a4w4 for c in here} == spellings
    assert {(c.a8w4, c.a4w4) for c in here} >= {("1", "1"), ("true", "1")}


@pytest.mark.parametrize("activation", cells.ACTIVATIONS)
def test_every_activation_meets_both_sides_of_the_bound_and_every_rank(full, activation):
    here = [c for c in full if c.activation == activation]
    assert {c.rows for c in here} == {"halves", "interleaved"}
    assert {c.arch for c in here} == {"gfx942", "gfx950", "gfx1250"}
    assert {255, 256, 257} <= {c.tokens for c in here if c.arch == "gfx950"}
    at_512 = {c.tokens for c in here if c.environment.get("AITER_BF16_FP8_MOE_BOUND") == "512"}
    assert {511, 512, 513} <= at_512
    assert {c.parallel for c in here} == set(cells.PARALLEL)
    unset = (
        {"unset A8W4", "unset A4W4"} if activation != "situv2" else set()
    )  # there they were never set
    biased = {cells.BIAS_UPDATE} if activation not in ("situv2", "swiglu") else set()
    assert {c.change for c in here} == set(cells.CHANGES) - unset - biased
    assert {c.bias for c in here} == {True, False}


@pytest.mark.parametrize("activation", ("situv2", "swiglu"))
def test_every_routing_meets_updates_and_ranks(activation):
    for chosen, tokens in ((cells.full(), {2, 257}), (cells.covering(), set())):
        for routing in cells.ROUTINGS[1:]:
            here = [c for c in chosen if c.routing == routing]
            assert {c.change for c in here} == {"nothing", "update from disk", "update from tensors"} | (
                set() if routing == "softmax" else {cells.BIAS_UPDATE}
            )  # fmt: skip
            assert {c.parallel for c in here} == {"tp1", "ep2r1"}
            assert {c.tokens for c in here if c.activation == activation} >= tokens
    for cell in cells.full():
        assert cell.routing != "given" or cell.change != cells.BIAS_UPDATE


@pytest.mark.parametrize("parts", (1, 3, 7))
def test_parts_are_the_whole_and_do_not_overlap(covering, parts):
    found = [cells.part(covering, number, parts) for number in range(1, parts + 1)]
    together = [cell for part in found for cell in part]
    assert len(together) == len(covering) and set(together) == set(covering)
    assert found[0][0] == covering[0] and max(map(len, found)) - min(map(len, found)) <= 1


def test_a_change_changes_something(full):
    for cell in full:
        change = cells.CHANGES[cell.change]
        if change is not None:
            name, value = change
            assert cell.environment.get(name) != value, cell.name


def test_flags_that_change_meet_updates_of_the_weights(full, covering):
    for chosen in (full, covering):
        here = [c for c in chosen if c.then != "nothing"]
        assert {c.activation for c in here} == {"situv2", "swiglu"}
        assert {c.arch for c in here} == {"gfx950", "gfx1250"}
        assert {(c.change, c.then) for c in here} == {
            (change, then)
            for change in (
                "set A8W4=1", "unset A8W4", "set A4W4=1", "unset A4W4",
                "set GU_ITLV=0", "set GU_ITLV=1", "set FP8_BOUND=1",
            )
            for then in ("update from disk", "update from tensors")
        }  # fmt: skip
    for activation, rows in (("situv2", "halves"), ("swiglu", "interleaved")):
        here = [c for c in full if c.then != "nothing" and c.activation == activation]
        assert {c.gu_itlv for c in here} == {None, "0", "1"}
        assert rows in {c.rows for c in here}


@pytest.mark.parametrize(
    "change,then,update",
    [
        ("nothing", "nothing", ""),
        ("set A8W4=1", "nothing", ""),
        ("process again", "nothing", ""),
        ("update from disk", "nothing", "update from disk"),
        ("broken update from tensors", "nothing", "broken update from tensors"),
        (cells.BIAS_UPDATE, "nothing", cells.BIAS_UPDATE),
        ("set A8W4=1", "update from disk", "update from disk"),
    ],
)
def test_how_the_weights_are_updated(change, then, update):
    assert Cell(change=change, then=then).update == update


def test_a_name_says_what_is_not_usual():
    cell = Cell(a8w4=" 1", parallel="ep2r1", change="unset A8W4", tokens=2)
    assert cell.name == "situv2/halves/gfx950/0.1.20/m2/A8W4=' 1'/ep2r1/unset A8W4"
    assert cell.environment == {"AITER_SITUV2_A8W4": " 1"}
    cell = Cell(change="set A8W4=1", then="update from disk")
    assert cell.name == "situv2/halves/gfx950/0.1.20/m257/set A8W4=1/then update from disk"
    assert Cell(routing="fp32 bias").name == "situv2/halves/gfx950/0.1.20/m257/routed, fp32 bias"
    assert Cell(setting="FORCE_A8W4=empty").environment == {"AITER_FORCE_A8W4": ""}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
