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


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, where there is none."""

    is_cuda = True


class FakeGpu:
    """Stands for the CUDA runtime: whether a capture runs, and which streams are entered.

    Attributes:
        capturing: what ``torch.cuda.is_current_stream_capturing`` says.
        streams: devices of the streams that have been entered.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.streams: list[torch.device] = []

    @contextlib.contextmanager
    def stream(self, device: torch.device) -> Iterator[None]:
        self.streams.append(device)
        yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


@contextlib.contextmanager
def gpu() -> Iterator[FakeGpu]:
    """For the block, what torch says of the GPU is what the yielded object says."""
    fake = FakeGpu()
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing),
        mock.patch.object(torch.cuda, "Stream", lambda device: device),
        mock.patch.object(torch.cuda, "stream", fake.stream),
    ):
        yield fake


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
