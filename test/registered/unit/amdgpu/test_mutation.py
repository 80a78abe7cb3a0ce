"""One changed instruction changes what an executed kernel writes: the mutation operators, and a small sample."""

from __future__ import annotations

import json
import random
import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.docsite import executed  # noqa: E402
from sglang_aiter_moe.testing import amd_launches, amd_mutation, amd_survivors  # noqa: E402

TEXT = """\t.text
other:
\tv_mul_f32_e32 v9, v9, v9
\ts_endpgm
k:
\tv_add_u32_e32 v1, 4, v2   ; comment
\ts_waitcnt vmcnt(0)
.LBB0_1:
\tbuffer_load_dword v3, v1, s[4:7], 0 offen offset:16
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
.Lfunc_end1:
\tv_mov_b32_e32 v1, 0
"""


def test_which_lines():
    lines = TEXT.splitlines()
    found = [lines[i].split()[0] for i in amd_mutation.instructions(TEXT, "k")]
    assert found == ["v_add_u32_e32", "buffer_load_dword", "s_cbranch_scc1"]


def test_every_kind_occurs_and_changes_one_line():
    choose = random.Random(0)
    kinds = set()
    for _ in range(200):
        text, mutation = amd_mutation.mutate(TEXT, "k", choose)
        different = [
            i + 1
            for i, (a, b) in enumerate(zip(TEXT.splitlines(), text.splitlines(), strict=True))
            if a != b
        ]
        assert different == [mutation.line] and mutation.before != mutation.after
        kinds.add(mutation.kind)
    assert kinds == {"dropped", "opcode", "register", "number", "modifier"}


def test_the_assembler_decides_what_a_mutant_is():
    assert amd_mutation.assembles("v_add_u32_e32 v1, 4, v2", "gfx950")
    assert not amd_mutation.assembles("v_nothing_u32_e32 v1, 4, v2", "gfx950")
    assert not amd_mutation.assembles("v_bitop3_b32 v1, v2, v3, v4 bitop3:0x6c", "gfx942")


def test_weights_choose_the_line():
    choose = random.Random(0)
    found = {amd_mutation.mutate(TEXT, "k", choose, {9: 5})[1].line for _ in range(20)}
    assert found == {9}


def test_reasons_are_of_survivors_that_are_kept():
    """``amd_survivors.py`` explains nothing that was noticed, or that nobody drew."""
    kept = json.loads(executed.MUTANTS.read_text(encoding="utf-8"))
    survivors = {
        (r["mode"], r["kernel"], f"{row['before']} -> {row['after']}")
        for r in kept
        for row in r["mutants"]
        if row["outcome"] is None
    }
    given = {(*key, change) for key, rows in amd_survivors.REASONS.items() for change in rows}
    assert given <= survivors
    assert all(len(why) > 20 for rows in amd_survivors.REASONS.values() for why in rows.values())


def test_sample():
    """A dozen mutants of stage 2; docs/amd-execution.md has the survey, where nine in ten are noticed."""
    case = amd_launches.layer("A4W4", hidden=1024, inter=128)
    kept = amd_launches.keep(case, "stage2_kernel")
    launches = amd_launches.launches(kept)
    assert amd_mutation.outcome(launches, kept.call.assembly) is None
    rows = amd_mutation.survey(launches, 12, seed=1)
    assert sum(row["outcome"] is not None for row in rows) >= 8, rows


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
