"""Scratch memory that outlives the calls: nothing is allocated after warm-up.

One arena per (device, stream). An arena that is too small is replaced by a larger one, and the old one is kept:
a captured CUDA graph holds its addresses. Two graphs that were captured on the same stream share an arena,
so they must not run at the same time.

Counters are int32 that kernels expect in a known state. They are cut from a slab a device, zeroed at its first call
outside of a capture: memory that is first made while a graph is captured is zeroed only when that graph runs, and
whoever shares the counter may run before.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.errors import ContractError

_ALIGN = 256
_GROWTH = 1 << 20
_SLAB = 1 << 18
"""int32 of a slab: counters of 896 experts for a hundred streams."""
_arenas: dict[tuple[str, int | None, int], list[torch.Tensor]] = {}

_slabs: dict[tuple[str, int | None], tuple[torch.Tensor, int]] = {}
"""device -> zeros, and how many of them are given away."""
_states: dict[tuple[str, int | None, int, str, int], torch.Tensor] = {}


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


def state(device: torch.device, size: int = 1, use: str = "counters") -> torch.Tensor:
    """``size`` int32 that outlive a call, zero at first; one tensor a (device, stream), use and size.

    "counters" are zero between calls; another use keeps what its kernel left.

    Raises:
        ContractError: a graph is being captured and the slab, which must be zero before any graph runs, is not there
        or used up.
    """
    key = (*_key(device), use, size)
    if key not in _states:
        _states[key] = _zeros(device, size)
    return _states[key]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _zeros(device: torch.device, size: int) -> torch.Tensor:
    place = device.type, device.index
    slab, used = _slabs.get(place, (None, 0))
    if slab is None or used + size > slab.numel():
        if _capturing(device):
            raise ContractError(
                f"a graph is captured on {device} before the layer has run there",
                allowed="a capture after one call outside of any capture, on whatever stream",
                fix="run the layer once, with this number of tokens, before capturing it",
            )
        slab, used = torch.zeros(max(_SLAB, size), dtype=torch.int32, device=device), 0
        if device.type == "cuda":  # the next to take from it may be on another stream
            torch.cuda.current_stream(device).synchronize()
    _slabs[place] = slab, used + -(-size * 4 // _ALIGN) * _ALIGN // 4
    return slab[used : used + size]


def holds(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in an arena."""
    arenas = _arenas.get(_key(tensor.device), [])
    return any(
        a.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for a in arenas
    )


def poison(device: torch.device) -> None:
    """Fills the arena with 0xFF, NaN in every format (tests): nothing may depend on what an earlier call left."""
    for arena in _arenas.get(_key(device), []):
        arena.fill_(0xFF)


def clear() -> None:
    """Drops every arena (tests). Graphs captured before must not be replayed after."""
    _arenas.clear()
    _states.clear()
    _slabs.clear()
