"""Barriers, mbarriers, fences, and the hints of a launch.

Source: PTX ISA 8.7, "Parallel Synchronization and Communication Instructions", "griddepcontrol", "setmaxnreg".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import decode
from sglang_aiter_moe.nvptx.convergence import here, together
from sglang_aiter_moe.nvptx.decode import Operation, full, refuse, source
from sglang_aiter_moe.nvptx.state import LANES, Group
from sglang_aiter_moe.nvptx.text import Instruction


def _named(aligned: bool, wait: bool = True):
    def build(instruction: Instruction) -> Operation:
        whole = aligned or "aligned" in instruction.modifiers
        if set(instruction.modifiers) - {"aligned"}:
            raise refuse(instruction, f"this form of {instruction.opcode}")
        found = instruction.operands
        if not 1 <= len(found) <= 2:
            raise refuse(instruction, f"this form of {instruction.opcode}")
        number = source(instruction, found[0], "u32")
        count = source(instruction, found[1], "u32") if len(found) == 2 else None
        place = instruction.place

        def run(g: Group):
            state = g.state
            if whole and g.mask is not None:
                ready = here(g, state.live[g.rows])
                if not ready.all():
                    state.reasons[place] = lambda: "a part of a warp, at an aligned barrier"
                    return _meet(g, ready)
            return _meet(g, None)

        def _meet(g: Group, ready: np.ndarray | None):
            state = g.state
            if ready is not None:
                passed = np.zeros((g.n, LANES), bool)
                if ready.any():
                    part = _meet(g.subset(ready), None)
                    passed[ready] = True if part is None else part
                return passed
            threads = count(g) if count else np.int64(state.warps * LANES)
            passed = state.named.meet(
                g, number(g).astype(np.int64), np.asarray(threads).astype(np.int64), wait
            )
            if passed is not None:
                state.reasons[place] = state.named.describe
            return passed

        return run

    return build


def _warp(instruction: Instruction) -> Operation:
    """bar.warp.sync: passes when all lanes of the mask stand here."""
    (m,) = decode.operands(instruction, 1)
    mask = source(instruction, m, "b32")

    return together(instruction.place, mask, lambda g: None)


def _mbarrier_address(instruction: Instruction, operand):
    return decode.address(instruction, operand, "shared")


def _each(g: Group, address: np.ndarray, act: Callable[[int, int, int, int], None]) -> None:
    """``act(CTA, address, row, lane)`` for every lane that acts, lane after lane; a Fault names the lane."""
    rows, lanes = np.nonzero(g.lanes)
    for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
        with _named_lane(row * LANES + lane):
            act(int(g.cta[row]), int(address[row, lane]), row, lane)


@contextmanager
def _named_lane(lane: int) -> Iterator[None]:
    try:
        yield
    except Fault as fault:
        fault.lane = lane
        raise


def _use(g: Group, cta: int, at: int, row: int, lane: int) -> None:
    """A lane of the group's row uses an mbarrier: there is one, and the warp knows of its initialisation."""
    g.state.barriers.at(cta, at)
    if g.state.races is not None:
        g.state.races.use(cta, at, g.ids[row : row + 1], np.array([row * LANES + lane]))


def _shared_only(instruction: Instruction, allowed: frozenset = frozenset()) -> None:
    left = set(instruction.modifiers) - {"shared", "shared::cta", "b64"} - allowed
    if left or not {"shared", "shared::cta"} & set(instruction.modifiers):
        raise refuse(instruction, f"this form of {instruction.opcode}")


def _init(instruction: Instruction) -> Operation:
    _shared_only(instruction)
    where, count = decode.operands(instruction, 2)
    address, n = _mbarrier_address(instruction, where), source(instruction, count, "u32")
    nothing = np.zeros((1, 8), np.uint8)

    def run(g: Group) -> None:
        counts = full(g, n(g))
        where = address(g)

        def act(cta: int, at: int, row: int, lane: int) -> None:
            g.state.barriers.init(cta, at, int(counts[row, lane]))
            g.state.shared.store(np.int64(cta), np.array([at]), nothing)
            g.state.shared.reserve(cta, at)

        _each(g, where, act)
        if g.state.races is not None:
            g.state.races.store(g, where, 8)

    return run


def _inval(instruction: Instruction) -> Operation:
    _shared_only(instruction)
    (where,) = decode.operands(instruction, 1)
    address = _mbarrier_address(instruction, where)

    def run(g: Group) -> None:
        where = address(g)

        def act(cta: int, at: int, row: int, lane: int) -> None:
            g.state.barriers.inval(cta, at)
            g.state.shared.release(cta, at)

        _each(g, where, act)
        if g.state.races is not None:
            g.state.races.store(g, where, 8)

    return run


_SCOPES = frozenset(("release", "acquire", "relaxed", "cta", "cluster"))


