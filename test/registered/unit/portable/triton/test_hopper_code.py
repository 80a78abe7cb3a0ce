"""What the compiler made of the Hopper forms, without a GPU: nothing exchanged between lanes, nothing staged, few
instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=145, suite="base-a-test-cpu")

pytest.importorskip("triton")

from sglang_aiter_moe.portable.triton.hopper import launch, table  # noqa: E402
from sglang_aiter_moe.testing.hopper_compile import (  # noqa: E402
    stores_beside_products,
    unwritten_halves,
)

STAGING = ("LDS", "STS", "LDSM", "STSM", "SHFL", "BAR")
BF16 = {"bf16 stage 1 list": 3.2, "bf16 stage 1 tokens": 3.3, "bf16 stage 2 list, K 2880": 3.4}
FP8 = {
    "fp8 stage 1": 2.2,
    "fp8 stage 1 gui": 2.2,
    "fp8 stage 1 A8W4": 2.5,
    "fp8 stage 1, 16 columns": 2.4,
    "fp8 stage 1, queue": 2.4,
    "fp8 stage 2, K 2880": 2.2,
    "fp8 stage 2 A8W4": 2.4,
    "fp8 stage 1 by row": 2.4,
    "fp8 stage 2 by row, K 2880": 2.4,
}
WHOLE = {"whole": 1.8, "whole gui": 1.8, "whole, K 2880": 1.8, "whole, one token": 1.8}
PREFILL = {"prefill stage 1": 2.6, "prefill stage 2": 4.2, "prefill stage 2, K 2880": 4.5}
MX_PREFILL = {
    "fp8 prefill stage 1": 3.5,
    "fp8 prefill stage 2": 3.2,
    "fp8 prefill stage 2, K 2880": 2.7,
}


WIDE = {
    "wide stage 1": (2.4, 0),
    "wide stage 2": (2.7, 8),
    "wide stage 1, K 2880": (2.6, 19),
    "wide stage 2, K 2880": (2.6, 0),
}
"""Instructions a weight in the loop, and spills with Triton 3.6."""
SHARED_PREFILL = {
    "shared prefill stage 1": (0, 128),
    "shared prefill stage 2": (4, 48),
    "shared prefill stage 1, K 2880": (2, 136),
    "shared prefill stage 1, 96 tokens": (0, 8),
    "shared prefill stage 2, 96 tokens": (3, 32),
    "shared prefill stage 2, K 2880": (2, 64),
}
"""Most spills with Triton 3.6 and later, all roles and choices of columns together."""


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "sglang_aiter_moe.testing.hopper_compile"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    rows = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert rows, child.stderr[-3000:]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("name", FP8)
def test_fp8_loop_only_reads_its_slots(results, name):
    """Weights come by bulk copies of another warp: the loop reads them by ldmatrix, exchanges nothing and loads nothing
    but column scales; two barriers let a slot go."""
    row = results[name]
    assert not [op for op in ("STS", "STSM", "SHFL", "LDGSTS") if op in row["mix"]], row
    assert row["mix"]["LDSM"] == 8 and row["mix"]["QGMMA"] == 16 and row["mix"]["BAR"] <= 3, row
    scaled = name.endswith("A8W4")
    assert bool(row["mix"].get("LDG")) == scaled, row
    # Triton after 3.6 spills where 16 rows are staged, outside the loop: 160 instructions.
    most = 160 if "by row, K 2880" in name and not table.fragments_stay_in_registers() else 0
    assert row["spills"] <= most and not {"LDL", "STL"} & set(row["mix"]), row
    assert row["instructions_per_weight"] <= FP8[name], row


def test_a_queue_costs_the_loop_nothing(results):
    """K3's stage 2, one step a row tile: its word is read once a run."""
    row = results["fp8 stage 2, queue"]
    assert row["mix"]["QGMMA"] == 12 and row["mix"]["LDSM"] == 6 and row["spills"] == 0, row
    assert row["instructions_per_weight"] <= 2.2, row
    loops = [
        sum(results[f"fp8 stage 1, {name}"]["mix"].values()) for name in ("queue", "16 columns")
    ]
    assert abs(loops[0] - loops[1]) <= 4, loops


def test_weights_are_copied_as_read_once(results):
    for name, row in results.items():
        assert (row["unhinted_copies"] == 0) == (not name.startswith("whole")), name


@pytest.mark.parametrize("name", WHOLE)
def test_one_launch_reads_its_slots_and_keeps_blocks_apart(results, name):
    """Stage 1's loop: one multiply-add for 16 weights of a lane (four elsewhere), its scales by one word a lane and
    eight blocks; as many products as it takes in flight."""
    row = results[name]
    assert not [op for op in ("STS", "STSM", "SHFL", "LDGSTS", "LDG") if op in row["mix"]], row
    assert row["mix"]["LDSM"] == 8 and row["mix"]["QGMMA"] == 16, row
    assert row["mix"]["FFMA"] == 16, row
    barriers = 3 if table.fragments_stay_in_registers() else 5  # Triton after 3.6 adds some
    assert row["mix"]["LDS"] <= 4 and row["mix"]["BAR"] <= barriers and row["spills"] == 0, row
    assert row["instructions_per_weight"] <= WHOLE[name] and row["shared"] <= 227 << 10, row


