"""Which kernels AITER may pick: docs/contract.md sections b.2 and b.3, row by row."""

import sys
from dataclasses import replace

import pytest

from sglang_aiter_moe.contract import ActivationMode, Capabilities, GateMode
from sglang_aiter_moe.contract.families import FAMILIES, Query, choose
from sglang_aiter_moe.numerics.activations import Activation
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SITUV2, SWIGLU = Activation.SITUV2, Activation.SWIGLU
SILU, GELU = Activation.SILU, Activation.GELU
SEPARATED, INTERLEAVE = GateMode.SEPARATED, GateMode.INTERLEAVE
A16W4, A8W4, A4W4 = ActivationMode.A16W4, ActivationMode.A8W4, ActivationMode.A4W4
#: A shape that no tuned table has; 100 tokens are too many to split K.
QUERY = Query(
    activation=SILU,
    mode=A4W4,
    gate_mode=SEPARATED,
    arch="gfx950",
    hidden=2048,
    intermediate=512,
    experts=64,
    topk=8,
    tokens=100,
    expert_mask=False,
    doweight=False,
    capabilities=Capabilities.for_release("0.1.20"),
    flydsl_force=True,
    ksplit=0,
    bypass_tuned=False,
    own_table=False,
)
WITHOUT_FLYDSL = QUERY.capabilities.with_flydsl(None, available=False)
OFF = {"flydsl_force": False}


def families(**changed):
    return [choice.family.name for choice in choose(replace(QUERY, **changed))]


@pytest.mark.parametrize(
    "changed, family",
    [
        # Interleaved SwiGLU: CK-tile, whatever the activations are.
        ({"activation": SWIGLU, "gate_mode": INTERLEAVE, "mode": A16W4}, "cktile"),
        ({"activation": SWIGLU, "gate_mode": INTERLEAVE, "mode": A8W4}, "cktile"),
        # FlyDSL: SiTUv2 with bf16 activations, SwiGLU and SiTUv2 with others, the rest only if forced.
        ({"activation": SITUV2, "mode": A16W4}, "flydsl_a16w4"),
        ({"activation": SITUV2, "mode": A8W4}, "flydsl_a8w4"),
        ({"activation": SITUV2, "mode": A4W4, **OFF}, "flydsl_a4w4"),
        ({"activation": SWIGLU, "mode": A4W4, **OFF}, "flydsl_a4w4"),
        ({}, "flydsl_a4w4"),
        ({"activation": GELU}, "flydsl_a4w4"),
        ({"mode": A8W4, "gate_mode": INTERLEAVE}, "flydsl_a8w4"),
        # SwiGLU with bf16 activations, or a split K: CK-tile's split-k, by its own epilogue or by "auto".
        ({"activation": SWIGLU, "mode": A16W4}, "cktile_splitk"),
        ({**OFF, "tokens": 8}, "cktile_splitk_auto"),
        ({**OFF, "ksplit": 2}, "cktile_splitk_auto"),
        ({"mode": A16W4, "tokens": 8}, "cktile_splitk_auto"),
        ({"activation": SWIGLU, "capabilities": WITHOUT_FLYDSL}, "cktile_splitk_auto"),
        # What is left: CK 2-stage, which has no kernel for bf16 or fp8 activations, nor for SiTUv2.
        ({**OFF, "tokens": 9}, "ck2stages"),
        ({**OFF, "tokens": 8, "ksplit": 1}, "ck2stages"),
        ({**OFF, "activation": GELU}, "ck2stages"),
        ({"capabilities": WITHOUT_FLYDSL}, "ck2stages"),
        ({"capabilities": Capabilities.for_release("0.1.14")}, "ck2stages"),
        ({"doweight": True}, "ck2stages"),
        ({"mode": A16W4}, "ck2stages_no_kernel"),
        ({"mode": A8W4, "gate_mode": INTERLEAVE, **OFF}, "ck2stages_no_kernel"),
        ({"activation": SITUV2, "capabilities": WITHOUT_FLYDSL}, "ck2stages_no_kernel"),
        ({"activation": SITUV2, "doweight": True}, "ck2stages_no_kernel"),
    ],
)
def test_without_a_row(changed, family):
    """docs/contract.md section b.3."""
    (choice,) = choose(replace(QUERY, **changed))
    assert choice.family is FAMILIES[family] and not choice.tuned
    assert choice.bias == choice.family.bias


def test_split_k_up_to_as_many_slots_as_experts():
    """Section b.3: M * top-k <= E."""
    assert families(**OFF, tokens=8) == ["cktile_splitk_auto"]
    assert families(**OFF, tokens=9) == ["ck2stages"]


QWEN = {"hidden": 4096, "intermediate": 256, "experts": 512, "topk": 10}
K3 = {"activation": SITUV2, "hidden": 3584, "intermediate": 384, "experts": 896, "topk": 16}


def test_with_a_row():
    """Section b.2; what happens without the row stays among the choices."""
    *rows, last = choose(replace(QUERY, **QWEN))
    assert rows and all(row.family.name == "silu_tuned" and row.tuned for row in rows)
    assert last.family.name == "flydsl_a4w4" and last.tuned is False


@pytest.mark.parametrize("changed", [{"arch": "gfx942"}, {"bypass_tuned": True}])
def test_rows_that_aiter_does_not_look_at(changed):
    (only,) = choose(replace(QUERY, **QWEN, **changed))
    assert only.family.name == "flydsl_a4w4" and only.tuned is False


def test_an_own_table_may_have_any_row():
    (only,) = choose(replace(QUERY, **QWEN, own_table=True))
    assert only.family.name == "flydsl_a4w4" and only.tuned is None


def test_flydsl_rows_need_flydsl():
    rows = choose(replace(QUERY, **K3, mode=A16W4))
    assert rows[0].tuned and rows[0].family.flydsl
    without = choose(replace(QUERY, **K3, mode=A16W4, capabilities=WITHOUT_FLYDSL))
    assert not any(choice.family.flydsl for choice in without)


def test_a_mask_is_one_slot_less():
    """Section b.2: AITER expects an always-masked slot beside the routed experts."""

    def tuned(**changed):
        return choose(replace(QUERY, **{**K3, "mode": A4W4, **changed}))[0].tuned

    without = {topk for topk in range(14, 20) if tuned(topk=topk)}
    masked = {topk for topk in range(14, 20) if tuned(topk=topk, expert_mask=True)}
    assert without == {16} and masked == {16, 17}


def test_gfx1250_has_one_path():
    for changed in ({}, {"mode": A8W4}, K3):
        assert families(**changed, arch="gfx1250") == ["grouped_gfx1250"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
