"""mbarrier objects: phases, arrivals, and the bytes of asynchronous copies that a phase expects.

Source: PTX ISA 8.7, "Parallel Synchronization and Communication Instructions: mbarrier". A phase completes when no
arrival and no byte is pending. A copy's effect that is attached to one lands in late mode when somebody waits for a
phase to which all arrivals have come, and in early mode at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx.state import State


@dataclass
class Mbarrier:
    """``expected`` arrivals a phase; ``pending`` arrivals and ``bytes`` are left of phase number ``phase``."""

    expected: int
    pending: int
    phase: int = 0
    bytes: int = 0
    copies: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"phase {self.phase} of it lacks {self.pending} of {self.expected} arrivals and {self.bytes} bytes,"
            f" {len(self.copies)} copies have not landed"
        )


class Barriers:
    """The mbarriers of a batch, by CTA and shared address."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._made: dict[tuple[int, int], Mbarrier] = {}

    def init(self, cta: int, address: int, count: int) -> None:
        """A new object, phase 0.

        Raises:
            Fault: the object exists (PTX ISA 8.7, "mbarrier.init": undefined without an ``mbarrier.inval``).
        """
        old = self._made.get((cta, address))
        if old is not None:
            raise _fault(address, f"is initialised, and there is one with no mbarrier.inval: {old}")
        if not 1 <= count < 1 << 20:
            raise _fault(address, f"is initialised for {count} arrivals")
        self._made[cta, address] = Mbarrier(count, count)
        if self._state.races is not None:
            self._state.races.forget(cta, address)

    def inval(self, cta: int, address: int) -> None:
        """The object ends; its bytes are ordinary again."""
        found = self.at(cta, address)
        if found.copies or found.bytes:
            raise _fault(address, f"is invalidated while in use: {found}")
        del self._made[cta, address]

    def at(self, cta: int, address: int) -> Mbarrier:
        """Raises a Fault where there is none."""
        found = self._made.get((cta, address))
        if found is None:
            raise _fault(address, "is used, and no mbarrier.init made it")
        return found

    def arrive(self, cta: int, address: int, count: int = 1, expect: int = 0) -> None:
        """``expect`` bytes more are awaited, then ``count`` arrivals happen."""
        found = self.at(cta, address)
        if found.pending < count:
            raise _fault(address, f"gets {count} arrivals more than its phase expects: {found}")
        found.bytes += expect
        found.pending -= count
        self._turn(cta, address, found)

    def expect(self, cta: int, address: int, nbytes: int) -> None:
        """``nbytes`` more are awaited in this phase."""
        self.at(cta, address).bytes += nbytes

    def attach(self, cta: int, address: int, nbytes: int, effect: Callable[[], None]) -> None:
        """A copy of ``nbytes`` that reports to the mbarrier: ``effect`` is what it does.

        Raises:
            Fault: no mbarrier is there, or the async proxy has not seen its initialisation.
        """
        found = self.at(cta, address)
        self._state.shared.load(np.int64(cta), np.array([address]), 8, proxy="async")
        if self._state.late:
            found.copies.append((nbytes, effect))
            self._state.event()
            return
        effect()
        found.bytes -= nbytes
        self._turn(cta, address, found)

    def attach_arrivals(
        self, cta: int, address: int, count: int, effect: Callable[[], None] | None
    ) -> None:
        """``count`` arrivals that happen when ``effect``, copies by ``cp.async``, has; None: it has already."""
        if effect is not None:
            self.at(cta, address).copies.append((0, effect))
        self.arrive(cta, address, count)

    def complete(self, cta: int, address: int, parity: int) -> bool:
        """Whether the phase with this parity has completed; lands copies if that is what it takes."""
        found = self.at(cta, address)
        if found.phase & 1 != parity:
            return True
        if found.pending or not found.copies:
            return False
        copies, found.copies = found.copies, []
        for nbytes, effect in copies:
            effect()
            found.bytes -= nbytes
        self._turn(cta, address, found)
        self._state.event()
        return found.phase & 1 != parity

    def _turn(self, cta: int, address: int, found: Mbarrier) -> None:
        if not found.pending and not found.bytes and not found.copies:
            if self._state.races is not None:
                self._state.races.turn(cta, address)
            found.phase += 1
            self._state.turns += 1
            found.pending = found.expected
            self._state.event()


def _fault(address: int, what: str) -> Fault:
    return Fault(
        f"the mbarrier at {address:#x} {what}",
        allowed="mbarrier.init once, then a phase's arrivals and bytes as announced",
        fix="check counts, bytes and addresses of the mbarrier",
    )
