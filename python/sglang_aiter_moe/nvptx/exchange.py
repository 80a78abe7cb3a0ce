"""Lanes of a warp that exchange values: shfl, redux, vote, match, elect, activemask.

Source: PTX ISA 8.7, "shfl.sync", "redux.sync", "vote.sync", "elect.sync". The lanes that the membership mask names have
to execute the instruction together; the interpreter lets lanes of a warp meet where their paths do, and reports it
where they have not met.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx.convergence import together
from sglang_aiter_moe.nvptx.decode import Operation, full, operands, refuse, source, target, value
from sglang_aiter_moe.nvptx.state import LANES
from sglang_aiter_moe.nvptx.text import Instruction

U32 = np.uint32
_LANE = np.arange(LANES, dtype=np.int64)
_BIT = U32(1) << np.arange(LANES, dtype=U32)


def _shfl(instruction: Instruction) -> Operation:
    if len(instruction.modifiers) != 3 or instruction.modifiers[2] != "b32":
        raise refuse(instruction, "this form of shfl")
    mode = instruction.modifiers[1]
    d, x, y, z, m = operands(instruction, 5)
    a = value(instruction, x, "b32")
    b, c, mask = (source(instruction, s, "b32") for s in (y, z, m))
    p = None
    if d.kind == "pair":
        d, second = d.items
        p = target(instruction, second, "pred")
    write = target(instruction, d, "b32")
    if mode not in ("idx", "bfly", "up", "down"):
        raise refuse(instruction, "this form of shfl")

    def run(g):
        lanes = g.lanes
        given = full(g, a(g))
        by = full(g, b(g)).astype(np.int64) & 31
        control = full(g, c(g)).astype(np.int64)
        clamp, segment = control & 31, (control >> 8) & 31
        most = (_LANE & segment) | (clamp & ~segment)
        least = _LANE & segment
        if mode == "up":
            at, inside = _LANE - by, _LANE - by >= most
        elif mode == "down":
            at, inside = _LANE + by, _LANE + by <= most
        elif mode == "bfly":
            at, inside = _LANE ^ by, (_LANE ^ by) <= most
        else:
            at = least | (by & ~segment)
            inside = at <= most
        at = np.where(inside, at, _LANE)
        gone = ~np.take_along_axis(lanes, at, 1) & lanes
        if gone.any():
            raise Fault(
                "a lane takes the value of a lane that does not take part",
                allowed="source lanes that execute the instruction",
                fix="check the membership mask and the lane's number",
                lane=int(np.flatnonzero(gone)[0]),
            )
        if g.state.unknown is not None:
            g.state.unknown = np.take_along_axis(g.state.unknown, at, 1)
        write(g, np.take_along_axis(given, at, 1))
        if p is not None:
            p(g, inside)

    return together(instruction.place, mask, run)


_REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def _redux(instruction: Instruction) -> Operation:
    if len(instruction.modifiers) != 3 or instruction.modifiers[1] not in _REDUCTIONS:
        raise refuse(instruction, "this form of redux")
    _, name, kind = instruction.modifiers
    if kind not in ("u32", "s32", "b32"):
        raise refuse(instruction, "this form of redux")
    d, x, m = operands(instruction, 3)
    a, mask, write = (
        source(instruction, x, kind),
        source(instruction, m, "b32"),
        target(instruction, d, kind),
    )
    f = _REDUCTIONS[name]

    def run(g):
        lanes, value = g.lanes, full(g, a(g))
        if g.mask is None:
            return write(
                g, np.broadcast_to(f.reduce(value, 1, dtype=value.dtype)[:, None], value.shape)
            )
        out = value.copy()
        for i in np.flatnonzero(lanes.any(1)):
            out[i] = f.reduce(value[i][lanes[i]], dtype=value.dtype)
        return write(g, out)

    return together(instruction.place, mask, run)


def _ballot(lanes: np.ndarray) -> np.ndarray:
    """bool [n, 32] to uint32 [n, 1]."""
    return np.where(lanes, _BIT, U32(0)).sum(1, dtype=U32)[:, None]


def _vote(instruction: Instruction) -> Operation:
    _, mode, kind = instruction.modifiers
    if (mode, kind) not in (("any", "pred"), ("all", "pred"), ("uni", "pred"), ("ballot", "b32")):
        raise refuse(instruction, "this form of vote")
    d, x, m = operands(instruction, 3)
    a, mask, write = (
        source(instruction, x, "pred"),
        source(instruction, m, "b32"),
        target(instruction, d, kind),
    )

    def run(g):
        lanes, value = g.lanes, full(g, a(g))
        if mode == "ballot":
            return write(g, np.broadcast_to(_ballot(value & lanes), value.shape))
        some, every = (value & lanes).any(1), (value | ~lanes).all(1)
        out = {"any": some, "all": every, "uni": ~some | every}[mode]
        return write(g, np.broadcast_to(out[:, None], value.shape))

    return together(instruction.place, mask, run)


def _elect(instruction: Instruction) -> Operation:
    """The lowest named lane is elected; PTX says that the choice is deterministic, not which it is."""
    d, m = operands(instruction, 2)
    if instruction.modifiers or d.kind != "pair":
        raise refuse(instruction, "this form of elect")
    number, elected = (
        target(instruction, d.items[0], "b32"),
        target(instruction, d.items[1], "pred"),
    )
    mask = source(instruction, m, "b32")

    def run(g):
        lanes = g.lanes
        first = lanes.argmax(1)[:, None]
        number(g, np.broadcast_to(first.astype(U32), lanes.shape))
        elected(g, first == _LANE)

    return together(instruction.place, mask, run)


def _activemask(instruction: Instruction) -> Operation:
    (d,) = operands(instruction, 1)
    write = target(instruction, d, "b32")
    return lambda g: write(g, np.broadcast_to(_ballot(g.lanes), (g.n, LANES)))


TABLE = {
    "shfl": _shfl, "redux": _redux, "vote": _vote, "elect.sync": _elect, "activemask": _activemask,
}  # fmt: skip
