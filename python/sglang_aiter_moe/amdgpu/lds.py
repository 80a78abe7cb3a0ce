"""LDS: reading and writing the bytes of many lanes, with the checks.

Every workgroup of a batch has its own bytes in one array; ``Batch.lds_base`` is where a wave's begin. Source: AMD,
"CDNA3 ISA", chapter "Data Share Operations". The instructions that do it are in ``lds_ops.py``.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.state import LANES, Batch

U32, U64 = np.uint32, np.uint64
_VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class _Places:
    """Where the lanes that act access LDS.

    Attributes:
        lanes: which lanes of the batch (None: all).
        at: their offsets in ``Batch.lds``, uint32.
        span: the lowest byte of a workgroup's LDS that is touched, and the one behind the highest.
    """

    def __init__(self, b: Batch, address: np.ndarray, nbytes: int, align: int) -> None:
        flat = np.broadcast_to(address, b.mask.shape)
        if b.full:
            self.lanes = None
            self.at = (flat + b.lds_base).reshape(-1)
            flat = flat.reshape(-1)
        else:
            self.lanes = np.flatnonzero(b.mask)
            self.at = (flat + b.lds_base).reshape(-1)[self.lanes]
            flat = flat.reshape(-1)[self.lanes]
        if not flat.size:
            self.span = (0, 0)
            return
        low, high = int(flat.min()), int(flat.max()) + nbytes
        self.span = (low, high)
        if high > b.lds_bytes or int(np.bitwise_or.reduce(flat)) & (align - 1):
            self._refuse(b, flat, nbytes, align)

    def lane(self, position: int) -> int:
        return position if self.lanes is None else int(self.lanes[position])

    def index(self, unit: int) -> np.ndarray:
        """Offsets in units of ``unit`` bytes, a power of two."""
        return (self.at >> U32(unit.bit_length() - 1)).astype(np.intp)

    def _refuse(self, b: Batch, flat: np.ndarray, nbytes: int, align: int) -> None:
        outside = flat.astype(U64) + U64(nbytes) > b.lds_bytes
        odd = flat & U32(align - 1) != 0
        n = int(np.flatnonzero(outside | odd)[0])
        why = f" of {b.lds_bytes}" if outside[n] else f", which is not a multiple of {align}"
        raise Fault(
            f"{nbytes} bytes of LDS at {int(flat[n])}{why}",
            allowed=f"multiples of {align} inside the {b.lds_bytes} bytes that the workgroup has",
            fix="check the address, and the LDS size that the launch states",
            lane=self.lane(n),
        )


def _check_written(b: Batch, places: _Places, nbytes: int) -> None:
    """Faults where a byte is read that no wave of the workgroup wrote."""
    if places.span in b.lds_sure:
        return
    low, high = places.span
    rows = b.lds_known.reshape(-1, b.lds_stride)
    if rows[:, low:high].all():
        b.lds_sure.add(places.span)  # bytes never become unwritten
        return
    for k in range(nbytes):
        missing = b.lds_known[places.at + U32(k)] == 0
        if missing.any():
            n = int(np.flatnonzero(missing)[0])
            raise Fault(
                f"byte {int(places.at[n]) % b.lds_stride + k} of LDS is read, and nothing has written it",
                allowed="LDS that a wave of the workgroup wrote",
                fix="check the store's address, and the barrier before the load",
                lane=places.lane(n),
            )


def _written(unit: int) -> np.generic:
    """What ``lds_known`` holds for ``unit`` written bytes."""
    return np.ones(unit, np.uint8).view(_VIEWS[unit])[0]


def load(b: Batch, address: np.ndarray, nbytes: int, align: int) -> np.ndarray:
    """uint32 [words, waves, 64]; lanes that do not act get 0."""
    places = _Places(b, address, nbytes, align)
    if b.checked:
        _check_written(b, places, nbytes)
    count = max(1, nbytes // 4)
    unit = min(nbytes, align)
    view = b.lds.view(_VIEWS[unit])
    index = places.index(unit)
    if nbytes < 4:
        value = view.take(index).astype(U32)[None]
    elif unit == 4:
        value = np.stack([view.take(index + k) for k in range(count)])
    else:
        wide = [
            view.take(index + k).view(U32).reshape(-1, unit // 4).T for k in range(nbytes // unit)
        ]
        value = np.ascontiguousarray(np.concatenate(wide) if len(wide) > 1 else wide[0])
    if places.lanes is None:
        return value.reshape(count, b.waves, LANES)
    out = np.zeros((count, b.waves * LANES), U32)
    out[:, places.lanes] = value
    return out.reshape(count, b.waves, LANES)


def store(b: Batch, address: np.ndarray, values: list[np.ndarray], nbytes: int, align: int) -> None:
    places = _Places(b, address, nbytes, align)
    data = [np.broadcast_to(v, b.mask.shape).reshape(-1) for v in values]
    if places.lanes is not None:
        data = [v[places.lanes] for v in data]
    unit = nbytes if nbytes <= align else min(nbytes, 4)
    index = places.index(unit)
    if unit > 4:
        wide = np.empty((index.size, unit // 4), U32)
        for k, value in enumerate(data):
            wide[:, k] = value
        b.lds.view(_VIEWS[unit])[index] = wide.view(_VIEWS[unit])[:, 0]
    else:
        view = b.lds.view(_VIEWS[unit])
        for k, value in enumerate(data):
            view[index + k] = value.astype(view.dtype, copy=False)
    if b.checked and places.span not in b.lds_sure:
        known, written = b.lds_known.view(_VIEWS[unit]), _written(unit)
        for k in range(nbytes // unit):
            known[index + k] = written
