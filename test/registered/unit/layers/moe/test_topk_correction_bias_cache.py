"""The correction bias: its dtype policy, and that no reader can see it stale.

Graph capture is simulated on the CPU by a list of recorded operations (``FakeGraph``) and is real
on a GPU. Expected values come from the source tensor converted by torch.
"""

import copy
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe import topk as topk_module
from sglang_aiter_moe.srt.layers.moe.topk import (
    TopKConfig,
    aligned_routing_inputs,
    correction_bias_for_dtype,
    correction_bias_of,
    refresh_correction_biases,
    routing_dtype,
    select_experts_inputs,
)
from sglang_aiter_moe.testing.registration import (
    register_amd_ci,
    register_cpu_ci,
    register_cuda_ci,
)
from sglang_aiter_moe.testing.routing import BIAS_CHANGES, IN_PLACE

register_cpu_ci(est_time=5, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, stage="base-a", runner_config="1-gpu-small")
register_amd_ci(est_time=10, stage="stage-a", runner_config="1-gpu-small-amd")

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ],
)
DEVICES = ["cpu", GPU]


class FakeGraph:
    """Stands for a graph capture on the CPU: records the copies that are made under it."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        self.nodes = []

    def __enter__(self):
        self.capturing = True
        write = topk_module._write

        def recorded(target, source):
            if self.capturing:
                # A graph holds addresses: the storages of now, whatever .data is later.
                here, there = target.detach(), source.detach()
                self.nodes.append(lambda: write(here, there))
            write(target, source)

        self.patch.setattr(topk_module, "_is_capturing", lambda tensor: self.capturing)
        self.patch.setattr(topk_module, "_write", recorded)
        return self

    def __exit__(self, *exc):
        self.capturing = False

    def replay(self):
        for node in self.nodes:
            node()


def make(values, dtype, device="cpu", parameter=True):
    tensor = torch.tensor(values, dtype=dtype, device=device)
    if parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    return TopKConfig(top_k=2, use_grouped_topk=True, correction_bias=tensor)


# ---- the contract of SGLang's method


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize(
    "have, ask", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_asked_dtype_same_pointer_while_unchanged(device, parameter, have, ask):
    config = make([7.0123, -1.0, 0.3, 2.5], have, device, parameter)
    first = config.correction_bias_for_dtype(ask)
    again = config.correction_bias_for_dtype(ask)
    assert first.dtype == ask
    assert first.data_ptr() == again.data_ptr() != config.correction_bias.data_ptr()
    assert torch.equal(again, config.correction_bias.detach().to(ask))


@pytest.mark.parametrize("device", DEVICES)
def test_a_visible_change_gives_new_content_at_a_new_address_before_any_capture(device):
    # SGLang's own test of this method asserts the new address.
    config = make([0.0, 0.0], torch.bfloat16, device, parameter=False)
    old = config.correction_bias_for_dtype(torch.float32)
    config.correction_bias.copy_(torch.tensor([1.5, 2.5]))
    new = config.correction_bias_for_dtype(torch.float32)
    assert new.tolist() == [1.5, 2.5]
    assert new.data_ptr() != old.data_ptr()


def test_matching_dtype_and_no_bias():
    config = make([1.0, 2.0], torch.float32)
    assert config.correction_bias_for_dtype(torch.float32) is config.correction_bias
    assert TopKConfig(top_k=2).correction_bias_for_dtype(torch.float32) is None


def test_two_dtypes_of_one_bias_do_not_disturb_each_other():
    config = make([7.0123, 0.1], torch.float32)
    half = config.correction_bias_for_dtype(torch.float16)
    brain = config.correction_bias_for_dtype(torch.bfloat16)
    assert config.correction_bias_for_dtype(torch.float16).data_ptr() == half.data_ptr()
    assert config.correction_bias_for_dtype(torch.bfloat16).data_ptr() == brain.data_ptr()


# ---- every way the source changes, seen by the next eager call


CHANGES = list(BIAS_CHANGES)
NEW = torch.tensor([7.015625, -2.0, 0.5, 1.0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
def test_eager_calls_see_every_change(change, device):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16, device)
    config.correction_bias_for_dtype(torch.float32)
    BIAS_CHANGES[change](config, NEW.to(device))
    seen = config.correction_bias_for_dtype(torch.float32)
    assert seen.tolist() == NEW.bfloat16().float().tolist()


# ---- captured graphs that only replay afterwards


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("warm", [True, False])
def test_replay_after_a_change_cpu(change, warm, monkeypatch):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16)
    if warm:
        config.correction_bias_for_dtype(torch.float32)
    with FakeGraph(monkeypatch) as graph:
        held = config.correction_bias_for_dtype(torch.float32)
    assert len(graph.nodes) == 1, "the conversion must be part of the graph"
    BIAS_CHANGES[change](config, NEW)
    if change not in IN_PLACE:
        assert refresh_correction_biases() >= 1
    graph.replay()
    assert held.tolist() == NEW.bfloat16().float().tolist()
    # The eager side keeps the captured address and content, too.
    assert config.correction_bias_for_dtype(torch.float32).data_ptr() == held.data_ptr()
    graph.replay()
    assert held.tolist() == NEW.bfloat16().float().tolist()


@pytest.mark.parametrize("change", CHANGES)
def test_replay_of_a_kernel_that_reads_the_source_cpu(change, monkeypatch):
    config = make([1.0, 2.0, 3.0, 4.0], torch.float32)
    with FakeGraph(monkeypatch) as graph:
        captured = correction_bias_of(config).read(config.correction_bias).detach()
    assert graph.nodes == [], "a kernel that takes any dtype needs no conversion"
    BIAS_CHANGES[change](config, NEW)
    if change not in IN_PLACE:
        assert captured.tolist() != NEW.tolist(), "the case must need the refresh"
        refresh_correction_biases()
    assert captured.tolist() == NEW.tolist()


def test_an_eager_call_after_a_swap_also_reaches_the_graphs(monkeypatch):
    config = make([1.0, 2.0, 3.0, 4.0], torch.float32)
    with FakeGraph(monkeypatch):
        captured = correction_bias_of(config).read(config.correction_bias).detach()
    BIAS_CHANGES["swap_data"](config, NEW)
    logits = torch.zeros(2, 4)
    select_experts_inputs(logits, config)
    assert captured.tolist() == NEW.tolist()


def test_address_is_fixed_from_the_first_capture_on(monkeypatch):
    config = make([1.0, 2.0], torch.bfloat16)
    with FakeGraph(monkeypatch):
        held = config.correction_bias_for_dtype(torch.float32)
    for step in range(3):
        BIAS_CHANGES["copy"](config, torch.tensor([float(step), 1.0]))
        now = config.correction_bias_for_dtype(torch.float32)
        assert now.data_ptr() == held.data_ptr()
        assert held.tolist() == [float(step), 1.0]


def test_a_bias_widened_after_capture_is_an_error(monkeypatch):
    config = make([1.0, 2.0], torch.bfloat16)
    with FakeGraph(monkeypatch):
        correction_bias_of(config).read(config.correction_bias)
    config.correction_bias.data = torch.tensor([7.01, 7.02])
    with pytest.raises(ContractError, match="captured graph reads it in the narrower dtype"):
        refresh_correction_biases()


def test_a_changed_shape_under_graphs_is_an_error(monkeypatch):
    config = make([1.0, 2.0], torch.bfloat16)
    with FakeGraph(monkeypatch):
        config.correction_bias_for_dtype(torch.float32)
    config.correction_bias = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ContractError, match="changed its shape"):
        refresh_correction_biases()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ask", [torch.float32, torch.bfloat16])
def test_replay_after_a_change_gpu(change, ask):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16, "cuda")
    result = torch.full((4,), float("nan"), device="cuda")

    def forward():
        result.copy_(config.correction_bias_for_dtype(ask).float() * 2)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    BIAS_CHANGES[change](config, NEW.cuda())
    if change not in IN_PLACE:
        refresh_correction_biases()
    result.fill_(float("nan"))
    graph.replay()
    assert result.tolist() == (NEW.bfloat16().float() * 2).tolist()


# ---- kinds of tensors


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        config = make([7.0123, 2.0], torch.float32, parameter=False)
        first = config.correction_bias_for_dtype(torch.bfloat16)
        config.correction_bias.copy_(torch.tensor([3.0, 4.0]))
        assert config.correction_bias_for_dtype(torch.bfloat16).tolist() == [3.0, 4.0]
    with pytest.raises(RuntimeError):
        _ = config.correction_bias._version
    assert config.correction_bias_for_dtype(torch.bfloat16).tolist() == [3.0, 4.0]
    assert not first.is_inference()


def test_a_captured_inference_tensor_is_written_from_outside(monkeypatch):
    with torch.inference_mode(), FakeGraph(monkeypatch):
        config = make([1.0, 2.0], torch.float32, parameter=False)
        captured = correction_bias_of(config).read(config.correction_bias)
    config.correction_bias = torch.tensor([3.0, 4.0])
    refresh_correction_biases()
    assert captured.is_inference() and captured.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(8, dtype=torch.bfloat16)[::2],
        torch.arange(8, dtype=torch.bfloat16).view(2, 4)[1],
        torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=True),
        torch.empty(0, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.bfloat16, device="meta"),
        torch.nn.Buffer(torch.ones(4, dtype=torch.bfloat16)),
    ],
    ids=["strided", "row", "grad", "empty", "meta", "buffer"],
)
def test_every_kind_of_tensor(source):
    config = TopKConfig(top_k=2, correction_bias=source)
    result = config.correction_bias_for_dtype(torch.float32)
    assert result.dtype == torch.float32 and result.shape == source.shape
    assert not result.requires_grad
    if source.device.type != "meta":
        assert torch.equal(result, source.detach().float())


def test_under_torch_compile_the_conversion_is_traced():
    config = make([1.0, 2.0], torch.bfloat16)

    @torch.compile(backend="eager", fullgraph=True)
    def forward(x):
        return x + config.correction_bias_for_dtype(torch.float32)

    x = torch.zeros(2)
    assert forward(x).tolist() == [1.0, 2.0]
    BIAS_CHANGES["copy_without_version"](config, torch.tensor([5.0, 6.0]))
    assert forward(x).tolist() == [5.0, 6.0]


def test_a_copied_config_has_a_state_of_its_own(monkeypatch):
    config = make([1.0, 2.0], torch.bfloat16)
    with FakeGraph(monkeypatch):
        held = config.correction_bias_for_dtype(torch.float32)
    other = copy.copy(config)
    other.correction_bias = torch.tensor([8.0, 9.0], dtype=torch.bfloat16)
    assert other.correction_bias_for_dtype(torch.float32).tolist() == [8.0, 9.0]
    assert held.tolist() == [1.0, 2.0]


def test_states_die_with_their_configs():
    before = refresh_correction_biases()
    config = make([1.0, 2.0], torch.bfloat16)
    config.correction_bias_for_dtype(torch.float32)
    assert refresh_correction_biases() == before + 1
    del config
    assert refresh_correction_biases() == before


def test_the_function_serves_a_foreign_config():
    class Foreign:  # SGLang's TopKConfig, to the function
        correction_bias = torch.ones(2, dtype=torch.bfloat16)

    assert correction_bias_for_dtype(Foreign(), torch.float32).tolist() == [1.0, 1.0]


# ---- the dtype policy


@pytest.mark.parametrize(
    "logits, bias, wide",
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
    ],
)
def test_routing_dtype_is_never_narrower(logits, bias, wide):
    assert routing_dtype(logits, bias) == wide
    a, b = aligned_routing_inputs(torch.ones(1, 2, dtype=logits), torch.ones(2, dtype=bias))
    assert a.dtype == b.dtype == wide


def test_select_experts_never_asks_for_a_narrower_bias():
    config = make([6.9, 7.0], torch.float32)
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    widened = select_experts_inputs(logits, config)
    assert widened.dtype == torch.float32
    # What SGLang's select_experts asks for next:
    assert config.correction_bias_for_dtype(widened.dtype) is config.correction_bias


def test_select_experts_inputs_leaves_alone_what_needs_nothing():
    config = make([6.9, 7.0], torch.bfloat16)
    logits = torch.zeros(3, 2)
    assert select_experts_inputs(logits, config) is logits
    assert select_experts_inputs(logits, TopKConfig(top_k=1)) is logits
    buffer = torch.zeros(3, 2, dtype=torch.bfloat16)
    wide = make([6.9, 7.0], torch.float32)
    partials = torch.zeros(2, 3, 2)
    assert select_experts_inputs(buffer, wide, router_logits_partials=partials) is buffer
    gating = TopKConfig(top_k=1, correction_bias=torch.ones(2), scoring_func="sqrtsoftplus")
    assert select_experts_inputs(buffer, gating) is buffer


def test_select_experts_inputs_takes_a_per_token_bias():
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    config = make([0.0, 0.0], torch.bfloat16)
    widened = select_experts_inputs(logits, config, dynamic_expert_bias=torch.zeros(3, 2))
    assert widened.dtype == torch.float32


def test_strided_rows_are_made_contiguous_for_kernels_that_need_it():
    front = torch.randn(4, 10)
    logits = front[:, 2:8]  # K3's fused front hands over such a slice
    config = TopKConfig(top_k=2, use_grouped_topk=True, correction_bias=torch.zeros(6))
    assert select_experts_inputs(logits, config).is_contiguous()
    assert select_experts_inputs(logits, config, strided_rows=True) is logits


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
