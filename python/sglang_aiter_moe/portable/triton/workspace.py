"""Scratch memory that outlives the calls: nothing is allocated after warm-up.

One arena per (device, stream). An arena that is too small is replaced by a larger one, and the old one is kept:
a captured CUDA graph holds its addresses. Two graphs that were captured on the same stream share an arena,
so they must not run at the same time.
"""

from __future__ import annotations

import torch

_ALIGN = 256
_GROWTH = 1 << 20
_arenas: dict[tuple[str, int | None, int], list[torch.Tensor]] = {}


def _key(device: torch.device) -> tuple[str, int | None, int]:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device.type, device.index, stream


def carve(device: torch.device, wanted: dict[str, tuple[tuple[int, ...], torch.dtype]]):
    """Tensors of the wanted shapes and dtypes, uninitialised, side by side in the arena.

    Args:
        wanted: name -> (shape, dtype).

    Returns:
        dict name -> tensor; valid until the next call on the same device and stream.
    """
    offsets, total = {}, 0
    for name, (shape, dtype) in wanted.items():
        offsets[name] = total
        count = 1
        for extent in shape:
            count *= extent
        total += -(-count * dtype.itemsize // _ALIGN) * _ALIGN
    arenas = _arenas.setdefault(_key(device), [])
    if not arenas or arenas[-1].numel() < total:
        size = -(-total // _GROWTH) * _GROWTH
        arenas.append(torch.zeros(size, dtype=torch.uint8, device=device))
    arena = arenas[-1]
    tensors = {}
    for name, (shape, dtype) in wanted.items():
        count = 1
        for extent in shape:
            count *= extent
        raw = arena[offsets[name] : offsets[name] + count * dtype.itemsize]
        tensors[name] = raw.view(dtype).view(shape)
    return tensors


def clear() -> None:
    """Drops every arena (tests). Graphs captured before must not be replayed after."""
    _arenas.clear()
