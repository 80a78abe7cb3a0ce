"""SGLang's MXFP4 method on the AITER path, without SGLang: its modules are stand-ins by the names that are read.

In SGLang itself: the matrix and test/registered/e2e. Expected specs are read off SGLang's models.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import Activation
from sglang_aiter_moe.srt import switch
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_method, mxfp4_packed
from sglang_aiter_moe.srt.layers.quantization.mxfp4_method import PLANNED
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import updating, weights_of
from sglang_aiter_moe.srt.releases import FIRST
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    load_shard,
    loaded_layer,
    packed_bytes,
    random_raw,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

SITU = MoeRunnerConfig(
    activation="situ", top_k=2, gemm1_alpha=4.0, gemm1_clamp_limit=25.0, gate_up_interleaved=False
)
GPT_OSS = MoeRunnerConfig(activation="silu", top_k=2, gemm1_alpha=1.702, gemm1_clamp_limit=7.0)


class Backend(NamedTuple):
    name: str

    def is_auto(self):
        return self.name == "auto"

    def is_aiter(self):
        return self.name == "aiter"


class SGLang:
    """What the stand-ins answer."""

    def __init__(self):
        self.backend, self.mori = Backend("auto"), False
        self.runners = []

    def modules(self):
        utils = {
            "get_moe_runner_backend": lambda: self.backend,
            "get_moe_a2a_backend": lambda: SimpleNamespace(is_mori=lambda: self.mori),
            "MoeRunnerBackend": SimpleNamespace(AITER="aiter's"),
        }
        return {
            "sglang": {"__version__": "0.5.23"},
            "sglang.srt": {},
            "sglang.srt.layers": {},
            "sglang.srt.layers.moe": {"MoeRunner": lambda *given: given},
            "sglang.srt.layers.moe.utils": utils,
            "sglang.srt.layers.quantization": {},
            "sglang.srt.layers.quantization.mxfp4": {"_use_aiter": True},
            "sglang.srt.utils": {"set_weight_attrs": self.set_weight_attrs},
        }

    @staticmethod
    def set_weight_attrs(weight, attributes):
        for name, value in attributes.items():
            assert not hasattr(weight, name), name
            setattr(weight, name, value)


@pytest.fixture
def sglang(monkeypatch):
    for name in (plans.A8W4, plans.A4W4, plans.KERNEL, plans.ITLV, switch.ENABLE):
        monkeypatch.delenv(name, raising=False)
    fake = SGLang()
    made = {}
    for name, values in fake.modules().items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
        monkeypatch.setitem(sys.modules, name, made[name])
    fake.module = made
    monkeypatch.setattr(mxfp4_method, "stored_for", lambda layer, plan: None)
    monkeypatch.setattr(mxfp4_method, "PROGRESS", Progress())
    with portable.installed(arch="gfx950", force=True):
        yield fake


class Progress:
    def __init__(self):
        self.seen = []

    def planned(self, layer):
        self.seen.append(("planned", layer.layer_id))

    def done(self, layer, rank):
        self.seen.append(("done", layer.layer_id, rank))


def make_layer(config=SITU, experts=2, **attributes):
    layer = torch.nn.Module()
    layer.moe_runner_config, layer.num_local_experts = config, experts
    layer.moe_ep_size, layer.layer_id = 1, 5
    layer.dispatcher = SimpleNamespace(expert_mask_gpu=None)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def create(layer, hidden=256, inter=128, **more):
    method = SimpleNamespace()
    mxfp4_method.create_weights(method, layer, 8, hidden, inter, torch.bfloat16, **more)
    return method


# --- which layers are ours ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend, method, uses_aiter, ours",
    [
        ("auto", {}, True, True),
        ("aiter", {}, True, True),
        ("aiter", {}, False, True),  # the portable one is installed
        ("marlin", {}, True, False),
        ("auto", {"use_mega_moe": True}, True, False),
        ("auto", {"use_mega_moe": False}, True, True),
    ],
)
def test_whose_layer_it_is(sglang, backend, method, uses_aiter, ours):
    sglang.backend = Backend(backend)
    sglang.module["sglang.srt.layers.quantization.mxfp4"]._use_aiter = uses_aiter
    assert mxfp4_method.takes_aiter_path(SimpleNamespace(**method)) is ours


def test_no_layer_is_ours_when_switched_off(sglang, monkeypatch):
    monkeypatch.setenv(switch.ENABLE, "0")
    assert mxfp4_method.takes_aiter_path(SimpleNamespace()) is False


def test_a_layer_is_planned_by_its_construction(sglang):
    layer = make_layer()
    assert mxfp4_method.is_planned(layer) is False
    create(layer)
    assert mxfp4_method.is_planned(layer) is True
    assert mxfp4_method.PROGRESS.seen == [("planned", 5)]


def test_the_target_is_this_process(sglang, monkeypatch):
    monkeypatch.setenv(plans.A8W4, "1")
    target = mxfp4_method.target()
    assert (target.arch, target.sglang, target.env[plans.A8W4]) == ("gfx950", "0.5.23", "1")
    assert target.capabilities.name == "release 0.1.20" and target.capabilities.identified


# --- what a model's config says ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation, alpha, expected",
    [
        ("situ", 4.0, Activation.SITUV2),
        ("silu", 1.702, Activation.SWIGLU),
        ("swiglu", 1.702, Activation.SWIGLU),
        ("swiglu", None, Activation.SWIGLU),
        ("silu", None, Activation.SILU),
        ("gelu", None, Activation.GELU),
        ("gelu", 1.702, Activation.GELU),
    ],
)
def test_the_activation(activation, alpha, expected):
    config = MoeRunnerConfig(activation=activation, gemm1_alpha=alpha)
    assert mxfp4_method.activation_of(config) is expected


def test_an_activation_that_nobody_knows():
    with pytest.raises(ContractError, match="the layer's activation is 'relu2'"):
        mxfp4_method.activation_of(MoeRunnerConfig(activation="relu2"))


SIZES = {"num_experts": 2, "topk": 2, "hidden_size": 256, "intermediate_size": 128}


@pytest.mark.parametrize(
    "config, expected",
    [
        (SITU, MoeSpec("situv2", **SIZES, beta=4.0, linear_beta=25.0)),
        (
            GPT_OSS,
            MoeSpec("swiglu", **SIZES, gate_up_interleaved=True, swiglu_limit=7.0, alpha=1.702),
        ),
        (
            MoeRunnerConfig(top_k=2, swiglu_limit=10.0, gate_up_interleaved=False),
            MoeSpec("silu", **SIZES, swiglu_limit=10.0),
        ),
        (
            MoeRunnerConfig(
                top_k=2,
                swiglu_limit=10.0,
                gemm1_clamp_limit=7.0,
                gate_up_interleaved=False,
                apply_router_weight_on_input=True,
                no_combine=True,
            ),
            MoeSpec("silu", **SIZES, swiglu_limit=7.0, doweight_stage1=True, no_combine=True),
        ),
    ],
    ids=["k3", "gpt-oss", "deepseek", "other"],
)
@pytest.mark.parametrize("ranks, bias", [(1, False), (2, True)])
def test_the_spec_of_a_layer(config, expected, ranks, bias):
    layer = make_layer(config, moe_ep_size=ranks)
    found = mxfp4_method.spec_of(layer, 256, 128, bias)
    assert found == replace(expected, name="layer 5", has_bias=bias, expert_parallel=ranks == 2)


def test_an_older_config_says_nothing_of_its_rows():
    """gpt-oss's alternate, and before 0.5.17 there is no other model."""
    said = vars(MoeRunnerConfig(top_k=2, gate_up_interleaved=False))
    config = SimpleNamespace(**{n: v for n, v in said.items() if n != "gate_up_interleaved"})
    assert mxfp4_method.spec_of(make_layer(config), 256, 128, False).gate_up_interleaved is True


