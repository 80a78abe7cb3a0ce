"""What a kept result says about itself, in repositories that the test makes."""

import json
import re
import subprocess
import sys

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation.provenance import (
    PROJECT,
    RESULTS,
    commit,
    may_keep,
    missing,
    provenance,
    write,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path


def test_the_commit_and_whether_anything_differs_from_it(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert commit(checkout) == head
    (checkout / "untracked").write_text("")
    assert commit(checkout) == head
    (checkout / "file").write_text("two")
    assert commit(checkout) == head + "+"


def test_kept_results_that_differ_do_not_mark_the_next_one(checkout):
    (checkout / "docs").mkdir()
    for name in ("rows.json", "page.md"):
        (checkout / "docs" / name).write_text("one")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "two")
    (checkout / "docs" / "rows.json").write_text("two")
    assert commit(checkout) == git(checkout, "rev-parse", "HEAD")
    (checkout / "docs" / "page.md").write_text("two")
    assert commit(checkout) == git(checkout, "rev-parse", "HEAD") + "+"


def test_without_a_commit_nothing_is_kept_and_elsewhere_the_reason_is_written(
    checkout, tmp_path_factory
):
    copy = tmp_path_factory.mktemp("copy")
    for folder in RESULTS:
        may_keep(checkout / folder / "x.json", checkout)
        with pytest.raises(ContractError, match="no git checkout"):
            may_keep(copy / folder / "x.json", copy)
    may_keep(copy / "x.json", copy)
    may_keep(None, copy)
    assert provenance(copy)["commit"] is None and "no git" in provenance(copy)["without_commit"]
    assert "without_commit" not in provenance(checkout)


def test_a_kept_result_is_refused_before_it_is_written(monkeypatch):
    monkeypatch.setattr("sglang_aiter_moe.evaluation.provenance.commit", lambda project: None)
    path = PROJECT / "docs" / "a-result-of-nothing.json"
    with pytest.raises(ContractError, match="no git checkout"):
        write(path, [])
    assert not path.exists()


def test_an_installed_package_does_not_name_the_repository_around_it(checkout):
    inside = checkout / "lib"
    inside.mkdir()
    assert commit(inside) is None


def test_a_repository_without_a_commit_names_none(tmp_path):
    git(tmp_path, "init", "--quiet")
    assert commit(tmp_path) is None


def test_the_command_is_the_users(checkout, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/sglang-aiter-moe", "eval", "--tp", "2"])
    found = provenance(checkout)
    assert found["command"] == "sglang-aiter-moe eval --tp 2"
    assert found["machine"]["cores"] >= 1 and len(found["date"]) == 10


@pytest.mark.parametrize(
    "program, named",
    [
        ("benchmark/layouts.py", "python benchmark/layouts.py"),
        (
            "python/sglang_aiter_moe/miniature/score.py",
            "python -m sglang_aiter_moe.miniature.score",
        ),
        ("python/sglang_aiter_moe/__main__.py", "sglang-aiter-moe"),
    ],
)
def test_how_it_was_started(monkeypatch, program, named):
    monkeypatch.setattr(sys, "argv", [str(PROJECT / program), "--json", "x"])
    assert provenance()["command"] == f"{named} --json x"


def test_what_is_written_says_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sglang_aiter_moe.evaluation.provenance.commit", lambda project: "abc")
    for result in ({"cases": [{"ms": 1}]}, [{"ms": 1}]):
        write(tmp_path / "result.json", result)
        kept = json.loads((tmp_path / "result.json").read_text())
        assert not missing(kept)
        assert kept.get("rows", kept.get("cases")) == [{"ms": 1}]


WHOLE = {"date": "2026-11-30", "commit": "abc", "gpu": "one"}


@pytest.mark.parametrize(
    "kept, lacks",
    [
        (WHOLE, set()),
        (WHOLE | {"commit": None}, {"commit"}),
        (WHOLE | {"gpu": ""}, {"machine"}),
        ({"rows": [WHOLE, WHOLE]}, set()),
        ({"rows": [WHOLE, {"date": "2026-11-30"}]}, {"commit", "machine"}),
        ({"machine": "x", "rows": [{"date": "2026-11-30", "commit": "abc"}]}, set()),
        ([WHOLE, WHOLE], set()),
        ([WHOLE, {}], {"date", "commit", "machine"}),
        ({"rows": []}, {"date", "commit", "machine"}),
        ([1, 2], {"date", "commit", "machine"}),
    ],
)
def test_what_a_result_does_not_say(kept, lacks):
    assert missing(kept) == lacks


ALL = {"date", "commit", "machine"}
BEFORE = {
    "benchmark/results/amd_compile.json": ALL,
    "benchmark/results/cpu_fused_moe.json": {"date", "commit"},
    "benchmark/results/graph_reload_h200.json": ALL,
    "benchmark/results/host_overhead_0.5.17.json": ALL,
    "benchmark/results/host_overhead_0.5.20.json": ALL,
    "benchmark/results/host_overhead_0.5.23.json": ALL,
    "benchmark/results/layouts_cpu.json": {"date", "commit"},
    "benchmark/results/layouts_cpu_given.json": {"date", "commit"},
    "benchmark/results/miniature_h200.json": {"date", "commit"},
    "benchmark/results/prefill_versions_h200.json": {"commit"},  # many versions, each described
    "benchmark/results/routing_graphs_h200.jsonl": ALL,
    "docs/amd-layers.json": ALL,
}
"""Results from before this was asked for, and what they lack: it is not known any more."""


TIED = ("matrix", "mutation")
"""Files of docs/ that begin so name the cells, or the hashes of the sources, that they are of: tests compare those."""


def read(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()][:1]  # the first line is of all
    return json.loads(text)


def test_every_kept_result_says_when_where_and_of_which_commit():
    folders = (PROJECT / "benchmark" / "results", PROJECT / "docs")
    found = {
        path.relative_to(PROJECT).as_posix(): missing(read(path))
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".jsonl") and not path.name.startswith(TIED)
    }
    assert len(found) > 20
    assert {name: lacks for name, lacks in found.items() if lacks} == BEFORE


ELSEWHERE = {
    "benchmark/results/kernel_checks_h200.json": {"75a39aa"},
    "benchmark/results/kernels_h200_prefill.json": {"75a39aa"},
}
"""Results that name a commit which this history does not have (it was rebased, or never merged)."""
CHANGED = {"benchmark/results/amdgpu.json"}
"""Results of a checkout with changes that its commit does not have."""


def commits(data):
    """Every text that stands as "commit" somewhere in a result."""
    if isinstance(data, list):
        return [text for part in data for text in commits(part)]
    if not isinstance(data, dict):
        return []
    own = [data["commit"]] if isinstance(data.get("commit"), str) else []
    return own + [text for part in data.values() for text in commits(part)]


FIRST = "50cb030c911c"
"""The project's first commit: a copy that was committed anew, or a shallow clone, does not have it."""


def is_ancestor(name, project=PROJECT):
    command = ["git", "-C", str(project), "merge-base", "--is-ancestor", name, "HEAD"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_whether_a_commit_is_in_a_history(checkout):
    first = git(checkout, "rev-parse", "HEAD")
    git(checkout, "checkout", "--quiet", "-b", "side")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "two")
    side = git(checkout, "rev-parse", "HEAD")
    git(checkout, "checkout", "--quiet", "-")
    assert [is_ancestor(name, checkout) for name in (first, side, "abcdef1")] == [
        True,
        False,
        False,
    ]


def test_the_commits_of_kept_results_are_in_this_history():
    if commit(PROJECT) is None or not is_ancestor(FIRST):
        pytest.skip("a tree without the project's git history")
    elsewhere, changed = {}, set()
    for folder in RESULTS:
        for path in sorted((PROJECT / folder).glob("*.json*")):
            name = path.relative_to(PROJECT).as_posix()
            for text in commits(read(path)):
                hashes = re.findall(r"\b[0-9a-f]{7,40}\b", text)
                assert hashes, f"{name} names no commit in {text!r}"
                lost = {h for h in hashes if not is_ancestor(h)}
                if lost:
                    elsewhere.setdefault(name, set()).update(lost)
                if text.endswith("+"):
                    changed.add(name)
    assert elsewhere == ELSEWHERE
    assert changed == CHANGED


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
