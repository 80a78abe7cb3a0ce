"""Counters that outlive a call: zero, apart from each other, and never first made while a graph is captured."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

from sglang_aiter_moe.portable.triton import workspace  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """No state of other tests here, and none of these elsewhere."""
    for name in ("_arenas", "_states", "_slabs"):
        monkeypatch.setattr(workspace, name, {})


def on_stream(monkeypatch, stream: int) -> None:
    monkeypatch.setattr(workspace, "_key", lambda device: (device.type, device.index, stream))


def capturing(monkeypatch, yes: bool) -> None:
    monkeypatch.setattr(workspace, "_capturing", lambda device: yes)


def test_each_use_size_and_stream_has_its_own_zeros(monkeypatch):
    found = []
    for stream in (1, 2):
        on_stream(monkeypatch, stream)
        for use, size in (("counters", 1), ("counters", 897), ("meeting", 1)):
            t = workspace.state(CPU, size, use)
            assert t.shape == (size,) and t.dtype == torch.int32 and not t.any()
            assert workspace.state(CPU, size, use).data_ptr() == t.data_ptr()
            t.fill_(7)
            found.append(t)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * 4) for t in found)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all((t == 7).all() for t in found)


def test_a_capture_on_another_stream_takes_zeros_that_are_there(monkeypatch):
    on_stream(monkeypatch, 1)
    first = workspace.state(CPU, 5)
    on_stream(monkeypatch, 2)
    capturing(monkeypatch, True)
    with pytest.MonkeyPatch.context() as made:
        made.setattr(torch, "zeros", lambda *_, **__: pytest.fail("allocated during a capture"))
        second = workspace.state(CPU, 5)
    assert not second.any() and first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("used_up", [False, True])
def test_a_capture_without_zeros_is_refused(monkeypatch, used_up):
    if used_up:
        workspace.state(CPU, workspace._SLAB - 8)
    capturing(monkeypatch, True)
    with pytest.raises(ContractError, match="a graph is captured on cpu before the layer has run"):
        workspace.state(CPU, 65)
    capturing(monkeypatch, False)
    assert not workspace.state(CPU, 65).any()


def test_a_state_larger_than_a_slab():
    assert workspace.state(CPU, workspace._SLAB + 1).numel() == workspace._SLAB + 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
