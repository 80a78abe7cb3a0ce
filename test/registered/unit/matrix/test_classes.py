"""Classes and kinds: each from what happened, written down by hand."""

import sys

import pytest

from sglang_aiter_moe.matrix import one_cell
from sglang_aiter_moe.matrix.cells import BIAS_UPDATE, Cell
from sglang_aiter_moe.matrix.classes import Class, asked_mode, classify, in_another_mode
from sglang_aiter_moe.matrix.kinds import BY_KEY, KINDS, kind_of
from sglang_aiter_moe.matrix.one_cell import Outcome
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LATE = "a16w4 (bf16 A x MXFP4 W) SiTUv2 is not supported: per-expert bias."


@pytest.mark.parametrize(
    "outcome,expected",
    [
        (Outcome("done", mode="A16W4", diff=1e-5), Class.RIGHT),
        (Outcome("done", mode="A16W4", diff=3e-5), Class.SILENT_WRONG),
        (Outcome("done", mode="A4W4", diff=1e-5), Class.RIGHT),
        (Outcome("done", mode="A4W4", diff=1e-4), Class.SILENT_WRONG),
        (Outcome("done", mode="", diff=0.0), Class.SILENT_WRONG),
        (Outcome("done", mode="", diff=float("inf")), Class.SILENT_WRONG),
        (Outcome("load", "ContractError", "AITER has not got SiTUv2"), Class.REFUSED),
        (Outcome("call", "ContractError", "anything"), Class.REFUSED_LATE),
        (Outcome("call", "NotImplementedError", LATE), Class.REFUSED_LATE),
        (Outcome("load", "ValueError", "Current platform gfx942 not support mxfp4 computation"), Class.REFUSED),
        (Outcome("load", "ValueError", "invalid literal for int() with base 10: 'many'"), Class.CRASHED),
        (Outcome("call", "AttributeError", "Situv2"), Class.CRASHED),
        (Outcome("call", "RuntimeError", "flydsl_a4w4 A4W4 does not exist for gfx942"), Class.CRASHED),
        (Outcome("call", "NotImplementedError", ""), Class.CRASHED),
        (Outcome("change", "AttributeError", "no attribute 'weight_loader'"), Class.CRASHED),
        (Outcome("change", "UpdateFailed", "a tensor has another shape"), Class.REFUSED),
    ],
)  # fmt: skip
def test_classes(outcome, expected):
    assert classify(Cell(), outcome) is expected


@pytest.mark.parametrize(
    "error", [("ContractError", "loaded under"), ("NotImplementedError", LATE)]
)
def test_the_first_call_may_refuse_what_changed_after_the_load(error):
    outcome = Outcome("call", *error)
    assert classify(Cell(change="unset A8W4"), outcome) is Class.REFUSED
    assert classify(Cell(), outcome) is Class.REFUSED_LATE
    before = Outcome("first call", *error)  # nothing had changed yet
    assert classify(Cell(change="unset A8W4"), before) is Class.REFUSED_LATE


CHANGED = Cell(change="unset A8W4", a8w4="1", then="update from disk")


@pytest.mark.parametrize(
    "cell,outcome,unchanged,expected",
    [
        # The layer would have said the same without the change: it was known at load.
        (CHANGED, Outcome("call", "NotImplementedError", LATE), Outcome("call", "NotImplementedError", LATE),
         Class.REFUSED_LATE),
        # The change is what is refused: the layer ran, or failed in another way, before it.
        (CHANGED, Outcome("call", "ContractError", "X was '1' and is None"), Outcome("done", mode="A8W4", diff=1e-6),
         Class.REFUSED),
        (CHANGED, Outcome("call", "NotImplementedError", LATE), Outcome("call", "ContractError", "of something else"),
         Class.REFUSED),
        (CHANGED, Outcome("call", "NotImplementedError", LATE), Outcome("load", "NotImplementedError", LATE),
         Class.REFUSED),
        # What is no refusal at the call needs no second look.
        (CHANGED, Outcome("change", "UpdateFailed", "no"), None, Class.REFUSED),
        (CHANGED, Outcome("done", mode="A16W4", diff=1e-6), None, Class.RIGHT),
        (Cell(), Outcome("call", "NotImplementedError", LATE), None, Class.REFUSED_LATE),
    ],
)  # fmt: skip
def test_a_change_is_compared_with_the_layer_without_it(
    monkeypatch, cell, outcome, unchanged, expected
):
    asked = []

    def run(one, worker):
        asked.append(one)
        return outcome if one == cell else unchanged

    monkeypatch.setattr(one_cell, "_run", run)
    assert classify(cell, one_cell.run(cell, None)) is expected
    assert asked == [cell] + [Cell(a8w4="1")] * (unchanged is not None)


