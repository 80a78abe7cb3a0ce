"""Byte-exact strided copies, one expert at a time: what every layout is made of."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import torch

from sglang_aiter_moe.errors import ContractError, check_integer

logger = logging.getLogger(__name__)

#: Off: torch's strided copies move one expert at a time. For benchmarks and tests that compare the two.
GPU_KERNELS = True

_DTYPES = tuple(
    getattr(torch, name)
    for name in ("uint8", "float4_e2m1fn_x2", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def as_bytes(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Views a tensor of bytes, packed E2M1 or E8M0 as uint8.

    Raises:
        ContractError: for another dtype, or for what is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ContractError(
            f"{what} is a {type(tensor).__name__}",
            allowed="a torch.Tensor",
            fix=f"pass the checkpoint tensor of {what}",
        )
    if tensor.dtype not in _DTYPES:
        raise ContractError(
            f"{what} has dtype {tensor.dtype}",
            allowed="one byte per element: " + ", ".join(str(d) for d in _DTYPES),
            fix=f"load {what} as packed MXFP4 bytes (view it, do not cast it)",
        )
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def sizes(shape: Sequence[int], what: str) -> tuple[int, ...]:
    """``shape`` as a tuple.

    Raises:
        ContractError: if it is no sequence, or of something else than integers.
    """
    fix = f"pass the shape of {what}"
    if not isinstance(shape, Sequence):
        raise ContractError(
            f"the shape of {what} is {shape!r}", allowed="a sequence of integers", fix=fix
        )
    for i, extent in enumerate(shape):
        check_integer(f"dimension {i} of {what}", extent, fix=fix)
    return tuple(shape)


def output_for(
    source: torch.Tensor, shape: Sequence[int], out: torch.Tensor | None, what: str
) -> torch.Tensor:
    """The uint8 tensor to write to: ``out`` if it fits, else a new one.

    Raises:
        ContractError: if ``out`` has another shape, device or dtype, or is not contiguous.
    """
    if out is None:
        return torch.empty(tuple(shape), dtype=torch.uint8, device=source.device)
    target = as_bytes(out, f"out for {what}")
    if tuple(target.shape) != tuple(shape) or target.device != source.device:
        raise ContractError(
            f"out for {what} has shape {tuple(target.shape)} on {target.device}",
            allowed=f"shape {tuple(shape)} on {source.device}",
            fix="allocate it with the layout's packed_shape",
        )
    if not target.is_contiguous():
        raise ContractError(
            f"out for {what} is not contiguous (strides {target.stride()})",
            allowed="a contiguous tensor",
            fix="pass the parameter itself, not a transposed or sliced view",
        )
    return target


def gpu_moves(source: torch.Tensor, target: torch.Tensor) -> ModuleType | None:
    """The kernels that move bytes between two GPU tensors; None on a CPU, without Triton, or switched off."""
    return _kernels() if GPU_KERNELS and source.is_cuda and target.is_cuda else None


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module("sglang_aiter_moe.contract.device_moves")
    except ImportError as error:
        logger.warning("weights are laid out by torch's copies, which are slower: %s", error)
        return None


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share the same first byte of the same memory."""
    return a.device == b.device and a.data_ptr() == b.data_ptr()


def words16(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views ``[..., K]`` bytes as ``[..., K/16, w]``: 16-byte words (w = 1) if all allow it, else w = 16."""
    split = [tensor.unflatten(-1, (-1, 16)) for tensor in tensors]
    if all(_word_aligned(tensor) for tensor in split):
        # complex128 is torch's only 16-byte dtype; a copy to the same dtype moves its bits untouched.
        return [tensor.view(torch.complex128) for tensor in split]
    return split


def _word_aligned(split: torch.Tensor) -> bool:
    return (
        split.storage_offset() % 16 == 0
        and split.data_ptr() % 16 == 0
        and split.stride(-1) == 1
        and all(stride % 16 == 0 for stride in split.stride()[:-1])
    )


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies one strided view into another of the same shape."""
    if source.device.type == "cpu" and target.device.type == "cpu":
        # numpy's copy of one expert is faster than torch's, which starts a thread team for it.
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def gather(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = source[index[i]]`` for flat uint8 tensors; every index is in range."""
    if source.device.type == "cpu" and out.device.type == "cpu":
        np.take(source.numpy(), index.numpy(), out=out.numpy(), mode="clip")
    else:
        torch.index_select(source, 0, index, out=out)


#: Below this many bytes a second thread costs more than it saves.
_WORTH_A_THREAD = 16 << 20


def for_each(
    count: int, work: Callable[[range], None], tensor: torch.Tensor, *, most: int | None = None
) -> None:
    """Hands the indices 0 .. count - 1 to ``work`` in as many parts as there are threads to use.

    Args:
        count: how many experts there are.
        work: takes a part; parts do not overlap.
        tensor: what is worked on, for its size and device.
        most: the most parts, where each needs memory of its own.
    """
    parts = torch.get_num_threads() if tensor.device.type == "cpu" else 1
    parts = min(parts, count, most or parts, 1 + tensor.numel() // _WORTH_A_THREAD)
    if parts <= 1:
        work(range(count))
        return
    # numpy copies without the interpreter's lock, so that plain threads share the work.
    edges = [count * i // parts for i in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(work, map(range, edges, edges[1:])))
