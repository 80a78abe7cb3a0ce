"""ld, st, atom and red. Source: PTX ISA 8.7, "Data Movement: ld, st", "atom", "red".

Memory is seen by everybody at once: scopes and orders (``.acquire``, ``.release``, ``.gpu``) say nothing here but that
an acquiring or volatile load may be a spin. A warp that reads the same again, and nobody has stored to global memory
since, waits until somebody has.
"""

from __future__ import annotations

import re

import numpy as np

from sglang_aiter_moe.amdgpu.atomics import rounds
from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import decode
from sglang_aiter_moe.nvptx.decode import (
    NUMPY,
    Operation,
    full,
    refuse,
    source,
    target,
    unknown_bytes,
    value,
)
from sglang_aiter_moe.nvptx.state import LANES, Group
from sglang_aiter_moe.nvptx.text import Instruction

_HINTS = re.compile(
    r"ca|cg|cs|lu|cv|wb|wt|nc|L1::\w+|L2::\w+|gpu|cta|sys|cluster|relaxed|weak|v2|v4|v8|acquire|release|volatile|acq_rel"
)
_SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "param": "param",
    "const": "global",
}


def _form(instruction: Instruction) -> tuple[str, int, str, frozenset]:
    """(space, values a vector, type, other modifiers)."""
    *given, kind = instruction.modifiers
    spaces = [m for m in given if m in _SPACES]
    rest = frozenset(given) - set(spaces)
    if len(spaces) != 1 or kind not in NUMPY or any(not _HINTS.fullmatch(m) for m in rest):
        raise refuse(
            instruction, f"this form of {instruction.opcode} (a generic address, or a modifier)"
        )
    counts = [int(m[1]) for m in rest if re.fullmatch(r"v\d", m)]
    return _SPACES[spaces[0]], counts[0] if counts else 1, kind, rest


def _vector(instruction: Instruction, operand, count: int) -> tuple:
    items = operand.items if operand.kind == "vector" else (operand,)
    if len(items) != count:
        raise refuse(instruction, f"{len(items)} registers for {count} values")
    return items


def _ld(instruction: Instruction) -> Operation:
    space, count, kind, rest = _form(instruction)
    hinted = "L2::cache_hint" in rest
    d, where = decode.operands(instruction, 2 + hinted)[:2]
    writes = [target(instruction, x, kind, wide=True) for x in _vector(instruction, d, count)]
    dtype = np.dtype(NUMPY[kind])
    nbytes = dtype.itemsize * count
    if space == "param":
        return _ld_param(instruction, where, writes, dtype)
    address = decode.address(instruction, where, space)
    if space == "shared":
        return _ld_shared(address, writes, dtype)
    spins = rest & {"acquire", "volatile", "relaxed"}

    def run(g: Group):
        at = address(g)
        raw, unwritten = see_global(g, at, nbytes)
        values = raw.view(dtype)
        passed = None
        if spins:
            again = _same_again(g, instruction.place, at, raw)
            if again.any():
                passed = ~again
                g = g.narrow(passed)
        for i, write in enumerate(writes):
            if unwritten is not None:
                part = unwritten[..., i * dtype.itemsize : (i + 1) * dtype.itemsize]
                g.state.unknown = _bits(part)
            write(g, values[..., i])
        return passed

    return run


def _bits(unwritten: np.ndarray) -> np.ndarray | None:
    """bool [n, 32, bytes] as bit i for byte i, None for none."""
    if not unwritten.any():
        return None
    size = unwritten.shape[-1]
    return np.where(unwritten, np.uint8(1) << np.arange(size, dtype=np.uint8), 0).sum(
        -1, dtype=np.uint8
    )


