"""Registers of many waves side by side, and which of their lanes act.

A vector register is a uint32 array [waves, 64], a scalar register one of [waves]. Arrays are never changed in place: a
write makes a new one, so two registers may share an array. ``Batch.active`` says which waves are at the instruction
that is executed; lanes act where their wave does and their bit of EXEC is set.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault

LANES = 64
VCC, M0, EXEC = 106, 124, 126
SGPRS = 128


class Batch:
    """State of ``waves`` waves, ``waves_a_group`` of each workgroup one after another."""

    def __init__(
        self, waves: int, waves_a_group: int, vgprs: int, agprs: int, lds_bytes: int, checked: bool
    ) -> None:
        self.waves, self.waves_a_group, self.lds_bytes = waves, waves_a_group, lds_bytes
        self.checked = checked
        nothing, nobody = (
            np.full((waves, LANES), 0xA5A5A5A5, np.uint32),
            np.full(waves, 0xA5A5A5A5, np.uint32),
        )
        self.v, self.a, self.s = [nothing] * vgprs, [nothing] * agprs, [nobody] * SGPRS
        # True: every lane is initialised; False: none is; else a bool array.
        known = not checked
        self.v_known: list = [known] * vgprs
        self.a_known: list = [known] * agprs
        self.s_known: list = [known] * SGPRS
        self._scc, self._scc_known = np.zeros(waves, bool), known
        self.active: np.ndarray | None = None
        self.mask = np.ones((waves, LANES), bool)
        self.full = True
        self._bits: dict[int, tuple] = {}
        groups = waves // waves_a_group
        # Room for the widest access behind the last byte.
        self.lds_stride = -(-lds_bytes // 16) * 16 + 16
        self.lds = np.full(groups * self.lds_stride, 0xA5, np.uint8)
        self.lds_known = np.full(groups * self.lds_stride, known, np.uint8)
        self.lds_sure: set[tuple[int, int]] = set()  # spans that are written in every workgroup
        self.lds_base = (
            (np.arange(waves, dtype=np.uint32) // waves_a_group) * np.uint32(self.lds_stride)
        )[:, None]
        self.memory = None
        # The private memory of each lane: its size, and where it is (uint64 [waves, 64]).
        self.scratch_bytes, self.scratch_at = 0, np.zeros((waves, LANES), np.uint64)
        everyone = np.full(waves, 0xFFFFFFFF, np.uint32)
        self.set_s64(EXEC, everyone, everyone)

    # Scalar registers.

    def set_s(self, i: int, value) -> None:
        self._put_s(i, value)
        if i >= EXEC:
            self.refresh()

    def _put_s(self, i: int, value) -> None:
        if np.ndim(value) == 0:
            value = np.full(self.waves, value, np.uint32)
        if self.active is None:
            self.s[i], self.s_known[i] = value, True
        else:
            self.s[i] = np.where(self.active, value, self.s[i])
            if self.s_known[i] is not True:
                self.s_known[i] = self.active | self.s_known[i]

    def set_s64(self, i: int, low, high) -> None:
        self._put_s(i, low)
        self._put_s(i + 1, high)
        if i >= EXEC:
            self.refresh()

    def check_s(self, i: int) -> None:
        """Faults where an active wave reads a scalar register that nothing wrote."""
        self._check_waves(self.s_known[i], _scalar_name(i))

    def _check_waves(self, known: bool | np.ndarray, name: str) -> None:
        if known is True:
            return
        bad = ~np.broadcast_to(known, self.waves)
        if self.active is not None:
            bad = bad & self.active
        if bad.any():
            raise _unwritten(name, wave=int(np.flatnonzero(bad)[0]))

    @property
    def scc(self) -> np.ndarray:
        """The SCC bit of each wave, bool [waves]; a fault where an active wave has not written it."""
        self._check_waves(self._scc_known, "scc")
        return self._scc

    def set_scc(self, value) -> None:
        value = np.broadcast_to(value, self.waves)
        if self.active is None:
            self._scc, self._scc_known = value, True
            return
        self._scc = np.where(self.active, value, self._scc)
        if self._scc_known is not True:
            self._scc_known = self.active | self._scc_known

    def bits(self, i: int) -> np.ndarray:
        """The 64-bit register s[i:i+1] as bool [waves, 64]."""
        if self.s_known[i] is not True or self.s_known[i + 1] is not True:
            # Also of a mask that is held: other waves read it than did then.
            self.check_s(i)
            self.check_s(i + 1)
        low, high = self.s[i], self.s[i + 1]
        held = self._bits.get(i)
        if held is not None and held[0] is low and held[1] is high:
            return held[2]
        pair = np.empty((self.waves, 2), np.uint32)
        pair[:, 0], pair[:, 1] = low, high
        bits = np.unpackbits(pair.view(np.uint8), axis=1, bitorder="little").view(bool)
        self._bits[i] = (low, high, bits)
        return bits

    def set_bits(self, i: int, bits: np.ndarray) -> None:
        """Writes bool [waves, 64] to s[i:i+1]."""
        pair = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        low, high = pair[:, 0], pair[:, 1]
        self._put_s(i, low)
        self._put_s(i + 1, high)
        if self.active is None:
            self._bits[i] = (low, high, bits)
        if i >= EXEC:
            self.refresh()

    def forget_bits(self, i: int, waves: np.ndarray) -> None:
        """Marks s[i:i+1] as unwritten in ``waves`` (bool [waves])."""
        self._bits.pop(i, None)
        for half in (i, i + 1):
            self.s_known[half] = np.logical_and(self.s_known[half], ~waves)

    def refresh(self) -> None:
        """Recomputes which lanes act, after a write to EXEC or a change of ``active``."""
        bits = self.bits(EXEC)
        self.mask = bits if self.active is None else bits & self.active[:, None]
        self.full = bool(self.mask.all())

    def activate(self, active: np.ndarray | None) -> None:
        self.active = active
        self.refresh()

    # Vector registers.

    def set_v(self, i: int, value: np.ndarray) -> None:
        """Writes uint32 [waves, 64], or what broadcasts to it, in the lanes that act."""
        if self.full:
            if value.shape != self.mask.shape:
                value = np.broadcast_to(value, self.mask.shape)
            self.v[i], self.v_known[i] = value, True
            return
        self.v[i] = np.where(self.mask, value, self.v[i])
        if self.v_known[i] is not True:
            self.v_known[i] = self.mask | self.v_known[i]

    def set_all_lanes(self, kind: str, i: int, value: np.ndarray) -> None:
        """Writes every lane of the active waves, whatever EXEC says (MFMA, v_readlane's kin)."""
        values, known = (self.v, self.v_known) if kind == "v" else (self.a, self.a_known)
        if self.active is None:
            values[i], known[i] = value, True
            return
        active = self.active[:, None]
        values[i] = np.where(active, value, values[i])
        if known[i] is not True:
            known[i] = active | known[i]

    def set_a(self, i: int, value: np.ndarray) -> None:
        if self.full and value.shape == self.mask.shape:
            self.a[i], self.a_known[i] = value, True
            return
        self.a[i] = np.where(self.mask, value, self.a[i])
        if self.a_known[i] is not True:
            self.a_known[i] = self.mask | self.a_known[i]

    def check(self, kind: str, i: int, all_lanes: bool = False) -> None:
        """Faults where an acting lane reads a vector register that nothing wrote."""
        known = (self.v_known if kind == "v" else self.a_known)[i]
        if known is True:
            return
        wanted = self.mask
        if all_lanes:
            wanted = (
                np.ones_like(self.mask)
                if self.active is None
                else np.repeat(self.active[:, None], LANES, 1)
            )
        bad = wanted & ~np.broadcast_to(known, wanted.shape)
        if bad.any():
            raise _unwritten(f"{kind}{i}", lane=int(np.flatnonzero(bad)[0]))

    # Waves that have ended.

    def keep(self, waves: np.ndarray) -> None:
        """Drops all waves but these (bool [waves], whole workgroups)."""
        before = self.waves

        def cut(arrays: list) -> list:
            made: dict[int, np.ndarray] = {}
            for x in arrays:
                if isinstance(x, np.ndarray) and id(x) not in made:
                    made[id(x)] = x[waves]
            return [made[id(x)] if isinstance(x, np.ndarray) else x for x in arrays]

        self.waves = int(waves.sum())
        for key in ("v", "a", "s", "v_known", "a_known", "s_known"):
            setattr(self, key, cut(getattr(self, key)))
        self._scc, self.scratch_at = self._scc[waves], self.scratch_at[waves]
        (self._scc_known,) = cut([self._scc_known])
        groups = waves[:: self.waves_a_group]
        for key in ("lds", "lds_known"):
            rows = getattr(self, key).reshape(before // self.waves_a_group, self.lds_stride)
            setattr(self, key, np.ascontiguousarray(rows[groups]).reshape(-1))
        self.lds_base = self.lds_base[: self.waves]
        if self.active is not None:
            self.active = self.active[waves]
        self._bits.clear()
        self.refresh()


def _scalar_name(i: int) -> str:
    return {VCC: "vcc_lo", VCC + 1: "vcc_hi", M0: "m0"}.get(i, f"s{i}")


def _unwritten(name: str, **where) -> Fault:
    return Fault(
        f"{name} is read, and nothing has written it",
        allowed="registers that the kernel wrote, or that the launch sets",
        fix="check the instruction before it, and EXEC where the register was written",
        **where,
    )
