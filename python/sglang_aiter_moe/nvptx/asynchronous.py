"""Effects that happen later than their instruction: the groups of cp.async and of wgmma.

A row (warp) has for each kind a list of effects that it issued and not committed, and a queue of committed groups.
In late mode ``wait`` runs the effects of the groups it waits for, oldest first, for the rows that wait and for nobody
else; in early mode an effect runs when it is issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx.state import LANES, Group, State


@dataclass
class _Effect:
    number: int
    group: Group
    run: Callable[[Group], None]


class Tasks:
    """All rows' effects of a batch. ``kind`` is any text: "cp.async", "wgmma"."""

    def __init__(self, state: State) -> None:
        self._late = state.late
        self._open: dict[str, list[list[_Effect]]] = {}
        self._committed: dict[str, list[deque[list[_Effect]]]] = {}
        self._rows, self._issued = state.rows, 0

    def _queues(self, kind: str):
        if kind not in self._open:
            self._open[kind] = [[] for _ in range(self._rows)]
            self._committed[kind] = [deque() for _ in range(self._rows)]
        return self._open[kind], self._committed[kind]

    def issue(self, kind: str, group: Group, effect: Callable[[Group], None]) -> None:
        """Registers ``effect`` in the open group of each of the group's rows."""
        if not self._late:
            effect(group)
            return
        self._issued += 1
        made = _Effect(self._issued, group, effect)
        opened, _ = self._queues(kind)
        for row in group.ids.tolist():
            opened[row].append(made)

    def commit(self, kind: str, group: Group) -> None:
        """What each row has issued since its last commit becomes a group, also when it is nothing."""
        if not self._late:
            return
        _whole_warps(kind, group)
        opened, committed = self._queues(kind)
        for row in group.ids.tolist():
            committed[row].append(opened[row])
            opened[row] = []

    def wait(self, kind: str, group: Group, at_most: int) -> None:
        """Lands the oldest groups of each row until ``at_most`` are pending."""
        if not self._late:
            return
        _whole_warps(kind, group)
        _, committed = self._queues(kind)
        effects: dict[int, tuple[_Effect, list[int]]] = {}
        for row in group.ids.tolist():
            queue = committed[row]
            while len(queue) > at_most:
                for effect in queue.popleft():
                    effects.setdefault(effect.number, (effect, []))[1].append(row)
        for number in sorted(effects):
            effect, rows = effects[number]
            positions = np.searchsorted(effect.group.ids, rows)
            effect.run(effect.group.subset(positions))
            effect.group.state.unknown = None

    def take(self, kind: str, group: Group) -> dict[int, Callable[[], None]]:
        """What each row has issued since its last commit, for somebody else to land; nothing in early mode.

        Raises:
            Fault: a row has committed groups that it has not waited for, which would have to come too.
        """
        _whole_warps(kind, group)
        if not self._late:
            return {}
        opened, committed = self._queues(kind)
        taken = {}
        for position, row in enumerate(group.ids.tolist()):
            if committed[row]:
                raise Fault(
                    f"{kind} operations report to an mbarrier while committed groups of them are pending",
                    allowed="one of both: they are not modelled together",
                    fix="wait for the groups first",
                    lane=position * LANES,
                )
            effects, opened[row] = opened[row], []

            def land(effects=effects, row=row) -> None:
                for effect in effects:
                    effect.run(effect.group.subset(np.searchsorted(effect.group.ids, [row])))
                    effect.group.state.unknown = None

            if effects:
                taken[row] = land
        return taken

    def pending(self, kind: str, row: int) -> int:
        """Groups of a row that have not landed."""
        return len(self._queues(kind)[1][row])


def _whole_warps(kind: str, group: Group) -> None:
    if group.mask is not None and not group.mask.all():
        raise Fault(
            f"a part of a warp's lanes commits {kind} operations or waits for them",
            allowed="whole warps: groups of single lanes are not modelled",
            fix="check the branch or the guard before it",
            lane=int(np.flatnonzero(~group.mask)[0]),
        )