@pytest.mark.parametrize(
    "cell,mode",
    [
        (Cell(), "A16W4"),
        (Cell(a8w4="true"), "A8W4"),
        (Cell(a8w4=" 1", a4w4="1"), "A8W4"),
        (Cell(a8w4="0", a4w4="yes"), "A4W4"),
        (Cell(a8w4="junk"), "A16W4"),
        (Cell(a4w4="1", change="unset A4W4"), "A16W4"),
        (Cell(change="set A8W4=1"), "A8W4"),
        (Cell(a8w4="1", a4w4="1", change="unset A8W4"), "A4W4"),
        (Cell(change="set A4W4=1"), "A4W4"),
        (Cell(arch="gfx1250"), None),
        (Cell(activation="silu", a8w4="1"), None),
    ],
)
def test_the_mode_that_the_flags_mean(cell, mode):
    assert asked_mode(cell) == mode


def test_right_in_another_mode():
    right = Outcome("done", mode="A16W4", diff=1e-6)
    assert in_another_mode(Cell(a4w4="true"), right)
    assert not in_another_mode(Cell(), right)
    assert not in_another_mode(Cell(a4w4="true"), Outcome("done", mode="A16W4", diff=1.0))
    assert not in_another_mode(Cell(activation="silu"), right)


LAYOUT = ("layout",)


@pytest.mark.parametrize(
    "cell,why,key",
    [
        (Cell(), LAYOUT, "SiTUv2 layout"),
        (
            Cell(a8w4="yes"),
            LAYOUT,
            "SiTUv2 layout",
        ),  # off for both: the default's layout is at fault
        (Cell(a8w4="true"), LAYOUT, "spelling"),
        (Cell(a8w4="True", a4w4="1"), LAYOUT, "spelling"),
        (Cell(change="set A8W4=1"), LAYOUT, "flag changed after load"),
        (Cell(activation="swiglu", change="set GU_ITLV=0"), LAYOUT, "flag changed after load"),
        (Cell(activation="swiglu_unclamped", change="set GU_ITLV=0"), LAYOUT, "no gate_mode sent"),
        (Cell(activation="swiglu", change="set A8W4=1"), LAYOUT, "gate_mode"),
        (Cell(activation="swiglu_unclamped"), LAYOUT, "no gate_mode sent"),
        (Cell(activation="silu"), ("layout", "activation"), "another activation"),
        (Cell(activation="gelu"), ("activation",), "another activation"),
        (Cell(change="process again"), ("packed twice",), "laid out twice"),
        (Cell(change="update from disk"), ("packed twice",), "laid out twice"),
        (Cell(change="update from tensors"), (), "raw update"),
        (Cell(activation="swiglu", parallel="tp4r0"), ("pads",), "pads"),
        (Cell(activation="swiglu", bias=True), ("bias",), "bias dropped"),
        (Cell(activation="swiglu_limit3"), ("limit",), "limit"),
        (Cell(), ("betas",), "betas"),
        (Cell(routing="fp32 bias"), ("routing",), "rounded correction bias"),
        (Cell(routing="fp32 bias"), ("layout", "routing"), "SiTUv2 layout"),
        (Cell(routing="bf16 bias", change=BIAS_UPDATE), ("old routing",), "old correction bias"),
        (Cell(routing="fp32 bias", change=BIAS_UPDATE), ("routing",), "rounded correction bias"),
        (Cell(routing="bf16 bias", change=BIAS_UPDATE), ("packed twice", "old routing"), "old correction bias"),
        (Cell(routing="bf16 bias", change=BIAS_UPDATE), ("packed twice",), "laid out twice"),
        (Cell(change="update from tensors in two steps"), (), "raw update"),
        (Cell(change="set A8W4=1", then="update from tensors"), LAYOUT, "raw update"),
        (Cell(change="set A8W4=1", then="update from disk"), ("packed twice",), "laid out twice"),
        (Cell(change="broken update from tensors in two steps"), (), "broken update"),
        (Cell(), (), "other"),
    ],
)  # fmt: skip
def test_kinds(cell, why, key):
    assert kind_of(cell, Outcome("done", mode="A16W4", diff=1.0, why=why)) is BY_KEY[key]


def test_public_issues_are_references():
    for kind in KINDS:
        for reference in filter(None, kind.public.split(", ")):
            repository, _, number = reference.partition("#")
            assert repository in ("sglang", "aiter", "vllm") and number.isdigit()


def test_an_outcome_survives_json():
    for outcome in (
        Outcome("done", mode="", diff=float("inf"), why=("layout", "pads")),
        Outcome("call", "TypeError", "no such keyword"),
        Outcome("done", mode="A8W4", diff=1e-5),
    ):
        import json

        assert Outcome.from_dict(json.loads(json.dumps(outcome.as_dict()))) == outcome


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
