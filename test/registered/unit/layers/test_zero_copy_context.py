"""The published buffer: when there is one, what fits into it, what may be written, and what is copied."""

import sys
import types

import pytest
import torch

from sglang_aiter_moe.srt.layers import zero_copy_context as context
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE, DTYPE = (3, 4), torch.bfloat16


@pytest.fixture
def sglangs(monkeypatch):
    """SGLang's context, by the two names that are read of it."""
    module = types.ModuleType("sglang.srt.layers.zero_copy_context")
    module.ctx = types.SimpleNamespace(moe_output=None)
    module.get_moe_output_spec = lambda *asked: (module.ctx.moe_output, asked)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_nothing_is_published_without_a_block():
    assert context.is_published() is False
    assert context.get_moe_output_spec(SHAPE, DTYPE, CPU) is None


def test_blocks_nest_and_end_even_by_an_error():
    outer, inner = torch.zeros(SHAPE), torch.ones(SHAPE)
    with context.set_moe_output(outer):
        with pytest.raises(ZeroDivisionError), context.set_moe_output(inner):
            assert context.get_moe_output_spec(SHAPE, torch.float32, CPU) is inner
            raise ZeroDivisionError
        assert context.get_moe_output_spec(SHAPE, torch.float32, CPU) is outer
    assert not context.is_published()


@pytest.mark.parametrize("published", [False, True])
def test_sglangs_context_counts_where_sglang_is_imported(sglangs, published):
    sglangs.ctx.moe_output = torch.zeros(SHAPE) if published else None
    assert context.is_published() is published
    found = context.get_moe_output_spec([3, 4], DTYPE, CPU)
    assert found == (
        (sglangs.ctx.moe_output, (torch.Size(SHAPE), DTYPE, CPU)) if published else None
    )


def test_our_own_block_goes_before_sglangs(sglangs):
    sglangs.ctx.moe_output = torch.zeros(SHAPE)
    own = torch.zeros(SHAPE, dtype=DTYPE)
    with context.set_moe_output(own):
        assert context.get_moe_output_spec(SHAPE, DTYPE, CPU) is own
        assert context.get_moe_output_spec((3, 5), DTYPE, CPU) is None


@pytest.mark.parametrize("own", [False, True])
def test_compiled_code_sees_our_own_block_alone(sglangs, monkeypatch, own):
    """SGLang publishes around eager calls; its module is not looked up while code is traced."""
    sglangs.ctx.moe_output = torch.zeros(SHAPE)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if own:
        with context.set_moe_output(torch.zeros(SHAPE)):
            assert context.is_published() is True
    else:
        assert context.is_published() is False


@pytest.mark.parametrize(
    "shape, dtype, device, fits",
    [
        (SHAPE, DTYPE, CPU, True),
        ([3, 4], DTYPE, CPU, True),
        (torch.Size(SHAPE), DTYPE, CPU, True),
        ((4, 3), DTYPE, CPU, False),
        ((12,), DTYPE, CPU, False),
        (SHAPE, torch.float16, CPU, False),
        (SHAPE, DTYPE, META, False),
    ],
)
def test_what_fits(shape, dtype, device, fits):
    assert context.fits(torch.zeros(SHAPE, dtype=DTYPE), shape, dtype, device) is fits


def test_rows_with_a_gap_do_not_fit():
    """Kernels write it flat."""
    assert not context.fits(torch.zeros(3, 8, dtype=DTYPE)[:, :4], SHAPE, DTYPE, CPU)


ARENA = torch.zeros(64)


@pytest.mark.parametrize(
    "buffer, tokens, free",
    [
        (ARENA[:8], ARENA[8:16], True),
        (ARENA[8:16], ARENA[:8], True),
        (ARENA[:9], ARENA[8:16], False),
        (ARENA[8:16], ARENA[:9], False),
        (ARENA[:16], ARENA[4:8], False),
        (ARENA[4:8], ARENA[:16], False),
        (ARENA[:8], ARENA[:8], False),
        (ARENA[:16].view(4, 4), ARENA[16:32].view(4, 4), True),
        (ARENA[:16].view(4, 4), ARENA[15:31].view(4, 4), False),
        # Rows with gaps reach from the first element to the last one of the last row.
        (ARENA[20:24], ARENA[:32].view(4, 8)[:, :2], False),
        (ARENA[26:32], ARENA[:32].view(4, 8)[:, :2], True),
        (ARENA[25:32], ARENA[:32].view(4, 8)[:, :2], False),
        (ARENA[:8].view(torch.uint8)[:4], ARENA[1:2], True),  # bytes, not elements
        (ARENA[:8].view(torch.uint8)[:5], ARENA[1:2], False),
    ],
)
def test_a_kernel_writes_what_it_does_not_read(buffer, tokens, free):
    assert context.kernel_may_write(buffer, tokens) is free


def test_a_result_without_a_buffer_and_a_buffer_without_a_result():
    result, buffer = torch.ones(SHAPE), torch.zeros(SHAPE)
    assert context.deliver(result, None) is result
    assert context.deliver(None, buffer) is buffer and not buffer.any()
    assert context.deliver(buffer, buffer) is buffer and buffer._version == 0


def test_a_result_is_copied_once_and_its_padding_is_left():
    result = torch.arange(12.0).view(SHAPE)
    for width in (4, 3):
        buffer = torch.zeros(3, width)
        assert context.deliver(result, buffer) is buffer
        assert torch.equal(buffer, result[:, :width]) and buffer._version == 1


def test_the_buffer_itself_is_not_copied_in_compiled_code_either(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    buffer = torch.ones(SHAPE)
    assert context.deliver(buffer, buffer) is buffer and buffer._version == 0


@pytest.mark.parametrize("compiling", [False, True])
def test_another_view_of_the_buffer_is_not_copied(monkeypatch, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    buffer = torch.ones(SHAPE)
    assert context.deliver(buffer.view(SHAPE), buffer) is buffer
    assert buffer._version == (1 if compiling else 0), "addresses cannot be asked for under tracing"


class Wrapped(torch.Tensor):
    """Whose address says nothing."""


@pytest.mark.parametrize(
    "a, b, same",
    [
        (ARENA[:4], ARENA[:4], True),
        (ARENA[:4], ARENA[1:5], False),
        (ARENA[:4], ARENA[:5], False),
        (ARENA[:8].view(2, 4), ARENA[:8].view(4, 2), False),
        (ARENA[:4].view(2, 2), ARENA[:4].view(2, 2).T, False),
        (ARENA[:4].as_subclass(Wrapped), ARENA[:4], False),
        (torch.empty(0), torch.empty(0, device="meta"), False),
    ],
)
def test_the_same_memory(a, b, same):
    assert context._is_same_memory(a, b) is same


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
