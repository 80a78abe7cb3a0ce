"""What patches do that no cell of the matrix shows: gone without the patch (``testing/patch_probe.py``)."""

import sys

import pytest

from sglang_aiter_moe.testing.matrix_controls import OUTSIDE
from sglang_aiter_moe.testing.patch_probe import PROBES
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import run_probe

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found():
    return run_probe("sglang_aiter_moe.testing.patch_probe", timeout=500)


def test_every_probe_is_of_a_patch_that_is_said_to_be_tested_here():
    here = {patch for patch, test in OUTSIDE.items() if test.endswith("test_patch_probe.py")}
    assert set(PROBES) == here


def test_parameters_are_raw_in_a_session(found):
    with_patch, without = found["raw form before a weight update"]
    assert with_patch == {"raw": True, "right": True}
    assert not without["raw"] and "did not come through the weight_loader" in without["error"]


def test_a_caller_can_state_the_gate_mode(found):
    with_patch, without = found["gate_mode and plan of a call"]
    assert with_patch == ["interleave"]
    assert "unexpected keyword argument 'gate_mode'" in without


def test_aiters_enum_is_looked_up_once(found):
    with_patch, without = found["AITER quant type"]
    assert (with_patch, without) == (0, 3)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