# --- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
def test_what_the_loader_fills_is_unpadded_and_neutral(sglang, with_bias):
    layer = make_layer(GPT_OSS)
    method = create(layer, hidden=192, inter=90, with_bias=with_bias)  # 90 is 96 in whole blocks
    plan = getattr(layer, PLANNED)
    assert (plan.spec.hidden_size, plan.spec.intermediate_size) == (192, 96)
    assert plan.spec.has_bias is with_bias
    shapes = {
        "w13_weight": (2, 192, 96),
        "w13_weight_scale": (2, 192, 6),
        "w2_weight": (2, 192, 48),
        "w2_weight_scale": (2, 192, 3),
    } | ({"w13_weight_bias": (2, 192), "w2_weight_bias": (2, 192)} if with_bias else {})
    found = dict(layer.named_parameters())
    assert {name: tuple(p.shape) for name, p in found.items()} == shapes
    for name, parameter in found.items():
        bias, scale = name.endswith("bias"), name.endswith("scale")
        assert parameter.dtype == (torch.bfloat16 if bias else torch.uint8)
        assert (parameter == (0x7F if scale else 0)).all() and not parameter.requires_grad
        assert getattr(parameter, "quant_method", None) == ("group" if scale else None)
        assert not hasattr(parameter, "weight_loader")
    assert (method.num_experts, method.with_bias) == (8, with_bias)
    assert (method.hidden_size, method.hidden_pad) == (plan.padded_hidden_size, plan.hidden_pad)
    assert method.intermediate_size_per_partition == plan.padded_intermediate_size == 256
    assert method.intermediate_pad == plan.intermediate_pad > 0


@pytest.mark.parametrize("inter, columns", [(96, 96), (97, 128), (128, 128)])
def test_whole_blocks_stay_as_they_are(sglang, inter, columns):
    layer = make_layer(GPT_OSS)
    create(layer, inter=inter)
    assert layer.w2_weight.shape[-1] == columns // 2


