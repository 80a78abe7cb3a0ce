"""The random changes of ``testing/ptx_mutation.py``: one line each, and a launch that is run again shows them."""

import dataclasses
import random
import re
import sys

import numpy as np
import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.nvptx.state import POISON, State  # noqa: E402
from sglang_aiter_moe.testing import amd_mutation, hopper_cases, ptx_mutation  # noqa: E402

LIMIT = 1 << 24


@pytest.fixture(scope="module")
def kept() -> ptx_mutation.Kept:
    return ptx_mutation.keep("fp8/A16W4/small", "stage1_fp8")


@pytest.fixture(scope="module")
def turning() -> ptx_mutation.Kept:
    """Each program multiplies more blocks than its ring has slots."""
    return ptx_mutation.keep("fp8/A16W4/one-expert", "stage1_fp8", multiprocessors=1)


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


@pytest.mark.parametrize("back", range(3))
def test_a_dropped_definition_of_what_is_stored_is_noticed(kept, back):
    """What comes of nothing is stored and not refused; here what is ``back`` instructions from what is stored."""
    lines = kept.call.assembly.splitlines()
    at = next(n for n, line in enumerate(lines) if "st.global.b16" in line)
    value = re.search(r"\{ (%rs\d+) \}", lines[at])[1]
    for _ in range(back + 1):
        at = max(n for n in range(at) if re.match(rf"\s*[\w.]+\s+{value},", lines[n]))
        value = re.findall(r"%\w+", lines[at])[1]
    lines[at] = ""
    found = {ptx_mutation.outcome(kept, "\n".join(lines) + "\n", LIMIT) for _ in range(3)}
    assert found == {"unwritten: a_ptr"}


def test_a_store_that_is_dropped_is_noticed_though_the_bits_are_the_same(kept):
    """Memory that holds by chance what the store would write."""
    text = re.sub(r"@%p\d+ st\.global\.b16[^;]*;", "", kept.call.assembly)
    tensors, _ = ptx_mutation._run(kept, text, LIMIT)
    lucky = dataclasses.replace(kept, written=tuple(tensor for _, tensor in tensors))
    assert ptx_mutation.outcome(lucky, text, LIMIT) == "unwritten: a_ptr"


def test_what_means_nothing_is_not_compared(kept):
    """A store that the unchanged kernel makes of nothing may store anything else that comes of nothing."""
    text = re.sub(r"@%p\d+ st\.global\.b16[^;]*;", "", kept.call.assembly)
    _, known = ptx_mutation._run(kept, text, LIMIT)
    nothing = dataclasses.replace(kept, known=tuple(known))
    assert ptx_mutation.outcome(nothing, text, LIMIT) is None
    assert ptx_mutation.outcome(nothing, kept.call.assembly, LIMIT) == "changed: a_ptr"


def test_registers_hold_nothing_of_an_earlier_launch():
    for kind, poison in POISON.items():
        for _ in range(3):
            state = State(2, 1, [("%x", kind)] * 50, checked=True, late=True)
            assert all((values == poison).all() for values in state.values)
            for values in state.values:
                values[...] = np.array(1).astype(values.dtype)


def test_two_runs_give_the_same_report(kept, capsys):
    """A new launch and a new choice, from the same seed."""
    again = ptx_mutation.keep("fp8/A16W4/small", "stage1_fp8")
    reports = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in ptx_mutation.survey(k, 6, 3)]
        for k in (kept, again)
    ]
    assert reports[0] == reports[1] and len(reports[0]) == 6


def copies(kept: ptx_mutation.Kept) -> float:
    """Into its ring, by a program, on average."""
    lines = kept.call.assembly.splitlines()
    done = sum(n for at, n in kept.executed.items() if "arrive.expect_tx" in lines[at - 1])
    return done / kept.call.grid[0]


def test_a_slot_that_is_not_released_shows_where_the_ring_turns_only(kept, turning):
    assert copies(kept) <= 1 and copies(turning) == 20
    release = r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 [^;]*;"
    found = [
        ptx_mutation.outcome(k, re.sub(release, "", k.call.assembly), LIMIT)
        for k in (kept, turning)
    ]
    assert found[0] is None and "waits" in found[1]


def test_names_that_do_not_exist_are_told():
    with pytest.raises(ContractError, match=r"layer 'fp9/.*fp8/A16W4/small"):
        ptx_mutation.keep("fp9/A16W4/small", "stage1_fp8")
    with pytest.raises(ContractError, match=r"kernel 'stage3'.*prepare_kernel, stage1_hopper"):
        ptx_mutation.keep("list/A16W4/small", "stage3")
    with pytest.raises(ContractError, match=r"'fp9/\*' matches no layer.*fp8/A16W4/small"):
        hopper_cases.chosen(["fp8/*", "fp9/*"])


def test_the_ptxas_that_takes_the_unchanged_kernel(kept):
    text = kept.call.assembly
    ptxas = ptx_mutation.assembler(text)
    assert ptx_mutation.assembles(text, ptxas)
    assert not ptx_mutation.assembles(text.replace("mov.u32", "mov.u33", 1), ptxas)


def test_a_kernel_that_no_ptxas_takes_ends_at_once(kept, monkeypatch):
    newer = re.sub(r"\.version \S+", ".version 99.9", kept.call.assembly)
    with pytest.raises(
        ContractError, match=r"no ptxas takes the unchanged kernel \(\.version 99\.9"
    ):
        ptx_mutation.assembler(newer)


def test_changes_that_are_never_accepted_end():
    mutation = amd_mutation.Mutation(1, "dropped", "a", "b")
    with pytest.raises(ContractError, match="200 changes after one another were refused"):
        amd_mutation.collect(1, lambda: ("b", mutation), lambda *_: False, lambda text: None)


def test_refused_changes_between_mutants_are_not_summed(capsys):
    mutation = amd_mutation.Mutation(1, "dropped", "a", "b")
    answers = iter(([False] * 150 + [True]) * 3)
    rows = amd_mutation.collect(
        3, lambda: ("b", mutation), lambda *_: next(answers), lambda text: None
    )
    assert len(rows) == 3


def test_an_opcode_that_is_not_modelled_is_no_mutant(kept):
    text = kept.call.assembly.replace("ex2.approx.f32", "ex3.approx.f32")
    with pytest.raises(ptx_mutation.NotAMutant):
        ptx_mutation.outcome(kept, text, LIMIT)


def test_mutants_differ_in_one_executed_line(kept):
    choose = random.Random(1)
    before = kept.call.assembly.splitlines()
    kinds = set()
    for _ in range(120):
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
