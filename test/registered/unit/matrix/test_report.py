"""docs/matrix.md and its picture are what docs/matrix.json gives, and they say what the project claims."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_aiter_moe.matrix import cells, picture, report, report_tables, stored
from sglang_aiter_moe.matrix.classes import Class
from sglang_aiter_moe.matrix.one_cell import Outcome
from sglang_aiter_moe.matrix.refusals import BY_KEY
from sglang_aiter_moe.matrix.run import RELEASES, Results, Side
from sglang_aiter_moe.patches.table import PATCHES
from sglang_aiter_moe.testing.matrix_controls import BEHIND, CONTROLS
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_environment import GPT_OSS_RELEASES

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DOCS = Path(__file__).resolve().parents[4] / "docs"


@pytest.fixture(scope="module")
def kept():
    return stored.load(DOCS / "matrix.json")


@pytest.fixture(scope="module")
def gpt_oss():
    return stored.load(DOCS / "matrix_gpt_oss.json")


@pytest.fixture(scope="module")
def full():
    return stored.load(DOCS / "matrix_full.json")


@pytest.fixture(scope="module")
def letter_of(full):
    """By cell, of 0.5.23 with the plugin."""
    return dict(zip(cells.full(), full.letters["0.5.23"]["patched"], strict=True))


def test_the_page_and_the_picture_are_made_from_the_results(kept):
    assert (DOCS / "matrix.md").read_text() == report.markdown(kept, *report.further(DOCS))
    assert (DOCS / "matrix.svg").read_text() == picture.svg(kept)


def test_every_release_has_both_sides_and_the_covering_cells(kept):
    assert tuple(kept.letters) == RELEASES
    covering = {cell.name for cell in cells.covering()}
    everywhere = {kept.names[index] for index in kept.run_everywhere()}
    assert covering <= everywhere
    for release, sides in kept.letters.items():
        assert set(sides) == {"unpatched", "patched"}, release
        assert {len(row) for row in sides.values()} == {len(kept.names)}


def test_the_two_releases_of_ci_have_every_cell(kept):
    for release in ("0.5.19", "0.5.23"):
        for side, row in kept.letters[release].items():
            assert stored.NOT_RUN not in row, (release, side)


@pytest.mark.parametrize("release", GPT_OSS_RELEASES)
def test_before_0_5_17_every_gpt_oss_cell_is_right_or_refused(gpt_oss, release):
    assert gpt_oss.cells == "gpt-oss" and tuple(gpt_oss.letters) == GPT_OSS_RELEASES
    counts = gpt_oss.counts(release, "patched")
    assert set(counts) == {Class.RIGHT, Class.REFUSED}
    assert counts.total() == len(cells.gpt_oss()) == 75
    assert gpt_oss.counts(release, "unpatched")[Class.SILENT_WRONG] > 20


def test_the_full_set_is_right_or_refused(full):
    assert full.cells == "full" and set(full.letters["0.5.23"]) == {"patched"}
    counts = full.counts("0.5.23", "patched")
    assert set(counts) == {Class.RIGHT, Class.REFUSED}
    assert counts.total() == len(full.names)
    assert "r" not in full.letters["0.5.23"]["patched"]  # every refusal has a reason


GPT_OSS = {"activation": "swiglu", "rows": "interleaved", "tokens": 255}


@pytest.mark.parametrize("then", cells.THEN[1:])
@pytest.mark.parametrize(
    "expected,cell",
    [
        # SiTUv2's flags decide the mode, A8W4 before A4W4 (docs/contract.md section b.1); a layer stays as laid out.
        ("changed after load", cells.Cell(change="set A8W4=1")),
        ("changed after load", cells.Cell(change="set A4W4=1", gu_itlv="0")),
        ("changed after load", cells.Cell(a8w4="1", change="unset A8W4", gu_itlv="1")),
        ("changed after load", cells.Cell(a4w4="1", change="set A8W4=1")),
        ("right", cells.Cell(a8w4="1", change="set A4W4=1")),
        ("right", cells.Cell(a8w4="1", a4w4="1", change="unset A4W4")),
        # SGLang alone reads the gate-up flag; after the load the plan says what is sent. SiTUv2's are SiTUv2's alone.
        ("right", cells.Cell(change="set GU_ITLV=0")),
        ("right", cells.Cell(gu_itlv="0", change="set GU_ITLV=1")),
        ("right", cells.Cell(**GPT_OSS, change="set GU_ITLV=0")),
        ("right", cells.Cell(**GPT_OSS, gu_itlv="1", change="set GU_ITLV=0")),
        ("right", cells.Cell(**GPT_OSS, gu_itlv="0", change="set GU_ITLV=1")),
        ("right", cells.Cell(**GPT_OSS, gu_itlv="0", change="set A8W4=1")),
        # 255 tokens are below AITER's bound of 256, and not below 1.
        ("changed after load", cells.Cell(**GPT_OSS, change="set FP8_BOUND=1")),
        # gfx1250 ignores both of SiTUv2's flags.
        ("right", cells.Cell(arch="gfx1250", change="set A8W4=1")),
        ("right", cells.Cell(arch="gfx1250", a4w4="1", change="unset A4W4")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_changed_flag_before_an_update_is_refused_where_the_layer_depends_on_it(
    letter_of, expected, cell, then
):
    letter = letter_of[replace(cell, then=then)]
    reason = stored.reason_for(letter) or stored.class_of(letter).value
    assert reason == expected


STORED = tuple(stored.load(DOCS / "matrix.json").letters)


@pytest.mark.parametrize("release", STORED)
def test_with_the_patch_set_every_cell_is_right_or_refused(kept, release):
    assert set(kept.counts(release, "patched")) == {Class.RIGHT, Class.REFUSED}


@pytest.mark.parametrize("release", STORED)
def test_sglang_alone_is_silently_wrong_and_crashes(kept, release):
    # A matrix that finds nothing there would find nothing in the patched one either.
    alone = kept.counts(release, "unpatched")
    assert alone[Class.SILENT_WRONG] > 100 and alone[Class.CRASHED] > 50
    assert not kept.kinds(release, "unpatched")["other"]


def test_the_readme_states_the_stored_numbers(kept):
    readme = (DOCS.parent / "README.md").read_text()
    alone = kept.counts("0.5.23", "unpatched")[Class.SILENT_WRONG]
    patched = kept.counts("0.5.23", "patched")[Class.SILENT_WRONG]
    assert f"**{alone} of {len(kept.names)}**" in readme
    counts = kept.counts("0.5.23", "patched")
    right, refused = counts[Class.RIGHT], counts[Class.REFUSED]
    assert f"with the plugin\n**{patched}**: {right} are right, {refused} refused" in readme

    unclamped = kept.positions(lambda c: c.activation == "swiglu_unclamped")
    unstated = kept.counts("0.5.23", "patched", unclamped)[Class.RIGHT]
    assert f"is so in {unstated} of the {right})" in readme

    def alone_of(wanted):
        only = kept.positions(wanted)
        return kept.counts("0.5.23", "unpatched", only)[Class.SILENT_WRONG], len(only)

    others, _ = alone_of(lambda cell: cell.activation.startswith(("silu", "gelu")))
    k3 = "{} of {}".format(*alone_of(lambda c: (c.activation, c.rows) == ("situv2", "halves")))
    oss = "{} of {}".format(
        *alone_of(lambda c: (c.activation, c.rows) == ("swiglu", "interleaved"))
    )
    assert (
        f"({others} of them SiLU and GELU layers; of Kimi K3's own combinations {k3}, of gpt-oss's {oss})"
        in readme
    )


def test_every_refusal_of_the_plugin_has_a_reason(kept, gpt_oss):
    for results in (kept, gpt_oss):
        for release, sides in results.letters.items():
            reasons = {stored.reason_for(letter) for letter in sides["patched"]}
            assert "other" not in reasons, release


def test_what_is_refused_although_right_says_why(kept):
    for release, sides in kept.letters.items():
        for own, alone in zip(sides["patched"], sides["unpatched"], strict=True):
            classes = stored.class_of(own), stored.class_of(alone)
            if classes == (Class.REFUSED, Class.RIGHT):
                assert BY_KEY[stored.reason_for(own)].although, (release, own)


def test_refusals_are_counted_against_sglang_alone():
    letters = {"0.5.23": {"patched": "0043.", "unpatched": ".Dc.D"}}
    table = report_tables.refusals(stored.Stored("covering", letters), "0.5.23").splitlines()
    assert table[0].startswith(
        "| the plugin refuses: reason | cells | alone: right | alone: silently"
    )
    assert table[2:] == [
        "| unclear spelling | 2 | 1 | 1 | 0 | 0 | 0 |",
        "| AITER too old | 1 | 1 | 0 | 0 | 0 | 0 |",
        "| limit | 1 | 0 | 0 | 1 | 0 | 0 |",
        "| all | 4 | 2 | 1 | 1 | 0 | 0 |",
    ]
    table = report_tables.stricter(stored.Stored("covering", letters), [0, 1, 2]).splitlines()
    assert table[2].startswith("| unclear spelling | the readers of a flag ") and table[2].endswith(
        "| 1 |"
    )
    assert table[3:] == ["| all |  | 1 |"]


def test_the_table_of_patches_has_every_patch():
    controls = json.loads((DOCS / "matrix_controls.json").read_text())
    assert list(controls["patches"]) == list(CONTROLS) and list(controls["behind"]) == list(BEHIND)
    for name, found in controls["patches"].items():
        assert (found["cells"] > 0) == (name not in BEHIND), name
    table = report_tables.patches(controls)
    assert all(patch.name in table for patch in PATCHES)
    assert "`e2e/test_patch_probe.py`: raw form before a weight update; " in table


def some_results(side, outcome):
    return Results(side, dict.fromkeys(cells.covering(), outcome), 1.0)


def test_storing_keeps_other_releases_and_reads_back(tmp_path):
    path = tmp_path / "matrix.json"
    wrong = Outcome("done", mode="A16W4", diff=1.0, why=("layout",))
    refused = Outcome("load", "ContractError", "no")
    stored.store(path, "covering", [some_results(Side("0.5.19", False), wrong)])
    stored.store(path, "covering", [some_results(Side("0.5.19", True), refused)])
    stored.store(path, "covering", [some_results(Side("0.5.23", True), refused)])
    back = stored.load(path)
    total = len(cells.covering())
    assert list(back.letters) == ["0.5.19", "0.5.23"]
    assert back.counts("0.5.19", "unpatched") == {Class.SILENT_WRONG: total}
    assert sum(back.kinds("0.5.19", "unpatched").values()) == total
    assert back.counts("0.5.19", "patched") == {Class.REFUSED: total}


def test_a_part_goes_into_the_results_of_the_whole(tmp_path):
    path = tmp_path / "matrix.json"
    refused = Outcome("load", "ContractError", "no")
    right = Outcome("done", mode="A16W4", diff=1e-6)
    whole = Results(Side("0.5.23", True), dict.fromkeys(cells.default(), refused), 1.0)
    stored.store(path, "default", [whole])
    stored.store(path, "covering", [some_results(Side("0.5.23", True), right)])
    kept = stored.store(path, "covering", [some_results(Side("0.5.19", True), right)])
    covering = len(cells.covering())
    assert kept.cells == "default"
    assert kept.counts("0.5.23", "patched")[Class.REFUSED] == len(cells.default()) - covering
    assert kept.counts("0.5.23", "patched")[Class.RIGHT] == covering
    assert kept.counts("0.5.19", "patched") == {Class.RIGHT: covering}
    assert [kept.names[i] for i in kept.run_everywhere()] == [c.name for c in cells.covering()]


def test_results_of_other_cells_are_not_taken_for_these(tmp_path):
    path = tmp_path / "matrix.json"
    refused = Outcome("load", "ContractError", "no")
    stored.store(path, "covering", [some_results(Side("0.5.23", True), refused)])
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"names_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="other cells"):
        stored.load(path)


def test_counts_for_json_add_up():
    cell = cells.Cell(a4w4="true")
    outcomes = {
        cell: Outcome("done", mode="A16W4", diff=1e-6),
        cells.Cell(): Outcome("done", mode="", diff=1.0, why=("layout",)),
        cells.Cell(tokens=2): Outcome("call", "AttributeError", "Situv2"),
        cells.Cell(tokens=255): Outcome("call", "ContractError", "late"),
        cells.Cell(tokens=256): Outcome("load", "ContractError", "no"),
    }
    results = Results(Side("0.5.23", False), outcomes, 2.0)
    found = results.to_json()
    assert found["cells"] == 5 and not results.holds
    assert [found[kind.value] for kind in Class] == [1, 1, 1, 1, 1]
    assert found["right_in_another_mode"] == 1
    assert found["kinds"] == {"SiTUv2 layout": 1}
    assert {f["class"] for f in found["failed"]} == {"refused_late", "crashed"}


def test_a_patched_failure_darkens_the_picture(kept):
    row = kept.letters["0.5.23"]["patched"]
    broken = {**kept.letters, "0.5.23": {**kept.letters["0.5.23"], "patched": "c" + row[1:]}}
    other = stored.Stored(kept.cells, broken)
    assert "not 0 in every column headed plugin" in picture.svg(other)
    assert "not 0" not in picture.svg(kept)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
