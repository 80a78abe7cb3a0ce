"""The variable table says what AITER and SGLang make of every spelling."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sglang_aiter_moe
from sglang_aiter_moe import environ
from sglang_aiter_moe.cli import app
from sglang_aiter_moe.cli.env import describe, markdown_table
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in environ.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "value", "aiter", "sglang"),
    [
        ("AITER_SITUV2_A8W4", "1", True, True),
        ("AITER_SITUV2_A8W4", "0", False, False),
        ("AITER_SITUV2_A8W4", "true", False, True),
        ("AITER_SITUV2_A8W4", "True", False, True),
        ("AITER_SITUV2_A8W4", "yes", False, False),
        ("AITER_SITUV2_A8W4", " 1", False, False),
        ("AITER_SITUV2_A8W4", "01", False, False),
        ("AITER_SITUV2_A8W4", "", False, False),
        ("AITER_SITUV2_A4W4", "TRUE", False, True),
        ("AITER_FORCE_A8W4", "", True, False),
        ("AITER_FORCE_A8W4", "true", False, True),
        ("AITER_FORCE_A8W4", "1", True, True),
        ("AITER_FORCE_A8W4", "0", False, False),
    ],
)
def test_two_readers_of_one_flag(name, value, aiter, sglang):
    row = describe(environ.VARIABLES[name], {name: value})
    assert row["reads"] == {"AITER": aiter, "SGLang": sglang}
    assert row["readers_differ"] == (aiter != sglang)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("AITER_BF16_FP8_MOE_BOUND", "0", 0),
        ("AITER_BF16_FP8_MOE_BOUND", " 12 ", 12),
        ("AITER_USE_GROUPED_GEMM", "yes", True),
        ("AITER_USE_GROUPED_GEMM", "TRUE", False),
        ("AITER_MOE_SORT_BACKEND", "CK", "ck"),
        ("AITER_FLYDSL_FORCE", "true", False),
    ],
)
def test_other_parsers(name, value, read):
    assert describe(environ.VARIABLES[name], {name: value})["reads"] == {"AITER": read}


def test_junk_is_shown_as_the_error_that_the_reader_raises():
    name = "AITER_BF16_FP8_MOE_BOUND"
    row = describe(environ.VARIABLES[name], {name: "many"})
    assert row["reads"]["AITER"].startswith("ValueError")


def test_unset_means_the_documented_default_for_every_reader():
    for name, variable in environ.VARIABLES.items():
        unset = describe(variable, {})
        assert not unset["readers_differ"], name
        if variable.default:
            assert unset["reads"] == describe(variable, {name: variable.default})["reads"], name
    assert describe(environ.VARIABLES["AITER_BF16_FP8_MOE_BOUND"], {})["reads"] == {"AITER": 256}
    assert describe(environ.VARIABLES["AITER_FLYDSL_FORCE"], {})["reads"] == {"AITER": True}


def test_command_shows_a_contradiction_and_fails(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "true")
    result = CliRunner().invoke(app, ["env", "--json", "-"])
    assert result.exit_code == 1
    rows = {row["name"]: row for row in json.loads(result.stdout)["variables"]}
    assert [name for name, row in rows.items() if row["readers_differ"]] == ["AITER_SITUV2_A8W4"]
    assert "SGLang reads True, AITER reads False" in " ".join(result.stderr.split())


def test_command_passes_when_readers_agree(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    assert CliRunner().invoke(app, ["env"]).exit_code == 0


def test_markdown_has_a_row_for_each_variable():
    result = CliRunner().invoke(app, ["env", "--markdown"])
    assert result.exit_code == 0
    rows = re.findall(r"^\| `(\w+)` \|", result.stdout, flags=re.M)
    assert rows == list(environ.VARIABLES)


def test_the_documentation_has_this_table():
    page = Path(__file__).parents[4] / "docs" / "reference" / "environment.md"
    assert page.read_text(encoding="utf-8").endswith("\n" + markdown_table()), (
        "write `sglang-aiter-moe env --markdown` into docs/reference/environment.md"
    )


def test_every_variable_that_the_sources_read_is_in_the_table():
    package = Path(sglang_aiter_moe.__file__).parent
    read = re.compile(r"""(?:environ(?:\.get)?|getenv)\s*[(\[]\s*["']([A-Z][A-Z0-9_]+)["']""")
    found = {
        name
        for file in package.rglob("*.py")
        for name in read.findall(file.read_text(encoding="utf-8"))
        if re.match(r"(SGLANG|AITER|GPTOSS)_", name)
    }
    assert found <= set(environ.VARIABLES), sorted(found - set(environ.VARIABLES))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
