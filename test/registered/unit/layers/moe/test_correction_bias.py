"""The owner of a bias's copies, rule by rule; a GPU's rules through tensors that only say they are on one.

The same rules on a real one: ``test_topk_correction_bias_cache.py`` and ``testing/routing_graphs.py``.
"""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe import correction_bias as module
from sglang_aiter_moe.srt.layers.moe.correction_bias import (
    correction_bias_of,
    is_narrower,
    refresh_all,
    traced,
)
from sglang_aiter_moe.srt.layers.moe.topk import (
    TopKConfig,
    bias_for_readers,
    refresh_biases_after,
    select_experts_inputs,
)
from sglang_aiter_moe.testing import fake_graph
from sglang_aiter_moe.testing.fake_graph import OnGpu, capture, make
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def no_others():
    module._owners.clear()


@pytest.fixture
def gpu():
    with fake_graph.gpu() as fake:
        yield fake


def test_what_the_config_leaves_open_is_what_sglangs_leaves_open():
    """By SGLang 0.5.17 to 0.5.23; a router without SGLang would otherwise weigh its experts in another way."""
    config = TopKConfig(2)
    assert config.renormalize is True and config.scoring_func == "softmax"
    assert config.use_grouped_topk is False and config.torch_native is False
    rest = (config.topk_group, config.num_expert_group, config.correction_bias)
    assert rest == (None, None, None) and config.routed_scaling_factor is None


def on_gpu(values, dtype=BF16):
    config = TopKConfig(top_k=2, use_grouped_topk=True)
    config.correction_bias = torch.tensor(values, dtype=dtype).as_subclass(OnGpu)
    return config


def captured(gpu, config, dtype):
    with gpu.capture():
        return config.correction_bias_for_dtype(dtype)


# --- captures on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_capture_after_a_warm_up_reads_what_the_warm_up_wrote(gpu, dtype):
    """Nothing is launched during the capture: it would be a node of the graph."""
    config = on_gpu([1.0, 2.0])
    config.correction_bias_for_dtype(dtype)
    (copy,) = correction_bias_of(config)._copies.values()
    version = copy.tensor._version
    held = captured(gpu, config, dtype)
    assert held is copy.tensor and held.dtype == dtype and held.tolist() == [1.0, 2.0]
    assert (held._version, gpu.streams, copy.held) == (version, [], True)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_capture_without_a_warm_up_says_so_and_holds_nothing(gpu, dtype, caplog):
    config = on_gpu([1.0, 2.0])
    found = captured(gpu, config, dtype)
    assert found.dtype == dtype and found.tolist() == [1.0, 2.0]
    assert not correction_bias_of(config)._copies and gpu.streams == []
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "no eager call has read before" in record.message


def test_a_bias_of_another_shape_since_the_warm_up_is_one_without(gpu, caplog):
    config = on_gpu([1.0, 2.0])
    config.correction_bias_for_dtype(F32)
    config.correction_bias = torch.tensor([1.0, 2.0, 3.0], dtype=BF16).as_subclass(OnGpu)
    assert captured(gpu, config, F32).tolist() == [1.0, 2.0, 3.0]
    assert "no eager call has read before" in caplog.text


def test_a_bias_that_was_replaced_since_the_warm_up_is_written_beside_the_capture(gpu, caplog):
    config = on_gpu([1.0, 2.0])
    config.correction_bias_for_dtype(F32)
    config.correction_bias = torch.tensor([5.0, 6.0], dtype=BF16).as_subclass(OnGpu)
    held = captured(gpu, config, F32)
    assert held.tolist() == [5.0, 6.0] and gpu.streams == [torch.device("cpu")]
    assert not caplog.records


def test_an_eager_call_in_the_biases_own_dtype_prepares_the_capture(gpu):
    config = on_gpu([1.0, 2.0])
    assert config.correction_bias_for_dtype(BF16) is config.correction_bias
    (copy,) = correction_bias_of(config)._copies.values()
    before = copy.tensor._version
    config.correction_bias_for_dtype(BF16)
    assert copy.tensor._version == before, "the same bias needs no other write"
    config.correction_bias.copy_(torch.tensor([3.0, 4.0]))
    config.correction_bias_for_dtype(BF16)
    assert captured(gpu, config, BF16).tolist() == [3.0, 4.0] and gpu.streams == []


