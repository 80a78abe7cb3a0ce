"""cp.async: copies of 4, 8 or 16 bytes a lane from global to shared memory, in groups of a warp or for an mbarrier.

Source: PTX ISA 8.7, "Non-bulk copy". The bytes count as in flight until the group's wait, or until somebody waits for
the mbarrier's phase; the source is read again when they land, so that one which was overwritten meanwhile is seen. The
ISA counts these copies to the generic proxy; the fp8 prefill form lets ``wgmma`` read what they brought without a
``fence.proxy.async``, as a GPU lets it (docs/kernel-notes.md, version 32), so their bytes count as fenced.
"""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import decode
from sglang_aiter_moe.nvptx.decode import Operation, full, refuse, source
from sglang_aiter_moe.nvptx.memory_ops import moved, see_global, store_shared
from sglang_aiter_moe.nvptx.state import LANES, Group
from sglang_aiter_moe.nvptx.text import Instruction

KIND = "cp.async"


def _copy(instruction: Instruction) -> Operation:
    cached, *rest = instruction.modifiers
    good = (
        cached in ("ca", "cg")
        and rest[:1] in (["shared"], ["shared::cta"])
        and rest[1:2] == ["global"]
    )
    hints = rest[2:]
    if not good or any(not h.startswith("L2::") for h in hints):
        raise refuse(instruction, "this form of cp.async")
    found = list(instruction.operands)
    if "L2::cache_hint" in hints:
        found.pop()
    if len(found) not in (3, 4) or found[2].kind != "int":
        raise refuse(instruction, "this form of cp.async")
    nbytes = int(found[2].value)
    if nbytes not in ((16,) if cached == "cg" else (4, 8, 16)):
        raise refuse(instruction, f"cp.async.{cached} of {nbytes} bytes")
    to = decode.address(instruction, found[0], "shared")
    of = decode.address(instruction, found[1], "global")
    size = source(instruction, found[3], "u32") if len(found) == 4 else None

    def run(g: Group) -> None:
        at, where = to(g), of(g).copy()
        sizes = None if size is None else full(g, size(g)).copy()  # not a view of registers
        if sizes is not None and (sizes == nbytes).all():
            sizes = None
        _fly(g, at, nbytes)
        first, unwritten = _read(g, where, sizes, nbytes)
        writes = g.state.writes

        def land(part: Group) -> None:
            rows = slice(None) if part.n == g.n else np.searchsorted(g.ids, part.ids)
            raw, lost = first[rows], None if unwritten is None else unwritten[rows]
            if part.state.writes != writes:
                raw, lost = _read(part, where[rows], None if sizes is None else sizes[rows], nbytes)
            store_shared(part, at[rows], raw, "async")
            if lost is not None:
                part.state.shared.forget(
                    np.broadcast_to(part.cta[:, None], at[rows].shape), at[rows], lost
                )

        g.state.tasks.issue(KIND, g, land)

    return run


def _fly(g: Group, at: np.ndarray, nbytes: int) -> None:
    if g.state.races is not None:
        g.state.races.before_store(g, at, nbytes)
    cta = g.cta[:, None]
    if g.mask is None:
        g.state.shared.fly(cta, at, nbytes)
        return
    lanes = np.flatnonzero(g.mask)
    try:
        g.state.shared.fly(
            np.broadcast_to(cta, at.shape).reshape(-1)[lanes], at.reshape(-1)[lanes], nbytes
        )
    except Fault as fault:
        raise moved(fault, lanes) from None


def _read(
    g: Group, where: np.ndarray, sizes: np.ndarray | None, nbytes: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """uint8 [n, 32, nbytes]: of each lane as many bytes as ``sizes`` says, zeros behind them; and which of them nothing
    has written (bool of that shape), or None."""
    if sizes is None:
        return see_global(g, where, nbytes)
    out, unwritten = np.zeros((g.n, LANES, nbytes), np.uint8), None
    for count in np.unique(sizes[g.lanes]).tolist():
        if count > nbytes:
            raise decode.fault(
                f"cp.async of {count} bytes into {nbytes}", f"at most {nbytes}", lane=0
            )
        lanes = (sizes == count) & g.lanes
        step = next(s for s in (16, 8, 4, 2, 1) if count % s == 0) if count else 1
        part = g.narrow(lanes)
        for start in range(0, count, step):
            raw, lost = see_global(part, where + start, step)
            out[..., start : start + step] |= np.where(lanes[..., None], raw, 0).astype(np.uint8)
            if lost is not None:
                unwritten = np.zeros(out.shape, bool) if unwritten is None else unwritten
                unwritten[..., start : start + step] |= lost
    return out, unwritten


def _commit(instruction: Instruction) -> Operation:
    decode.operands(instruction, 0)
    return lambda g: g.state.tasks.commit(KIND, g)


def _wait_group(instruction: Instruction) -> Operation:
    (count,) = decode.operands(instruction, 1)
    if count.kind != "int":
        raise refuse(instruction, "a count that is not a constant")
    at_most = int(count.value)
    return lambda g: g.state.tasks.wait(KIND, g, at_most)


def _wait_all(instruction: Instruction) -> Operation:
    decode.operands(instruction, 0)

    def run(g: Group) -> None:
        g.state.tasks.commit(KIND, g)
        g.state.tasks.wait(KIND, g, 0)

    return run


def _arrive(instruction: Instruction) -> Operation:
    """cp.async.mbarrier.arrive.noinc: each lane arrives once its copies so far have landed. Whole warps alone, and one
    mbarrier for all lanes.

    It orders nothing else that the warp did (PTX ISA 8.7, "cp.async.mbarrier.arrive"): who waits knows of the copies.
    """
    if instruction.modifiers not in (("shared", "b64"), ("shared::cta", "b64"), ("b64",)):
        raise refuse(instruction, "this form of cp.async.mbarrier.arrive")
    (where,) = decode.operands(instruction, 1)
    address = decode.address(instruction, where, "shared")

    def run(g: Group) -> None:
        at, races = address(g), g.state.races
        if (other := at != at[:, :1]).any():
            raise decode.fault(
                "lanes of a warp report copies to different mbarriers",
                "the same one in all lanes: others are not modelled",
                lane=int(np.flatnonzero(other)[0]),
            )
        effects = g.state.tasks.take(KIND, g)
        for position, row in enumerate(g.ids.tolist()):
            cta, place = int(g.cta[position]), int(at[position, 0])
            if races is not None:
                races.use(cta, place, np.array([row]), np.array([position * LANES]))
                if not g.state.late:
                    races.arrive(cta, place, row)
            effect = effects.get(row)
            if effect is not None and races is not None:
                effect = races.carried(cta, place, effect)
            g.state.barriers.attach_arrivals(cta, place, LANES, effect)

    return run


TABLE = {
    "cp.async": _copy, "cp.async.commit_group": _commit, "cp.async.wait_group": _wait_group,
    "cp.async.wait_all": _wait_all, "cp.async.mbarrier.arrive.noinc": _arrive,
}  # fmt: skip
