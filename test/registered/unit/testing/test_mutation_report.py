"""docs/mutation.md is what docs/mutation.json gives; every survivor is explained, and enough were killed."""

import json
import sys
from pathlib import Path

import pytest

from sglang_aiter_moe.testing import mutation_report
from sglang_aiter_moe.testing.mutation_draw import beside, sources
from sglang_aiter_moe.testing.mutation_targets import TESTS
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

DOCS = Path(__file__).resolve().parents[4] / "docs"


@pytest.fixture(scope="module")
def kept():
    return mutation_report.read(DOCS)


def test_the_page_is_made_from_the_results(kept):
    assert (DOCS / "mutation.md").read_text() == mutation_report.markdown(*kept)


def test_every_module_was_run(kept):
    results, _, _ = kept
    assert set(results) == set(TESTS)
    assert all(len(entry["ran"]) >= min(3, entry["mutants"]) for entry in results.values())


def test_every_survivor_is_explained_and_nothing_else(kept):
    results, reasons, draws = kept
    later = [results, *map(mutation_report.after, draws.values())]
    found = [s for r in later for s in mutation_report.survivors(r, reasons)]
    assert [one for one in found if not one.reason] == []
    survived = {(one.module, mutation_report.without_line(one.change)) for one in found}
    assert {(module, change) for module in reasons for change in reasons[module]} == survived


def test_no_draw_has_a_mutant_that_tests_were_written_for(kept):
    results, _, draws = kept
    before = [results, draws["second"], json.loads((DOCS / "mutation_seen.json").read_text())]
    for name in [draw.name for draw in mutation_report.DRAWS[1:]]:
        for module, entry in draws[name].items():
            known = beside(before, module, entry["source"])
            assert not known & entry["ran"].keys(), (name, module)
        before.append(draws[name])


@pytest.mark.parametrize("package", ["contract/", "srt/"])
def test_nine_of_ten_are_killed(kept, package):
    """Of the sample that tests were written for, and of the last draw, for which none were."""
    results, _, draws = kept
    _, run, killed, _ = mutation_report.counts(results, [], package)
    assert run >= 90 and killed >= 0.9 * run
    counts = [mutation_report.counts(drawn, [], package) for drawn in draws.values()]
    _, run, killed, _ = next(found for found in reversed(counts) if found[1])
    assert run >= 50 and killed >= 0.9 * run


def test_every_draw_that_is_kept_is_on_the_page(kept):
    """None is left out because of what it gave."""
    _, _, draws = kept
    files = {file.stem.removeprefix("mutation_") for file in DOCS.glob("mutation_*.json")}
    assert files - {"survivors", "seen"} == set(draws)
    page = (DOCS / "mutation.md").read_text()
    for name, drawn in draws.items():
        ran = [v for m, e in drawn.items() if m.startswith("srt/") for v in e["ran"].values()]
        killed = sum(verdict != "survived" for verdict in ran)
        assert f"| {name} | `srt/` | {len(ran)} | {killed} | **{killed / len(ran):.1%} (" in page


def test_modules_that_have_changed_since_are_told():
    name = "contract/modes.py"
    same = {name: {"source": sources([name])[name]}}
    assert mutation_report.changed(same) == []
    other = {name: {"source": "of before"}, "contract/gone.py": {"source": "of before"}}
    assert mutation_report.changed(same | other) == [name, "contract/gone.py"]
    other[name]["now"] = {"source": sources([name])[name], "ran": {}}
    assert mutation_report.changed(other) == ["contract/gone.py"]


def test_counts_and_reasons():
    results = {
        "contract/a.py": {
            "mutants": 9,
            "ran": {"line 1: x": "killed", "line 2: y": "survived", "line 3: z": "timeout"},
        },
        "srt/b.py": {"mutants": 5, "ran": {"line 4: y": "survived"}},
    }
    reasons = {"contract/a.py": {"y": "equivalent: the same number"}}
    found = mutation_report.survivors(results, reasons)
    assert [(one.change, one.equivalent, one.reason != "") for one in found] == [
        ("line 2: y", True, True),
        ("line 4: y", False, False),
    ]
    assert mutation_report.counts(results, found) == (14, 4, 2, 1)
    assert mutation_report.counts(results, found, "contract/") == (9, 3, 2, 1)
    page = mutation_report.markdown(results, reasons, {})
    assert "| `contract/` | 9 | 3 | 2 | 1 | 1 | **66.7%** | 100.0% |" in page
    assert "equivalent: the same number" in page and "not looked into" in page


def test_a_draw_keeps_its_first_verdicts():
    first = {"srt/a.py": {"mutants": 9, "ran": {"line 1: x": "killed", "line 2: y": "survived"}}}
    ran = {"line 1: x": "killed", "line 3: v": "killed", "line 4: w": "survived"}
    second = {"srt/a.py": {"mutants": 9, "ran": ran | {"line 5: z": "survived"}}}
    page = mutation_report.markdown(first, {}, {"second": second})
    assert "| second | `srt/` | 4 | 2 | **50.0% (" in page
    assert "| 1 of 3, 33.3% | not run |" in page
    moved = {"srt/a.py": first["srt/a.py"] | {"source": "later", "ran": {"line 7: x": "killed"}}}
    assert "| 1 of 3, 33.3% |" in mutation_report.markdown(moved, {}, {"second": second})
    second["srt/a.py"]["again"] = {"line 4: w": "killed", "line 5: z": "survived"}
    page = mutation_report.markdown(first, {"srt/a.py": {"z": "no GPU"}}, {"second": second})
    assert "| second | `srt/` | 4 | 2 | **50.0% (" in page
    assert "| 1 of 3, 33.3% | 3 of 4, 75.0% |" in page
    assert "but since tests were written for them (1):\n\n- `srt/a.py` line 4: `w`\n" in page
    assert "Others (1):\n\n- `srt/a.py` line 5: `z`\n  no GPU" in page
    # The module has changed since: what is there of the draw, on whichever line.
    later = {"line 8: w": "killed", "line 9: z": "survived", "line 10: z": "killed"}
    second["srt/a.py"]["now"] = {"source": "later", "ran": later}
    page = mutation_report.markdown(first, {"srt/a.py": {"z": "no GPU"}}, {"second": second})
    assert "| second | `srt/` | 4 | 2 | **50.0% (" in page
    assert "| 1 of 3, 33.3% | 2 of 3, 66.7% |" in page
    assert "but since tests were written for them (1):\n\n- `srt/a.py` line 4: `w`\n" in page
    assert "Others (1):\n\n- `srt/a.py` line 9: `z`\n  no GPU" in page


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