def test_on_a_cpu_an_eager_call_in_the_own_dtype_keeps_no_copy():
    config = make([1.0, 2.0], F32)
    config.correction_bias_for_dtype(F32)
    assert not correction_bias_of(config)._copies


def test_readers_on_a_gpu_get_the_bias_in_eager_calls_and_the_copy_in_captures(gpu):
    config, logits = on_gpu([1.0, 2.0], F32), torch.zeros(1, 2, dtype=BF16)
    assert bias_for_readers(config, logits) is config.correction_bias
    with gpu.capture():
        held = bias_for_readers(config, logits)
    assert held is not config.correction_bias and held.dtype == F32
    config.correction_bias = torch.tensor([3.0, 4.0]).as_subclass(OnGpu)
    assert bias_for_readers(config, logits) is config.correction_bias
    assert held.tolist() == [3.0, 4.0], "an eager call with another storage reaches the graph"


@pytest.mark.parametrize("capturing", [False, True])
def test_only_what_is_on_the_gpu_is_part_of_a_capture(gpu, capturing):
    gpu.capturing = capturing
    owner = correction_bias_of(make([1.0], F32))
    assert owner.is_capturing(torch.ones(1)) is False
    assert owner.is_capturing(torch.ones(1).as_subclass(OnGpu)) is capturing


# --- what a graph keeps --------------------------------------------------------------------------------------


def held_by(config, dtype=F32):
    with capture():
        return config.correction_bias_for_dtype(dtype)


def test_what_a_capture_was_given_is_converted_and_not_owned():
    """SGLang asks for the bias of a bias: the config carries the copy during the call."""
    config = make([1.0, 2.0], BF16)
    held = held_by(config)
    config.correction_bias = held
    with capture():
        assert config.correction_bias_for_dtype(F32) is held
        assert config.correction_bias_for_dtype(F16).dtype == F16
    bias_for_readers(config, torch.zeros(1, 2))
    assert list(correction_bias_of(config)._copies) == [F32]


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.view(torch.int16).view(F16),  # the same bytes in another dtype
        lambda t: t[:1].expand(2),  # other strides
        lambda t: t + 1,
    ],
    ids=["dtype", "stride", "address"],
)
def test_graphs_follow_every_part_of_the_stamp_at_the_next_eager_call(other):
    config = make([1.0, 2.0], BF16, parameter=False)
    held = held_by(config)
    new = other(config.correction_bias)
    assert held.tolist() != new.float().tolist() and new._version == 0
    config.correction_bias = new
    bias_for_readers(config, torch.zeros(1, 2))
    assert held.tolist() == new.float().tolist()


def test_the_same_bias_is_not_written_again_for_the_graphs():
    config = make([1.0, 2.0], BF16)
    held = held_by(config)
    for _ in range(3):
        bias_for_readers(config, torch.zeros(1, 2))
    version = held._version
    bias_for_readers(config, torch.zeros(1, 2))
    assert held._version == version


def test_an_unchanged_copy_on_a_cpu_is_looked_at_and_not_written():
    config = make([1.0, 2.0], BF16)
    first = config.correction_bias_for_dtype(F32)
    version = first._version
    assert config.correction_bias_for_dtype(F32) is first and first._version == version
    config.correction_bias.data.copy_(torch.tensor([1.0, 3.0]))  # bumps no version
    assert config.correction_bias_for_dtype(F32).tolist() == [1.0, 3.0]


def test_a_copy_that_no_graph_reads_makes_way_for_another_shape():
    config = make([1.0, 2.0], BF16)
    config.correction_bias_for_dtype(F32)
    config.correction_bias = torch.zeros(3, dtype=BF16)
    assert refresh_all() == 1 and not correction_bias_of(config)._copies


