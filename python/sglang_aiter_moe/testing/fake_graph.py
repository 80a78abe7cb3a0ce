"""Graph captures without a GPU, and the routing configs that tests of the correction bias make."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from sglang_aiter_moe.srt.layers.moe import correction_bias
from sglang_aiter_moe.srt.layers.moe.topk import TopKConfig


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Stands for a graph capture: what is handed out under it is what a graph keeps reading."""
    with mock.patch.object(correction_bias, "_is_capturing", lambda tensor: True):
        yield


def make(
    values: Sequence[float],
    dtype: torch.dtype,
    device: str = "cpu",
    parameter: bool = True,
) -> TopKConfig:
    """The config of a layer with this correction bias."""
    tensor = torch.tensor(values, dtype=dtype, device=device)
    if parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    return TopKConfig(top_k=2, use_grouped_topk=True, correction_bias=tensor)