def test_halves_of_k_are_one_pass_without_a_loop(results):
    """Three slots and a half (K3) and the activation: two multiply-adds for 16 weights of a lane (28 * 4 of 122), one
    exchange between warps, and as many products as a pass takes in flight."""
    row = results["whole halves"]
    assert not [op for op in ("STSM", "LDGSTS", "LDG", "LDL", "STL") if op in row["mix"]], row
    assert row["mix"]["LDSM"] == 28 and row["mix"]["QGMMA"] == 56, row
    assert row["mix"]["FFMA"] <= 124 and row["mix"]["STS"] <= 4 and row["mix"]["SHFL"] <= 8, row
    barriers = 12 if table.fragments_stay_in_registers() else 20
    assert row["mix"]["BAR"] <= barriers and row["waits"] == 14 and row["spills"] == 0, row
    assert row["instructions_per_weight"] <= 1.9 and row["shared"] <= 227 << 10, row


def test_tiles_of_16_rows_only_read_their_slots(results):
    """Stage 2's loop: four multiply-adds for 16 weights of a lane, as many products as it takes in flight."""
    row = results["whole narrow, K 2880"]
    for op in ("STS", "STSM", "SHFL", "LDGSTS", "LDG"):
        assert op not in row["mix"], row
    assert row["mix"]["LDSM"] == 8 and row["mix"]["QGMMA"] == 16 and row["waits"] == 4, row
    barriers = 2 if table.fragments_stay_in_registers() else 5
    assert row["mix"]["FFMA"] == 64 and row["mix"]["BAR"] <= barriers and row["spills"] == 0, row
    assert row["instructions_per_weight"] <= 2.2, row
    assert row["shared"] <= 227 << 10, row


@pytest.mark.parametrize("name", BF16)
def test_bf16_forms_run_only_where_nothing_is_staged(results, name):
    """Fragments straight from global memory are the compiler's choice; where it chooses otherwise, the table leaves
    these forms out."""
    row = results[name]
    staged = [op for op in STAGING if op in row["mix"]]
    assert row["mix"]["HMMA"], row
    if table.fragments_stay_in_registers():
        assert not staged and row["spills"] == 0, row
        assert row["instructions_per_weight"] <= BF16[name], row
    else:
        assert staged, f"{row}: this Triton stages nothing; raise table.FRAGMENTS_UP_TO"


def test_forms_that_would_be_staged_are_not_chosen(monkeypatch, caplog):
    # The rows of the forms of bulk copies come first: bytes that those cannot read.
    scales = torch.zeros(8 * 512 * 8 + 16, dtype=torch.uint8)
    scales = scales[4 - scales.data_ptr() % 16 :]
    request = KernelRequest(
        mode="A16W4", family="test", num_experts=8, hidden_size=256, intermediate_size=64, activation="situv2",
        w13_layout="separated", w13_scale_layout="separated", w2_layout="separated", w2_scale_layout="separated",
    )  # fmt: skip
    forms = (launch.run_tokens, launch.run_list)
    counts = (1, 4, 16, 23, 89, 300, 5792)  # of tokens, one expert each

    def chosen(up_to: int) -> list:
        monkeypatch.setattr(table, "FRAGMENTS_UP_TO", (up_to, 0))
        table.fragments_stay_in_registers.cache_clear()
        return [table.choose(request, tokens, 1, *[scales] * 4)[0] for tokens in counts]

    try:
        assert {form for form in chosen(99) if form in forms} == set(forms)
        assert not [form for form in chosen(0) if form in forms]
    finally:
        table.fragments_stay_in_registers.cache_clear()
    assert caplog.text.count("stages bf16 weight fragments") == 1


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_weights_never_touch_shared_memory(results, name):
    """Tokens arrive by cp.async (LDGSTS) and leave through wgmma's descriptors: no load or store of shared memory."""
    row = results[name]
    assert row["mix"]["HGMMA"] >= 8 and row["spills"] == 0, row
    assert not [op for op in ("LDS", "STS", "LDSM", "STSM", "SHFL") if op in row["mix"]], row
    # A lane decodes 64 weights a step of 8 (twice as many with a second accumulator) matrix instructions.
    assert row["instructions_per_weight"] <= PREFILL[name], row


@pytest.mark.parametrize("name", MX_PREFILL)
def test_fp8_prefill_multiplies_fp8_and_waits_once_a_step(results, name):
    """e5m2 weights times e4m3 tokens, nothing spilled. A step of four products has two waits: for the products, and
    after the additions; ptxas that serialises (C7513, C7514) puts one behind each product."""
    row = results[name]
    mix = row["mix"]
    assert row["operands"] == ["E5M2.E4M3"] and mix["QGMMA"] % 4 == 0 and "HGMMA" not in mix, row
    assert row["waits"] * 2 <= mix["QGMMA"], row
    assert not [op for op in ("STS", "STSM", "STL") if op in mix], row
    # The table's registers are those of Triton 3.6, with which it was timed; 3.9 needs a few more.
    if table.fragments_stay_in_registers():
        assert row["spills"] == 0, row
    else:
        assert row["spills"] <= 24 and mix.get("LDL", 0) <= 1, row
    assert row["instructions_per_weight"] <= MX_PREFILL[name], row


