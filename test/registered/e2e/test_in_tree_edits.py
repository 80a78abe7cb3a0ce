"""The edits on the released files, without running them: every release, moved lines, changed meanings."""

import ast
import shutil
import sys

import pytest

pytest.importorskip("libcst", reason="the extra `apply` is not installed")

from sglang_aiter_moe.intree import run
from sglang_aiter_moe.intree.anchors import ChangedCode
from sglang_aiter_moe.intree.edits import Outcome, edited_files
from sglang_aiter_moe.intree.tree import find_tree
from sglang_aiter_moe.testing.in_tree import released_package
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import MAIN, RELEASES

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

pytestmark = pytest.mark.sglang
MXFP4 = "srt/layers/quantization/mxfp4.py"
TOPK = "srt/layers/moe/topk.py"
RUNNER = "srt/layers/moe/moe_runner/aiter.py"


@pytest.fixture
def tree(tmp_path):
    """Writes the files of a release that are edited; returns the tree."""

    def write(release):
        package = tmp_path / "sglang"
        for name in (*edited_files(), "version.py"):
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(released_package(release) / name, package / name)
        return find_tree(tmp_path, release)

    return write


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_is_edited_and_reverted(tree, release):
    found = tree(release)
    before = {name: (found.package / name).read_bytes() for name in edited_files()}
    report = run.apply(found)
    edited = {c.path: c.after for c in report.changes if c.before is not None}
    assert len(edited) == (6 if release < "0.5.20" else 7 if release < "0.5.21" else 8)
    for text in edited.values():
        ast.parse(text)
    outcomes = {edit.patch: edit.outcome for edit in report.edits}
    assert outcomes["MXFP4 call"] is outcomes["AITER runner"] is Outcome.MADE
    old, late = release < "0.5.20", release > "0.5.21"
    assert (outcomes["w13 layout selector"] is Outcome.ABSENT) == old
    assert (outcomes["correction bias cache"] is Outcome.ABSENT) == old
    assert (outcomes["output buffer of a call"] is Outcome.UPSTREAM) == late
    run.revert(found)
    assert {name: (found.package / name).read_bytes() for name in before} == before


def test_lines_that_moved_do_not_matter(tree):
    found = tree(MAIN)
    released = {c.path: c.after for c in run.check(found).changes if c.before is not None}
    filler = b"\n" * 30 + b"# a comment\n" * 20
    for name in edited_files():
        path = found.package / name
        head, middle, tail = path.read_bytes().partition(b"\n\n\n")
        path.write_bytes(head + middle + filler + tail)
    moved = {c.path: c.after for c in run.check(found).changes if c.before is not None}
    assert {path: text.replace(filler, b"") for path, text in moved.items()} == released


@pytest.mark.parametrize(
    "file, old, new, named",
    [
        (
            MXFP4,
            "        num_experts: int,\n        hidden",
            "        experts: int,\n        hidden",
            "`experts`",
        ),
        (
            MXFP4,
            "_inter_align = 128 if _aiter_k3_opt else 256",
            "_inter_align = 128",
            "create_weights",
        ),
        (
            MXFP4,
            "return a8w4 or not a4w4",
            "return a8w4",
            "_aiter_situ_uses_gu_interleaved_weights",
        ),
        (MXFP4, "layer.w13_weight.is_shuffled = True", "pass", "process_weights_after_loading"),
        (
            TOPK,
            "topk_config.correction_bias_for_dtype(router_logits.dtype)",
            "None",
            "select_experts",
        ),
        (RUNNER, "    hidden_pad: int = 0", "    pad: int = 0", "the field pad"),
        (RUNNER, "bias1=quant_info.b13", "bias1=None", "AiterRunnerCore.run"),
    ],
)
def test_a_changed_meaning_is_refused_with_place_and_reason(tree, file, old, new, named):
    found = tree(MAIN)
    path = found.package / file
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ChangedCode) as error:
        run.apply(found)
    assert named in error.value.what and f"sglang/{file}:" in error.value.what
    assert path.read_text() == text.replace(old, new, 1)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
