"""MoeSpec and Target refuse bad input by name and value; shards are whole blocks."""

import sys

import pytest

from sglang_aiter_moe.contract import Capabilities, MoeSpec, Target, shard
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import Activation
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

AITER = Capabilities.for_release("0.1.20")
GOOD = {
    "activation": "silu",
    "num_experts": 8,
    "topk": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    "change, fragment",
    [
        ({"activation": "situ"}, "activation is 'situ'"),
        ({"activation": None}, "activation is None"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": True}, "num_experts is True"),
        ({"topk": -1}, "topk is -1"),
        ({"topk": 256, "num_experts": 512}, "topk is 256"),
        ({"topk": 9}, "topk is 9"),
        ({"hidden_size": 256.0}, "hidden_size is 256.0"),
        ({"hidden_size": 250}, "hidden_size is 250, 26 over a multiple of 32"),
        ({"intermediate_size": 360}, "intermediate_size is 360, 8 over a multiple of 32"),
        ({"swiglu_limit": "7"}, "swiglu_limit is '7'"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"linear_beta": True}, "linear_beta is True"),
        ({"alpha": None}, "alpha is None"),
    ],
)
def test_bad_spec(change, fragment):
    with pytest.raises(ContractError) as caught:
        MoeSpec(**{**GOOD, **change})
    assert fragment in str(caught.value) and caught.value.fix


def test_more_slots_than_local_experts():
    """An expert-parallel rank may hold fewer experts than a token chooses; no other rank may."""
    assert MoeSpec(**{**GOOD, "topk": 9}, expert_parallel=True).topk == 9


@pytest.mark.parametrize("arch", ["", "gfx90a", "gfx1200", None, "sm_90", "GFX950"])
def test_unknown_arch(arch):
    with pytest.raises(ContractError, match="arch is"):
        Target(arch, AITER)


def test_arch_features_are_left_out():
    assert Target("gfx950:sramecc+:xnack-", AITER).arch == "gfx950"


def test_target_keeps_known_variables_alone():
    env = {"AITER_SITUV2_A8W4": "1", "HOME": "/root", "SECRET": "x"}
    assert Target("gfx950", AITER, env).env == {"AITER_SITUV2_A8W4": "1"}


def test_target_of_this_process(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    monkeypatch.setenv("SGLANG_AITER_MOE_A16W4_KERNEL", "gu_interleaved")
    target = Target.current("gfx950", AITER, sglang="0.5.23")
    assert target.env["AITER_SITUV2_A8W4"] == "1"
    assert (target.a16w4_kernel, target.sglang) == ("gu_interleaved", "0.5.23")


def test_round_trips():
    spec = MoeSpec(**GOOD, has_bias=True, swiglu_limit=3.0)
    assert spec.activation is Activation.SILU
    assert MoeSpec.from_dict(spec.to_dict()) == spec
    target = Target("gfx942", AITER, {"AITER_KSPLIT": "1"}, sglang="0.5.23")
    assert Target.from_dict(target.to_dict()) == target


def test_shard():
    """sglang#27201: the loader divides whole blocks of 32, so TP4 and TP8 hold 736 and 384 columns."""
    assert [shard(2880, n) for n in (1, 2, 4, 8)] == [2880, 1440, 736, 384]
    assert [shard(3072, n) for n in (1, 2, 4, 8)] == [3072, 1536, 768, 384]
    for full, ranks in ((2881, 1), (0, 1), (2880, 0)):
        with pytest.raises(ContractError):
            shard(full, ranks)


def test_the_smallest_layer():
    smallest = MoeSpec("silu", num_experts=1, topk=1, hidden_size=32, intermediate_size=32)
    assert smallest.num_experts == smallest.topk == 1
    assert shard(32, 1) == 32


def test_frozen():
    for made in (MoeSpec(**GOOD), Target("gfx950", AITER), AITER):
        with pytest.raises(AttributeError):
            made.arch = "gfx942"


@pytest.mark.parametrize("env", [None, {"AITER_SITUV2_A8W4": 1}, {"AITER_SITUV2_A8W4": None}])
def test_an_environment_that_holds_no_raw_values(env):
    with pytest.raises(ContractError, match="env"):
        Target("gfx950", AITER, env)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