def _ld_shared(address, writes, dtype: np.dtype) -> Operation:
    """What nothing has written is unknown in the registers too: compilers load what nobody uses."""
    size = dtype.itemsize

    def run(g: Group) -> None:
        raw, unwritten = look_shared(g, address(g), size * len(writes))
        values = raw.view(dtype)
        for i, write in enumerate(writes):
            if unwritten is not None:
                g.state.unknown = _bits(unwritten[..., i * size : (i + 1) * size])
            write(g, values[..., i])

    return run


def _ld_param(instruction: Instruction, where, writes, dtype) -> Operation:
    base = where.base
    if base is None or base.kind != "param":
        raise refuse(instruction, "a parameter that is not named")
    offset = base.value + where.offset
    size = dtype.itemsize

    def run(g: Group) -> None:
        at = int(g.state.params) + offset
        for i, write in enumerate(writes):
            write(g, g.state.memory.read(at + i * size, dtype, 1)[0])

    return run


def _same_again(g: Group, place: tuple, address: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """bool [n, 32]: lanes that read here what they read before, and nothing was stored since."""
    state = g.state
    seen = state.seen.get(place)
    if seen is None:
        seen = state.seen[place] = np.full((3, state.rows, LANES), -1, np.int64)
        state.reasons[place] = lambda: "it spins on a value in global memory that nobody changes"
    found = np.zeros((g.n, LANES), np.int64)
    for i in range(min(8, raw.shape[-1])):
        found |= raw[..., i].astype(np.int64) << (8 * i)
    old = seen[:, g.rows]
    again = (old[0] == state.writes) & (old[1] == address) & (old[2] == found) & g.lanes
    new = np.stack([np.full_like(found, state.writes), address, found])
    seen[:, g.rows] = np.where(g.lanes, new, old)
    return again


def _check_alignment(at: np.ndarray, nbytes: int) -> None:
    bad = at & (nbytes - 1) != 0
    if bad.any():
        lane = int(np.flatnonzero(bad)[0])
        raise Fault(
            f"{nbytes} bytes at {int(at[lane]):#x}",
            allowed=f"addresses that are multiples of {nbytes}",
            fix="check the pointer's alignment and the offsets",
            lane=lane,
        )


def see_global(g: Group, address: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray | None]:
    """As :func:`load_global`, but what nothing has written (bool [n, 32, nbytes], or None) is told, and no Fault
    where it is followed (``State.follow``).

    Kernels read scratch memory that nobody wrote and drop it: rows that stand for no token.
    """
    try:
        return load_global(g, address, nbytes), None
    except Fault:
        if not (g.state.checked and g.state.follow):
            raise
    raw = load_global(g, address, nbytes, checked=False)
    unwritten = np.zeros(raw.shape, bool)
    lanes = g.lanes
    unwritten[lanes] = g.state.memory.unwritten(address[lanes].view(np.uint64), nbytes)
    return raw, unwritten


def load_global(g: Group, address: np.ndarray, nbytes: int, *, checked: bool = True) -> np.ndarray:
    """uint8 [n, 32, nbytes]; lanes that do not act get zeros."""
    lanes, flat = None, address.reshape(-1)
    if g.mask is not None:
        lanes = np.flatnonzero(g.mask)
        flat = flat[lanes]
    try:
        _check_alignment(flat, nbytes)
        words = g.state.memory.gather(flat.view(np.uint64), nbytes, checked and g.state.checked)
    except Fault as fault:
        raise moved(fault, lanes) from None
    if nbytes < 4:
        raw = words[0].astype(f"u{nbytes}").view(np.uint8).reshape(-1, nbytes)
    else:
        raw = np.ascontiguousarray(words.T).view(np.uint8)
    if lanes is not None:
        out = np.zeros((g.n * LANES, nbytes), np.uint8)
        out[lanes] = raw
        raw = out
    return raw.reshape(g.n, LANES, nbytes)


def store_global(g: Group, address: np.ndarray, raw: np.ndarray) -> None:
    """``raw`` uint8 [n, 32, nbytes] of the lanes that act."""
    nbytes = raw.shape[-1]
    flat, raw, lanes = address.reshape(-1), raw.reshape(-1, nbytes), None
    if g.mask is not None:
        lanes = np.flatnonzero(g.mask)
        flat, raw = flat[lanes], raw[lanes]
    words = np.ascontiguousarray(raw).view(f"u{min(nbytes, 4)}").T
    try:
        _check_alignment(flat, nbytes)
        g.state.memory.scatter(flat.view(np.uint64), words, nbytes, g.state.checked)
    except Fault as fault:
        raise moved(fault, lanes) from None
    g.state.writes += 1
    g.state.event()


def load_shared(g: Group, address: np.ndarray, nbytes: int) -> np.ndarray:
    """uint8 [n, 32, nbytes] for an atomic operation, which tells ``races`` itself; lanes that do not act get zeros."""
    data, unwritten = _look_shared(g, address, nbytes)
    if unwritten is not None:
        lane = int(np.flatnonzero(unwritten.any(-1))[0])
        raise decode.fault(
            f"shared memory at {int(address.reshape(-1)[lane]):#x} is read, which nothing has written",
            "bytes that were written", lane=lane,
        )  # fmt: skip
    return data


def look_shared(g: Group, address: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray | None]:
    """As ``load_shared``; what is unwritten (bool [n, 32, nbytes], or None) is told and no Fault."""
    found = _look_shared(g, address, nbytes)
    if g.state.races is not None:
        g.state.races.load(g, address, nbytes)
    return found


def _look_shared(
    g: Group, address: np.ndarray, nbytes: int
) -> tuple[np.ndarray, np.ndarray | None]:
    cta = g.cta[:, None]
    if g.mask is None:
        return g.state.shared.look(cta, address, nbytes)
    lanes = np.flatnonzero(g.mask)
    cta = np.broadcast_to(cta, address.shape).reshape(-1)[lanes]
    out = np.zeros((g.n * LANES, nbytes), np.uint8)
    try:
        out[lanes], unwritten = g.state.shared.look(cta, address.reshape(-1)[lanes], nbytes)
    except Fault as fault:
        raise moved(fault, lanes) from None
    if unwritten is not None:
        where = np.zeros((g.n * LANES, nbytes), bool)
        where[lanes] = unwritten
        unwritten = where.reshape(g.n, LANES, nbytes)
    return out.reshape(g.n, LANES, nbytes), unwritten


def store_shared(g: Group, address: np.ndarray, raw: np.ndarray, proxy: str = "generic") -> None:
    """``raw`` uint8 [n, 32, nbytes] of the lanes that act."""
    _store_shared(g, address, raw, proxy)
    if g.state.races is not None:
        g.state.races.store(g, address, raw.shape[-1])


def _store_shared(g: Group, address: np.ndarray, raw: np.ndarray, proxy: str = "generic") -> None:
    cta = g.cta[:, None]
    if g.mask is None:
        g.state.shared.store(cta, address, raw, proxy)
        return
    lanes = np.flatnonzero(g.mask)
    cta = np.broadcast_to(cta, address.shape).reshape(-1)[lanes]
    raw = raw.reshape(-1, raw.shape[-1])[lanes]
    try:
        g.state.shared.store(cta, address.reshape(-1)[lanes], raw, proxy)
    except Fault as fault:
        raise moved(fault, lanes) from None


def moved(fault: Fault, lanes: np.ndarray | None) -> Fault:
    """A fault of one of the acting lanes, with its place in the group."""
    if fault.lane is None or lanes is None:
        return fault
    return Fault(fault.what, allowed=fault.allowed, fix=fault.fix, lane=int(lanes[fault.lane]))


def _st(instruction: Instruction) -> Operation:
    space, count, kind, rest = _form(instruction)
    hinted = "L2::cache_hint" in rest
    where, x = decode.operands(instruction, 2 + hinted)[:2]
    items = _vector(instruction, x, count)
    reads = [value(instruction, v, kind, wide=True) for v in items]
    if space not in ("global", "shared"):
        raise refuse(instruction, f"a store to {space}")
    address, store = (
        decode.address(instruction, where, space),
        store_shared if space == "shared" else store_global,
    )
    dtype = np.dtype(NUMPY[kind])

    def run(g: Group) -> None:
        values = np.empty((g.n, LANES, count), dtype)
        for i, read in enumerate(reads):
            values[..., i] = read(g)
        unknown = g.state.unknown
        if unknown is not None and space == "global" and not g.state.follow:
            for v in items:
                if v.kind == "reg":
                    g.check(v.slot, (1 << dtype.itemsize) - 1)
        at = address(g)
        store(g, at, values.view(np.uint8))
        if unknown is not None:
            parts = [unknown_bytes(g, v)[..., None] >> np.arange(dtype.itemsize) & 1 for v in items]
            lost = np.concatenate(parts, -1).astype(bool) & g.lanes[..., None]
            if space == "global":
                g.state.memory.forget_bytes(at.view(np.uint64), lost)
            else:
                g.state.shared.forget(np.broadcast_to(g.cta[:, None], at.shape), at, lost)

    return run


def _typed(f):
    return lambda old, new: f(old, new).astype(old.dtype)


_ATOMIC = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1), "dec": lambda old, new: np.where((old == 0) | (old > new),
                                                                                           new, old - 1),
}  # fmt: skip