def test_loaders_also_work_on_a_layer_that_is_laid_out(sglang):
    spec = plans.situv2(2, 2, 256, 128, name="layer 5")
    layer, old, new = make_layer(), random_raw(spec, 1), random_raw(spec, 2)
    create(layer, weight_loader=load_shard, other="attribute")
    for raw in (old, new):
        with updating():
            for name, parameter in layer.named_parameters():
                assert parameter.other == "attribute"
                parameter.weight_loader(parameter, raw[name], name, None, None)
        mxfp4_method.process_weights_after_loading(SimpleNamespace(), layer)
        want = packed_bytes(loaded_layer(getattr(layer, PLANNED), raw))
        for name, tensor in packed_bytes(layer).items():
            assert torch.equal(tensor, want[name]), name
    assert mxfp4_method.PROGRESS.seen[1:] == [("done", 5, 0)] * 2


@pytest.mark.parametrize("mori", [True, False])
@pytest.mark.parametrize("takes", [True, False])
def test_moris_dispatcher_quantises_nothing(sglang, mori, takes):
    sglang.mori, given = mori, []
    layer = make_layer()
    if takes:
        layer.dispatcher.set_quant_config = given.append
    create(layer)
    mxfp4_method.process_weights_after_loading(SimpleNamespace(), layer)
    assert given == ([{}] if mori and takes else [])


class Stored:
    def __init__(self):
        self.checked = []

    def check_filled(self, plan, tensors):
        self.checked.append((plan, sorted(tensors)))


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_that_comes_laid_out(sglang, monkeypatch, with_bias):
    stored = Stored()
    monkeypatch.setattr(mxfp4_method, "stored_for", lambda layer, plan: stored)
    layer = make_layer(GPT_OSS)
    create(layer, hidden=192, inter=96, with_bias=with_bias)
    plan = getattr(layer, PLANNED)
    want = mxfp4_packed.packed_tensors(plan, with_bias)
    assert {name: p.shape for name, p in layer.named_parameters()} == want
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith("bias") else torch.uint8)
    before = packed_bytes(layer)
    mxfp4_method.process_weights_after_loading(SimpleNamespace(), layer)
    assert stored.checked == [(plan, sorted(want))]
    assert all(torch.equal(tensor, before[name]) for name, tensor in packed_bytes(layer).items())
    assert weights_of(layer).plan is plan and layer.w13_weight.is_shuffled is True
    mxfp4.moe_quant_info(layer)
    mxfp4_method.process_weights_after_loading(SimpleNamespace(), layer)
    assert len(stored.checked) == 1, "after an update the bytes are others"
    assert mxfp4_method.PROGRESS.seen == [("planned", 5), ("done", 5, 0), ("done", 5, 0)]


@pytest.mark.parametrize("available, initialized", [(True, True), (True, False), (False, True)])
def test_the_rank_of_a_progress_line(monkeypatch, available, initialized):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: available)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert mxfp4_method._rank() == (3 if available and initialized else 0)


# --- releases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, config, loads",
    [
        (FIRST, SITU, True),
        (f"{FIRST}rc1", SITU, False),  # before it
        (f"{FIRST}.post1", SITU, True),
        (f"{FIRST}+rocm", SITU, True),
        ("0.5.9", SITU, False),  # by number, not by letter
        ("0.5.9", GPT_OSS, True),
        ("0.5.16", MoeRunnerConfig(activation="silu", top_k=2), False),
    ],
)
def test_older_releases_load_gpt_oss_alone(sglang, version, config, loads):
    sglang.module["sglang"].__version__ = version
    layer = make_layer(config)
    if loads:
        mxfp4_method._refuse_what_older_releases_load_wrong(layer)
        return
    message = (
        f"layer 5 has MXFP4 experts with activation '{config.activation}', and SGLang {version}"
    )
    with pytest.raises(ContractError) as caught:
        create(layer)
    assert caught.value.what.startswith(message) and not mxfp4_method.is_planned(layer)


# --- calls --------------------------------------------------------------------------------------------------------


class Dispatched(NamedTuple):
    hidden_states: torch.Tensor
    rest: str = "routing"


def test_the_runner_is_aiters_with_the_checkpoints_config(sglang):
    method = SimpleNamespace()
    mxfp4_method.create_moe_runner(method, make_layer(), SITU)
    assert method.moe_runner_config is SITU and method.runner == ("aiter's", SITU)


@pytest.mark.parametrize("masked", [False, True])
def test_a_call_is_padded_and_has_the_dispatchers_mask(sglang, masked):
    layer = make_layer(GPT_OSS)
    mask = torch.ones(2, dtype=torch.int32) if masked else None
    layer.dispatcher.expert_mask_gpu = mask
    create(layer, hidden=192, inter=96)
    mxfp4_method.process_weights_after_loading(SimpleNamespace(), layer)
    method = SimpleNamespace(runner=SimpleNamespace(run=lambda *given: given))
    given, info = mxfp4_method.apply(method, layer, Dispatched(torch.ones(3, 192)))
    assert given.rest == "routing" and given.hidden_states.shape == (3, 256)
    assert given.hidden_states.sum() == 3 * 192
    assert info.plan is getattr(layer, PLANNED) and info.expert_mask is mask


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
