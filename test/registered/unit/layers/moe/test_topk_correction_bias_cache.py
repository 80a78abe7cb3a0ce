"""The correction bias: its dtype policy, and that no reader can see it stale.

Graph capture is simulated on the CPU (``fake_graph.capture``) and is real on a GPU. Expected values come from
the source tensor converted by torch.
"""

import copy
import gc
import pickle
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe import correction_bias as owner_module
from sglang_aiter_moe.srt.layers.moe.topk import (
    TopKConfig,
    aligned_routing_inputs,
    bias_for_readers,
    correction_bias_for_dtype,
    correction_bias_of,
    refresh_correction_biases,
    routing_dtype,
    select_experts_inputs,
)
from sglang_aiter_moe.testing.fake_graph import capture, make
from sglang_aiter_moe.testing.registration import (
    register_amd_ci,
    register_cpu_ci,
    register_cuda_ci,
)
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


# ---- every way the source changes, seen by the next eager call


def test_the_operator_has_the_packages_name():
    """In SGLang's source it has another: both may be loaded, and an operator is defined once."""
    placed = owner_module.__name__.startswith("sglang.")
    package = "sglang_srt_layers_moe_aiter_moe" if placed else "sglang_aiter_moe"
    assert owner_module.traced._qualname == f"{package}::correction_bias"


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


# ---- memory that belongs to others


def test_a_storage_that_was_swapped_away_is_not_written():
    config = make([1.0, 2.0], torch.float32)
    backup = config.correction_bias.data
    with capture():
        held = config.correction_bias_for_dtype(torch.float32)
    config.correction_bias.data = torch.tensor([5.0, 6.0])
    refresh_correction_biases()
    assert backup.tolist() == [1.0, 2.0], "the backup belongs to whoever made it"
    assert held.tolist() == [5.0, 6.0]
    config.correction_bias.data = backup
    refresh_correction_biases()
    assert held.tolist() == config.correction_bias.tolist() == [1.0, 2.0]


def test_two_biases_that_exchange_their_storages():
    a, b = make([1.0, 2.0], torch.float32), make([3.0, 4.0], torch.float32)
    with capture():
        held_a = a.correction_bias_for_dtype(torch.float32)
        held_b = b.correction_bias_for_dtype(torch.float32)
    a.correction_bias.data, b.correction_bias.data = b.correction_bias.data, a.correction_bias.data
    refresh_correction_biases()
    assert a.correction_bias.tolist() == held_a.tolist() == [3.0, 4.0]
    assert b.correction_bias.tolist() == held_b.tolist() == [1.0, 2.0]


def test_a_parameter_that_two_configs_share_until_one_is_replaced():
    a = make([1.0, 2.0], torch.float32)
    b = TopKConfig(top_k=2, correction_bias=a.correction_bias)
    with capture():
        held_a = a.correction_bias_for_dtype(torch.float32)
        held_b = b.correction_bias_for_dtype(torch.float32)
    BIAS_CHANGES["new_parameter"](a, torch.tensor([5.0, 6.0]))
    refresh_correction_biases()
    assert held_a.tolist() == [5.0, 6.0]
    assert held_b.tolist() == b.correction_bias.tolist() == [1.0, 2.0]


def test_another_stride_over_the_same_address_is_another_bias():
    storage = torch.tensor([1.0, 2.0, 3.0, 4.0])
    config = TopKConfig(top_k=2, correction_bias=storage[:2])
    with capture():
        held = config.correction_bias_for_dtype(torch.float32)
    config.correction_bias = storage[::2]
    bias_for_readers(config, torch.zeros(1, 2))
    assert held.tolist() == [1.0, 3.0]


# ---- a bias that no longer fits


def test_a_bias_widened_after_capture_is_an_error():
    config = make([1.0, 2.0], torch.bfloat16)
    with capture():
        config.correction_bias_for_dtype(torch.bfloat16)
    config.correction_bias.data = torch.tensor([7.01, 7.02])
    with pytest.raises(ContractError, match="captured graph reads it in the narrower dtype"):
        refresh_correction_biases()


def test_a_narrower_copy_that_was_asked_for_stays_allowed():
    config = make([7.01, 7.02], torch.float32)
    with capture():
        held = config.correction_bias_for_dtype(torch.bfloat16)
    config.correction_bias.data = torch.tensor([8.0, 9.0])
    refresh_correction_biases()
    assert held.tolist() == [8.0, 9.0]


def test_one_changed_shape_is_an_error_after_all_others_are_refreshed():
    configs = [make([1.0, 2.0], torch.bfloat16) for _ in range(3)]
    with capture():
        held = [config.correction_bias_for_dtype(torch.float32) for config in configs]
    configs[1].correction_bias = torch.zeros(3, dtype=torch.bfloat16)
    for config in configs[::2]:
        BIAS_CHANGES["copy_without_version"](config, torch.tensor([5.0, 6.0]))
    with pytest.raises(ContractError, match="changed its shape from \\(2,\\)"):
        refresh_correction_biases()
    assert held[0].tolist() == held[2].tolist() == [5.0, 6.0]