def _atomic(instruction: Instruction) -> Operation:
    """atom and red: lanes one after another in ascending order. The hardware's order is not established."""
    *given, kind = instruction.modifiers
    names = [m for m in given if m in _ATOMIC or m == "cas"]
    spaces = [_SPACES[m] for m in given if m in _SPACES]
    rest = set(given) - set(names) - set(_SPACES)
    if (
        len(names) != 1
        or spaces not in (["global"], ["shared"])
        or any(not _HINTS.fullmatch(m) for m in rest)
    ):
        raise refuse(instruction, f"this form of {instruction.opcode}")
    if kind not in ("u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64") or rest & {
        "v2",
        "v4",
        "v8",
    }:
        raise refuse(instruction, f"this form of {instruction.opcode}")
    swaps, returns = names[0] == "cas", instruction.opcode == "atom"
    found = list(decode.operands(instruction, 2 + returns + swaps))
    write = target(instruction, found.pop(0), kind) if returns else None
    address = decode.address(instruction, found[0], spaces[0])
    reads = [source(instruction, x, kind) for x in found[1:]]
    dtype, shared = np.dtype(NUMPY[kind]), spaces[0] == "shared"
    load, store = (load_shared, _store_shared) if shared else (load_global, store_global)
    f = _typed(_ATOMIC.get(names[0], np.add))

    def run(g: Group) -> None:
        at = address(g)
        values = [full(g, read(g)) for read in reads]
        before = np.zeros((g.n, LANES), dtype)
        acting = np.flatnonzero(g.lanes)
        places = at.reshape(-1)[acting]
        if shared:
            places = places + np.repeat(g.cta, LANES)[acting] * (1 << 20)
        if shared and g.state.races is not None:
            g.state.races.atomic(g, at, dtype.itemsize)
        for turn in rounds(places):
            mask = np.zeros(g.n * LANES, bool)
            mask[acting[turn]] = True
            part = g.narrow(mask.reshape(g.n, LANES))
            old = load(part, at, dtype.itemsize).view(dtype)[..., 0]
            new = np.where(old == values[0], values[1], old) if swaps else f(old, values[0])
            store(part, at, np.ascontiguousarray(new.astype(dtype))[..., None].view(np.uint8))
            before = np.where(part.lanes, old, before)
        if write is not None:
            write(g, before)

    return run


TABLE = {"ld": _ld, "st": _st, "atom": _atomic, "red": _atomic}
