"""Which tensors a correction bias may be, whose memory it is, and what no longer fits a captured graph."""

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
    bias_for_readers,
    correction_bias_of,
    refresh_correction_biases,
)
from sglang_aiter_moe.testing.fake_graph import capture, make
from sglang_aiter_moe.testing.registration import register_amd_ci, register_cpu_ci, register_cuda_ci
from sglang_aiter_moe.testing.routing import BIAS_CHANGES

register_cpu_ci(est_time=3, suite="base-a-test-cpu")
register_cuda_ci(est_time=5, stage="base-a", runner_config="1-gpu-small")
register_amd_ci(est_time=5, stage="stage-a", runner_config="1-gpu-small-amd")


@pytest.fixture(autouse=True)
def no_others():
    """A test that fails or expects an error keeps its configs in the traceback."""
    owner_module._owners.clear()


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


# ---- configs


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_config_with_state_can_be_pickled_and_copied(duplicate):
    config = make([1.0, 2.0], torch.bfloat16)
    ours = config.correction_bias_for_dtype(torch.float32)
    other = duplicate(config)
    theirs = other.correction_bias_for_dtype(torch.float32)
    assert theirs.tolist() == [1.0, 2.0] and theirs.data_ptr() != ours.data_ptr()
    assert correction_bias_of(other) is not correction_bias_of(config)


def test_a_copied_config_has_a_state_of_its_own():
    config = make([1.0, 2.0], torch.bfloat16)
    with capture():
        held = config.correction_bias_for_dtype(torch.float32)
    other = copy.copy(config)
    other.correction_bias = torch.tensor([8.0, 9.0], dtype=torch.bfloat16)
    assert other.correction_bias_for_dtype(torch.float32).tolist() == [8.0, 9.0]
    assert held.tolist() == [1.0, 2.0]


def test_states_die_with_their_configs():
    gc.collect()
    before = refresh_correction_biases()
    config = make([1.0, 2.0], torch.bfloat16)
    config.correction_bias_for_dtype(torch.float32)
    assert refresh_correction_biases() == before + 1
    del config
    assert refresh_correction_biases() == before


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
