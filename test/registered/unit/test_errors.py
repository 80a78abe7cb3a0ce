"""What is no number is refused by name at every public entry point, before anything is computed or launched."""

import pickle
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.layouts import WEIGHT_LAYOUTS
from sglang_aiter_moe.contract.plan import plan_moe
from sglang_aiter_moe.contract.scale_layouts import SCALE_LAYOUTS
from sglang_aiter_moe.contract.spec import MoeSpec, Target, shard
from sglang_aiter_moe.errors import ContractError, check_integer, check_number
from sglang_aiter_moe.portable import routing, sorting
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.testing import portable_cases as pc
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

NO_INTEGERS = (2.5, 1.0, "2", True, float("nan"), torch.tensor(2), torch.tensor([1, 2]), np.ones(1))
NO_NUMBERS = ("2", True, torch.tensor(2.0), [1.0])
LOGITS, BIAS = torch.zeros(4, 8), torch.zeros(8)
IDS, WEIGHTS = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
SPEC = {
    "activation": "situv2", "num_experts": 8, "topk": 2, "hidden_size": 512, "intermediate_size": 256,
    "beta": 4.0, "linear_beta": 25.0,
}  # fmt: skip
REQUEST = KernelRequest(
    "A16W4", "flydsl_a16w4", 4, 256, 128, *("separated",) * 4, activation="situv2"
)


def biased_topk(**options):
    return routing.biased_topk(LOGITS, BIAS, **({"topk": 2} | options))


def biased_grouped_topk(**options):
    given = {"num_expert_group": 1, "topk_group": 1, "need_renorm": True} | options
    out = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int32)
    return routing.biased_grouped_topk(LOGITS, BIAS, *out, **given)


def moe_sorting(**options):
    given = {"num_experts": 8, "model_dim": 64, "moebuf_dtype": torch.bfloat16} | options
    return sorting.moe_sorting(IDS, WEIGHTS, **given)


def fused_moe(**options):
    experts = pc.random_experts(2, 256, 128)
    with portable.installed():
        packed = pc.pack(experts)
        routed = pc.random_routing(3, 2, 1, 256)
        return pc.fused_moe(routed, packed, "Situv2", beta=4.0, linear_beta=25.0, **options)


def spec(**options):
    return MoeSpec(**(SPEC | options))


def plan():
    return plan_moe(spec(), Target("gfx950", Capabilities.for_release("0.1.20"), {}))


def request(**options):
    return replace(REQUEST, **options)


INTEGERS = {
    biased_topk: ("topk", "num_expert_group", "topk_group", "num_shared_slots", "padded_id"),
    biased_grouped_topk: ("num_expert_group", "topk_group"),
    moe_sorting: ("num_experts", "model_dim", "block_size"),
    fused_moe: ("hidden_pad", "intermediate_pad"),
    spec: ("num_experts", "topk", "hidden_size", "intermediate_size"),
    request: (
        "num_experts", "hidden_size", "intermediate_size",
        "hidden_skip_k", "intermediate_skip_n", "intermediate_skip_k", "hidden_skip_n",
    ),
}  # fmt: skip
COUNTS = {biased_topk: "num_tokens", moe_sorting: "num_local_tokens", fused_moe: "num_local_tokens"}
COUNTS |= {request: "num_local_tokens"}
NUMBERS = {
    biased_topk: ("routed_scaling_factor", "shared_weight"),
    biased_grouped_topk: ("routed_scaling_factor",),
    spec: ("alpha", "beta", "linear_beta", "swiglu_limit"),
    request: ("alpha", "beta", "linear_beta", "limit"),
}


def refused(value, name, call, *arguments, **options):
    with pytest.raises(ContractError) as caught:
        call(*arguments, **options)
    assert name in caught.value.what and repr(value) in caught.value.what


@pytest.mark.parametrize("call, name", [(f, n) for f, names in INTEGERS.items() for n in names])
def test_sizes_and_places(call, name):
    call()
    for value in (*NO_INTEGERS, None):
        refused(value, name, call, **{name: value})


@pytest.mark.parametrize("call, name", COUNTS.items())
def test_counts_that_may_be_a_tensor(call, name):
    """One integer, as a number or on the device; None: all rows."""
    for value in (None, 2, torch.tensor([2], dtype=torch.int32), torch.tensor(2)):
        call(**{name: value})
    for value in (2.5, 2.0, "2", True, float("nan")):
        refused(value, name, call, **{name: value})
    for value in (torch.tensor(2.0), torch.tensor([], dtype=torch.int32)):
        with pytest.raises(ContractError, match=name):
            call(**{name: value})


@pytest.mark.parametrize("call, name", [(f, n) for f, names in NUMBERS.items() for n in names])
def test_constants(call, name):
    for value in NO_NUMBERS:
        refused(value, name, call, **{name: value})


@pytest.mark.parametrize("what", ["logits", "bias"])
def test_what_is_no_tensor(what):
    for value in (None, [1.0]):
        given = {"logits": LOGITS, "bias": BIAS, "topk": 2} | {what: value}
        refused(value, what, routing.biased_topk, **given)


@pytest.mark.parametrize("layout", [*WEIGHT_LAYOUTS.values(), *SCALE_LAYOUTS.values()])
def test_shapes(layout):
    good = (2, 64, 64)
    for call in (layout.check, layout.packed_shape, layout.index_map):
        call(good)
        call(list(good))
        for value in (None, 3, torch.tensor(good)):
            refused(value, "shape", call, value)
        for value in NO_INTEGERS:
            refused(value, "dimension 1", call, (2, value, 64))
            refused(value, "dimension 2", call, [2, 64, value])


def test_token_counts_and_ranks():
    decided = plan()
    for value in (*NO_INTEGERS, None):
        for call in (decided.mode_for, decided.family_for, decided.tuned_for):
            refused(value, "token count", call, value)
        refused(value, "ranks", shard, 512, value)
        refused(value, "intermediate size", shard, value, 4)


@pytest.mark.parametrize(
    "name", [n for n, f in MoeSpec.__dataclass_fields__.items() if f.type == "bool"]
)
def test_truth_values(name):
    for value in (None, 1, 0, "false", torch.tensor(True)):
        refused(value, name, spec, **{name: value})


def test_what_counts_as_one():
    for value in (0, -3, np.int64(3), 1 << 70):
        check_integer("n", value, fix="")
    for value in (0, 2.5, float("inf"), np.float32(1), Fraction(1, 2)):
        check_number("x", value, fix="")
    check_integer("n", 1, least=1, fix="")
    with pytest.raises(
        ContractError, match=r"n is 0\. Allowed: an integer of at least 1\. To fix: count"
    ):
        check_integer("n", 0, least=1, fix="count")


def test_errors_travel_between_processes():
    with pytest.raises(ContractError) as caught:
        check_integer("n", 2.5, fix="count")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.fix) == (ContractError, str(caught.value), "count")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
