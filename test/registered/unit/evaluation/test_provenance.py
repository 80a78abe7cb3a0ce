"""What a kept result says about itself, in repositories that the test makes."""

import subprocess
import sys

import pytest

from sglang_aiter_moe.evaluation.provenance import commit, provenance
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
