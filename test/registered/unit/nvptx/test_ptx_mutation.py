"""The random changes of ``testing/ptx_mutation.py``: one line each, and a launch that is run again shows them."""

import random
import re
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.testing import ptx_mutation  # noqa: E402

LIMIT = 1 << 24


@pytest.fixture(scope="module")
def kept() -> ptx_mutation.Kept:
    return ptx_mutation.keep("fp8/A16W4/small", "stage1_fp8")


def test_the_unchanged_launch_gives_the_same_bits(kept):
    assert ptx_mutation.outcome(kept, kept.call.assembly, LIMIT) is None


@pytest.mark.parametrize(
    ("pattern", "by", "found"),
    [
        (r"0x1C1C1C1C", "0x1C1C1C0C", "changed: a_ptr"),
        (r"(st\.global\.b16 \[ %rd\d+ \+) 0 \]", r"\1 2 ]", "changed: a_ptr|raised"),
        (r"wgmma\.wait_group\.sync\.aligned 0;", "", "raised: .*in flight"),
        (r"wgmma\.fence\.sync\.aligned;", "", "raised: .*fence"),
        (r"max\.relu|ex2\.approx", "lg2.approx", "changed: a_ptr"),
    ],
)
def test_a_change_shows(kept, pattern, by, found):
    text = re.sub(pattern, by, kept.call.assembly)
    assert text != kept.call.assembly
    assert re.match(found, ptx_mutation.outcome(kept, text, LIMIT) or "nothing")


def test_an_opcode_that_is_not_modelled_is_no_mutant(kept):
    text = kept.call.assembly.replace("ex2.approx.f32", "ex3.approx.f32")
    with pytest.raises(ptx_mutation.NotAMutant):
        ptx_mutation.outcome(kept, text, LIMIT)


def test_mutants_differ_in_one_executed_line(kept):
    choose = random.Random(1)
    before = kept.call.assembly.splitlines()
    kinds = set()
    for _ in range(60):
        text, mutation = ptx_mutation.mutate(kept.call.assembly, kept.executed, choose)
        after = text.splitlines()
        different = [i + 1 for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert different == [mutation.line]
        assert kept.executed[mutation.line] > 0
        assert mutation.before != mutation.after
        kinds.add(mutation.kind)
    assert kinds == {"dropped", "opcode", "register", "number", "guard"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
