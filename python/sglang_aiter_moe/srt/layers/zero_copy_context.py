"""The output buffer that a caller publishes for the MoE result.

SGLang's models publish a tensor (Kimi K3: the latent that the all-reduce reads) with
``sglang.srt.layers.zero_copy_context.set_moe_output``; a runner that finds a fitting one returns *that
object*. Where SGLang is imported its context is the one that is read; without it, the context of this
file is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch

_SGLANG_MODULE = "sglang.srt.layers.zero_copy_context"
_published: torch.Tensor | None = None


@contextlib.contextmanager
def set_moe_output(out: torch.Tensor) -> Iterator[None]:
    """Publishes ``out`` as the destination of MoE results inside the block."""
    global _published
    before, _published = _published, out
    try:
        yield
    finally:
        _published = before


def is_published() -> bool:
    """Whether any buffer is published at the moment."""
    if _published is not None:
        return True
    if torch.compiler.is_compiling():
        return False  # SGLang publishes around eager calls only
    sglang = sys.modules.get(_SGLANG_MODULE)
    return sglang is not None and sglang.ctx.moe_output is not None


def get_moe_output_spec(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The published buffer if it can take a result of this shape, dtype and device.

    It has to be contiguous, because kernels write it flat.

    Args:
        shape: ``(M, H)``.
        dtype: of the result.
        device: of the result.
    """
    if not is_published():
        return None
    if _published is not None:
        return _published if fits(_published, shape, dtype, device) else None
    return sys.modules[_SGLANG_MODULE].get_moe_output_spec(torch.Size(shape), dtype, device)


def fits(
    buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether ``buffer`` can stand in for a contiguous result of this shape, dtype and device."""
    return (
        buffer.dtype == dtype
        and buffer.device == device
        and tuple(buffer.shape) == tuple(shape)
        and buffer.is_contiguous()
    )


def kernel_may_write(buffer: torch.Tensor, hidden_states: torch.Tensor) -> bool:
    """Whether a kernel may write ``buffer`` while it still reads ``hidden_states``.

    AITER zeroes its output before stage 1 reads the input (docs/contract.md section d), so the two
    must not share memory. Only the address ranges are compared: a strided input whose rows lie
    between the buffer's counts as shared.
    """
    start, end = _byte_range(buffer)
    other_start, other_end = _byte_range(hidden_states)
    return end <= other_start or other_end <= start


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def deliver(result: torch.Tensor | None, buffer: torch.Tensor | None) -> torch.Tensor:
    """The object that the caller published, holding ``result``: copied at most once.

    Args:
        result: what the kernel returned; None when it only wrote ``buffer``.
        buffer: the published buffer, or None. A buffer narrower than the result takes its first
            columns (the rest is hidden padding).
    """
    if buffer is None:
        return result
    if result is None or result is buffer:
        return buffer
    if not torch.compiler.is_compiling() and _is_same_memory(result, buffer):
        return buffer
    buffer.copy_(result[..., : buffer.shape[-1]])
    return buffer


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if type(a) is not torch.Tensor or a.shape != b.shape or a.stride() != b.stride():
        return False
    return a.device == b.device and a.data_ptr() == b.data_ptr()
