"""How AITER is found and what is known of it: by its own signature, once, and anew for another one."""

import sys
import types
from enum import IntEnum

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter_api
from sglang_aiter_moe.testing import fake_aiter
from sglang_aiter_moe.testing.fake_aiter import ActivationType, QuantType
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch):
    monkeypatch.setattr(aiter_api, "_api", None)


def takes(fused_moe):
    api = aiter_api.AiterApi(None, fused_moe)
    names = ("gate_mode", "output", "no_combine", "quant_dtype_a")
    return {name for name in names if getattr(api, f"takes_{name}")}


def test_what_a_signature_names():
    assert takes(lambda hidden_states, *, gate_mode=None: 0) == {"gate_mode"}
    assert takes(lambda hidden_states, output=None: 0) == {"output"}
    assert takes(lambda hidden_states, no_combine=False: 0) == {"no_combine"}
    assert takes(lambda hidden_states, quant_dtype_a=None: 0) == {"quant_dtype_a"}
    assert takes(lambda hidden_states, *args: 0) == set()


def test_a_catch_all_counts_for_gate_mode_alone():
    """What takes anything may pass it on to a kernel that does not know an output."""
    assert takes(lambda hidden_states, **kwargs: 0) == {"gate_mode"}


@pytest.mark.parametrize(
    "name, member",
    [
        ("silu", ActivationType.Silu),
        ("gelu", ActivationType.Gelu),
        ("swiglu", ActivationType.Swiglu),
        ("situ", ActivationType.Situv2),
        ("situv2", ActivationType.Situv2),
    ],
)
def test_activations_by_sglangs_names(name, member):
    with fake_aiter.installed():
        aiter_api.refresh(name)
        assert aiter_api.current().activations == {name: member}
        assert aiter_api.current().quant_types == {}


def test_members_are_looked_up_once_and_kept():
    with fake_aiter.installed() as fake:
        aiter_api.refresh("silu", "per_1x32")
        found = aiter_api.current()
        assert found.fused_moe is fake.fused_moe
        sys.modules["aiter"].ActivationType = sys.modules["aiter"].QuantType = None
        aiter_api.refresh("silu", "per_1x32")  # asks nobody
        aiter_api.refresh()
        assert aiter_api.current() is found
        assert found.activations == {"silu": ActivationType.Silu}
        assert found.quant_types == {"per_1x32": QuantType.per_1x32}


@pytest.mark.parametrize("other", ["fused_moe", "package"])
def test_another_fused_moe_or_another_package_is_looked_at_anew(other):
    with fake_aiter.installed():
        aiter_api.refresh("silu")
        before = aiter_api.current()
        if other == "package":  # AITER was reloaded: its members are others
            again = types.ModuleType("aiter")
            again.ActivationType = IntEnum("ActivationType", {"Silu": 7})
            sys.modules["aiter"] = again
        else:
            sys.modules["aiter.fused_moe"].fused_moe = lambda output=None: None
        aiter_api.refresh("silu")
        now = aiter_api.current()
        assert now is not before
        assert now.takes_output is (other == "fused_moe")
        assert now.activations["silu"] == (7 if other == "package" else 0)


@pytest.mark.parametrize("known", [True, False])
def test_a_member_that_aiter_lacks_is_told_with_those_that_it_has(known):
    with fake_aiter.installed():
        names = {"Silu": 0, "Swiglu": 2} | ({"Situv2": 3} if known else {})
        sys.modules["aiter"].ActivationType = types.SimpleNamespace(**names, _private=1)
        if known:
            aiter_api.refresh("situ")
            return
        message = r"aiter\.ActivationType\.Situv2 does not exist"
        with pytest.raises(ContractError, match=message) as caught:
            aiter_api.refresh("situ")
        assert caught.value.allowed == "one of Silu, Swiglu"
        with pytest.raises(ContractError, match=r"aiter\.QuantType\.per_9x9"):
            aiter_api.refresh("silu", "per_9x9")


def test_an_aiter_that_nobody_has_imported_yet_is(monkeypatch, tmp_path):
    package = tmp_path / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text("class ActivationType:\n    Silu = 'theirs'\n")
    (package / "fused_moe.py").write_text("def fused_moe(hidden_states, output=None): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("aiter", "aiter.fused_moe"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        aiter_api.refresh("silu")
        assert aiter_api.current().takes_output and not aiter_api.current().takes_gate_mode
        assert aiter_api.current().activations == {"silu": "theirs"}
    finally:
        for name in ("aiter", "aiter.fused_moe"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["aiter.fused_moe", "aiter"])
def test_the_part_that_cannot_be_imported_is_named(monkeypatch, name):
    with fake_aiter.installed(), monkeypatch.context() as until_then:
        until_then.setitem(sys.modules, name, None)
        with pytest.raises(ContractError, match=f"not importable: import {name} says"):
            aiter_api.refresh()


def test_a_module_without_an_origin_is_no_stand_in(monkeypatch):
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    assert aiter_api.is_stand_in() is False
    with fake_aiter.installed():
        assert aiter_api.is_stand_in() is False
        sys.modules["aiter"].__spec__ = types.SimpleNamespace(origin="/site-packages/aiter")
        assert aiter_api.is_stand_in() is False
        sys.modules["aiter"].__spec__.origin = aiter_api.STAND_IN
        assert aiter_api.is_stand_in() is True


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
