"""Mutants: each kind of change is made, text is left alone, and tests that guard something kill them."""

import ast
import subprocess
import sys
import textwrap

import pytest

from sglang_aiter_moe.testing.mutation import mutants, sample
from sglang_aiter_moe.testing.mutation_draw import (
    beside,
    chosen,
    distinct,
    later_look,
    sources,
    without_line,
)
from sglang_aiter_moe.testing.mutation_targets import ELSEWHERE, PACKAGE, TESTS, UNIT
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

ROOT = PACKAGE.parents[1]


def changes(source):
    return {(m.operator, m.before, m.after) for m in mutants(textwrap.dedent(source))}


@pytest.mark.parametrize(
    "source,expected",
    [
        ("x = a == b", ("comparison", "a == b", "a != b")),
        ("x = a <= b", ("comparison", "a <= b", "a < b")),
        ("x = a in b", ("comparison", "a in b", "a not in b")),
        ("x = a is None", ("comparison", "a is None", "a is not None")),
        ("x = a and b", ("and/or", "a and b", "a or b")),
        ("x = a and b", ("condition dropped", "a and b", "a")),
        ("x = not a", ("not dropped", "not a", "a")),
        ("x = a // b", ("arithmetic", "a // b", "a * b")),
        ("x = 31", ("constant", "31", "32")),
        ("x = True", ("constant", "True", "False")),
        ("x = a if b else c", ("condition negated", "a if b else c", "a if not b else c")),
        ("if a:\n    b = c", ("condition negated", "if a: b = c", "if not a: b = c")),
        ("raise ValueError('no')", ("raise dropped", "raise ValueError('no')", "pass")),
        ("def f():\n    return a", ("result dropped", "return a", "return None")),
        ("f(a)", ("call dropped", "f(a)", "pass")),
        ("for a in b:\n    continue", ("loop control", "continue", "break")),
    ],
)
def test_operators(source, expected):
    assert expected in changes(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring 1."""',
        "x = f'{a + 1} of {b == c}'",
        "logger.warning('%d', 1)",
        "__all__ = [name for name in b if 1]",
        "from a import b",
        "x: Literal[1] = a",
        "def f():\n    return None",
        "if TYPE_CHECKING:\n    x = 1",
        "x = ContractError(f'{a}', allowed=1 + 1)",
    ],
)
def test_what_is_text_stays(source):
    assert not changes(source)


def test_only_the_raise_itself_changes():
    assert changes("raise ValueError(f'{a}' if a == 1 else 2)") == {
        ("raise dropped", "raise ValueError(f'{a}' if a == 1 else 2)", "pass")
    }


def test_each_mutant_is_one_change_that_compiles():
    source = (PACKAGE / "contract" / "padding.py").read_text()
    plain = ast.unparse(ast.parse(source))
    found = mutants(source)
    assert len(found) > 20
    for mutant in found:
        compile(mutant.source, "padding.py", "exec")
        assert mutant.source != plain, mutant.name


def test_the_sample_is_always_the_same_and_of_the_asked_size():
    source = (PACKAGE / "contract" / "routes.py").read_text()
    found = mutants(source)
    chosen = sample(found, 10, "routes")
    assert len(chosen) == 10 and chosen == sample(list(reversed(found)), 10, "routes")
    assert chosen != sample(found, 10, "other")
    moved = mutants("# a line more\n" + source)
    assert [(m.operator, m.before) for m in sample(moved, 10, "routes")] == [
        (m.operator, m.before) for m in chosen
    ]


def test_another_draw_beside_the_first_has_none_of_its_mutants():
    name = "contract/modes.py"
    first = {mutant.name for mutant in chosen(name, 0.5)}
    other = chosen(name, 0.3, "other", 2, first)
    assert len(other) == round(0.3 * len(distinct(name)))
    assert not first & {mutant.name for mutant in other}
    assert len(chosen(name, 0.0)) == 3 and len(chosen(name, 0.0, "other", 2, first)) == 2
    (source,) = sources([name]).values()
    results = {name: {"source": source, "ran": dict.fromkeys(first, "killed")}}
    assert beside([results], name, source) == first and not beside([{}], name, source)
    assert beside([{}, results, results], name, source) == first


def test_mutants_of_an_edited_file_are_known_by_their_text():
    name = "contract/modes.py"
    one = distinct(name)[3]
    (source,) = sources([name]).values()
    moved = {
        name: {"source": "of before", "ran": {"line 999: " + without_line(one.name): "killed"}}
    }
    known = beside([moved], name, source)
    assert one.name in known
    assert {without_line(found) for found in known} == {without_line(one.name)}


def test_again_runs_survivors_and_of_another_source_all_that_are_still_there():
    there = distinct("srt/switch.py")
    first, second = there[0].name, there[1].name
    entry = {"source": "now", "ran": {first: "killed", second: "survived"}}
    todo, kept = later_look(entry, "srt/switch.py", "now")
    assert [mutant.name for mutant in todo] == [second] and kept is entry["again"]
    kept[second] = "killed"
    assert later_look(entry, "srt/switch.py", "now") == ([], kept)
    texts = [f"line 999: {without_line(name)}" for name in (first, second)]
    moved = {"source": "before", "ran": dict.fromkeys([*texts, "line 1: gone"], "killed")}
    todo, kept = later_look(moved, "srt/switch.py", "now")
    assert {first, second} <= {mutant.name for mutant in todo}
    assert {without_line(m.name) for m in todo} == set(map(without_line, texts))
    kept |= {mutant.name: "killed" for mutant in todo}
    assert later_look(moved, "srt/switch.py", "now")[0] == []
    assert later_look(moved, "srt/switch.py", "later")[0] == todo
    assert moved["ran"].keys() == {*texts, "line 1: gone"}


def test_equal_changes_are_drawn_together_or_one_by_one():
    found = mutants("\n".join(["x = a + 1", "y = b and c"] * 20))
    ones = [m for m in found if m.operator == "constant"]
    assert len(ones) == 20 and len({m.name.partition(": ")[2] for m in ones}) == 1
    counts = [len({*sample(found, 20, str(salt))} & {*ones}) for salt in range(20)]
    assert set(counts) == {0, 20}, "all or none"
    counts = [len({*sample(found, 20, str(salt), apart=True)} & {*ones}) for salt in range(20)]
    assert min(counts) > 0 and max(counts) < 20
    assert sample(found, 20, apart=True) == sample(found[::-1], 20, apart=True)


def test_every_module_has_tests_or_a_reason():
    modules = {
        str(file.relative_to(PACKAGE))
        for folder in ("contract", "srt")
        for file in (PACKAGE / folder).rglob("*.py")
        if mutants(file.read_text())
    }
    assert modules == {*TESTS, *ELSEWHERE}
    for tests in TESTS.values():
        assert all((ROOT / UNIT / test).is_file() for test in tests)


CHECK = """
import os, sys
from sglang_aiter_moe.testing.mutation_run import passes
from sglang_aiter_moe.testing.mutation_targets import PACKAGE, UNIT
name, tests = "contract/padding.py", ("contract/test_padding.py",)
source = (PACKAGE / name).read_text()
broken = source.replace("KERNEL_MULTIPLE = 128", "KERNEL_MULTIPLE = 64")
assert broken != source
print(*(passes(name, text, tests, 100)[0] for text in (None, source, broken)))
print(passes(name, "while True: pass", tests, 2)[0])
print(passes(name, "import time; time.sleep(1000)", tests, 0.1)[0])
in_child = (os.path.relpath(sys.argv[1], UNIT),)
print(*(passes(name, text, in_child, 100)[0] for text in (source, broken)))
"""
IN_CHILD = """
import subprocess, sys

def test_what_a_process_that_it_starts_has():
    code = "from sglang_aiter_moe.contract.padding import KERNEL_MULTIPLE as m; sys.exit(m != 128)"
    assert not subprocess.run([sys.executable, "-c", "import sys; " + code]).returncode
"""


def test_a_run_tells_a_guarded_change_from_none(tmp_path):
    in_child = tmp_path / "test_in_child.py"
    in_child.write_text(IN_CHILD)
    command = [sys.executable, "-c", CHECK, str(in_child)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    here, child = done.stdout.split()[:5], done.stdout.split()[5:]
    assert here == ["survived", "survived", "killed", "timeout", "timeout"]
    assert child == ["survived", "killed"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
