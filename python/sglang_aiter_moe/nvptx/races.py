"""Shared memory that one warp writes and another one reads with nothing between them that orders the two.

Each warp has a clock for every warp of its CTA: how far it knows that one to have come. A barrier or an mbarrier
carries clocks from those who arrive to those who wait: an mbarrier's phase when it completes. A byte remembers who
wrote it last and who read it last, and when. A load of what another warp wrote, and a store over what another warp
read, need to know of it.

What a copy that reports to an mbarrier brings is written by that one, which has a clock like a warp's: a warp knows of
it that waited for the mbarrier, or met one that did. ``mbarrier.init`` and ``inval`` store; who uses the object loads.
Atomic operations of several warps do not need to know of each other; loads and stores need to know of the last one.

Followed are ld, st, atom, red, ldmatrix, stmatrix, what ``wgmma`` reads and what copies write; not two stores to one
byte by warps (they write what they hold in common), and of several readers only the last. A product reads where it is
issued: a barrier behind that lets others store over its operand, though it may go on until its wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx.named_barrier import BARRIERS
from sglang_aiter_moe.nvptx.shared import BASE
from sglang_aiter_moe.nvptx.state import LANES, Group, State

NOBODY = 255
_PENDING, _DONE = 0, 1
"""What an mbarrier knows: from the arrivals and copies so far, and of it what a completed phase has handed on."""


class Races:
    """The clocks of a batch's warps, and of its shared memory."""

    def __init__(self, state: State) -> None:
        self._state = state
        size = state.shared.data.size
        self._writer, self._written = np.full(size, NOBODY, np.uint8), np.zeros(size, np.int32)
        self._reader, self._read = np.full(size, NOBODY, np.uint8), np.zeros(size, np.int32)
        self._changer, self._changed = np.full(size, NOBODY, np.uint8), np.zeros(size, np.int32)
        self._atomics = False
        rows = np.arange(state.rows)
        self._own = (rows // state.ctas).astype(np.uint8)
        self._clocks = np.zeros((state.rows, state.warps), np.int32)
        self._clocks[rows, self._own] = 1
        self._named = np.zeros((state.ctas * BARRIERS, state.warps), np.int32)
        self._mbarriers: dict[tuple[int, int], np.ndarray] = {}
        self._agents: dict[int, int] = {}
        """Address of an mbarrier whose copies have landed -> its column of the clocks, behind the warps'."""
        self._landings = 0
        self._carrier: tuple[int, int] | None = None
        """For whom stores happen, and when: an mbarrier while copies land that report to it, else their warp."""

    def _tick(self, rows: np.ndarray) -> None:
        self._clocks[rows, self._own[rows]] += 1

    def arrive_named(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Rows arrive at barriers (CTA * 16 + number)."""
        np.maximum.at(self._named, keys, self._clocks[rows])
        self._tick(rows)

    def leave_named(self, rows: np.ndarray, keys: np.ndarray) -> None:
        self._clocks[rows] = np.maximum(self._clocks[rows], self._named[keys])

    def arrive(self, cta: int, address: int, row: int) -> None:
        """A row arrives at an mbarrier."""
        known = self._known(cta, address)[_PENDING]
        np.maximum(known, self._clocks[row], out=known)
        self._tick(np.array([row]))

    def turn(self, cta: int, address: int) -> None:
        """A phase of an mbarrier has completed."""
        known = self._known(cta, address)
        np.maximum(known[_DONE], known[_PENDING], out=known[_DONE])

    def land(self, cta: int, address: int, at: np.ndarray) -> None:
        """A copy that reports to an mbarrier has brought the bytes ``at`` (positions in the arrays)."""
        agent = self._agent(address)
        self._landings += 1
        self._known(cta, address)[_PENDING, agent] = self._landings
        self._writer[at], self._written[at] = agent, self._landings
        self._reader[at] = self._changer[at] = NOBODY

    def carried(self, cta: int, address: int, effect: Callable[[], None]) -> Callable[[], None]:
        """``effect``, copies of a warp that report to an mbarrier, so that their stores count as the mbarrier's."""

        def run() -> None:
            agent = self._agent(address)
            self._landings += 1
            self._known(cta, address)[_PENDING, agent] = self._landings
            self._carrier = agent, self._landings
            try:
                effect()
            finally:
                self._carrier = None

        return run

    def use(self, cta: int, address: int, rows: np.ndarray, lanes: np.ndarray) -> None:
        """Rows arrive at an mbarrier, wait for it or give it a copy, by lanes of the group [rows]: a load of it."""
        at = np.full((len(rows), 1), address - BASE + cta * self._state.shared.stride)
        bad = self._unknown(rows, at, self._writer, self._written)
        self._check(lanes, at, bad, "is used as an mbarrier", self._writer, "initialised")
        self._reader[at] = self._own[rows][:, None]
        self._read[at] = self._clocks[rows, self._own[rows]][:, None]

    def forget(self, cta: int, address: int) -> None:
        """An mbarrier is new: what another one at its address knew is nothing to it."""
        self._mbarriers.pop((cta, address), None)

    def _known(self, cta: int, address: int) -> np.ndarray:
        """[2, clocks] of an mbarrier."""
        found = self._mbarriers.get((cta, address))
        if found is None:
            found = np.zeros((2, self._clocks.shape[1]), np.int32)
            self._mbarriers[cta, address] = found
        return found

    def _agent(self, address: int) -> int:
        found = self._agents.get(address)
        if found is None:
            found = min(self._state.warps + len(self._agents), NOBODY - 1)
            self._agents[address] = found
            if found == self._clocks.shape[1]:
                wider = (0, 0), (0, 1)
                self._clocks, self._named = np.pad(self._clocks, wider), np.pad(self._named, wider)
                self._mbarriers = {k: np.pad(v, wider) for k, v in self._mbarriers.items()}
        return found

    def leave(self, cta: int, address: int, rows: np.ndarray) -> None:
        """Rows pass a wait for an mbarrier."""
        known = self._mbarriers.get((cta, address))
        if known is not None:
            self._clocks[rows] = np.maximum(self._clocks[rows], known[_DONE])

    def _places(self, g: Group, address: np.ndarray, nbytes: int) -> tuple[np.ndarray, ...]:
        """Of lanes that act: their positions, rows, and bytes [lanes, nbytes]."""
        lanes = np.arange(g.n * LANES) if g.mask is None else np.flatnonzero(g.mask)
        position = lanes // LANES
        at = address.reshape(-1)[lanes].astype(np.int64) - BASE
        at = at + g.cta[position] * self._state.shared.stride
        return lanes, g.ids[position], at[:, None] + np.arange(nbytes)

    def _unknown(self, rows, at, who: np.ndarray, when: np.ndarray) -> np.ndarray:
        """bool [lanes, nbytes]: where another warp did something that a row does not know of."""
        other = who[at]
        mine = self._own[rows][:, None]
        foreign = (other != NOBODY) & (other != mine)
        if not foreign.any():
            return foreign
        known = self._clocks[rows[:, None], np.where(foreign, other, mine)]
        return foreign & (known < when[at])

    def load(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """Raises a Fault for what another warp wrote, unknown to the reader."""
        lanes, rows, at = self._places(g, address, nbytes)
        self._after_write(lanes, rows, at, "is read")
        self._after_atomic(lanes, rows, at, "is read")
        self._reader[at] = self._own[rows][:, None]
        self._read[at] = self._clocks[rows, self._own[rows]][:, None]

    def store(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """Raises a Fault for what another warp read, unknown to the writer."""
        lanes, rows, at = self._places(g, address, nbytes)
        self._after_read(lanes, rows, at, "is overwritten")
        self._after_atomic(lanes, rows, at, "is overwritten")
        if self._agents:
            bad = self._unknown(rows, at, self._writer, self._written)
            bad &= self._writer[at] >= self._state.warps
            self._check(lanes, at, bad, "is overwritten", self._writer, "wrote")
        if self._carrier is not None:
            self._writer[at], self._written[at] = self._carrier
        else:
            self._writer[at] = self._own[rows][:, None]
            self._written[at] = self._clocks[rows, self._own[rows]][:, None]
        self._reader[at] = self._changer[at] = NOBODY

    def atomic(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """A Fault for what another warp wrote or read, unknown to this one, other than by an atomic operation."""
        lanes, rows, at = self._places(g, address, nbytes)
        self._after_write(lanes, rows, at, "is changed")
        self._after_read(lanes, rows, at, "is changed")
        self._atomics = True
        self._changer[at] = self._own[rows][:, None]
        self._changed[at] = self._clocks[rows, self._own[rows]][:, None]
        self._reader[at] = NOBODY

    def before_store(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """As ``store`` for a copy that begins: nothing is written yet."""
        lanes, rows, at = self._places(g, address, nbytes)
        self._after_read(lanes, rows, at, "is given to a copy")
        self._after_atomic(lanes, rows, at, "is given to a copy")

    def before_copy(self, row: int, lane: int, at: np.ndarray) -> None:
        """A row's lane ``lane`` of the group begins a tensor copy to bytes ``at`` [...] (positions in the arrays)."""
        lanes, rows, at = np.array([lane]), np.array([row]), at.reshape(1, -1)
        self._after_read(lanes, rows, at, "is given to a copy")
        self._after_write(lanes, rows, at, "is given to a copy")
        self._after_atomic(lanes, rows, at, "is given to a copy")

    def matrix(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """Each row [n] reads an operand of a product: pieces of ``nbytes`` at ``address`` [n, pieces]."""
        at = address.astype(np.int64) - BASE + g.cta[:, None] * self._state.shared.stride
        ids = g.ids
        self._after_write(np.arange(g.n) * LANES, ids, at, "is read by a product")
        self._after_atomic(np.arange(g.n) * LANES, ids, at, "is read by a product")
        every = at[..., None] + np.arange(nbytes)
        self._reader[every] = self._own[ids][:, None, None]
        self._read[every] = self._clocks[ids, self._own[ids]][:, None, None]

    def _after_write(self, lanes, rows, at, what: str) -> None:
        bad = self._unknown(rows, at, self._writer, self._written)
        self._check(lanes, at, bad, what, self._writer, "wrote")

    def _after_read(self, lanes, rows, at, what: str) -> None:
        bad = self._unknown(rows, at, self._reader, self._read)
        self._check(lanes, at, bad, what, self._reader, "read")

    def _after_atomic(self, lanes, rows, at, what: str) -> None:
        if self._atomics:
            bad = self._unknown(rows, at, self._changer, self._changed)
            self._check(lanes, at, bad, what, self._changer, "changed")

    def _check(self, lanes, at, bad: np.ndarray, what: str, who: np.ndarray, did: str) -> None:
        if not bad.any():
            return
        i, byte = (int(x[0]) for x in np.nonzero(bad))
        place = int(at[i, byte])
        before = f"which warp {who[place]} {did}, with no barrier between the two"
        if who[place] >= self._state.warps:
            before = "which a copy brought for whose mbarrier this warp has not waited"
        raise Fault(
            f"byte {place % self._state.shared.stride} of shared memory {what}, {before}",
            allowed="a bar.sync or an mbarrier that the one arrives at and the other waits for",
            fix="check the barrier before this instruction, and who takes part",
            lane=int(lanes[i]),
        )
