"""The tensors beside the experts in an update that fails: copied, or watched, and open until they come again."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.srt.layers.quantization.mxfp4_layer_weights import STAGING
from sglang_aiter_moe.srt.layers.quantization.mxfp4_others import UNNAMED, Others
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

EXPERT = "model.layers.0.mlp.experts.0.w1.weight"


class Layer(torch.nn.Module):
    """With an expert tensor of its own, and one of a child, which is not the layer's."""

    def __init__(self):
        super().__init__()
        self.w2_weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.child = torch.nn.Linear(2, 2, bias=False)


class State:
    def __init__(self, layer):
        self.layer, self.blocked = layer, None

    def block(self, reason, *, poison):
        self.blocked = (reason, poison)

    def unblock(self):
        self.blocked = None


@pytest.fixture
def model():
    made = torch.nn.Module()
    made.experts = Layer()
    made.norm = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    made.register_buffer("bias", torch.ones(2))
    made.register_buffer("later", torch.empty(2, device="meta"))
    return made


@pytest.fixture
def states(model):
    return [State(model.experts), State(Layer())]


@pytest.fixture(params=["none", "host"])
def staging(request, monkeypatch):
    monkeypatch.setenv(STAGING, request.param)
    return request.param


def write(model):
    model.norm.data.fill_(7)
    model.bias.fill_(7)
    model.experts.child.weight.data.fill_(7)


def test_a_model_has_one(model):
    assert Others.of(model) is Others.of(model) is not Others.of(torch.nn.Module())


def test_what_can_be_copied_is_put_back(model, states, monkeypatch, caplog):
    monkeypatch.setenv(STAGING, "host")
    child = model.experts.child.weight.clone()
    others = Others.of(model)
    others.begin(model, states, ["model.norm.weight"])
    write(model)
    model.experts.w2_weight.data.fill_(7)
    others.failed(states, "connection lost")
    assert model.norm.tolist() == [1, 1, 1] and model.bias.tolist() == [1, 1]
    assert torch.equal(model.experts.child.weight, child)
    assert model.experts.w2_weight.tolist() == [7] * 4, "the layer looks after its own"
    assert not others.pending and all(state.blocked is None for state in states)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.message.endswith("connection lost")


def test_what_cannot_blocks_every_layer_and_poisons_one(model, states, monkeypatch):
    monkeypatch.setenv(STAGING, "none")
    others = Others.of(model)
    others.begin(model, states, [EXPERT, "b", "c", "a", "d"])
    write(model)
    others.failed(states, "connection lost")
    assert others.pending == {"a", "b", "c", "d"}
    said = "connection lost; 4 tensors beside the experts are open: a, b, c"
    assert [state.blocked for state in states] == [(said, True), (said, False)]


@pytest.mark.parametrize("what", ["norm", "bias", "child"])
def test_one_tensor_is_enough(model, states, monkeypatch, what):
    monkeypatch.setenv(STAGING, "none")
    others = Others.of(model)
    others.begin(model, states, ["a"])
    tensor = {"norm": model.norm, "bias": model.bias, "child": model.experts.child.weight}[what]
    tensor.data.view(-1)[1] += 1
    others.failed(states, "")
    assert others.pending == {"a"}


def test_what_was_not_written_is_not_open(model, states, staging):
    others = Others.of(model)
    others.begin(model, states, ["a"])
    others.failed(states, "")
    assert not others.pending and states[0].blocked is None


def test_an_update_of_experts_alone_looks_at_nothing_else(model, states, staging):
    others = Others.of(model)
    others.begin(model, states, [EXPERT])
    write(model)
    others.failed(states, "")
    assert not others.pending and model.norm.tolist() == [7, 7, 7]


def test_nobody_told_the_names(model, states, monkeypatch):
    monkeypatch.setenv(STAGING, "none")
    others = Others.of(model)
    others.begin(model, states, [])
    write(model)
    others.failed(states, "")
    assert others.pending == {UNNAMED}


def test_a_session_begins_with_its_first_step(model, states, staging):
    """What a later step finds is what the first one has written already."""
    others = Others.of(model)
    others.begin(model, states, ["a"])
    write(model)
    others.begin(model, states, ["b"])
    others.failed(states, "")
    if staging == "host":
        assert model.norm.tolist() == [1, 1, 1]
    else:
        assert others.pending == {"a", "b"}


def test_the_next_update_begins_anew(model, states, staging):
    others = Others.of(model)
    others.begin(model, states, ["a"])
    write(model)
    others.succeeded(states, whole=False)
    others.end()
    others.begin(model, states, ["b"])
    others.failed(states, "")
    assert model.norm.tolist() == [7, 7, 7] and not others.pending


@pytest.mark.parametrize(
    "names, whole, left",
    [
        (["a"], False, {"b"}),
        (["a", "b", "c"], False, set()),
        (["c"], False, {"a", "b"}),
        ([EXPERT], True, set()),
    ],
)
def test_what_is_open_closes_by_name_or_by_a_whole_checkpoint(
    model, states, monkeypatch, names, whole, left
):
    monkeypatch.setenv(STAGING, "none")
    others = Others.of(model)
    others.begin(model, states, ["a", "b"])
    write(model)
    others.failed(states, "")
    others.begin(model, states, names)
    others.succeeded(states, whole=whole)
    assert others.pending == left
    assert [state.blocked is None for state in states] == [not left] * 2


def test_layers_that_others_blocked_are_not_unblocked(model, states):
    states[0].blocked = "somebody else's reason"
    Others.of(model).succeeded(states, whole=True)
    assert states[0].blocked == "somebody else's reason"


def test_a_model_that_is_no_module(states, staging):
    """SGLang's stand-ins for models have neither parameters nor buffers."""
    model = SimpleNamespace()
    others = Others.of(model)
    others.begin(model, states, ["a"])
    others.failed(states, "")
    assert not others.pending


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
