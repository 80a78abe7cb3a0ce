"""Same code, two deliveries: released SGLang with the plugin, and an applied tree without it.

For each release one process builds the real layers with the plugin and one from the applied tree
(``testing/layer_probe.py``); every answer has to be the same, to the last bit, and every outcome of a part
of the matrix. Then the tree is reverted.
"""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="the extra `apply` is not installed")

from sglang_aiter_moe.intree import run
from sglang_aiter_moe.intree.tree import find_tree
from sglang_aiter_moe.matrix.cells import covering
from sglang_aiter_moe.matrix.worker import CELL
from sglang_aiter_moe.testing import in_tree
from sglang_aiter_moe.testing.checkpoints import write_gpt_oss_checkpoint, write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_process import printed
from sglang_aiter_moe.testing.sglang_releases import FREE_PORT, MAIN, run_probe
from sglang_aiter_moe.testing.sglang_server import PLACEHOLDERS, environment, free_port
from sglang_aiter_moe.testing.stand_in_tree import content

register_cpu_ci(est_time=240, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
RELEASES = ("0.5.17", "0.5.20", MAIN)
SOURCE_TREE = "0.5.20"  # the others have the layout of site-packages
#: Every eighth of the cells that cover each pair of values; IN_TREE_MATRIX_STEP=1: all, a minute a side.
MATRIX_STEP = int(os.environ.get("IN_TREE_MATRIX_STEP", "8"))
ABOUT_THE_PLUGIN = {"origin", "states", "doctor"}
with_release = pytest.mark.parametrize("release", RELEASES)


def hashes(tree):
    return {name: hashlib.sha256(data).hexdigest() for name, data in content(tree).items()}


def matrix(folder, release, path):
    """Each cell's outcome as the worker prints it: stage, error, layout read, difference from the oracle."""
    job = folder / f"{release}-{'plugin' if path is None else 'applied'}.json"
    cells = [asdict(cell) for cell in covering()[::MATRIX_STEP]]
    job.write_text(json.dumps({"cells": cells, "without": [None]}))
    env = environment(release=path, SGLANG_PLUGINS=None if path is None else "none")
    done = subprocess.run(
        [sys.executable, "-m", "sglang_aiter_moe.matrix.worker", str(job), str(free_port())],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [answer for line in done.stdout.splitlines() if (answer := printed(line, CELL))]
    assert len(found) == len(cells)
    return {outcome["cell"]: outcome for _, outcome in found}


class Trees:
    """One applied tree a release, and what its layers and those of the plugin answered."""

    def __init__(self, folder, pool):
        self.folder, self.pool = folder, pool
        self.trees, self.originals, self.applied, self.plugin, self.both = {}, {}, {}, {}, {}
        self.matrix = {}
        write_kimi_checkpoint(folder / "checkpoints" / "kimi")
        write_gpt_oss_checkpoint(folder / "checkpoints" / "gpt_oss")

    def add(self, release):
        root = self.folder / release
        in_tree.copy_release(release, root, source=release == SOURCE_TREE)
        self.originals[release] = hashes(root)
        run.apply(find_tree(root), allow_uncommitted=True)
        self.trees[release] = root
        self.applied[release] = self._probe(release, root, **in_tree.WITHOUT_PLUGIN)
        self.plugin[release] = self._probe(release, None)
        if release == MAIN:
            self.both[release] = self._probe(release, root)
            for side, path in (("applied", in_tree.search_path(release, root)), ("plugin", None)):
                self.matrix[side] = self.pool.submit(matrix, self.folder, release, path)

    def _probe(self, release, tree, **variables):
        return self.pool.submit(
            run_probe,
            "sglang_aiter_moe.testing.layer_probe",
            str(self.folder / "checkpoints"),
            FREE_PORT,
            release=release,
            path=None if tree is None else in_tree.search_path(release, tree),
            controls=bool(variables),
            **variables,
        )


@pytest.fixture(scope="session")
def trees(tmp_path_factory, request):
    chosen = set()
    for item in request.session.items:
        # A test without a release is about one of these two.
        named = getattr(item, "callspec", None) and item.callspec.params.get("release")
        chosen |= {named} if named else {MAIN, SOURCE_TREE}
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = Trees(tmp_path_factory.mktemp("in_tree"), pool)
        for release in RELEASES:
            if release in chosen:
                found.add(release)
        yield found


@with_release
def test_the_applied_tree_runs_by_itself(trees, release):
    found = trees.applied[release].result()
    assert found["release"] == release
    assert found["origin"]["mxfp4"].startswith(str(trees.trees[release]))
    assert found["origin"]["loaded"] == []  # nothing of the plugin's code, no copy of ours


@with_release
def test_every_answer_is_that_of_the_plugin(trees, release):
    applied, plugin = trees.applied[release].result(), trees.plugin[release].result()
    assert "plugin" in plugin["origin"]["loaded"]
    assert len(plugin.keys() - ABOUT_THE_PLUGIN) >= 10
    for probe in plugin.keys() - ABOUT_THE_PLUGIN:
        assert not isinstance(plugin[probe], dict) or "error" not in plugin[probe], probe
        assert applied[probe] == plugin[probe], probe


@with_release
@pytest.mark.parametrize("mode", ["A16W4", "A8W4", "A4W4"])
def test_the_applied_tree_agrees_with_the_reference(trees, release, mode):
    found = trees.applied[release].result()["kimi"][mode]
    assert found["rows"] >= 15 and found["cosine"] > 0.9999, found


def test_every_outcome_of_the_matrix_is_that_of_the_plugin(trees):
    applied, plugin = (trees.matrix[side].result() for side in ("applied", "plugin"))
    assert applied == plugin
    assert len({outcome.get("stage") for outcome in plugin.values()}) > 1
    assert sum("error_type" not in outcome for outcome in plugin.values()) > 10


def test_the_plugin_sees_what_is_in_the_tree(trees):
    both, plugin = trees.both[MAIN].result(), trees.plugin[MAIN].result()
    states = {state["name"]: state for state in both["states"]}
    before = {state["name"]: state for state in plugin["states"]}
    in_force = {name for name, state in before.items() if state["state"] == "in force"}
    twice = {name for name in in_force if states[name]["state"] != "in force"}
    assert len(twice) > 15
    assert all(states[name]["reason"].startswith("in the tree already") for name in twice)
    assert {"MXFP4 call", "AITER runner", "correction bias cache"} <= twice
    for probe in plugin.keys() - ABOUT_THE_PLUGIN:
        assert both[probe] == plugin[probe], probe


def test_the_placed_tests_pass_sglangs_collector_and_run(trees):
    tree = trees.trees[SOURCE_TREE]
    env = environment(release=in_tree.search_path(SOURCE_TREE, tree), SGLANG_PLUGINS="none")
    # Without this distribution: the tests import what was placed.
    env["PYTHONPATH"] = f"{in_tree.search_path(SOURCE_TREE, tree)}:{PLACEHOLDERS}"
    env["PYTHONSAFEPATH"] = "1"
    tests = sorted(map(str, (tree / "test" / "registered").rglob("test_*.py")))
    assert len(tests) >= 6
    collect = (
        "import sys; from sglang.test.ci.ci_register import collect_tests;"
        "print(len(collect_tests(sys.argv[1:], sanity_check=True)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", collect, *tests],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and int(done.stdout.split()[-1]) >= len(tests), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=env,
        cwd=trees.folder,  # where hypothesis may leave its examples: not in the tree
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 150, done.stdout[-300:]


@with_release
def test_reverted_every_byte_is_as_released(trees, release):
    waited = [trees.applied[release]]
    if release == MAIN:
        waited += [trees.both[release], *trees.matrix.values()]
    for answer in waited:
        answer.result()
    tree = trees.trees[release]
    assert hashes(tree) != trees.originals[release]
    run.revert(find_tree(tree))
    assert hashes(tree) == trees.originals[release]
    folder = in_tree.released_package(release)
    package = find_tree(tree).package
    for name, data in content(folder).items():
        assert (package / name).read_bytes() == data
    assert not [p for p in Path(tree).rglob("aiter_moe*") if "__pycache__" not in p.parts]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
