"""When the patch set acts: SGLang's own switch, the portable AITER, and the kill switch over both."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.contract import Capabilities, Target
from sglang_aiter_moe.srt import switch
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter_api
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(switch.ENABLE, raising=False)


@pytest.mark.parametrize("value, acts", [(None, True), ("1", True), ("", True), ("0", False)])
def test_the_kill_switch_is_exactly_0(monkeypatch, value, acts):
    if value is not None:
        monkeypatch.setenv(switch.ENABLE, value)
    assert switch.acts(True) is acts


def test_without_aiter_it_does_not_act():
    assert switch.acts(False) is False


def test_the_portable_aiter_counts_as_aiter(monkeypatch):
    with portable.installed(arch="gfx942"):
        assert aiter_api.is_stand_in() and switch.acts(False)
        assert aiter_api.architecture() == "gfx942"
        monkeypatch.setenv(switch.ENABLE, "0")
        assert switch.acts(False) is False
    assert not aiter_api.is_stand_in()


def test_on_a_gpu_the_architecture_is_the_current_ones(monkeypatch):
    # ROCm's target IDs carry features (LLVM AMDGPU usage, "Target ID"); a plan's target is without them.
    names = {0: "gfx942:sramecc+:xnack-", 1: "gfx950:sramecc+:xnack-"}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(gcnArchName=names[i])
    )
    assert not aiter_api.is_stand_in()
    assert Target(aiter_api.architecture(), Capabilities.for_release("0.1.19")).arch == "gfx950"


def test_around_calls_the_original_alone_when_switched_off(monkeypatch):
    @switch.around(lambda original, x: ("ours", original(x + 1)))
    def double(x):
        """Doubles."""
        return 2 * x

    assert double(3) == ("ours", 8) and double.__doc__ == "Doubles."
    monkeypatch.setenv(switch.ENABLE, "0")
    assert double(3) == 6


def test_the_two_names_of_the_portable_aiter_agree():
    # The patch set must not import it: it is no part of what is placed in SGLang's tree.
    assert aiter_api.STAND_IN == portable.registry.ORIGIN


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