def test_a_changed_shape_without_any_capture_is_no_error():
    config = make([1.0, 2.0], torch.bfloat16)
    config.correction_bias_for_dtype(torch.float32)
    config.correction_bias = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    refresh_correction_biases()
    assert config.correction_bias_for_dtype(torch.float32).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "new", [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7.01, 7.02])], ids=["shape", "wider"]
)
def test_graphs_that_are_captured_again_take_a_bias_that_did_not_fit(new, caplog):
    config = make([1.0, 2.0], torch.bfloat16)
    with capture():
        config.correction_bias_for_dtype(torch.bfloat16)
    config.correction_bias = new
    assert config.correction_bias_for_dtype(torch.float32) is new, "the eager warm-up does not stop"
    assert "captured graph" in caplog.text
    with capture():
        held = config.correction_bias_for_dtype(torch.float32)
    refresh_correction_biases()
    assert held.tolist() == new.tolist()


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


def test_an_inference_tensor_under_capture():
    with torch.inference_mode(), capture():
        config = make([1.0, 2.0], torch.float32, parameter=False)
        held = config.correction_bias_for_dtype(torch.float32)
    with torch.inference_mode():
        config.correction_bias.copy_(torch.tensor([3.0, 4.0]))
    refresh_correction_biases()
    assert not held.is_inference() and held.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(8, dtype=torch.bfloat16)[::2],
        torch.arange(8, dtype=torch.bfloat16).view(2, 4)[1],
        torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=True),
        torch.empty(0, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.bfloat16, device="meta"),
        torch.nn.Buffer(torch.ones(4, dtype=torch.bfloat16)),
        torch.tensor([0, 1.0, 0, 2.0], dtype=torch.bfloat16).to_sparse(),
        torch.ones((), dtype=torch.bfloat16).expand(4),
        torch.ones(3, 4, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.float8_e4m3fn),
    ],
    ids=[
        "strided",
        "row",
        "grad",
        "empty",
        "meta",
        "buffer",
        "sparse",
        "expanded",
        "matrix",
        "fp8",
    ],
)
def test_every_kind_of_tensor(source):
    config = TopKConfig(top_k=2, correction_bias=source)
    result = config.correction_bias_for_dtype(torch.float32)
    assert result.dtype == torch.float32 and result.shape == source.shape
    assert not result.requires_grad
    if source.device.type != "meta":
        source = source.to_dense() if source.is_sparse else source
        assert torch.equal(result, source.detach().float())
        assert torch.equal(config.correction_bias_for_dtype(torch.float32), source.detach().float())


def test_a_bias_that_leaves_the_meta_device():
    config = TopKConfig(2, correction_bias=torch.ones(2, dtype=torch.bfloat16, device="meta"))
    assert config.correction_bias_for_dtype(torch.float32).is_meta
    config.correction_bias = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    refresh_correction_biases()
    assert config.correction_bias_for_dtype(torch.float32).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("real_bias", [True, False])
def test_fake_tensors_leave_nothing_behind(real_bias):
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = make([1.0, 2.0], torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        real = config.correction_bias
        if not real_bias:
            config.correction_bias = mode.from_tensor(real)
        config.correction_bias_for_dtype(torch.float32)
        config.correction_bias = real
    after = config.correction_bias_for_dtype(torch.float32)
    assert type(after) is torch.Tensor and after.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_config_with_state_can_be_pickled_and_copied(duplicate):
    config = make([1.0, 2.0], torch.bfloat16)
    ours = config.correction_bias_for_dtype(torch.float32)
    other = duplicate(config)
    theirs = other.correction_bias_for_dtype(torch.float32)
    assert theirs.tolist() == [1.0, 2.0] and theirs.data_ptr() != ours.data_ptr()
    assert correction_bias_of(other) is not correction_bias_of(config)


# ---- torch.compile


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


def test_a_copied_config_has_a_state_of_its_own():
    config = make([1.0, 2.0], torch.bfloat16)
    with capture():
        held = config.correction_bias_for_dtype(torch.float32)
    other = copy.copy(config)
    other.correction_bias = torch.tensor([8.0, 9.0], dtype=torch.bfloat16)
    assert other.correction_bias_for_dtype(torch.float32).tolist() == [8.0, 9.0]
    assert held.tolist() == [1.0, 2.0]


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


def test_states_die_with_their_configs():
    gc.collect()
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
    strided = torch.zeros(2, 4)[:, ::2]
    assert select_experts_inputs(strided, TopKConfig(top_k=1)) is strided, "no bias, no business"


@pytest.mark.parametrize("torch_native, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_sqrtsoftplus_is_widened_where_torch_computes_it(torch_native, dtype):
    config = TopKConfig(
        top_k=1,
        correction_bias=torch.ones(2),
        scoring_func="sqrtsoftplus",
        torch_native=torch_native,
    )
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    assert select_experts_inputs(logits, config).dtype == dtype


def test_a_custom_routing_function_reads_no_bias_and_gets_its_logits():
    config = TopKConfig(top_k=1, correction_bias=torch.ones(2))
    config.custom_routing_function = lambda **kwargs: None
    logits = torch.zeros(3, 2, dtype=torch.bfloat16)
    assert select_experts_inputs(logits, config) is logits
    config.use_grouped_topk = True  # SGLang asks this first
    assert select_experts_inputs(logits, config).dtype == torch.float32


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
