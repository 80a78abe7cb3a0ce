"""Named barriers of CTAs: 16 each, with the number of threads that meet there.

Source: PTX ISA 8.7, "bar, barrier".
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx.state import LANES, Group, State

BARRIERS = 16
_FREE, _WAITS, _RELEASED = 0, 1, 2


class NamedBarriers:
    """Who waits at which barrier of a batch's CTAs."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._stage = np.zeros((state.rows, LANES), np.uint8)
        self._at = np.zeros((state.rows, LANES), np.int64)
        """CTA * 16 + barrier where a lane waits."""
        self._arrived = np.zeros(state.ctas * BARRIERS, np.int64)
        self._expected = np.zeros(state.ctas * BARRIERS, np.int64)

    def meet(self, g: Group, number, count, wait: bool = True) -> np.ndarray | None:
        """Lanes arrive at barrier ``number`` [n, 32] for ``count`` threads; returns those that pass, None for all."""
        lanes, stage = g.lanes, self._stage[g.rows]
        new = lanes & (stage == _FREE)
        if new.any():
            self._arrive(g, new, number, count, wait)
            if not wait:
                return None
            stage = self._stage[g.rows]
        passed = (stage == _RELEASED) & lanes
        if passed.any():
            if self._state.races is not None:
                some = passed.any(1)
                keys = self._at[g.rows][some]
                first = passed[some].argmax(1)
                self._state.races.leave_named(g.ids[some], keys[np.arange(len(keys)), first])
            self._stage[g.rows] = np.where(passed, _FREE, stage)
            if (passed | ~lanes).all():
                return None
        return passed

    def _arrive(self, g: Group, new: np.ndarray, number, count, wait: bool) -> None:
        key = np.broadcast_to(g.cta[:, None] * BARRIERS + number, new.shape)
        count = np.broadcast_to(count, new.shape)
        bad = new & ((count & (LANES - 1) != 0) | (count <= 0))
        bad |= new & (np.broadcast_to(number, new.shape) >= BARRIERS)
        if bad.any():
            lane = int(np.flatnonzero(bad)[0])
            raise _fault(f"is given {int(count.reshape(-1)[lane])} threads", lane)
        if self._state.races is not None:
            some = new.any(1)
            self._state.races.arrive_named(g.ids[some], key[some, new[some].argmax(1)])
        arriving, threads = key[new], count[new]
        keys, first, arrived = np.unique(arriving, return_index=True, return_counts=True)
        fresh = self._arrived[keys] == 0
        self._expected[keys[fresh]] = threads[first[fresh]]
        other = threads != self._expected[arriving]
        if other.any():
            k, lane = int(arriving[other][0]), int(np.flatnonzero(new)[other][0])
            counts = sorted({int(threads[other][0]), int(self._expected[k])})
            raise _fault(f"{k % BARRIERS} is used with {counts} threads", lane)
        self._arrived[keys] += arrived
        over = self._arrived[keys] > self._expected[keys]
        if over.any():
            k = int(keys[over][0])
            raise _fault(
                f"{k % BARRIERS} gets {int(self._arrived[k])} threads, and expects {int(self._expected[k])}",
                int(np.flatnonzero(new & (key == k))[0]),
            )
        if wait:
            self._stage[g.rows] = np.where(new, _WAITS, self._stage[g.rows])
            self._at[g.rows] = np.where(new, key, self._at[g.rows])
        full = keys[self._arrived[keys] == self._expected[keys]]
        if full.size:
            self._arrived[full] = 0
            here = (self._stage == _WAITS) & np.isin(self._at, full)
            self._stage[here] = _RELEASED
            self._state.event()

    def describe(self) -> str:
        """Which barriers are waited for, and how many have come."""
        told = []
        for k in np.flatnonzero(self._arrived):
            told.append(
                f"barrier {k % BARRIERS} of CTA {k // BARRIERS} of the batch has"
                f" {self._arrived[k]} of {self._expected[k]} threads"
            )
        return "; ".join(told[:6])


def _fault(what: str, lane: int) -> Fault:
    return Fault(
        f"a named barrier {what}",
        allowed=f"barriers 0 to {BARRIERS - 1}, and one number of threads, a multiple of 32, for all that meet",
        fix="check the barrier's number and count at every place that uses it",
        lane=lane,
    )
