"""Registers of the warps of several CTAs side by side, and groups of warps that stand at one instruction.

A register is an array [rows, 32]; row = warp * CTAs + CTA, so that one role's warps of all CTAs are a slice. Which rows
of a register are initialised is a bit set (a Python int), because asking that of an array would cost as much as the
instruction; rows that are initialised in part only have a bool array besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault

if TYPE_CHECKING:
    from sglang_aiter_moe.amdgpu.memory import Memory
    from sglang_aiter_moe.nvptx.asynchronous import Tasks
    from sglang_aiter_moe.nvptx.mbarrier import Barriers
    from sglang_aiter_moe.nvptx.named_barrier import NamedBarriers
    from sglang_aiter_moe.nvptx.races import Races
    from sglang_aiter_moe.nvptx.shared import Shared

LANES = 32
ALL_BYTES = 255
DTYPES = {"pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
POISON = {
    "pred": True, "b8": 0xA5, "b16": 0xA5A5, "b32": 0xA5A5A5A5, "b64": 0xA5A5A5A5_A5A5A5A5,
}  # fmt: skip


class State:
    """A batch of ``ctas`` CTAs of ``warps`` warps.

    Attributes:
        late: an asynchronous effect lands when its wait completes; else when it is issued.
        fp8_bits: of a sum of fp8 products (``matrix_sums``); None: all.
        follow: what nothing has written may be loaded from global memory and stored there, and stays unknown; else both
            are Faults.
        events: grows with everything that can end a wait; ``turns`` with phases of mbarriers that complete; ``writes``
            with what is stored to global memory.
        params: address of the parameters; ``specials``: special registers by name.
        live: bool [rows, 32], lanes that have not ended.
        unknown: bytes of the current instruction's result (bit i for byte i, uint8 [n, 32]) that come from what nothing
            has written, or None.
        seen: what a load that may be a spin has read before (``memory_ops``).
        reasons: an instruction's ``place`` -> what a warp that stands there waits for, for the report of a deadlock.
    """

    shared: Shared
    memory: Memory
    tasks: Tasks
    barriers: Barriers
    named: NamedBarriers
    races: Races | None = None

    def __init__(
        self, ctas: int, warps: int, registers: list[tuple[str, str]], *, checked: bool, late: bool
    ) -> None:
        """``registers``: (name, class) by slot; a class is a key of ``DTYPES``."""
        self.ctas, self.warps, self.rows = ctas, warps, ctas * warps
        self.registers, self.checked, self.late = registers, checked, late
        self.values: list[np.ndarray] = self._arrays()
        self.known = [0 if checked else (1 << self.rows) - 1] * len(registers)
        self.partial: dict[int, np.ndarray] = {}
        self.flying: dict[int, int] = {}
        self.events = self.writes = self.turns = 0
        self.follow = False
        self.fp8_bits: int | None = None
        self.params = np.uint64(0)
        self.specials: dict[str, np.ndarray] = {}
        self.clock = 0
        self.unknown: np.ndarray | None = None
        self.live = np.ones((self.rows, LANES), bool)
        self.seen: dict[tuple, np.ndarray] = {}
        self.reasons: dict[tuple, Callable[[], str]] = {}
        self._groups: dict[int, Group] = {}

    def _arrays(self) -> list[np.ndarray]:
        """One array a slot, filled with ``POISON``.

        Also where reads are checked: what nothing has written is computed with and stored to global memory as unknown
        (``follow``), so what a register holds must not be what an earlier launch left in recycled memory.
        """
        made: dict[str, list[np.ndarray]] = {}
        kinds = [kind for _, kind in self.registers]
        for kind in set(kinds):
            shape = (kinds.count(kind), self.rows, LANES)
            made[kind] = list(np.full(shape, POISON[kind], DTYPES[kind]))
            made[kind].reverse()
        return [made[kind].pop() for kind in kinds]

    def special(self, name: str, group: Group) -> np.ndarray:
        """A special register: a scalar, or an array that broadcasts to [n, 32]."""
        if name in ("%clock", "%clock64", "%globaltimer"):
            self.clock += 1
            return np.uint64(self.clock)
        value = self.specials[name]
        return value if value.ndim == 0 else value[group.rows]

    def event(self) -> None:
        """Something happened that a waiting warp may wait for."""
        self.events += 1

    def group(self, bits: int) -> Group:
        """The group of the rows whose bits are set, all lanes."""
        found = self._groups.get(bits)
        if found is None:
            found = self._groups[bits] = Group(self, bits)
        return found


class Group:
    """Warps that execute one instruction together."""

    __slots__ = ("_cta", "_ids", "_warp", "bits", "mask", "n", "rows", "state")

    def __init__(self, state: State, bits: int, mask: np.ndarray | None = None) -> None:
        self.state, self.bits, self.mask = state, bits, mask
        self._ids = self._cta = self._warp = None
        self.n = bits.bit_count()
        first = (bits & -bits).bit_length() - 1
        if bits >> first == (1 << self.n) - 1:
            self.rows: slice | np.ndarray = slice(first, first + self.n)
        else:
            self.rows = self.ids

    @property
    def ids(self) -> np.ndarray:
        """Rows, ascending [n]."""
        if self._ids is None:
            self._ids = np.flatnonzero(flags(self.bits, self.state.rows))
        return self._ids

    @property
    def cta(self) -> np.ndarray:
        """CTA of each row, counted in the batch [n]."""
        if self._cta is None:
            self._cta = self.ids % self.state.ctas
        return self._cta

    @property
    def warp(self) -> np.ndarray:
        """Warp of each row, counted in its CTA [n]."""
        if self._warp is None:
            self._warp = self.ids // self.state.ctas
        return self._warp

    @property
    def lanes(self) -> np.ndarray:
        """bool [n, 32]: lanes that act."""
        return np.ones((self.n, LANES), bool) if self.mask is None else self.mask

    def narrow(self, mask: np.ndarray) -> Group:
        """The same rows, only the lanes of ``mask`` [n, 32] that act already."""
        if self.mask is not None:
            mask = mask & self.mask
        elif mask.all():
            return self
        made = Group.__new__(Group)
        made.state, made.bits, made.n, made.rows = self.state, self.bits, self.n, self.rows
        made._ids, made._cta, made._warp, made.mask = self._ids, self._cta, self._warp, mask
        return made

    def subset(self, positions: np.ndarray) -> Group:
        """Fewer rows, by their positions in this group (ascending) or as bool [n]."""
        ids = self.ids[positions]
        bits = bits_of(ids)
        if bits == self.bits:
            return self
        if self.mask is None:
            return self.state.group(bits)
        return Group(self.state, bits, self.mask[positions])

    def get(self, slot: int) -> np.ndarray:
        """[n, 32], unchecked; may be a view of the register."""
        return self.state.values[slot][self.rows]

    def put(self, slot: int, value: np.ndarray) -> None:
        """Writes the lanes that act."""
        state = self.state
        if state.flying and state.flying.get(slot, 0) & self.bits:
            raise Fault(
                f"{state.registers[slot][0]} is written while a result for it is in flight",
                allowed="a wait for the asynchronous instruction first",
                fix="check the wait before this instruction",
                lane=0,
            )
        array = state.values[slot]
        if state.unknown is not None:
            self._put_unknown(slot)
        elif self.mask is None:
            array[self.rows] = value
            state.known[slot] |= self.bits
            return
        rows = self.rows
        if type(rows) is slice:
            np.copyto(array[rows], value, where=self.lanes)
        else:
            array[rows] = np.where(self.lanes, value, array[rows])
        if state.unknown is None and state.known[slot] & self.bits != self.bits:
            partial = self._partial(slot)
            here = partial[rows]
            here[self.lanes] = 0
            partial[rows] = here
            whole = ~here.any(1)
            if whole.any():
                state.known[slot] |= bits_of(self.ids[whole])

    def _partial(self, slot: int) -> np.ndarray:
        partial = self.state.partial.get(slot)
        if partial is None:
            shape = self.state.rows, LANES
            partial = self.state.partial[slot] = np.full(shape, ALL_BYTES, np.uint8)
        return partial

    def _put_unknown(self, slot: int) -> None:
        """Notes that the lanes whose sources were unknown get an unknown result."""
        state = self.state
        before = self.unknown_bytes(slot)
        after = np.where(self.lanes, state.unknown, before)
        self._partial(slot)[self.rows] = after
        whole = bits_of(self.ids[~after.any(1)])
        state.known[slot] = state.known[slot] & ~self.bits | whole

    def _among(self, bits: int) -> np.ndarray:
        """bool [n]: which of the group's rows are in a bit set."""
        return flags(bits, self.state.rows)[self.rows]

    def unknown_bytes(self, slot: int) -> np.ndarray:
        """uint8 [n, 32]: which bytes of a register nothing has written, bit i for byte i."""
        state = self.state
        found = self._partial(slot)[self.rows].copy()
        known = state.known[slot] & self.bits
        if known:
            found[self._among(known)] = 0
        return found

    def soften(self, slot: int, bytes_read: int = ALL_BYTES) -> None:
        """As ``check``, but lanes that nothing has written make what the instruction writes unknown."""
        bad, flying = self._missing(slot, bytes_read)
        if flying:
            self.check(slot)
        if bad is not None:
            state = self.state
            bad = np.where(bad, np.uint8(ALL_BYTES), np.uint8(0))
            state.unknown = bad if state.unknown is None else state.unknown | bad

    def check(self, slot: int, bytes_read: int = ALL_BYTES) -> None:
        """Raises a Fault unless every lane that acts has been written."""
        bad, flying = self._missing(slot, bytes_read)
        if bad is None:
            return
        name = self.state.registers[slot][0]
        raise Fault(
            f"{name} is read while a result for it is in flight"
            if flying
            else f"{name} is read, and nothing has written it, or it was computed from what nothing has written",
            allowed="registers that the kernel wrote, and whose asynchronous results were waited for",
            fix="check the wait, the predicate or the branch before it",
            lane=int(np.flatnonzero(bad)[0]),
        )

    def _missing(self, slot: int, bytes_read: int) -> tuple[np.ndarray | None, int]:
        """(lanes that act and lack a byte, or None; rows for which a result is in flight)."""
        state = self.state
        missing = self.bits & ~state.known[slot]
        if not missing or not state.checked:
            return None, 0
        flying = state.flying.get(slot, 0) & missing
        if flying:
            bad = np.zeros((self.n, LANES), bool)
            bad[self._among(flying)] = True
        else:
            bad = self.unknown_bytes(slot) & np.uint8(bytes_read) != 0
        bad &= self.lanes
        return (bad if bad.any() else None), flying

    def fly(self, slot: int) -> None:
        """A result is on its way to this register: reading or writing it is a Fault until ``land``."""
        state = self.state
        state.known[slot] &= ~self.bits
        state.flying[slot] = state.flying.get(slot, 0) | self.bits

    def land(self, slot: int) -> None:
        """The results have arrived; call it before ``put``."""
        state = self.state
        left = state.flying.get(slot, 0) & ~self.bits
        if left:
            state.flying[slot] = left
        else:
            state.flying.pop(slot, None)


def flags(bits: int, count: int) -> np.ndarray:
    """bool [count] of a bit set."""
    raw = np.frombuffer(bits.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").view(bool)


def bits_of(ids: np.ndarray) -> int:
    """The bit set of some numbers."""
    if not ids.size:
        return 0
    marked = np.zeros(int(ids.max()) + 1, bool)
    marked[ids] = True
    return int.from_bytes(np.packbits(marked, bitorder="little").tobytes(), "little")
