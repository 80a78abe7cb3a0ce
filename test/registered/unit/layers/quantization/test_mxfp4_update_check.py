"""Every tensor of an update by its name, shape and dtype: what fits a layer, and what is refused with its name."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4_update_check
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import weights_of
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import loaded_layer, random_raw
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

# This rank's share: 4 of 8 experts, 128 of 512 rows; H is 256.
SPEC = plans.situv2(4, 2, 256, 128, name="layer 3")
NAME = "model.layers.3.mlp.experts"
U8 = torch.uint8


@pytest.fixture(scope="module")
def state():
    layer = loaded_layer(plans.plan(SPEC), random_raw(SPEC, 1))
    layer.layer_id = 3
    layer.moe_tp_size, layer.intermediate_size_per_partition, layer.num_experts = 4, 128, 8
    return weights_of(layer)


def check(state, name, shape, dtype=U8):
    mxfp4_update_check.check_update([(name, shape, dtype)], [state])


SHAPES = {
    f"{NAME}.7.w1.weight": (512, 128),
    f"{NAME}.0.w3.weight_packed": (512, 128),
    f"{NAME}.0.w2.weight": (256, 256),
    f"{NAME}.0.w1.weight_scale": (512, 8),
    f"{NAME}.0.w2.weight_scale": (256, 16),
    f"{NAME}.w13_weight": (8, 1024, 128),
    f"{NAME}.w2_weight": (8, 256, 256),
    f"{NAME}.w13_weight_scale": (8, 1024, 8),
    f"{NAME}.w2_weight_scale": (8, 256, 16),
    f"{NAME}.gate_up_proj_blocks": (8, 1024, 8, 16),
    f"{NAME}.down_proj_blocks": (8, 256, 16, 16),
    f"{NAME}.down_proj_scales": (8, 256, 16),
}
BIASES = {
    f"{NAME}.0.w1.bias": (512,),
    f"{NAME}.0.w2.bias": (256,),
    f"{NAME}.w13_weight_bias": (8, 1024),
    f"{NAME}.down_proj_bias": (8, 256),
}


@pytest.mark.parametrize("name", [*SHAPES, *BIASES])
def test_the_shapes_of_a_checkpoint(state, name):
    shape, dtype = (SHAPES | BIASES)[name], torch.bfloat16 if name in BIASES else U8
    check(state, name, shape, dtype)
    for position in range(len(shape)):
        for step in (-1, 1):
            other = tuple(n + step * (i == position) for i, n in enumerate(shape))
            with pytest.raises(ContractError) as caught:
                check(state, name, other, dtype)
            assert caught.value.what == f"{name} has shape {other} in the update"
            assert str(shape) in caught.value.allowed
    with pytest.raises(ContractError, match=re.escape(f"{name} has shape {(*shape, 1)}")):
        check(state, name, (*shape, 1), dtype)


def test_only_weights_come_in_blocks(state):
    with pytest.raises(ContractError, match="down_proj_scales has shape"):
        check(state, f"{NAME}.down_proj_scales", (8, 256, 1, 16))


@pytest.mark.parametrize(
    "name, shape", [("w13_weight", (4, 256, 128)), ("w2_weight_scale", (4, 256, 4))]
)
def test_a_ranks_own_share_is_a_whole_tensor(state, name, shape):
    check(state, f"{NAME}.{name}", shape)
    with pytest.raises(ContractError, match="has shape"):
        check(state, f"{NAME}.0.w1.weight", shape)


def test_the_allowed_shapes_are_each_told_once(state):
    with pytest.raises(ContractError) as caught:
        check(state, f"{NAME}.w13_weight", (1,))
    assert caught.value.allowed == "(8, 1024, 128) or (8, 1024, 8, 16) or (4, 256, 128)"
    with pytest.raises(ContractError) as caught:
        check(state, f"{NAME}.0.w1.weight", (1,))
    assert caught.value.allowed == "(512, 128)"


@pytest.mark.parametrize("expert, known", [(0, True), (7, True), (8, False)])
def test_experts_of_the_whole_model(state, expert, known):
    name = f"{NAME}.{expert}.w1.weight"
    if known:
        check(state, name, (512, 128))
        return
    with pytest.raises(ContractError, match=f"{name} is of expert 8") as caught:
        check(state, name, (512, 128))
    assert caught.value.allowed == "experts 0 to 7 of layer 3"


@pytest.mark.parametrize(
    "kind, dtypes, said",
    [
        ("w1.weight", {U8, torch.int8, torch.float4_e2m1fn_x2}, "two E2M1 codes a byte: "),
        ("w1.weight_scale", {U8, torch.int8, torch.float8_e8m0fnu}, "E8M0 bytes: "),
        ("w1.bias", {torch.float32, torch.bfloat16, torch.float16}, "a bias: "),
    ],
)
def test_the_dtypes_of_each_kind(state, kind, dtypes, said):
    every = {U8, torch.int8, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float32}
    every |= {torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.float8_e4m3fn}
    for dtype in every:
        if dtype in dtypes:
            check(state, f"{NAME}.0.{kind}", None, dtype)
            continue
        with pytest.raises(ContractError) as caught:
            check(state, f"{NAME}.0.{kind}", None, dtype)
        assert caught.value.what == f"{NAME}.0.{kind} has dtype {dtype} in the update"
        assert caught.value.allowed == said + ", ".join(sorted(map(str, dtypes)))


def test_what_is_not_known_yet_is_not_checked(state):
    check(state, f"{NAME}.0.w1.weight", None, None)
    with pytest.raises(ContractError, match="has shape"):
        check(state, f"{NAME}.0.w1.weight", (1,), None)
    with pytest.raises(ContractError, match="has dtype"):
        check(state, f"{NAME}.0.w1.weight", None, torch.float64)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.13.mlp.experts.0.w1.weight",  # of a layer that is elsewhere
        "model.layers.13.mlp.experts.0.w9.weight",
        "model.layers.33.mlp.experts.0.w9.weight",
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "mtp.experts.0.w1.weight",  # without a number
    ],
)
def test_what_belongs_to_others_is_left_to_sglang(state, name):
    check(state, name, (1,), torch.float64)


def test_a_layer_without_a_number_is_never_the_one_that_is_meant(state):
    """Its tensors would have no number either."""
    unnumbered = SimpleNamespace(layer=SimpleNamespace(), plan=state.plan, forms=state.forms)
    for states in ([unnumbered, state], [state, unnumbered]):
        mxfp4_update_check.check_update([("layers.0.experts.0.w9.weight", (1,), U8)], states)
        with pytest.raises(ContractError, match="is no MXFP4 expert tensor"):
            mxfp4_update_check.check_update([(f"{NAME}.0.w9.weight", (1,), U8)], states)


def test_the_tensors_after_one_that_is_elsewhere_are_checked_too(state):
    described = [
        ("model.layers.4.mlp.experts.0.w1.weight", (1,), U8),
        ("model.norm.weight", (1,), torch.bfloat16),
        (f"{NAME}.0.w1.weight", (1,), U8),
    ]
    with pytest.raises(ContractError, match=r"layers\.3\..* has shape"):
        mxfp4_update_check.check_update(described, [state])


def test_a_layer_that_says_nothing_of_ranks_is_whole(state):
    plain = SimpleNamespace(layer=SimpleNamespace(), plan=state.plan)
    assert mxfp4_update_check.full_sizes(plain) == (4, 128, 256)
    assert mxfp4_update_check.full_sizes(state) == (8, 512, 256)


# --- tensors of this rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "experts, shape",
    [
        (slice(None), (4, 256, 128)),
        (slice(1, 3), (2, 256, 128)),
        ([0, 3], (2, 256, 128)),
        (2, (256, 128)),
        (torch.tensor([1]), (1, 256, 128)),
    ],
)
def test_some_of_this_ranks_experts(state, experts, shape):
    check_local = mxfp4_update_check.check_local
    check_local(state, {"w13_weight": torch.zeros(shape, dtype=U8)}, experts)
    with pytest.raises(ContractError, match=r"w13_weight has shape \(9,\) in the update") as caught:
        check_local(state, {"w13_weight": torch.zeros(9, dtype=U8)}, experts)
    assert caught.value.allowed.startswith(f"{shape},")


def test_unknown_parameters_and_dtypes_of_this_rank(state):
    check_local = mxfp4_update_check.check_local
    with pytest.raises(ContractError, match="layer 3 has no parameter w1_weight") as caught:
        check_local(state, {"w1_weight": torch.zeros(1)}, slice(None))
    assert caught.value.allowed == "w13_weight, w13_weight_scale, w2_weight, w2_weight_scale"
    with pytest.raises(ContractError, match=r"w2_weight has dtype torch.float32"):
        check_local(state, {"w2_weight": torch.zeros(4, 256, 64)}, slice(None))
    with pytest.raises(ContractError, match=r"layer 3 w2_weight has dtype torch.float32"):
        mxfp4_update_check.check_dtype("w2_weight", torch.zeros(1), "layer 3")
    mxfp4_update_check.check_dtype("w2_weight", torch.zeros(1, dtype=U8), "layer 3")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
