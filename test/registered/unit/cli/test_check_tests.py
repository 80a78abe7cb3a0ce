"""The registration rule bites on every way in which SGLang's collection has been broken."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.cli import app
from sglang_aiter_moe.testing import check_registration
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

REGISTRATION = 'register_cpu_ci(est_time=5, suite="base-a-test-cpu")\n'
MAIN = 'if __name__ == "__main__":\n    sys.exit(pytest.main([__file__, "-v"]))\n'
GOOD = REGISTRATION + MAIN

BROKEN = {
    "no registration": (MAIN, "no register_*_ci() call"),
    "no main": (REGISTRATION, "no `if __name__"),
    "main without a call": (
        REGISTRATION + 'if __name__ == "__main__":\n    pass\n',
        "calls nothing",
    ),
    "main calls only in else": (
        REGISTRATION + 'if __name__ == "__main__":\n    pass\nelse:\n    run()\n',
        "calls nothing",
    ),
    "main only inside a function": (
        REGISTRATION + 'def f():\n    if __name__ == "__main__":\n        run()\n',
        "no `if __name__",
    ),
    "a name for a literal": (
        'SUITE = "base-a-test-cpu"\nregister_cpu_ci(est_time=5, suite=SUITE)\n' + MAIN,
        "register_cpu_ci(suite=SUITE) is no literal",
    ),
    "an expression": ('register_cpu_ci(est_time=2 * 3, suite="s")\n' + MAIN, "est_time=2 * 3"),
    "keywords unpacked": ("register_cpu_ci(**OPTIONS)\n" + MAIN, "is no literal"),
    "inside a function": ("def f():\n    " + REGISTRATION + MAIN, "not a top-level statement"),
    "under a condition": ("if True:\n    " + REGISTRATION + MAIN, "not a top-level statement"),
    "assigned": ("mark = " + REGISTRATION + MAIN, "not a top-level statement"),
    "no suite": ("register_cpu_ci(est_time=5)\n" + MAIN, "lacks suite="),
    "no runner": (
        'register_amd_ci(est_time=5, stage="stage-b")\n' + MAIN,
        "lacks runner_config=",
    ),
    "zero time": ('register_cpu_ci(est_time=0, suite="s")\n' + MAIN, "a number above 0"),
    "text for a time": ('register_cpu_ci(est_time="5", suite="s")\n' + MAIN, "a number above 0"),
    "unknown platform": ('register_npu_ci(est_time=5, suite="s")\n' + MAIN, "is unknown"),
    "a syntax error": ("def (:\n", "does not parse"),
    "only a comment": ("# " + REGISTRATION + MAIN, "no register_*_ci() call"),
    "only a string": (f"TEXT = {REGISTRATION!r}\n" + MAIN, "no register_*_ci() call"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_what_to_do(name):
    source, expected = BROKEN[name]
    violations = check_registration.check_source(source, "test_x.py")
    assert violations, name
    assert any(expected in str(violation) for violation in violations), violations


@pytest.mark.parametrize(
    "source",
    [
        GOOD,
        'register_cpu_ci(5, "base-a-test-cpu")\n' + MAIN,
        'ci.register_cuda_ci(est_time=1.5, stage="base-a", runner_config="1-gpu-small")\n' + MAIN,
        REGISTRATION
        + 'register_amd_ci(est_time=5, stage="stage-a", runner_config="1-gpu-small-amd")\n'
        + MAIN,
        REGISTRATION + 'if "__main__" == __name__:\n    unittest.main()\n',
    ],
)
def test_good_files_pass(source):
    assert check_registration.check_source(source, "test_x.py") == []


def test_command_counts_and_exits(tmp_path):
    (tmp_path / "test_good.py").write_text(GOOD)
    (tmp_path / "conftest.py").write_text("")
    (tmp_path / "__init__.py").write_text("")
    good = CliRunner().invoke(app, ["check-tests", str(tmp_path), "--json", "-"])
    assert good.exit_code == 0
    assert json.loads(good.stdout) == {"files": 1, "violations": []}

    (tmp_path / "test_bad.py").write_text(MAIN)
    target = tmp_path / "out.json"
    bad = CliRunner().invoke(app, ["check-tests", str(tmp_path), "--json", str(target)])
    assert bad.exit_code == 1
    report = json.loads(target.read_text())
    assert report["files"] == 2
    assert [Path(v["path"]).name for v in report["violations"]] == ["test_bad.py"]


def test_missing_and_empty_paths_do_not_pass(tmp_path):
    assert CliRunner().invoke(app, ["check-tests", str(tmp_path / "nowhere")]).exit_code == 1
    assert CliRunner().invoke(app, ["check-tests", str(tmp_path)]).exit_code == 1


def test_the_hook_runs_the_file_without_the_package(tmp_path):
    (tmp_path / "test_bad.py").write_text(REGISTRATION)
    script = check_registration.__file__
    run = [sys.executable, "-I", "-S", script, str(tmp_path / "test_bad.py")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "add at the end" in done.stdout, done.stderr


def test_the_hook_for_other_repositories_is_that_file(tmp_path):
    root = Path(__file__).parents[4]
    hook = (root / ".pre-commit-hooks.yaml").read_text()
    entry = re.search(r"entry: (\S+)", hook)[1]
    assert (root / entry).samefile(check_registration.__file__)
    assert re.search(r"files: (\S+)", hook)[1] == r"^test/registered/.*\.py$"
    for name, status in (("test_good.py", 0), ("test_bad.py", 1)):
        (tmp_path / name).write_text(GOOD if status == 0 else REGISTRATION)
        # As pre-commit runs a script: the file itself, with the changed files as arguments.
        done = subprocess.run([root / entry, tmp_path / name], capture_output=True, check=False)
        assert done.returncode == status


def test_this_repository_keeps_the_rule():
    root = Path(__file__).parents[4]
    files, violations = check_registration.check_paths([root / "test/registered"])
    assert files
    assert violations == []


NEEDS_GPU = "pytest.mark.skipif(not torch.cuda.is_available()"


def unmarked(source):
    """Lines of marks that skip without a GPU, without ``pytest.mark.gpu`` beside them: ``-m gpu`` leaves them out."""
    tree = ast.parse(source)
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    skips = {
        node.targets[0].id for node in assigned if ast.unparse(node.value).startswith(NEEDS_GPU)
    }
    for node in ast.walk(tree):
        marks = getattr(node, "decorator_list", getattr(node, "elts", []))
        texts = [ast.unparse(mark) for mark in marks]
        needs = any(text in skips or text.startswith(NEEDS_GPU) for text in texts)
        if needs and "pytest.mark.gpu" not in texts:
            yield node.lineno


SKIP = f"@{NEEDS_GPU}, reason='needs a GPU')\n"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (f"{SKIP}def test(): ...", [2]),
        (f"@pytest.mark.gpu\n{SKIP}def test(): ...", []),
        (f"needs_gpu = {SKIP[1:]}@needs_gpu\ndef test(): ...", [3]),
        (f"needs_gpu = {SKIP[1:]}@needs_gpu\n@pytest.mark.gpu\ndef test(): ...", []),
        (f"pytestmark = [{SKIP[1:-1]}]", [1]),
        (f"pytestmark = [pytest.mark.gpu, {SKIP[1:-1]}]", []),
    ],
)
def test_a_gpu_test_without_its_mark_is_found(source, lines):
    assert list(unmarked(source)) == lines


def test_what_needs_a_gpu_is_marked_so():
    files = sorted(Path(__file__).parents[2].rglob("test_*.py"))
    using = [file for file in files if NEEDS_GPU in file.read_text()]
    assert len(using) > 3
    assert {f.name: found for f in using if (found := list(unmarked(f.read_text())))} == {}
    # A skip that the test itself makes is no mark: nothing could choose it.
    in_a_call = 'pytest.skip("needs a ' + 'GPU")'
    assert [file.name for file in files if in_a_call in file.read_text()] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
