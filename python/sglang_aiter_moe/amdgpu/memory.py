"""The memory that a kernel's 64-bit pointers name: allocations with gaps between, bounds and initialisation checked.

One byte array holds all allocations, a second one of the same size holds what each byte is. Unallocated gaps of at
least 4 KiB lie between allocations, so an index that runs past an array is an error and not a neighbour's value.
The first allocation ends beyond a multiple of 4 GiB, so that a carry from the low to the high half of an address is
needed somewhere; most bits of the upper half are set, so that code which drops one is noticed.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.errors import ContractError

BASE = 0x7FFE_FFFF_F000
GAP = 4096
ALIGN = 256
_ALLOCATED, _INITIALISED, _WRITABLE = 1, 2, 4
_READABLE = _ALLOCATED | _INITIALISED
_VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass
class Allocation:
    """``start`` and ``end`` are offsets from ``BASE``."""

    name: str
    start: int
    end: int
    writable: bool
    initialised: bool


class Memory:
    """Allocations only grow; a memory serves as many launches as wanted."""

    def __init__(self) -> None:
        self._bytes = np.zeros(1 << 20, np.uint8)
        self._state = np.zeros(1 << 20, np.uint8)
        self._top = GAP - ALIGN
        self._starts: list[int] = []
        self.allocations: list[Allocation] = []

    def place(
        self, array: np.ndarray, name: str, *, writable: bool = True, initialised: bool = True
    ) -> int:
        """Copies ``array`` (C order) in and returns its address, a multiple of 256.

        ``initialised=False`` keeps the bytes but reports a kernel that reads them before it wrote them.
        """
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = self._allocate(raw.size, name, writable, initialised)
        self._bytes[start : start + raw.size] = raw
        return BASE + start

    def reserve(self, nbytes: int, name: str) -> int:
        """Uninitialised, writable memory; holds 0xA5 bytes until it is written."""
        start = self._allocate(nbytes, name, True, False)
        self._bytes[start : start + nbytes] = 0xA5
        return BASE + start

    def read(self, address: int, dtype, shape, *, allow_uninitialised: bool = False) -> np.ndarray:
        """A copy of what is at ``address``.

        Raises:
            ContractError: bytes outside an allocation, or that nothing wrote.
        """
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        start = address - BASE
        wanted = _ALLOCATED if allow_uninitialised else _READABLE
        state = self._state[max(start, 0) : max(start, 0) + nbytes]
        bad = np.flatnonzero((state & wanted) != wanted)
        if start < 0 or state.size < nbytes or bad.size:
            at = address + (int(bad[0]) if bad.size else 0)
            raise ContractError(
                f"{nbytes} bytes from {address:#x} on: {self.describe(at)}",
                allowed="memory that was placed, or reserved and written",
                fix="check the address and whether the kernel ran",
            )
        return self._bytes[start : start + nbytes].view(dtype).reshape(shape).copy()

    def write(self, address: int, array: np.ndarray) -> None:
        """Copies ``array`` over what is at ``address``, as a host does between launches.

        Raises:
            ContractError: bytes outside an allocation.
        """
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.read(address, np.uint8, raw.size, allow_uninitialised=True)  # checks the bounds
        start = address - BASE
        self._bytes[start : start + raw.size] = raw
        self._state[start : start + raw.size] |= _INITIALISED

    def written(self, address: int, nbytes: int) -> np.ndarray:
        """bool [nbytes]: which bytes are initialised."""
        start = address - BASE
        return (self._state[start : start + nbytes] & _INITIALISED) != 0

    def unwritten(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """bool [n, nbytes]: which bytes at ``addresses`` (uint64 [n], all inside allocations) nothing has written."""
        at = (addresses - np.uint64(BASE)).astype(np.int64)[:, None] + np.arange(nbytes)
        return (self._state[at] & _INITIALISED) == 0

    def forget(self, address: int, nbytes: int) -> None:
        """Marks bytes of a reservation as never written."""
        start = address - BASE
        self._state[start : start + nbytes] &= ~np.uint8(_INITIALISED)
        for a in self.allocations:
            if a.start <= start < a.end:
                a.initialised = False

    def forget_bytes(self, addresses: np.ndarray, which: np.ndarray) -> None:
        """Marks bytes (bool [..., nbytes] of ``addresses`` [...]) as never written, until something writes them."""
        at = (addresses - np.uint64(BASE)).astype(np.int64)[..., None] + np.arange(which.shape[-1])
        at = at[which]
        self._state[at] &= ~np.uint8(_INITIALISED)
        for start in np.unique(at):
            self.allocations[bisect.bisect_right(self._starts, int(start)) - 1].initialised = False

    def describe(self, address: int) -> str:
        """Where an address is, in words."""
        offset = address - BASE
        at = bisect.bisect_right(self._starts, offset) - 1
        if at < 0:
            return f"{address:#x} is before every allocation"
        a = self.allocations[at]
        if offset < a.end:
            state = int(self._state[offset])
            kind = "" if state & _INITIALISED else ", which nothing has written"
            kind += "" if state & _WRITABLE else ", which is read-only"
            return f"byte {offset - a.start} of {a.end - a.start} of {a.name}{kind}"
        return f"{address:#x} is {offset - a.end} bytes past the end of {a.name} ({a.end - a.start} bytes)"

    def settle(self) -> None:
        """Notes which allocations are initialised throughout; the machine calls it before each launch."""
        for a in self.allocations:
            if not a.initialised:
                a.initialised = bool((self._state[a.start : a.end] & _INITIALISED).all())

    def gather(self, addresses: np.ndarray, nbytes: int, checked: bool = True) -> np.ndarray:
        """What lanes load: ``addresses`` uint64 [n] to uint32 [words, n], bytes and halves zero-extended.

        Raises:
            Fault: ``lane`` is the position in ``addresses``.
        """
        offsets = self._offsets(addresses, nbytes, _READABLE, checked)
        return _load(self._bytes, offsets, nbytes)

    def scatter(
        self, addresses: np.ndarray, words: np.ndarray, nbytes: int, checked: bool = True
    ) -> None:
        """What lanes store: ``words`` uint32 [words, n]; of lanes with the same address the last one stays."""
        offsets = self._offsets(addresses, nbytes, _ALLOCATED | _WRITABLE, checked)
        unit = nbytes if nbytes < 4 else 4
        data, state = self._bytes.view(_VIEWS[unit]), self._state.view(_VIEWS[unit])
        at = offsets >> np.uint64(unit.bit_length() - 1)
        mark = _VIEWS[unit](int.from_bytes(bytes([_READABLE | _WRITABLE]) * unit, "little"))
        for i, word in enumerate(words):
            data[at + np.uint64(i)] = word.astype(data.dtype, copy=False)
            state[at + np.uint64(i)] = mark

    def _allocate(self, nbytes: int, name: str, writable: bool, initialised: bool) -> int:
        start = -(-self._top // ALIGN) * ALIGN
        end = start + nbytes
        self._top = end + GAP
        if self._top > self._bytes.size:
            size = max(2 * self._bytes.size, -(-self._top // GAP) * GAP + GAP)
            for key in ("_bytes", "_state"):
                grown = np.zeros(size, np.uint8)
                old = getattr(self, key)
                grown[: old.size] = old
                setattr(self, key, grown)
        state = _ALLOCATED | (_WRITABLE if writable else 0) | (_INITIALISED if initialised else 0)
        self._state[start:end] = state
        self._starts.append(start)
        self.allocations.append(Allocation(name, start, end, writable, initialised))
        return start

    def _offsets(
        self, addresses: np.ndarray, nbytes: int, wanted: int, checked: bool
    ) -> np.ndarray:
        offsets = addresses - np.uint64(BASE)
        if not offsets.size:
            return offsets
        unit = nbytes if nbytes < 4 else 4
        if unit > 1 and int(np.bitwise_or.reduce(offsets)) & (unit - 1):
            lane = int(np.flatnonzero(offsets & np.uint64(unit - 1))[0])
            raise Fault(
                f"{nbytes} bytes at {int(addresses[lane]):#x}, which is not a multiple of {unit}",
                allowed=f"addresses that are multiples of {unit}",
                fix="check the pointer's alignment and the offsets",
                lane=lane,
            )
        low, high = int(offsets.min()), int(offsets.max()) + nbytes
        at = bisect.bisect_right(self._starts, low) - 1
        if at >= 0:
            a = self.allocations[at]
            if high <= a.end and (a.writable if wanted & _WRITABLE else a.initialised):
                return offsets
        if high > self._bytes.size:
            self._refuse(
                addresses,
                int(np.flatnonzero(offsets > np.uint64(self._bytes.size - nbytes))[0]),
                nbytes,
            )
        if not checked:
            wanted &= ~_INITIALISED
        for i in range(nbytes):
            bad = (self._state[offsets + np.uint64(i)] & wanted) != wanted
            if bad.any():
                self._refuse(addresses, int(np.flatnonzero(bad)[0]), nbytes, i)
        return offsets

    def _refuse(self, addresses: np.ndarray, lane: int, nbytes: int, byte: int = 0) -> None:
        address = int(addresses[lane])
        raise Fault(
            f"{nbytes} bytes at {address:#x}: {self.describe(address + byte)}",
            allowed="memory inside an allocation, written before it is read, writable if it is stored to",
            fix="check the kernel's arguments, and the instruction's address",
            lane=lane,
        )


def _load(source: np.ndarray, offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """uint8 ``source``, offsets that are multiples of the word size: uint32 [words, n]."""
    if nbytes < 4:
        view = source.view(_VIEWS[nbytes])
        return view[offsets >> np.uint64(nbytes - 1)].astype(np.uint32)[None]
    if nbytes in (8, 16) and not int(np.bitwise_or.reduce(offsets)) & (nbytes - 1):
        shift = np.uint64(nbytes.bit_length() - 1)
        wide = source.view(_VIEWS[nbytes]).take((offsets >> shift).view(np.int64))
        return np.ascontiguousarray(wide.view(np.uint32).reshape(offsets.size, nbytes // 4).T)
    view = source.view(np.uint32)
    at = (offsets >> np.uint64(2)).view(np.int64)
    return np.stack([view.take(at + i) for i in range(nbytes // 4)])