def _arrive(instruction: Instruction) -> Operation:
    expects = "expect_tx" in instruction.modifiers
    _shared_only(instruction, _SCOPES | {"expect_tx"})
    found = instruction.operands
    if not found or found[0].kind != "sink":
        raise refuse(instruction, "an mbarrier state as result")
    address = _mbarrier_address(instruction, found[1])
    if len(found) > 3 or (expects and len(found) != 3):
        raise refuse(instruction, "this form of mbarrier.arrive")
    extra = source(instruction, found[2], "u32") if len(found) == 3 else None

    def run(g: Group) -> None:
        value = None if extra is None else full(g, extra(g))

        def act(cta: int, at: int, row: int, lane: int) -> None:
            n = 0 if value is None else int(value[row, lane])
            _use(g, cta, at, row, lane)
            if g.state.races is not None:
                g.state.races.arrive(cta, at, int(g.ids[row]))
            if expects:
                g.state.barriers.arrive(cta, at, 1, n)
            else:
                g.state.barriers.arrive(cta, at, 1 if value is None else n)

        _each(g, address(g), act)

    return run


def _expect(instruction: Instruction) -> Operation:
    _shared_only(instruction, _SCOPES)
    where, count = decode.operands(instruction, 2)
    address, n = _mbarrier_address(instruction, where), source(instruction, count, "u32")

    def run(g: Group) -> None:
        counts = full(g, n(g))

        def act(cta: int, at: int, row: int, lane: int) -> None:
            _use(g, cta, at, row, lane)
            g.state.barriers.expect(cta, at, int(counts[row, lane]))

        _each(g, address(g), act)

    return run


def _try_wait(instruction: Instruction) -> Operation:
    """Holds the lanes whose phase has not completed; what passes gets a true predicate.

    PTX lets try_wait give up after a while; a program cannot tell that from a longer wait.
    """
    _shared_only(instruction, _SCOPES | {"parity"})
    if "parity" not in instruction.modifiers:
        raise refuse(instruction, "a wait for a state instead of a parity")
    d, where, p = instruction.operands[:3]
    write, address = decode.target(instruction, d, "pred"), _mbarrier_address(instruction, where)
    parity = source(instruction, p, "u32")
    place = instruction.place

    def run(g: Group):
        state, at, wanted = g.state, address(g), full(g, parity(g))
        if (bad := g.lanes & (wanted > 1)).any():
            raise decode.fault("a parity above 1", "0 or 1", lane=int(np.flatnonzero(bad)[0]))
        acting = g.lanes
        keys = (g.cta[:, None] << 32) + (at << 1) + wanted
        standing = np.flatnonzero(acting)
        different, position = np.unique(keys[acting], return_inverse=True)
        passed, waiting = np.zeros(different.size, bool), []
        for i, key in enumerate(different.tolist()):
            which = key >> 32, (key & 0xFFFFFFFF) >> 1, key & 1
            rows, first = np.unique(standing[position == i] // LANES, return_index=True)
            with _named_lane(int(standing[position == i][0])):
                state.barriers.at(*which[:2])
            if state.races is not None:
                state.races.use(*which[:2], g.ids[rows], standing[position == i][first])
            with _named_lane(int(standing[position == i][0])):
                passed[i] = state.barriers.complete(*which)
            if passed[i] and state.races is not None:
                state.races.leave(*which[:2], g.ids[rows])
            if not passed[i]:
                waiting.append(which)
        if not waiting:
            write(g, np.bool_(True))
            return None
        state.reasons[place] = lambda: "; ".join(
            f"parity {p} of the mbarrier at {at:#x} of CTA {cta} of the batch: {state.barriers.at(cta, at)}"
            for cta, at, p in waiting[:4]
        )
        done = np.zeros((g.n, LANES), bool)
        done[acting] = passed[position]
        if done.any():
            write(g.narrow(done), np.bool_(True))
        return done

    return run


def _test_wait(instruction: Instruction) -> Operation:
    raise refuse(instruction, "mbarrier.test_wait")


_ORDERS = frozenset(
    (
        "acq_rel",
        "sc",
        "acquire",
        "release",
        "cta",
        "gpu",
        "cluster",
        "sys",
        "proxy",
        "alias",
        "tensormap::generic",
    )
)


def _fence(instruction: Instruction) -> Operation:
    """``fence.proxy.async`` shows generic writes to the async proxy; memory is in order otherwise."""
    parts = set(instruction.modifiers)
    if parts & {"async", "mbarrier_init"}:
        return _nothing(instruction) if "global" in parts else lambda g: g.state.shared.fence(g.cta)
    if parts - _ORDERS:
        raise refuse(instruction, "this form of fence")
    return lambda g: None


def _nothing(instruction: Instruction) -> Operation:
    """griddepcontrol, setmaxnreg, nanosleep: timing and resources, which are not modelled."""
    return lambda g: None


TABLE = {
    "bar.sync": _named(True), "bar.arrive": _named(True, False), "barrier.sync": _named(False),
    "barrier.arrive": _named(False, False), "barrier.cta.sync": _named(False), "bar.cta.sync": _named(True),
    "bar.warp.sync": _warp, "mbarrier.init": _init, "mbarrier.inval": _inval, "mbarrier.arrive": _arrive,
    "mbarrier.expect_tx": _expect, "mbarrier.try_wait": _try_wait, "mbarrier.test_wait": _test_wait,
    "fence": _fence, "membar": _nothing, "griddepcontrol": _nothing, "setmaxnreg": _nothing, "nanosleep": _nothing,
}  # fmt: skip