@pytest.mark.parametrize("name", SHARED_PREFILL)
def test_shared_prefill_waits_for_a_step_and_not_for_each_product(results, name):
    """The consumers' loop: four or eight products from shared memory, then one wait, in which the next step's are in
    flight; what ptxas serialises (C7513, C7514) waits behind each one."""
    row = results[name]
    mix = row["mix"]
    assert row["operands"] == ["E5M2.E4M3"] and "HGMMA" not in mix, row
    of_3_6 = table.fragments_stay_in_registers()
    serial = not of_3_6 and name.endswith(
        "stage 2, 96 tokens"
    )  # four groups (docs/kernel-notes.md)
    assert mix["QGMMA"] % 8 == 0 and (serial or row["waits"] * 4 <= mix["QGMMA"]), row
    if of_3_6:  # later ones' text has a role between the branches of another one's loop
        assert not [op for op in ("LDGSTS", "UTMALDG") if op in mix], row
    assert row["spills"] <= SHARED_PREFILL[name][not of_3_6], row
    assert row["shared"] <= 227 << 10, row


@pytest.mark.parametrize("name", WIDE)
def test_wide_multiplies_one_quad_while_it_decodes_the_next(results, name):
    """A slot's words and scales are read once, 16 and one bytes a lane; products wait for each other by fours, and the
    barriers of a step are two, whatever number of columns."""
    row = results[name]
    mix = row["mix"]
    assert row["operands"] == ["E5M2.E4M3"] and mix["QGMMA"] in (12, 16), row
    assert row["waits"] * 4 <= mix["QGMMA"], row
    assert not [op for op in ("LDSM", "LDGSTS", "UTMALDG") if op in mix], row
    # Tokens, slots and what a tile's end exchanges have bytes of their own: another warp group may still multiply.
    stage, long = int(name[11]), "2880" in name
    group, columns = ("A8W4 long", (2880, 2880)) if long else ("A8W4 short", (3584, 384))
    config = [c for _, form, c in table.load()[group] if form == "wide"][-1]
    ring = (config.one, config.two)[stage - 1]
    assert 0 <= row["shared"] - config.shared(ring, columns[stage - 1], 32 * stage) < 64, row
    most, spills = WIDE[name]
    assert row["instructions_per_weight"] <= most, row
    if table.fragments_stay_in_registers():
        assert mix["BAR"] <= 3 and not {"LDL", "STL"} & set(mix), row
        assert row["spills"] <= spills and row["shared"] <= 227 << 10, row
    else:  # room for 64 columns of 48 tokens (wide.OVERLAPS), and more barriers
        assert mix["BAR"] <= 5 and row["spills"] <= 48, row


def test_prefill_loops_that_keep_their_tokens_have_no_barrier(results):
    """Triton after 3.6 puts one before each product; the warps then wait for each other."""
    barriers = results["prefill stage 2"]["mix"].get("BAR", 0)
    assert barriers == 0 if table.fragments_stay_in_registers() else barriers <= 12


def test_no_warp_group_stores_where_anothers_products_read(results):
    """With Triton 3.6 prefill failed until it waited in front of its last barrier; 3.9 adds a barrier itself."""
    for name, row in results.items():
        if not name.startswith("wide"):  # whose exchange has bytes of its own
            assert row["stores_beside_products"] == 0, name


def test_a_store_beside_products_is_seen():
    products, wait, barrier, store = (
        "    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1}, %rd1, 1, 1, 1;",
        "    wgmma.wait_group.sync.aligned 0;",
        "    bar.sync     0;",
        "    st.shared.b32 [ %r2 + 0 ], %r1;",
    )
    assert stores_beside_products("\n".join((products, wait, barrier, store))) == 0
    assert stores_beside_products("\n".join((products, barrier, wait, store, store))) == 2


def test_no_half_of_a_word_is_what_a_register_happens_to_hold(results):
    """Seen with Triton 3.6 where a row of ``a`` ends within 128 columns: tokens that were NaN now and then."""
    assert "wide stage 2, K 2112" in results
    for name, row in results.items():
        assert row["unwritten_halves"] == 0, name


def test_a_half_that_nothing_wrote_is_seen():
    low, whole = (
        "F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C R9, R13, RZ",
        "@!P0 F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C R24, R8, R9",
    )
    assert unwritten_halves([low, whole]) == 0
    assert unwritten_halves([whole]) == 1
    # As ptxas wrote it: the register is written later, from what it gave.
    assert unwritten_halves([low, whole.replace("R9", "R62"), "PRMT R62, R24, 0x7632, R62"]) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
