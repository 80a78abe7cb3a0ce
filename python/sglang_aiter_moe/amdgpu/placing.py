"""Tensors on the CPU as arguments of interpreted launches: where they are in the interpreted memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.errors import ContractError


class Placing:
    """Copies tensors into ``memory`` before a launch and back after it.

    Arguments may be the same tensor twice, but not overlap otherwise.

    Args:
        scratch: tells of a tensor whether its bytes mean nothing before a kernel has written them; reading them is
            then an error, also in a later launch.
    """

    def __init__(self, memory: Memory, scratch: Callable[[torch.Tensor], bool]) -> None:
        self._memory, self.scratch = memory, scratch
        self._placed: dict[tuple[int, int], int] = {}

    def address(self, tensor: torch.Tensor, name: str) -> int:
        """Where ``tensor`` is in the interpreted memory, after its bytes have been copied there; 0 if it has none."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ContractError(
                f"{name} is on {tensor.device} with strides {list(tensor.stride())}",
                allowed="contiguous tensors on the CPU",
                fix=f"pass {name}.cpu().contiguous()",
            )
        data = as_bytes(tensor)
        key = tensor.data_ptr(), data.size
        if not data.size:
            return 0
        if key in self._placed:
            if not self.scratch(tensor):
                self._memory.write(self._placed[key], data)
            return self._placed[key]
        for start, size in self._placed:
            if start < key[0] + key[1] and key[0] < start + size:
                raise ContractError(
                    f"{name} overlaps another argument in part",
                    allowed="arguments that are the same tensor or lie apart",
                    fix=f"pass a copy of {name}",
                )
        if self.scratch(tensor):
            self._placed[key] = self._memory.reserve(data.size, name)
        else:
            self._placed[key] = self._memory.place(data, name)
        return self._placed[key]

    def address_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor has been placed, or None."""
        return self._placed.get((tensor.data_ptr(), tensor.numel() * tensor.element_size()))

    def copy_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """The bytes of the interpreted memory into the tensors that were placed there."""
        for tensor in tensors:
            data = as_bytes(tensor)
            if data.size:
                address = self._placed[tensor.data_ptr(), data.size]
                data[:] = self._memory.read(
                    address, data.dtype, data.shape, allow_uninitialised=True
                )


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own bytes as a flat numpy array."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
