"""The correction bias in the asked dtype: no reader, eager, captured or compiled, can see it stale.

Graph capture is simulated on the CPU (``fake_graph.capture``) and is real on a GPU. Expected values come from
the source tensor converted by torch.
"""

import copy
import sys

import pytest
import torch

from sglang_aiter_moe.srt.layers.moe import correction_bias as owner_module
from sglang_aiter_moe.srt.layers.moe.topk import (
    TopKConfig,
    bias_for_readers,
    correction_bias_for_dtype,
    correction_bias_of,
    refresh_correction_biases,
)
from sglang_aiter_moe.testing.fake_graph import capture, make
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci, register_cuda_ci
from sglang_aiter_moe.testing.routing import BIAS_CHANGES

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
CHANGES = list(BIAS_CHANGES)
NEW = torch.tensor([7.015625, -2.0, 0.5, 1.0])


@pytest.fixture(autouse=True)
def no_others():
    """A test that fails or expects an error keeps its configs in the traceback."""
    owner_module._owners.clear()


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


def test_the_function_serves_a_foreign_config():
    class Foreign:  # SGLang's TopKConfig, to the function
        correction_bias = torch.ones(2, dtype=torch.bfloat16)

    assert correction_bias_for_dtype(Foreign(), torch.float32).tolist() == [1.0, 1.0]


# ---- every way the source changes, seen by the next eager call


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
@pytest.mark.parametrize("ask", [torch.float32, torch.bfloat16])
def test_a_graph_reads_the_new_bias_after_an_update(change, warm, ask):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16)
    if warm:
        config.correction_bias_for_dtype(ask)
    with capture():
        held = config.correction_bias_for_dtype(ask)
    assert held.dtype == ask and held.tolist() == [1.0, 2.0, 3.0, 4.0]
    BIAS_CHANGES[change](config, NEW)
    assert held.tolist() == [1.0, 2.0, 3.0, 4.0], "the case must need the refresh"
    assert refresh_correction_biases() == 1
    assert held.tolist() == NEW.bfloat16().float().tolist()


def test_an_eager_call_after_a_swap_also_reaches_the_graphs():
    config = make([1.0, 2.0, 3.0, 4.0], torch.float32)
    with capture():
        held = config.correction_bias_for_dtype(torch.float32)
    BIAS_CHANGES["swap_data"](config, NEW)
    assert bias_for_readers(config, torch.zeros(2, 4)) is config.correction_bias
    assert held.tolist() == NEW.tolist()


def test_the_address_is_fixed_from_the_first_capture_on():
    config = make([1.0, 2.0], torch.bfloat16)
    with capture():
        held = config.correction_bias_for_dtype(torch.float32)
    for step in range(3):
        BIAS_CHANGES["copy"](config, torch.tensor([float(step), 1.0]))
        now = config.correction_bias_for_dtype(torch.float32)
        assert now.data_ptr() == held.data_ptr()
        assert held.tolist() == [float(step), 1.0]


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_capture_does_not_take_an_earlier_graphs_copy_away(change):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16)
    with capture():
        first = config.correction_bias_for_dtype(torch.float32)
    BIAS_CHANGES[change](config, NEW)
    with capture():  # no eager call and no refresh in between
        second = config.correction_bias_for_dtype(torch.float32)
    assert second.tolist() == NEW.bfloat16().float().tolist()
    BIAS_CHANGES["copy"](config, torch.tensor([5.0, 6.0, 7.0, 8.0]))
    refresh_correction_biases()
    assert first.tolist() == second.tolist() == [5.0, 6.0, 7.0, 8.0]


def test_what_is_held_does_not_grow_with_captures_and_updates():
    config = make([1.0, 2.0], torch.bfloat16)
    for step in range(20):
        with capture():
            config.correction_bias_for_dtype(torch.float32)
            config.correction_bias_for_dtype(torch.bfloat16)
        BIAS_CHANGES["swap_data"](config, torch.tensor([float(step), 1.0]))
        refresh_correction_biases()
    owner = correction_bias_of(config)
    assert len(owner._copies) == 2 and not owner._retired


# ---- captured graphs on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ask", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_replay_after_a_change_gpu(change, ask, compiled):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16, "cuda")
    result = torch.full((4,), float("nan"), device="cuda")
    logits = torch.zeros(1, dtype=ask, device="cuda")

    def read():
        if compiled:
            return bias_for_readers(config, logits).float() * 2
        return config.correction_bias_for_dtype(ask).float() * 2

    if compiled:
        read = torch.compile(read, backend="aot_eager")
    read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(read())
    BIAS_CHANGES[change](config, NEW.cuda())
    refresh_correction_biases()
    result.fill_(float("nan"))
    graph.replay()
    assert result.tolist() == (NEW.bfloat16().float() * 2).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_capture_before_any_eager_call_says_so_and_follows_what_is_written_in_place(caplog):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16, "cuda")
    result = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(config.correction_bias_for_dtype(torch.float32))
    assert "no eager call has read before" in caplog.text
    BIAS_CHANGES["copy_without_version"](config, NEW.cuda())
    graph.replay()
    assert result.tolist() == NEW.bfloat16().float().tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_conversion_is_no_node_of_the_graph():
    # A replay must not convert: were it a node, the replay would undo what is written here.
    config = make([1.0, 2.0], torch.bfloat16, "cuda")
    graph = torch.cuda.CUDAGraph()
    result = torch.zeros(2, device="cuda")
    config.correction_bias_for_dtype(torch.float32)
    with torch.cuda.graph(graph):
        held = config.correction_bias_for_dtype(torch.float32)
        result.copy_(held)
    held.fill_(9.0)
    graph.replay()
    assert result.tolist() == [9.0, 9.0]


# ---- torch.compile


def test_the_operator_has_the_packages_name():
    """In SGLang's source it has another: both may be loaded, and an operator is defined once."""
    placed = owner_module.__name__.startswith("sglang.")
    package = "sglang_srt_layers_moe_aiter_moe" if placed else "sglang_aiter_moe"
    assert owner_module.traced._qualname == f"{package}::correction_bias"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("change", CHANGES)
def test_compiled_code_sees_every_change(change, backend):
    config = make([1.0, 2.0, 3.0, 4.0], torch.bfloat16)

    @torch.compile(backend=backend, fullgraph=True)
    def forward(x):
        return x + config.correction_bias_for_dtype(torch.float32)

    x = torch.zeros(4)
    assert forward(x).tolist() == [1.0, 2.0, 3.0, 4.0]
    BIAS_CHANGES[change](config, NEW)
    assert forward(x).tolist() == NEW.bfloat16().float().tolist()


def test_compiled_code_and_a_copied_config():
    config = make([1.0, 2.0], torch.bfloat16)
    other = copy.copy(config)
    other.correction_bias = torch.tensor([8.0, 9.0], dtype=torch.bfloat16)

    @torch.compile(backend="eager", fullgraph=True)
    def forward():
        return config.correction_bias_for_dtype(torch.float32), other.correction_bias_for_dtype(
            torch.float32
        )

    for _ in range(2):
        assert [t.tolist() for t in forward()] == [[1.0, 2.0], [8.0, 9.0]]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
