"""AITER's precedence between the SiTUv2 flags, and which spellings are clean."""

import itertools
import sys

import pytest

from sglang_aiter_moe.contract import ActivationMode, GateMode
from sglang_aiter_moe.contract.modes import check_clean_flag, gfx1250_mode, situv2_mode
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.plans import A4W4, A8W4, FORCE_A8W4
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_names():
    """The names that plans, AITER and the command line use."""
    assert [m.value for m in ActivationMode] == ["A16W4", "A8W4", "A4W4"]
    assert [m.value for m in GateMode] == ["separated", "interleave", "mock_gate_only", "gate_only"]
    assert f"{ActivationMode.A8W4} {GateMode.INTERLEAVE}" == "A8W4 interleave"


@pytest.mark.parametrize("a8, a4", list(itertools.product([None, "0", "1"], repeat=2)))
@pytest.mark.parametrize("knows_a4w4", [True, False])
def test_precedence(a8, a4, knows_a4w4):
    env = {name: value for name, value in ((A8W4, a8), (A4W4, a4)) if value is not None}
    expected = "A8W4" if a8 == "1" else "A4W4" if a4 == "1" and knows_a4w4 else "A16W4"
    assert situv2_mode(env, has_a4w4_flag=knows_a4w4) == expected


def test_the_other_flag_is_checked_too():
    for env in ({A8W4: "1", A4W4: "yes"}, {A8W4: "on", A4W4: "1"}):
        with pytest.raises(ContractError):
            situv2_mode(env)
    with pytest.raises(ContractError):
        situv2_mode({A4W4: "true"}, has_a4w4_flag=False)


@pytest.mark.parametrize("value, mode", [(None, "A4W4"), ("0", "A4W4"), ("1", "A8W4")])
def test_gfx1250(value, mode):
    assert gfx1250_mode({} if value is None else {FORCE_A8W4: value}) == mode


@pytest.mark.parametrize("value, clean", [(None, False), ("0", False), ("1", True)])
def test_clean(value, clean):
    assert check_clean_flag(A8W4, value) is clean


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
