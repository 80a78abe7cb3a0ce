"""Building the environment of the real SGLang, with a pip that the test makes up."""

import sys

import pytest

from sglang_aiter_moe.testing import sglang_environment
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture
def venv(tmp_path):
    """An environment whose Python does what it is told without doing it, and notes that it was called."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" >> "$0.log"\necho noise\n')
    python.chmod(0o755)
    return tmp_path


def test_progress_stays_off_standard_output_which_may_be_the_callers_json(venv, capfd):
    assert sglang_environment.build(venv) == venv / "bin" / "python"
    out, error = capfd.readouterr()
    assert out == "" and "SGLang 0.5.23 ..." in error


def test_what_is_there_is_not_installed_again(venv):
    log = venv / "bin" / "python.log"
    sglang_environment.build(venv)
    before = log.read_text()
    assert "torch==2.13.0" in before and str(sglang_environment.LOCK) in before
    sglang_environment.build(venv)
    assert log.read_text() == before
    sglang_environment.build(venv, torch="torch==2.12.0")
    assert "torch==2.12.0" in log.read_text().removeprefix(before)


def test_a_step_that_fails_ends_it_with_its_output(venv, capfd):
    (venv / "bin" / "python").write_text("#!/bin/sh\necho no such package\nexit 1\n")
    with pytest.raises(SystemExit, match="no such package"):
        sglang_environment.build(venv)
    assert capfd.readouterr().out == ""
    assert not (venv / ".lock-installed").exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
