"""Apply, check and revert on a miniature SGLang: what comes back, and in which states it is refused."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.testing.registration import register_cpu_ci

pytest.importorskip("libcst", reason="the extra `apply` is not installed")

from sglang_aiter_moe.cli import app
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree import run, transaction
from sglang_aiter_moe.intree.manifest import FOLDER, NAME
from sglang_aiter_moe.intree.tree import find_tree
from sglang_aiter_moe.testing import stand_in_tree
from sglang_aiter_moe.testing.check_registration import check_paths

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

TOPK = "sglang/srt/layers/moe/topk.py"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    stand_in_tree.accept(monkeypatch.setattr)
    return stand_in_tree.write(tmp_path / "tree")


def test_applied_twice_and_reverted_every_byte_is_as_before(tree):
    before = stand_in_tree.content(tree)
    found = find_tree(tree)
    assert run.check(found).state == "original" and stand_in_tree.content(tree) == before
    assert run.apply(found).done == "applied"
    once = stand_in_tree.content(tree)
    assert len(once) > len(before) + 50
    assert run.apply(found).done.startswith("nothing to do")
    assert run.check(found).state == "applied"
    assert stand_in_tree.content(tree) == once
    assert run.revert(found).done == "reverted"
    assert stand_in_tree.content(tree) == before
    assert run.revert(found).done.startswith("nothing to do")


def test_what_is_placed_imports_nothing_of_this_distribution(tree):
    run.apply(find_tree(tree))
    for path in (tree / "sglang" / FOLDER).rglob("*.py"):
        for line in path.read_text().splitlines():
            if line.lstrip().startswith(("import ", "from ")):
                assert "sglang_aiter_moe" not in line, (path, line)
    names = {path.name for path in (tree / "sglang" / FOLDER).iterdir()}
    assert not names & {"portable", "testing", "plugin.py", "patches", "cli", "intree", "verify"}


def test_the_placed_code_computes_without_this_distribution(tree):
    run.apply(find_tree(tree))
    code = (
        "import sys; from sglang.srt.layers.moe.aiter_moe.srt.layers.moe import topk; import torch;"
        "from sglang.srt.layers.moe.aiter_moe.srt.layers.quantization import mxfp4_method, mxfp4;"
        "assert not any(n.startswith('sglang_aiter_moe') for n in sys.modules);"
        "print(topk.routing_dtype(torch.bfloat16, torch.float32))"
    )
    # SGLang's own packages of the miniature lack their __init__: namespace packages.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tree}:{':'.join(p for p in sys.path if 'site-packages' in p)}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "torch.float32", done.stderr


def test_tests_go_along_into_a_source_tree_and_follow_the_rule(tmp_path, monkeypatch):
    stand_in_tree.accept(monkeypatch.setattr)
    root = stand_in_tree.write(tmp_path / "tree", source=True)
    before = stand_in_tree.content(root)
    run.apply(find_tree(root))
    folder = root / "test" / "registered"
    files, violations = check_paths([folder])
    assert {"test_mxfp4_reload.py", "test_topk_correction_bias_cache.py"} <= {f.name for f in files}
    assert violations == []
    for file in files:
        text = file.read_text()
        assert "from sglang.test.ci.ci_register import" in text
        assert "from sglang_aiter_moe" not in text
        for part in text.split('"'):
            if part.endswith(".npz"):
                assert (file.parent / "golden" / part).is_file()
    run.revert(find_tree(root))
    assert stand_in_tree.content(root) == before
    run.apply(find_tree(root), tests=False)
    assert not list(folder.rglob("test_*.py"))


# --- trees that are refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    "release, named",
    [("", "is unknown"), ("0.5.16", "is SGLang 0.5.16"), ("0.5.24", "0.5.17 to 0.5.23")],
)
def test_unknown_and_untested_releases(tmp_path, release, named):
    root = stand_in_tree.write(tmp_path, release=release)
    with pytest.raises(ContractError, match=named):
        find_tree(root)
    assert str(find_tree(root, "v0.5.23").release) == "0.5.23"
    with pytest.raises(ContractError, match="--release is 'new'"):
        find_tree(root, "new")


@pytest.mark.parametrize("release", ["0.5.23.post1", "0.5.23rc1", "0.5.23.dev3+gabc"])
def test_builds_of_a_release_count_as_that_release(tmp_path, release):
    assert str(find_tree(stand_in_tree.write(tmp_path, release=release)).release) == "0.5.23"


def test_the_release_of_a_wheel_and_of_a_checkout(tmp_path):
    wheel = stand_in_tree.write(tmp_path / "wheel", release="")
    (wheel / "sglang-0.5.19.dist-info").mkdir()
    assert str(find_tree(wheel).release) == "0.5.19"
    checkout = stand_in_tree.write(tmp_path / "checkout", source=True, release="")
    commit(checkout)
    git(checkout, "tag", "v0.5.21")
    git(checkout, "commit", "--allow-empty", "-m", "more")
    assert str(find_tree(checkout).release) == "0.5.21"


def test_what_to_do_with_a_release_depends_on_which_side_it_is(tmp_path):
    def fix(release):
        with pytest.raises(ContractError) as error:
            find_tree(stand_in_tree.write(tmp_path / release, release=release))
        return error.value.fix

    assert "--release 0.5.23" in fix("0.5.24")
    for old in ("0.5.12", "0.5.13", "0.5.16"):
        assert "use the plugin" in fix(old) and "--release" not in fix(old)


def test_an_applied_tree_is_reverted_whatever_its_release_says_by_then(tmp_path, monkeypatch):
    stand_in_tree.accept(monkeypatch.setattr)
    root = stand_in_tree.write(tmp_path / "tree", release="")
    before = stand_in_tree.content(root)
    run.apply(find_tree(root, "0.5.23"))
    (root / "sglang-0.5.24.dist-info").mkdir()
    assert str(find_tree(root).release) == "0.5.23"
    run.revert(find_tree(root))
    assert stand_in_tree.content(root) == before
    with pytest.raises(ContractError, match=r"is SGLang 0.5.24"):
        find_tree(root)


def test_directories_in_a_checkout_are_told_where_the_checkout_is(tmp_path):
    root = stand_in_tree.write(tmp_path / "checkout", source=True, release="")
    commit(root)
    for inside in ("python", "python/sglang"):
        with pytest.raises(ContractError) as error:
            find_tree(root / inside)
        assert error.value.fix == f"give {root}"


def test_not_an_sglang_tree(tmp_path):
    with pytest.raises(ContractError, match="is no SGLang tree"):
        find_tree(tmp_path)
    root = stand_in_tree.write(tmp_path)
    with pytest.raises(ContractError) as error:
        find_tree(root / "sglang")
    assert error.value.fix == f"give {root}"


@pytest.mark.parametrize("python, refused", [("3.9", True), ("3.10", True), ("3.11", False)])
def test_an_installed_sglang_says_which_python_runs_it(tmp_path, python, refused):
    root = stand_in_tree.write(tmp_path / "lib" / f"python{python}" / "site-packages")
    if refused:
        with pytest.raises(ContractError, match=f"is run by Python {python}"):
            find_tree(root)
    else:
        assert find_tree(root).tests is None


def test_a_half_applied_tree(tree):
    found, path = find_tree(tree), tree / TOPK
    released = path.read_bytes()
    run.apply(found)
    applied = stand_in_tree.content(tree)
    path.write_bytes(released)
    for command in (run.check, run.apply):
        with pytest.raises(
            ContractError, match=r"half-applied: sglang/srt/layers/moe/topk.py is as"
        ):
            command(found)
    run.revert(found)
    assert path.read_bytes() == released
    run.apply(found)
    assert stand_in_tree.content(tree) == applied
    (tree / "sglang" / FOLDER / "errors.py").unlink()
    with pytest.raises(ContractError, match=r"errors.py is missing"):
        run.apply(found)
    run.revert(found)
    run.apply(found)
    (tree / "sglang" / FOLDER / NAME).unlink()
    for command in (run.check, run.apply, run.revert):
        with pytest.raises(ContractError, match=f"{NAME} is missing"):
            command(found)


def test_remains_without_call_sites(tree):
    folder = tree / "sglang" / FOLDER
    folder.mkdir()
    (folder / "errors.py").write_text("")
    for command in (run.check, run.apply, run.revert):
        with pytest.raises(ContractError, match="aiter_moe is there"):
            command(find_tree(tree))


@pytest.mark.parametrize("file", [TOPK, f"sglang/{FOLDER}/errors.py"])
def test_files_that_were_changed_after_are_not_thrown_away(tree, file):
    run.apply(find_tree(tree))
    (tree / file).write_text((tree / file).read_text() + "# mine\n")
    before = stand_in_tree.content(tree)
    with pytest.raises(ContractError, match=f"{file} was changed after"):
        run.revert(find_tree(tree))
    assert stand_in_tree.content(tree) == before


def test_another_state_of_ours_has_to_be_taken_out_first(tree, monkeypatch):
    run.apply(find_tree(tree))
    older = run.placed_files() | {f"{FOLDER}/errors.py": b"# older\n"}
    monkeypatch.setattr(run, "placed_files", lambda: older)
    for command in (run.apply, run.check):
        with pytest.raises(ContractError, match="has another patch set, of version"):
            command(find_tree(tree))
    run.revert(find_tree(tree))
    assert run.apply(find_tree(tree)).done == "applied"


def test_an_interrupted_run_is_said_and_finished_or_undone(tree, monkeypatch):
    before, found = stand_in_tree.content(tree), find_tree(tree)
    real, calls = transaction._put, []

    def put(path, data):
        calls.append(path)
        if len(calls) == 60:
            raise KeyboardInterrupt
        real(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(transaction, "_put", put)
        with pytest.raises(KeyboardInterrupt):
            run.apply(found)
    with pytest.raises(ContractError, match="half-changed: `apply` was interrupted"):
        run.check(found)
    assert "was found" in run.apply(found).done
    assert run.check(found).state == "applied"
    calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(transaction, "_put", put)
        with pytest.raises(KeyboardInterrupt):
            run.revert(found)
    assert "and finished" in run.revert(found).done
    assert stand_in_tree.content(tree) == before


# --- git ---------------------------------------------------------------------------------------


def git(root, *arguments):
    command = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*command, *arguments], check=True, capture_output=True)


def commit(root):
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")


def test_uncommitted_changes_are_left_alone_unless_told(tree):
    commit(tree)
    (tree / "README.md").write_text("another file may be dirty\n")
    path = tree / TOPK
    path.write_text(path.read_text() + "# mine\n")
    before = stand_in_tree.content(tree)
    with pytest.raises(
        ContractError, match=r"uncommitted changes in sglang/srt/layers/moe/topk.py"
    ):
        run.apply(find_tree(tree))
    assert "uncommitted changes" in run.check(find_tree(tree)).refusal.what
    assert run.check(find_tree(tree), allow_uncommitted=True).refusal is None
    done = CliRunner().invoke(app, ["apply", str(tree), "--check"])
    assert done.exit_code == 2 and "but not as it is" in done.stderr and done.stdout[:4] == "--- "
    assert stand_in_tree.content(tree) == before
    run.apply(find_tree(tree), allow_uncommitted=True)
    run.revert(find_tree(tree))
    assert stand_in_tree.content(tree) == before
    git(tree, "commit", "-aqm", "mine")
    run.apply(find_tree(tree))


# --- the command -------------------------------------------------------------------------------


def test_the_command(tree, tmp_path):
    def call(*arguments):
        return CliRunner().invoke(app, ["apply", str(tree), *arguments])

    out = tmp_path / "report.json"
    done = call("--check", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "+    if aiter_switch.acts(_use_aiter):" in done.stdout
    assert "would be applied (8 files edited" in done.stderr
    report = json.loads(out.read_text())
    assert report["state"] == "original" and report["diff"] == done.stdout
    assert report["refusal"] is None
    as_json = call("--check", "--json", "-")
    assert json.loads(as_json.stdout) == report and "would be applied" in as_json.stderr
    assert {e["outcome"] for e in report["edits"]} == {"edited", "upstream"}
    assert call().exit_code == 0
    assert "in the tree already" in call("--check").output
    assert "reverted" in call("--revert").output
    assert call("--check", "--revert").exit_code == 2
    (tree / TOPK).write_text((tree / TOPK).read_text().replace("hidden_states, r", "x, r"))
    refused = call()
    assert refused.exit_code == 2


def test_the_diff_keeps_odd_bytes_and_says_where_the_last_line_has_no_end(tree):
    before = b"a\tb\x0cc\n\xe2\x80\xa8\xff\nlast"
    change = transaction.Change(tree / TOPK, before, before + b" line")
    diff = run.Report(find_tree(tree), "original", changes=[change]).diff()
    lines = diff.encode("utf-8", "surrogateescape").split(b"\n")
    missing = b"\\ No newline at end of file"
    assert lines[3:] == [
        b" a\tb\x0cc",
        b" \xe2\x80\xa8\xff",
        *(b"-last", missing, b"+last line", missing, b""),
    ]


def test_a_damaged_record_is_recovered_by_what_the_message_says(tree):
    before = stand_in_tree.content(tree)
    run.apply(find_tree(tree))
    folder = tree / "sglang" / FOLDER
    (folder / NAME).write_text("{")
    with pytest.raises(ContractError, match="is not what `apply` wrote") as error:
        find_tree(tree)
    assert f"remove {folder}" in error.value.fix
    shutil.rmtree(folder)
    for name, data in before.items():
        (tree / name).write_bytes(data)
    assert run.apply(find_tree(tree)).done == "applied"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_checks_output_is_a_patch_that_git_applies(tree, end):
    path = tree / TOPK
    odd = b"\n# a tab\t, a form feed \f and \xe2\x80\xa8 inside a line, and no end of the last"
    for file in tree.rglob("*.py"):
        file.write_bytes(file.read_bytes().rstrip(b"\n").replace(b"\n", end))
    path.write_bytes(path.read_bytes() + odd.replace(b"\n", end))
    before = stand_in_tree.content(tree)
    commit(tree)
    done = CliRunner().invoke(app, ["apply", str(tree), "--check"])
    assert done.exit_code == 0, done.output
    patch = tree.with_name("check.patch")
    patch.write_bytes(done.stdout_bytes)
    git(tree, "apply", "--whitespace=nowarn", str(patch))
    by_git = {name: data for name, data in stand_in_tree.content(tree).items() if name in before}
    git(tree, "checkout", "--", ".")
    run.apply(find_tree(tree))
    ours = stand_in_tree.content(tree)
    assert by_git == {name: ours[name] for name in before}
    assert all(ours[n].count(b"\n") == ours[n].count(end) for n in before if n.endswith(".py"))
    run.revert(find_tree(tree))
    assert stand_in_tree.content(tree) == before


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
