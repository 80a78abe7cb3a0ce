"""The trained miniature behind the real ``sglang serve``: A16W4, and updated in place to other weights and back.

The other modes, wrong layouts, releases and ranks: ``sglang-aiter-moe eval``, on request, with the same code.
"""

import json
import sys

import pytest
from typer.testing import CliRunner

from sglang_aiter_moe.cli import app
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def report():
    arguments = ["--mode", "A16W4", "--update", "--no-wrong-layout", "--json", "-"]
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.stdout, result.output + repr(result.exception)
    return result.exit_code, json.loads(result.stdout)


def test_it_answers_as_the_float32_model_does(report):
    _, found = report
    (row,) = found["modes"]
    assert row["questions"] == 200 and row["layout"] == "separated"
    assert row["right"] >= row["required"] >= 194, row["example"]


def test_updated_in_place_it_answers_with_the_other_weights_and_then_with_the_first(report):
    _, found = report
    updates = found["modes"][0]["updates"]
    assert [u["checkpoint"] for u in updates] == ["kimi_second", "kimi"]
    for update in updates:
        assert update["accuracy"] * 200 >= update["required"] >= 194


def test_the_exit_status_says_so(report):
    code, found = report
    assert code == 0 and found["holds"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
