"""Shared memory of a batch of CTAs: one window each, with what is known of every byte.

A window begins at ``BASE``, as on hardware, where the first 1024 bytes of sm_90 are the system's. Each byte is
unwritten, written, in flight, part of an mbarrier, or written through the generic proxy with no ``fence.proxy.async``
since.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault

BASE = 1024
_WRITTEN, _UNFENCED, _FLYING, _MBARRIER = 1, 2, 4, 8
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Shared:
    """``size`` bytes for each of ``ctas`` CTAs."""

    def __init__(self, ctas: int, size: int, *, checked: bool) -> None:
        self.ctas, self.size, self.checked = ctas, size, checked
        self.stride = -(-size // 16) * 16
        self.data = np.full(ctas * self.stride, 0xA5, np.uint8)
        self.kind = np.zeros(ctas * self.stride, np.uint8)

    def load(self, cta, address, nbytes: int, proxy: str = "generic") -> np.ndarray:
        """uint8 [..., nbytes] from ``address`` (integers [...]), which must be multiples of ``nbytes``.

        Raises:
            Fault: bytes outside the window, unwritten, in flight, or not fenced for the async proxy; ``lane`` is the
                position in ``address``.
        """
        data, unwritten = self.look(cta, address, nbytes, proxy)
        if unwritten is not None:
            lane, byte = (int(x[0]) for x in np.nonzero(unwritten.reshape(-1, nbytes)))
            raise _fault(address, lane, byte, "which nothing has written")
        return data

    def look(
        self, cta, address, nbytes: int, proxy: str = "generic"
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """As ``load``, but unwritten bytes are told (bool [..., nbytes], or None) and no Fault."""
        at, unit = self._units(cta, address, nbytes)
        shape = (*np.shape(address), nbytes)
        unwritten = None
        if self.checked:
            kind = self.kind.view(_UNITS[unit])
            found = kind[at]
            bad = found != self._pattern(_WRITTEN, unit)
            if bad.any():
                unwritten = self._examine(found, proxy, address, nbytes)
        data = self.data.view(_UNITS[unit])[at]
        data = np.ascontiguousarray(data).view(np.uint8).reshape(shape)
        return data, None if unwritten is None else unwritten.reshape(shape)

    def store(self, cta, address, data: np.ndarray, proxy: str = "generic") -> None:
        """Writes uint8 ``data`` [..., nbytes]; of equal addresses the last one stays.

        Raises:
            Fault: bytes outside the window; for the generic proxy, bytes in flight or of an mbarrier.
        """
        nbytes = data.shape[-1]
        at, unit = self._units(cta, address, nbytes)
        if proxy == "generic":
            self._refuse_overwriting(at, unit, address, _FLYING | _MBARRIER, "is stored to")
        values = np.ascontiguousarray(data).view(_UNITS[unit]).reshape(at.shape)
        self.data.view(_UNITS[unit])[at] = values
        mark = _WRITTEN if proxy == "async" else _WRITTEN | _UNFENCED
        self.kind.view(_UNITS[unit])[at] = self._pattern(mark, unit)

    def fly(self, cta, address, nbytes: int, proxy: str = "generic") -> None:
        """Marks bytes as on their way.

        Raises:
            Fault: bytes outside the window or of an mbarrier; for the async proxy, bytes in flight, and such as a store
                wrote with no fence since.
        """
        at, unit = self._units(cta, address, nbytes)
        marks = _MBARRIER if proxy == "generic" else _MBARRIER | _FLYING | _UNFENCED
        self._refuse_overwriting(at, unit, address, marks, "is given to a copy")
        self.kind.view(_UNITS[unit])[at] = self._pattern(_FLYING, unit)

    def reserve(self, cta: int, address: int) -> None:
        """Marks the 8 bytes of a new mbarrier."""
        at = address - BASE + cta * self.stride
        self.kind[at : at + 8] |= _MBARRIER

    def release(self, cta: int, address: int) -> None:
        """The mbarrier has ended: its bytes are ordinary ones that nothing has written."""
        at = address - BASE + cta * self.stride
        self.kind[at : at + 8] = 0

    def forget(self, cta, address, unknown: np.ndarray) -> None:
        """Marks bytes (bool [..., nbytes]) as unwritten: what was stored there is unknown."""
        at = np.asarray(address).astype(np.int64) - BASE + np.asarray(cta) * self.stride
        at = at[..., None] + np.arange(unknown.shape[-1])
        self.kind[at[unknown]] = 0

    def fence(self, ctas: np.ndarray) -> None:
        """``fence.proxy.async`` by a thread of each of these CTAs: what was written is seen by the async proxy.

        All bytes of the CTA count, also those which another warp wrote: who has synchronised with whom is not followed.
        """
        for cta in np.unique(ctas):
            self.kind[cta * self.stride : (cta + 1) * self.stride] &= np.uint8(~_UNFENCED & 0xFF)

    def window(self, cta: int) -> np.ndarray:
        """The bytes of one CTA, unchecked."""
        return self.data[cta * self.stride : cta * self.stride + self.size]

    @staticmethod
    def _pattern(mark: int, unit: int):
        return _UNITS[unit](int.from_bytes(bytes([mark]) * unit, "little"))

    def _units(self, cta, address, nbytes: int) -> tuple[np.ndarray, int]:
        """Indices [..., parts] of units of 1 to 8 bytes in the arrays, and the unit."""
        address = np.asarray(address).astype(np.int64)
        unit = min(nbytes, 8)
        at = address - BASE
        if at.size:
            bad = (at < 0) | (at > self.size - nbytes) | (at & (nbytes - 1) != 0)
            if bad.any():
                self._refuse(np.flatnonzero(bad)[0], address, nbytes)
        at = (at + np.asarray(cta) * self.stride) >> (unit.bit_length() - 1)
        if nbytes <= 8:
            return at[..., None], unit
        return at[..., None] + np.arange(nbytes // unit), unit

    def _refuse_overwriting(self, at, unit: int, address, marks: int, does: str) -> None:
        if not self.checked:
            return
        found = self.kind.view(_UNITS[unit])[at] & self._pattern(marks, unit)
        if found.any():
            first = int(np.flatnonzero(found)[0])
            of = np.bitwise_or.reduce(found.reshape(-1)[first : first + 1].view(np.uint8))
            mark = next(m for m in _OVERWRITTEN if m & of)
            lane = first // at.shape[-1]
            raise Fault(
                f"shared memory at {int(np.asarray(address).reshape(-1)[lane]):#x} {does}, "
                + _OVERWRITTEN[mark],
                allowed="bytes whose copy was waited for, whose mbarrier was invalidated and, for bulk copies,"
                " whose stores were fenced",
                fix="check the address, and the wait, the mbarrier.inval or the fence before this instruction",
                lane=lane,
            )

    def _refuse(self, lane: int, address: np.ndarray, nbytes: int) -> None:
        at = int(address.reshape(-1)[lane])
        raise Fault(
            f"{nbytes} bytes of shared memory at {at:#x}",
            allowed=f"multiples of {nbytes} from {BASE:#x} to {BASE + self.size:#x}, the CTA's {self.size} bytes",
            fix="check the address, and the size of the launch's shared memory",
            lane=int(lane),
        )

    @staticmethod
    def _examine(found, proxy: str, address, nbytes: int) -> np.ndarray | None:
        """Which bytes are unwritten, bool [positions, nbytes], or None; a Fault for others that may not be read."""
        kinds = np.ascontiguousarray(found).view(np.uint8).reshape(-1, nbytes)
        for mark, what in _FORBIDDEN[proxy]:
            if (kinds & mark).any():
                lane, byte = (int(x[0]) for x in np.nonzero(kinds & mark))
                raise _fault(address, lane, byte, what)
        unwritten = kinds == 0
        return unwritten if unwritten.any() else None


_IN_FLIGHT = _FLYING, "whose data is still in flight: it is read before the wait for the copy"
_FORBIDDEN = {
    "generic": (_IN_FLIGHT, (_MBARRIER, "which is an mbarrier")),
    "async": (
        _IN_FLIGHT,
        (
            _UNFENCED,
            "which a store wrote and no fence.proxy.async has made visible to the async proxy",
        ),
    ),
}


_OVERWRITTEN = {
    _MBARRIER: "which is an mbarrier",
    _FLYING: "while a copy to it is in flight",
    _UNFENCED: "which a store wrote with no fence.proxy.async since",
}


def _fault(address, lane: int, byte: int, what: str) -> Fault:
    at = int(np.asarray(address).reshape(-1)[lane]) + byte
    return Fault(
        f"byte {at - BASE} of shared memory is read, {what}",
        allowed="bytes that were written, waited for and, for wgmma and bulk copies, fenced",
        fix="check the wait, its group count or parity, and the fence before this instruction",
        lane=lane,
    )
