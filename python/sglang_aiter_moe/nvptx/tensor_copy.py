"""Bulk copies by tensor map: ``cp.async.bulk.tensor`` from global to shared memory.

One lane starts a copy; it moves a box, counts the box's bytes as a transaction of an mbarrier, and belongs to the async
proxy. Late mode reads and writes when somebody waits for the mbarrier's phase; until then reading the destination is a
Fault, and afterwards only those know of the data who waited for that phase (``races``). Source: PTX ISA 8.7,
"cp.async.bulk.tensor". Cache policies change nothing. Not modelled: multicast, im2col, copies to global memory.
"""

from __future__ import annotations

import re

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import tensor_map
from sglang_aiter_moe.nvptx.decode import Operation, address, full, operands, refuse, source
from sglang_aiter_moe.nvptx.shared import BASE
from sglang_aiter_moe.nvptx.state import LANES, Group, State
from sglang_aiter_moe.nvptx.tensor_map import SIZE, TensorMap
from sglang_aiter_moe.nvptx.text import Instruction

_FORM = re.compile(
    r"(\d)d\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?"
)


def _bulk_tensor(instruction: Instruction) -> Operation:
    found = _FORM.fullmatch(".".join(instruction.modifiers))
    if not found:
        raise refuse(instruction, f"the form {instruction.name}")
    target, tensor, barrier = operands(instruction, 4 if found.group(2) else 3)[:3]
    if len(tensor.items) != 1 or len(tensor.items[0].items) != int(found.group(1)):
        raise refuse(instruction, "a tensor operand of other than a map and its coordinates")
    read_target = address(instruction, target, "shared")
    read_barrier = address(instruction, barrier, "shared")
    read_map = address(instruction, tensor, "global")
    read_places = [source(instruction, c, "s32") for c in tensor.items[0].items]

    def execute(g: Group) -> None:
        at, bar, maps = read_target(g), read_barrier(g), read_map(g)
        places = [full(g, read(g)) for read in read_places]
        cta = g.cta
        for position in np.flatnonzero(g.lanes):
            row, lane = divmod(int(position), LANES)
            try:
                _start(
                    g.state,
                    int(g.ids[row]),
                    int(position),
                    int(cta[row]),
                    int(at[row, lane]),
                    int(bar[row, lane]),
                    int(maps[row, lane]),
                    tuple(int(p[row, lane]) for p in places),
                )
            except Fault as fault:
                fault.lane = int(position)
                raise

    return execute


def _map_at(state: State, where: int) -> TensorMap:
    raw = state.memory.gather(
        np.array([where], np.uint64) + np.arange(0, SIZE, 16, dtype=np.uint64), 16
    )
    try:
        return TensorMap.decode(raw.T.tobytes())
    except ValueError as error:
        raise Fault(
            f"{error} at {where:#x}",
            allowed="the address of a parameter that holds one",
            fix="check the operand, and the launch's arguments",
        ) from None


def _start(
    state: State,
    warp: int,
    lane: int,
    cta: int,
    at: int,
    barrier: int,
    where: int,
    places: tuple[int, ...],
) -> None:
    tensor = _map_at(state, where)
    if tensor.rank != len(places):
        raise Fault(
            f"{len(places)} coordinates for a tensor map of {tensor.rank} dimensions",
            allowed="as many",
            fix="check the instruction's .Nd and its coordinates",
        )
    if at % 128:
        raise Fault(
            f"a bulk copy goes to {at:#x}",
            allowed="multiples of 128",
            fix="check the address of the slot",
        )
    if state.races is not None:
        state.races.use(cta, barrier, np.array([warp]), np.array([lane]))
    moved = tensor_map.pieces(tensor, places)
    to = tensor_map.destination(tensor, at, moved.offset)
    state.shared.fly(cta, to, moved.width, "async")
    bytes_to = (to.astype(np.int64) - BASE + cta * state.shared.stride)[:, None] + np.arange(
        moved.width
    )
    if state.races is not None:
        state.races.before_copy(warp, lane, bytes_to)

    def effect() -> None:
        data = np.empty((to.size, moved.width), np.uint8)
        data.reshape(-1, tensor.element_bytes)[:] = tensor_map.fill_bytes(tensor)
        inside = moved.inside
        data[inside] = load(state, moved.address[inside].astype(np.uint64), moved.width)
        state.shared.store(cta, to, data, proxy="async")
        if state.races is not None:
            state.races.land(cta, barrier, bytes_to)

    state.barriers.attach(cta, barrier, tensor.box_bytes, effect)


def load(state: State, addresses: np.ndarray, width: int) -> np.ndarray:
    """uint8 [n, width] of global memory."""
    words = state.memory.gather(addresses, width, state.checked)
    if width < 4:
        return np.ascontiguousarray(words[0].astype(f"u{width}")).view(np.uint8).reshape(-1, width)
    return np.ascontiguousarray(words.T).view(np.uint8)


TABLE = {"cp.async.bulk.tensor": _bulk_tensor}