def test_a_graph_of_another_shape_is_kept_alive_until_it_is_gone():
    """Its memory must not be given to anybody while the graph may still be replayed."""
    config = make([1.0, 2.0], BF16)
    old = held_by(config)
    config.correction_bias = torch.zeros(3, dtype=BF16)
    new = held_by(config)
    (kept,) = correction_bias_of(config)._retired
    assert kept is old
    assert new.shape == (3,) and refresh_all() == 1 and old.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "have, asked, new, fits",
    [
        (BF16, BF16, F32, False),
        (BF16, BF16, F16, False),  # neither holds the other
        (BF16, BF16, BF16, True),
        (BF16, F32, F32, True),
        (F32, F32, BF16, True),
        (F32, BF16, F32, True),  # narrower was asked for, in full knowledge
    ],
)
@pytest.mark.parametrize("graph", [True, False])
def test_a_bias_of_another_dtype_after_a_capture(have, asked, new, fits, graph):
    config = make([1.0, 2.0], have)
    held = held_by(config, asked) if graph else config.correction_bias_for_dtype(asked)
    config.correction_bias = torch.tensor([3.0, 4.0], dtype=new)
    if graph and not fits:
        message = f"changed to {new}, and a captured graph reads it in the narrower dtype {asked}"
        with pytest.raises(ContractError, match=message):
            refresh_all()
        assert held.tolist() == [1.0, 2.0]
        return
    assert refresh_all() == 1
    if graph:
        assert held.tolist() == [3.0, 4.0]


def test_the_first_problem_is_raised_and_everything_else_is_written():
    configs = [make([1.0, 2.0], BF16) for _ in range(3)]
    held = [held_by(config) for config in configs]
    for config, size in zip(configs[:2], (3, 4), strict=True):
        config.correction_bias = torch.zeros(size, dtype=BF16)
    configs[2].correction_bias = torch.tensor([5.0, 6.0], dtype=BF16)
    with pytest.raises(ContractError, match=r"from \(2,\) on cpu to \(3,\) on cpu"):
        refresh_all()
    assert held[2].tolist() == [5.0, 6.0]


def test_a_copy_on_another_device_does_not_fit():
    config = make([1.0, 2.0], BF16)
    held_by(config)
    config.correction_bias = torch.zeros(2, dtype=BF16, device="meta")
    with pytest.raises(ContractError, match=r"from \(2,\) on cpu to \(2,\) on meta"):
        refresh_all()


def test_an_eager_call_tells_of_a_bias_that_no_longer_fits_and_goes_on(caplog):
    config = make([1.0, 2.0], BF16)
    held_by(config)
    bias_for_readers(config, torch.zeros(1, 2))
    assert not caplog.records
    config.correction_bias = torch.zeros(3, dtype=BF16)
    assert bias_for_readers(config, torch.zeros(1, 3)) is config.correction_bias
    (record,) = caplog.records
    assert "changed its shape from (2,)" in record.message
    bias_for_readers(config, torch.zeros(1, 3))
    assert len(caplog.records) == 1, "once for one change"


def test_biases_that_are_none_and_configs_that_are_gone_are_not_counted():
    kept = [make([1.0], BF16), TopKConfig(top_k=1), make([1.0], BF16)]
    gone = make([1.0], BF16)
    assert refresh_all() == 3
    del gone
    assert refresh_all() == 2 and len(kept) == 3


# --- the operator of compiled code ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("known", [True, False])
def test_the_operator_gives_a_tensor_of_its_own(dtype, known):
    config = make([1.0, 2.0], F32)
    number = correction_bias_of(config).number if known else -1
    source = config.correction_bias.detach()
    found = traced(source, number, dtype)
    assert found.dtype == dtype and found.tolist() == [1.0, 2.0]
    found.fill_(9.0)
    assert source.tolist() == traced(source, number, dtype).tolist() == [1.0, 2.0]


class Foreign:
    """A config that no patch of ours has seen being made."""

    correction_bias = torch.ones(2, dtype=BF16)


