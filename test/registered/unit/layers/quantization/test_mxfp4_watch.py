"""Bytes that reach a packed parameter around its ``weight_loader`` are never served."""

import copy
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import updating, weights_of
from sglang_aiter_moe.srt.layers.quantization.mxfp4_watch import (
    PackedParameter,
    checksum,
    data_of,
    set_data,
    versions,
    watch,
)
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    load,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

PLAN = plans.plan(plans.situv2(4, 2, 256, 128), {plans.A8W4: "1"})


@pytest.fixture
def layer():
    return loaded_layer(PLAN, random_raw(PLAN.spec, 1))


def raw_over_the_whole(layer):
    layer.w13_weight.data.copy_(random_raw(PLAN.spec, 2)["w13_weight"])


def the_same_weights_raw(layer):
    layer.w2_weight.data.copy_(random_raw(PLAN.spec, 1)["w2_weight"])


def one_expert(layer):
    """One that no fingerprint samples."""
    layer.w13_weight.data[1].copy_(random_raw(PLAN.spec, 1)["w13_weight"][1])


def one_byte_of_a_scale(layer):
    layer.w2_weight_scale.data.view(-1)[77] ^= 1


def without_data(layer):
    with torch.no_grad():
        layer.w2_weight.copy_(random_raw(PLAN.spec, 2)["w2_weight"])


def load_state_dict(layer):
    raw = random_raw(PLAN.spec, 2)
    layer.load_state_dict({"w13_weight": raw["w13_weight"]}, strict=False)


def other_memory(layer):
    layer.w13_weight.data = random_raw(PLAN.spec, 2)["w13_weight"]


def another_parameter(layer):
    raw = random_raw(PLAN.spec, 2)["w13_weight"]
    layer.w13_weight = torch.nn.Parameter(raw, requires_grad=False)


def another_parameter_that_was_written_as_often(layer):
    raw, writes = random_raw(PLAN.spec, 2)["w13_weight"], layer.w13_weight._version
    layer.w13_weight = torch.nn.Parameter(raw, requires_grad=False)
    for _ in range(writes):
        layer.w13_weight.add_(0)
    assert weights_of(layer).is_callable, "nothing but its address tells it"


WRITES = (
    raw_over_the_whole,
    the_same_weights_raw,
    one_expert,
    one_byte_of_a_scale,
    without_data,
    load_state_dict,
    other_memory,
    another_parameter,
    another_parameter_that_was_written_as_often,
)


@pytest.mark.parametrize("write", WRITES)
def test_the_next_call_refuses(layer, write):
    write(layer)
    for _ in range(2):  # the second look must not forget what the first one saw
        with pytest.raises(ContractError, match="did not come through the weight_loader"):
            mxfp4.moe_quant_info(layer)
    # Captured graphs ask nobody: they get NaN.
    assert bool((layer.w13_weight_scale == 0xFF).all())
    assert bool((layer.w2_weight_scale == 0xFF).all())


@pytest.mark.parametrize("write", [raw_over_the_whole, the_same_weights_raw, one_expert])
def test_processing_again_refuses_too(layer, write):
    write(layer)
    with pytest.raises(ContractError, match="did not come through"):
        mxfp4.prepare_weights(layer, PLAN)


def test_a_full_update_makes_the_layer_valid_again(layer):
    one_expert(layer)
    with pytest.raises(ContractError):
        mxfp4.moe_quant_info(layer)
    new = random_raw(PLAN.spec, 3)
    with updating():
        load(layer, new)
    mxfp4.moe_quant_info(layer)
    assert same(packed_bytes(layer), packed_bytes(loaded_layer(PLAN, new)))


def test_who_only_reads_is_not_refused(layer):
    assert weights_of(layer).is_callable
    layer.w13_weight.data.sum()
    assert not weights_of(layer).is_callable
    mxfp4.moe_quant_info(layer)
    assert weights_of(layer).is_callable


def test_what_loaders_and_state_dicts_do_to_a_parameter_still_works(layer):
    parameter = layer.w13_weight
    assert isinstance(parameter, torch.nn.Parameter) and parameter.weight_loader
    assert type(layer.state_dict()["w13_weight"]) is torch.Tensor
    twin = copy.deepcopy(parameter)
    assert torch.equal(twin, parameter)
    compiled = torch.compile(
        lambda: layer.w13_weight_scale.float().sum(), backend="eager", fullgraph=True
    )
    assert compiled() == layer.w13_weight_scale.float().sum()


def test_a_checksum_of_a_transposed_tensor_and_of_odd_sizes():
    table = torch.arange(64 * 64, dtype=torch.int32).view(64, 64)
    assert checksum(table) != checksum(table.T.contiguous())
    odd = torch.arange(21, dtype=torch.uint8)
    assert checksum(odd) != checksum(odd.flip(0)) and checksum(odd) == checksum(odd.clone())
    assert checksum(torch.zeros(8)) != checksum(torch.ones(8))


def parameter(cls=torch.nn.Parameter):
    return cls(torch.zeros(2), requires_grad=False)


def test_who_takes_or_sets_the_data_is_noted_and_our_own_way_is_not():
    notes, watched = set(), parameter()
    watch(watched, "w", notes)
    assert type(watched) is PackedParameter
    assert data_of(watched).tolist() == [0.0, 0.0]
    set_data(watched, torch.ones(2))
    assert watched.tolist() == [1.0, 1.0] and notes == set()
    assert watched.data.tolist() == [1.0, 1.0] and notes == {"w"}
    notes.clear()
    watched.data = torch.full((2,), 3.0)
    assert watched.tolist() == [3.0, 3.0] and notes == {"w"}


def test_a_parameter_of_another_class_keeps_it():
    """Whose own ``data`` may be a property: it is compared by its version alone."""

    class Theirs(torch.nn.Parameter):
        pass

    theirs = parameter(Theirs)
    watch(theirs, "w", set())
    assert type(theirs) is Theirs


def test_a_packed_parameter_that_nobody_watches():
    assert parameter(PackedParameter).data.tolist() == [0.0, 0.0]


def test_versions_count_writes_one_by_one():
    a, b = parameter(), parameter()
    before = versions([a, b])
    with torch.no_grad():
        b.add_(1)
    assert versions([a, b]) == (before[0], before[1] + 1)
    with torch.inference_mode():
        assert versions([torch.zeros(1)]) == (0,), "such tensors count nothing"


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.float32, torch.int64]
)
@pytest.mark.parametrize("size", [1, 3, 4, 1024, 4096, 5000])
def test_a_checksum_sees_every_byte(dtype, size):
    tensor = torch.zeros(size, dtype=dtype)
    known, seen = checksum(tensor), set()
    as_bytes = tensor.view(torch.uint8)
    for position in {0, size // 2, as_bytes.numel() - 1}:
        as_bytes[position] = 1
        seen.add(checksum(tensor))
        as_bytes[position] = 0
    assert known not in seen and checksum(tensor) == known
    assert len(seen) == len({0, size // 2, as_bytes.numel() - 1})


def test_a_checksum_of_nothing_and_of_a_strided_tensor():
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0, dtype=torch.uint8))
    table = torch.arange(24, dtype=torch.uint8).view(4, 6)
    assert checksum(table.T) == checksum(table.T.contiguous()) != checksum(table)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_checksum_sees_two_words_change_places(rows):
    """In one column and in one row of its table of words."""
    words = torch.arange(rows * 1024, dtype=torch.int32)
    for a, b in ((0, 1), (0, 1024), (5, 1030)):
        moved = words.clone()
        moved[[a, b]] = words[[b, a]]
        assert checksum(moved) != checksum(words)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
