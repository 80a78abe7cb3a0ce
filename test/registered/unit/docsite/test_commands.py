"""Every command in the documentation parses; those that need nothing but this package are run.

`sglang serve` lines are parsed by SGLang's own parser in test/registered/e2e/test_docs_commands.py.
"""

import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sglang_aiter_moe import environ
from sglang_aiter_moe.cli import app, doctor_checks
from sglang_aiter_moe.docsite.commands import Command, commands
from sglang_aiter_moe.docsite.generate import ROOT
from sglang_aiter_moe.model_config import example_names
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL = [command for page in PAGES for command in commands(page)]
OURS = [c for c in ALL if c.words[0] == "sglang-aiter-moe"]
#: Commands that are quick and need no server, no file and no AITER.
QUICK = ("plan", "doctor", "env", "prebuild")


def by_line(command):
    return str(command)


def without_brackets(words):
    """A synopsis as a command: `[--tp N]` is given, and stands for a number."""
    words = [word.strip("[]") for word in words if word not in ("...", "...]", "[OPTIONS]", "[--")]
    numbers = {"N": "1", "K": "128", "R": "0"}
    return [numbers.get(word, word) for word in words]


def click_parse(words):
    """Parses as the program would, up to the call of the command."""
    command = typer.main.get_command(app)
    context = command.make_context("sglang-aiter-moe", list(words), resilient_parsing=False)
    while hasattr(command, "commands") and context._protected_args:
        name, sub, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context, command = sub.make_context(name, rest, parent=context), sub
    return context


def test_there_are_commands_of_every_kind():
    assert len(ALL) > 40
    found = {c.words[1] for c in OURS}
    assert {"plan", "doctor", "verify", "prebuild", "eval", "bench", "layout"} <= found
    assert any(c.words[:2] == ("sglang", "serve") for c in ALL)


@pytest.mark.parametrize("command", OURS, ids=by_line)
def test_our_commands_parse(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    click_parse(without_brackets(command.words[1:]))


@pytest.mark.parametrize("words", [["plan", "--tq", "8"], ["plan", "--tp", "x"], ["polish"]])
def test_what_does_not_parse_is_noticed(words):
    with pytest.raises(Exception, match=r"[Nn]o such|valid integer|No such command"):
        click_parse(words)


def examples_only(command):
    """Whether a command names nothing that only its reader has."""
    places = re.compile(r"[NKR]|[A-Z]{2,}(=VALUE)?|\[.*")  # N, CONFIG, NAME=VALUE, [OPTIONS]
    return command.words[1] in QUICK and not any(map(places.fullmatch, command.words))


RUN = [c for c in OURS if examples_only(c) and len(c.words) > 2]


@pytest.mark.parametrize("command", RUN, ids=by_line)
def test_commands_that_need_nothing_else_run(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # With a real AITER, `prebuild` would build.
    monkeypatch.setattr(doctor_checks, "aiter_package", lambda: None)
    for name in environ.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in [*exported_before(command), *command.env]:
        monkeypatch.setenv(name, value)
    words = without_brackets(command.words[1:])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == command.status, result.output


def exported_before(command):
    """What `export` lines of the same block above the command set."""
    lines = command.page.read_text(encoding="utf-8").splitlines()
    start = command.line - 1
    while start and not lines[start - 1].startswith("```"):
        start -= 1
    return [
        tuple(word.split("=", 1))
        for other in commands(command.page)
        if other.words[0] == "export" and start < other.line < command.line
        for word in other.words[1:]
    ]


def test_commands_were_run_for_every_model():
    text = "\n".join(map(str, RUN))
    for name in ("kimi-k3", "gpt-oss-120b", "deepseek-v4"):
        assert f"plan {name}" in text and f"prebuild {name}" in text
    assert set(example_names()) >= {"kimi-k3", "gpt-oss-120b", "deepseek-v4"}


@pytest.mark.parametrize("command", [c for c in ALL if c.words[0] == "make"], ids=by_line)
def test_make_targets_exist(command):
    makefile = (ROOT / "Makefile").read_text()
    target = next(w for w in command.words[1:] if "=" not in w)
    assert target == ".venv/.installed" or re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize(
    "command", [c for c in ALL if c.words[0] in ("python", "pytest")], ids=by_line
)
def test_scripts_and_modules_exist(command):
    words = command.words[1:]
    if words[0] == "-m":
        path = Path("python") / Path(*words[1].split("."))
        assert (ROOT / path).is_dir() or (ROOT / path).with_suffix(".py").exists()
        return
    path = next(w for w in words if not w.startswith("-"))
    assert (ROOT / path).exists()
    # Options that the script does not have would stop it.
    if path.endswith(".py"):
        text = (ROOT / path).read_text()
        for option in (w.partition("=")[0] for w in words if w.startswith("--")):
            assert f'"{option}"' in text, option


@pytest.mark.parametrize("command", [c for c in ALL if c.words[0] == "export"], ids=by_line)
def test_exported_variables_are_known(command):
    for word in command.words[1:]:
        name = word.partition("=")[0]
        assert name in environ.VARIABLES, name


def test_the_kinds_of_code_that_are_looked_at(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Type `A=1 make verify` or `nothing`, it's\n\n    make test && make lint\n\n"
        "```\n$ sglang-aiter-moe plan x # exits with 2\noutput of make\n```\n"
    )
    assert list(commands(page)) == [
        Command(page, 1, (("A", "1"),), ("make", "verify")),
        Command(page, 3, (), ("make", "test")),
        Command(page, 3, (), ("make", "lint")),
        Command(page, 6, (), ("sglang-aiter-moe", "plan", "x"), 2),
    ]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
