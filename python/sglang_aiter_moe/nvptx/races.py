"""Shared memory that one warp writes and another one reads with nothing between them that orders the two.

Each warp has a clock for every warp of its CTA: how far it knows that one to have come. A barrier or an mbarrier
carries clocks from those who arrive to those who wait. A byte remembers who wrote it last and who read it last, and
when. A load of what another warp wrote, and a store over what another warp read, need to know of it.

Followed are ld, st, ldmatrix, stmatrix, what ``wgmma`` reads and what copies write; not two stores to one byte (warps
write what they hold in common), and of several readers only the last. A product reads where it is issued: a barrier
behind that lets others store over its operand, though it may go on until its wait.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx.named_barrier import BARRIERS
from sglang_aiter_moe.nvptx.shared import BASE
from sglang_aiter_moe.nvptx.state import LANES, Group, State

NOBODY = 255


class Races:
    """The clocks of a batch's warps, and of its shared memory."""

    def __init__(self, state: State) -> None:
        self._state = state
        size = state.shared.data.size
        self._writer, self._written = np.full(size, NOBODY, np.uint8), np.zeros(size, np.int32)
        self._reader, self._read = np.full(size, NOBODY, np.uint8), np.zeros(size, np.int32)
        rows = np.arange(state.rows)
        self._own = (rows // state.ctas).astype(np.uint8)
        self._clocks = np.zeros((state.rows, state.warps), np.int32)
        self._clocks[rows, self._own] = 1
        self._named = np.zeros((state.ctas * BARRIERS, state.warps), np.int32)
        self._mbarriers: dict[tuple[int, int], np.ndarray] = {}

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
        known = self._mbarriers.setdefault((cta, address), np.zeros(self._state.warps, np.int32))
        np.maximum(known, self._clocks[row], out=known)
        self._tick(np.array([row]))

    def leave(self, cta: int, address: int, rows: np.ndarray) -> None:
        """Rows pass a wait for an mbarrier."""
        known = self._mbarriers.get((cta, address))
        if known is not None:
            self._clocks[rows] = np.maximum(self._clocks[rows], known)

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
        self._check(
            lanes,
            at,
            self._unknown(rows, at, self._writer, self._written),
            "is read",
            self._writer,
            "wrote",
        )
        self._reader[at] = self._own[rows][:, None]
        self._read[at] = self._clocks[rows, self._own[rows]][:, None]

    def store(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """Raises a Fault for what another warp read, unknown to the writer."""
        lanes, rows, at = self._places(g, address, nbytes)
        self._check(
            lanes,
            at,
            self._unknown(rows, at, self._reader, self._read),
            "is overwritten",
            self._reader,
            "read",
        )
        self._writer[at] = self._own[rows][:, None]
        self._written[at] = self._clocks[rows, self._own[rows]][:, None]
        self._reader[at] = NOBODY

    def before_store(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """As ``store`` for a copy that begins: nothing is written yet."""
        lanes, rows, at = self._places(g, address, nbytes)
        bad = self._unknown(rows, at, self._reader, self._read)
        self._check(lanes, at, bad, "is given to a copy", self._reader, "read")

    def before_copy(self, row: int, lane: int, at: np.ndarray) -> None:
        """A row's lane ``lane`` of the group begins a tensor copy to bytes ``at`` [...] (positions in the arrays)."""
        at = at.reshape(1, -1)
        bad = self._unknown(np.array([row]), at, self._reader, self._read)
        self._check(np.array([lane]), at, bad, "is given to a copy", self._reader, "read")

    def matrix(self, g: Group, address: np.ndarray, nbytes: int) -> None:
        """Each row [n] reads an operand of a product: pieces of ``nbytes`` at ``address`` [n, pieces]."""
        at = address.astype(np.int64) - BASE + g.cta[:, None] * self._state.shared.stride
        ids = g.ids
        bad = self._unknown(ids, at, self._writer, self._written)
        self._check(np.arange(g.n) * LANES, at, bad, "is read by a product", self._writer, "wrote")
        every = at[..., None] + np.arange(nbytes)
        self._reader[every] = self._own[ids][:, None, None]
        self._read[every] = self._clocks[ids, self._own[ids]][:, None, None]

    def forget(self, at: np.ndarray) -> None:
        """Bytes (positions in the arrays) get a new content that waits order."""
        self._writer[at] = self._reader[at] = NOBODY

    def _check(self, lanes, at, bad: np.ndarray, what: str, who: np.ndarray, did: str) -> None:
        if not bad.any():
            return
        i, byte = (int(x[0]) for x in np.nonzero(bad))
        place = int(at[i, byte])
        raise Fault(
            f"byte {place % self._state.shared.stride} of shared memory {what}, which warp {who[place]} {did}, with no"
            " barrier between the two",
            allowed="a bar.sync or an mbarrier that the one arrives at and the other waits for",
            fix="check the barrier before this instruction, and who takes part",
            lane=int(lanes[i]),
        )
