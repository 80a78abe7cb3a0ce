"""Which parts of a product's result come from what nothing has written.

Kernels multiply rows and columns that stand for no token, or for weights that a program does not have, and drop what
comes out. A row of A, a column of B or an element of the accumulator that is unknown makes its row, its column or its
element of the result unknown, and nothing else.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.nvptx.state import LANES, Group, State

_ALL = np.uint8(255)
U8 = np.uint8


class Doubts:
    """Of one accumulator: uint8 [rows, 32, registers], 255 where the product so far is unknown; None: nowhere."""

    def __init__(self, target: list[int]) -> None:
        self._target = target
        self._found: np.ndarray | None = None

    @staticmethod
    def of(state: State, target: list[int]) -> Doubts:
        kept = state.__dict__.setdefault("doubts", {})
        if target[0] not in kept:
            kept[target[0]] = Doubts(target)
        return kept[target[0]]

    def at_issue(self, g: Group, settled: np.ndarray) -> np.ndarray | None:
        """Notes what is unknown in the accumulator of the rows that are ``settled`` (bool [n]: added to, and no
        product is on its way there), and takes what reading A has left in ``state.unknown``.

        Returns:
            Rows of the result, as uint8 [n, 32], whose row of A is unknown; None: none.
        """
        state = g.state
        unknown, state.unknown = state.unknown, None
        rows = None
        if unknown is not None:
            of_row = unknown.reshape(g.n, 8, 4).any(-1)
            rows = np.repeat(np.where(of_row, _ALL, U8(0)), 4, axis=1)
        if not settled.any():
            return rows
        part = g.subset(settled)
        if self._found is not None:
            self._found[part.ids] = 0
        for i, slot in enumerate(self._target):
            part.soften(slot)
            if state.unknown is not None:
                self._all(state)[part.ids, :, i] = np.where(state.unknown != 0, _ALL, U8(0))
                state.unknown = None
        return rows

    def at_effect(
        self,
        rows: Group,
        adds: np.ndarray,
        of_a: np.ndarray | None,
        of_b: np.ndarray | None,
    ) -> np.ndarray | None:
        """What is unknown in the result of ``rows``: uint8 [n, 32, registers], or None.

        Args:
            adds: bool [n], rows whose accumulator is added to.
            of_a: as ``at_issue`` gave it; ``of_b``: bool [n, columns], unknown columns of B.
        """
        if of_a is None and of_b is None and self._found is None:
            return None
        found = np.zeros((rows.n, LANES, len(self._target)), U8)
        if self._found is not None:
            found |= np.where(adds[:, None, None], self._found[rows.ids], U8(0))
        if of_a is not None:
            found |= of_a[:, :, None]
        if of_b is not None:
            lane, register = np.indices((LANES, len(self._target)))
            columns = 8 * (register // 4) + 2 * (lane % 4) + register % 2
            found |= np.where(of_b[:, columns], _ALL, U8(0))
        self._all(rows.state)[rows.ids] = found
        return found

    def _all(self, state: State) -> np.ndarray:
        if self._found is None:
            self._found = np.zeros((state.rows, LANES, len(self._target)), U8)
        return self._found