def test_a_config_that_is_first_seen_by_compiled_code_gets_no_owner(monkeypatch):
    config = Foreign()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        owner = correction_bias_of(config)
        assert owner.as_dtype(config.correction_bias, BF16) is config.correction_bias
        assert owner.as_dtype(config.correction_bias, F32).tolist() == [1.0, 1.0]
    assert owner is module._NOBODY and not owner._copies
    assert correction_bias_of(config) is not owner, "the first eager call makes one"


@pytest.mark.parametrize(
    "dtype, other, narrower",
    [
        (BF16, F32, True),
        (F32, BF16, False),
        (BF16, BF16, False),
        (BF16, F16, True),
        (F16, BF16, True),
    ],
)
def test_narrower_is_what_cannot_hold_every_number(dtype, other, narrower):
    assert is_narrower(dtype, other) is narrower


# --- which configs route by the bias -----------------------------------------------------------------------


def routed(**fields):
    config = TopKConfig(top_k=1, correction_bias=torch.ones(2))
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    "fields, dtype",
    [
        ({}, F32),
        ({"use_grouped_topk": True}, F32),
        ({"scoring_func": "sqrtsoftplus"}, BF16),
        ({"scoring_func": "sqrtsoftplus", "use_grouped_topk": True}, F32),
        ({"scoring_func": "sqrtsoftplus", "torch_native": True}, F32),
        ({"custom_routing_function": max}, BF16),
        ({"custom_routing_function": max, "use_grouped_topk": True}, F32),
        ({"correction_bias": None}, BF16),
    ],
)
def test_logits_are_widened_where_the_bias_meets_them(fields, dtype):
    """sqrtsoftplus's gating takes a pair of dtypes; a custom function reads no bias."""
    config, logits = routed(**fields), torch.zeros(3, 2, dtype=BF16)
    assert select_experts_inputs(logits, config).dtype == dtype
    with capture():
        read = bias_for_readers(config, logits)
    if config.correction_bias is None:
        assert read is None
    else:  # a reader that takes no part gets the parameter itself
        takes_part = "custom_routing_function" not in fields or "use_grouped_topk" in fields
        assert (read is not config.correction_bias) is takes_part and read.dtype == F32


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_a_graph_reads_the_bias_in_the_dtype_of_its_reader(scoring):
    config = routed(scoring_func=scoring, correction_bias=torch.ones(2, dtype=BF16))
    with capture():
        read = bias_for_readers(config, torch.zeros(3, 2))
    assert read.dtype == (F32 if scoring == "sigmoid" else BF16)


def test_older_configs_lack_some_fields():
    """SGLang before 0.5.20 has neither a score function nor torch_native there."""
    config = SimpleNamespace(correction_bias=torch.ones(2))
    assert select_experts_inputs(torch.zeros(3, 2, dtype=BF16), config).dtype == F32


@pytest.mark.parametrize("strided_rows", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_rows_with_a_stride(strided_rows, wide):
    config, dtype = routed(), F32 if wide else BF16
    rows = torch.arange(24.0, dtype=dtype).view(3, 8)[:, 2:4]
    found = select_experts_inputs(rows, config, strided_rows=strided_rows)
    assert found.dtype == F32 and torch.equal(found, rows.float())
    if wide:
        assert (found is rows) is strided_rows
    assert found.is_contiguous() or strided_rows
    columns = (
        torch.arange(24.0).view(2, 12)[:, ::6].T
    )  # elements of a row apart: no kernel takes it
    assert select_experts_inputs(columns, config, strided_rows=strided_rows).is_contiguous()


@pytest.mark.parametrize(
    "arguments, refreshed",
    [
        ((), True),
        ((SimpleNamespace(),), True),
        ((SimpleNamespace(offload_tags=set()),), True),
        ((SimpleNamespace(offload_tags={"weights"}),), False),
    ],
)
def test_biases_follow_an_update_unless_memory_is_released(arguments, refreshed):
    config = make([1.0, 2.0], BF16)
    held = held_by(config)

    def update(*_, value):
        config.correction_bias.data.fill_(value)
        return "updated"

    assert refresh_biases_after(update, *arguments, value=7.0) == "updated"
    assert held.tolist() == ([7.0, 7.0] if refreshed else [1.0, 2.0])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
