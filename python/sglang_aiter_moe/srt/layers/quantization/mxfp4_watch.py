"""Writes to packed parameters that go around their ``weight_loader``: noticed, proved, and never served.

Raw and packed weights have the same shape, so ``parameter.data.copy_(raw)`` on a layer that is laid out raises
nothing. ``.data`` bumps no version counter either. A packed parameter is therefore a
:class:`PackedParameter`: who takes its ``.data`` is noted, at no cost to anybody else, and before the next call
the bytes are compared with a checksum of all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

#: Attribute of a parameter: the set that its name is added to when somebody takes its bytes.
_NOTES = "aiter_moe_notes"
_WORDS = 1024


class PackedParameter(torch.nn.Parameter):
    """A parameter that notes when its ``.data`` is taken or set."""

    @property
    def data(self) -> torch.Tensor:
        """As ``torch.Tensor.data``."""
        _note(self)
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _note(self)
        torch.Tensor.data.__set__(self, value)


def watch(parameter: torch.nn.Parameter, name: str, notes: set[str]) -> None:
    """From now on ``name`` is in ``notes`` once somebody has taken the parameter's ``.data``."""
    setattr(parameter, _NOTES, (notes, name))
    if type(parameter) is torch.nn.Parameter:
        # The same object: loaders, captured graphs and optimisers hold on to it.
        parameter.__class__ = PackedParameter


def data_of(parameter: torch.Tensor) -> torch.Tensor:
    """``parameter.data``, without a note."""
    return torch.Tensor.data.__get__(parameter)


def set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """``parameter.data = value``, without a note."""
    torch.Tensor.data.__set__(parameter, value)


def versions(parameters: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The version counters, which every write but those through ``.data`` bumps."""
    return tuple(0 if p.is_inference() else p._version for p in parameters)


def checksum(tensor: torch.Tensor) -> str:
    """Tells any two layouts of the same bytes apart, and any two contents; reads all of the tensor.

    SHA-256 over the sums of its rows and columns as 32-bit words, modulo 2**32, ``[n/1024, 1024]``: little more
    than two readings, and a thousandth of the memory. Both change when words move, unless equal ones do.
    """
    words = tensor.detach().reshape(-1)
    if words.element_size() != 4:
        words = words.view(torch.uint8)
        words = words.view(torch.int32) if words.numel() % 4 == 0 else words.int()
    words = words.view(torch.int32)
    count = words.numel()
    width = min(_WORDS, count & -count) or 1
    table = words.view(-1, width)
    total = hashlib.sha256()
    for dimension in (0, 1):
        sums = table.sum(dimension, dtype=torch.int32)
        total.update(sums.cpu().numpy().tobytes())
    return total.hexdigest()


def _note(parameter: Any) -> None:
    notes = parameter.__dict__.get(_NOTES)
    if notes is not None:
        notes[0].add(notes[1])
