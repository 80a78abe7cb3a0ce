"""docs/upstreaming.md names every patch, and the tests that it names exist."""

import re
import sys

import pytest

from sglang_aiter_moe.docsite.generate import ROOT
from sglang_aiter_moe.patches.table import GUARD, PATCHES
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE = (ROOT / "docs" / "upstreaming.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("patch", [GUARD, *PATCHES], ids=lambda patch: patch.name)
def test_every_patch_is_named(patch):
    for prefix in ("MXFP4 weights in ", "correction bias after "):
        if patch.name.startswith(prefix):
            (row,) = [line for line in PAGE.splitlines() if prefix in line]
            assert patch.name.removeprefix(prefix) in row.partition(prefix)[2]
            return
    assert patch.name in PAGE


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`((?:test|python|docs)/[\w/.-]+)`", PAGE))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("part", ["Motivation", "Modifications", "Risk", "Test", "Accuracy"])
def test_every_pull_request_has_every_part(part):
    sections = re.split(r"^## \d", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == 8
    assert all(f"**{part}" in section for section in sections)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
