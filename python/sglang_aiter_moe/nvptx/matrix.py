"""Matrix products: ``mma.sync`` and ``wgmma.mma_async`` with its groups and fence.

A warp's part of a product needs its own rows of A, its own registers and all of B, so each warp executes a ``wgmma`` by
itself, also where the four warps of a group come to it at different times.

Sums: exact, rounded to float32 once an instruction, or with fewer bits for fp8 (``matrix_sums``). Integer products are
exact and wrap.

Late mode: A, whether in registers or in shared memory, B and the accumulator are read, and the result is written, when
``wgmma.wait_group`` asks for the product's group; until then reading or writing the result's registers is a Fault.
Early mode does all of it where the instruction stands. Sources: PTX ISA 8.7, "Warp Level Matrix Multiply-Accumulate
Instructions" and "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.nvptx import matrix_layout as layout
from sglang_aiter_moe.nvptx.decode import Operation, constant, full, operands, refuse, source
from sglang_aiter_moe.nvptx.matrix_doubts import Doubts
from sglang_aiter_moe.nvptx.matrix_sums import add_product
from sglang_aiter_moe.nvptx.operands import Operand
from sglang_aiter_moe.nvptx.state import LANES, Group, State
from sglang_aiter_moe.nvptx.text import Instruction

F32, F64, U32, I64 = np.float32, np.float64, np.uint32, np.int64
WARPS = 4
"""Of a warp group: warp ``w`` of it has rows ``16 * w`` to ``16 * w + 15``."""


def slots(instruction: Instruction, operand: Operand, count: int) -> list[int]:
    """The registers of a vector operand, all of 32 bits."""
    items = operand.items if operand.kind == "vector" else (operand,)
    if len(items) != count or any(i.kind != "reg" or i.type != "b32" for i in items):
        raise refuse(instruction, f"an operand of other than {count} registers of 32 bits")
    return [i.slot for i in items]


def gather(group: Group, registers: list[int], checked: bool = True) -> np.ndarray:
    """uint32 [n, 32, len(registers)]."""
    if checked:
        for slot in registers:
            group.check(slot)
    out = np.empty((group.n, LANES, len(registers)), U32)
    for i, slot in enumerate(registers):
        out[:, :, i] = group.get(slot)
    return out


def whole_warps(group: Group, what: str) -> None:
    """A Fault unless all lanes act: these instructions are ``.aligned``."""
    if group.mask is not None and not group.mask.all():
        raise Fault(
            f"{what} is executed by a part of a warp's lanes",
            allowed="all 32 lanes",
            fix="check the branch or the guard before it",
            lane=int(np.flatnonzero(~group.mask)[0]),
        )


_MMA_KINDS = {("bf16", "bf16"): 16, ("f16", "f16"): 16} | {
    (a, b): 32
    for kinds in (("e4m3", "e5m2"), ("s8", "u8"))
    for a in kinds
    for b in kinds
}  # fmt: skip


def _mma(instruction: Instruction) -> Operation:
    """mma.sync.aligned.m16n8kK.row.col.dtype.atype.btype.ctype."""
    left, right, kinds = _mma_types(instruction)
    k = _MMA_KINDS[left, right]
    integer = left in ("s8", "u8")
    if kinds != (("s32",) * 2 if integer else ("f32",) * 2):
        raise refuse(instruction, f"accumulators of {kinds}")
    d, a, b, c = operands(instruction, 4)
    target = slots(instruction, d, 4)
    a_slots, b_slots = slots(instruction, a, 4), slots(instruction, b, 2)
    if all(i.kind in ("int", "float") for i in c.items):
        c_kind = "s32" if integer else "f32"
        fixed = np.array([constant(instruction, i, c_kind) for i in c.items])
        c_slots, fixed = None, fixed.view(U32)
    else:
        c_slots, fixed = slots(instruction, c, 4), None

    def execute(g: Group) -> None:
        whole_warps(g, "mma.sync")
        for slot in (*a_slots, *b_slots, *(c_slots or ())):
            g.soften(slot)
        if (unknown := g.state.unknown) is not None:
            # Not followed by rows and columns: all of the warp's result.
            g.state.unknown = np.broadcast_to(unknown.max(1, keepdims=True), unknown.shape)
        start = (
            np.broadcast_to(fixed, (g.n, LANES, 4))
            if c_slots is None
            else gather(g, c_slots, False)
        )
        result = add_product(
            layout.a_matrix(gather(g, a_slots, False), left),
            layout.b_matrix(gather(g, b_slots, False), right),
            layout.result_matrix(start),
            integer,
            g.state.fp8_bits if k == 32 else None,
        )
        registers = layout.result_registers(result)
        for i, slot in enumerate(target):
            g.put(slot, registers[:, :, i])

    return execute


def _mma_types(instruction: Instruction) -> tuple[str, str, tuple[str, str]]:
    found = re.fullmatch(
        r"sync\.aligned\.m16n8k(\d+)\.row\.col\.(\w+)\.(\w+)\.(\w+)\.(\w+)",
        ".".join(instruction.modifiers),
    )
    if not found:
        raise refuse(instruction, f"the form {instruction.name}")
    k, d, left, right, c = found.groups()
    if _MMA_KINDS.get((left, right)) != int(k):
        raise refuse(instruction, f"m16n8k{k} of {left} and {right}")
    return left, right, (d, c)


_WGMMA = re.compile(r"sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)")


def _wgmma(instruction: Instruction) -> Operation:
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.atype.btype d, a, b-desc, scale-d, imm-scale-a, imm-scale-b, ..."""
    found = _WGMMA.fullmatch(".".join(instruction.modifiers))
    if not found:
        raise refuse(instruction, f"the form {instruction.name}")
    columns, k = int(found.group(1)), int(found.group(2))
    left, right = found.groups()[2:]
    if _MMA_KINDS.get((left, right)) != k or columns % 8 or not 8 <= columns <= 256:
        raise refuse(instruction, f"m64n{columns}k{k} of {left} and {right}")
    d, a, b, scale, *immediates = instruction.operands
    signs, turned_a, turned_b = _immediates(instruction, immediates, k == 16, a.kind == "vector")
    target = slots(instruction, d, columns // 2)
    if a.kind == "vector":
        read_a = _a_in_registers(slots(instruction, a, 4), left)
    else:
        read_a = _a_in_memory(source(instruction, a, "b64"), left, turned_a)
    descriptors = source(instruction, b, "b64")
    if scale.kind == "reg" and scale.type == "pred":
        scaled = source(instruction, scale, "pred")
    else:
        scaled = source(instruction, scale, "b32")

    def execute(g: Group) -> None:
        whole_warps(g, "wgmma.mma_async")
        state = g.state
        adds = uniform(g, full(g, scaled(g)), "scale-d").astype(bool)
        b_at = uniform(g, full(g, descriptors(g)), "the descriptor of B")
        if state.races is not None:
            first, inverse, at = _where(g, b_at, columns, turned_b)
            state.races.matrix(g, at.reshape(len(first), -1)[inverse], 16)
        a_of = read_a(g)
        pending = _pending(state, target)
        doubts = Doubts.of(state, target)
        of_a = doubts.at_issue(g, adds & (pending[g.ids] == 0))
        issued = g.ids

        def effect(rows: Group) -> None:
            at = np.searchsorted(issued, rows.ids)
            matrix, of_b = stored_matrix(rows, b_at[at], columns, right, turned_b)
            matrix = matrix.transpose(0, 2, 1)
            old = None
            keep = adds[at]
            if keep.any():
                old = layout.result_matrix(gather(rows, target, checked=False))
                if not keep.all():
                    old = np.where(keep[:, None, None], old, U32(0))
            result = add_product(
                a_of(rows, at) * signs, matrix, old, False, state.fp8_bits if k == 32 else None
            )
            registers = layout.result_registers(result)
            unknown = doubts.at_effect(rows, keep, None if of_a is None else of_a[at], of_b)
            pending[rows.ids] -= 1
            again = pending[rows.ids] > 0
            for i, slot in enumerate(target):
                rows.land(slot)
                state.unknown = None if unknown is None else unknown[:, :, i]
                rows.put(slot, registers[:, :, i])
            state.unknown = None
            if again.any():
                still = rows.subset(again)
                for slot in target:
                    still.fly(slot)

        pending[issued] += 1
        for slot in target:
            g.fly(slot)
        state.tasks.issue("wgmma", g, effect)

    return execute


def _immediates(instruction: Instruction, given, wide: bool, registers: bool):
    """(the product's sign, whether A and B are stored the other way round: imm-trans, which 16-bit types have)."""
    if any(o.kind != "int" for o in given):
        raise refuse(instruction, "immediates that are not numbers")
    values = [int(o.value) for o in given]
    transposes = 0 if not wide else 1 if registers else 2
    if len(values) != 2 + transposes or any(v not in (-1, 1) for v in values[:2]):
        raise refuse(instruction, f"the immediates {values}")
    if any(v not in (0, 1) for v in values[2:]):
        raise refuse(instruction, f"the immediates {values}")
    turned = [bool(v) for v in values[2:]]
    turned = [False] * (2 - len(turned)) + turned
    return F32(values[0] * values[1]), *turned


def uniform(group: Group, values: np.ndarray, what: str) -> np.ndarray:
    """One value a warp, [n]; a Fault where its lanes disagree."""
    first = values[:, :1]
    if (values != first).any():
        raise Fault(
            f"{what} differs between the lanes of a warp",
            allowed="one value for all lanes",
            fix="check how it is computed",
            lane=int(np.flatnonzero(values != first)[0]),
        )
    return first[:, 0].copy()


def _pending(state: State, target: list[int]) -> np.ndarray:
    """How many products of each row are on their way to this accumulator; kept with the state."""
    counts = state.__dict__.setdefault("products", {})
    if target[0] not in counts:
        counts[target[0]] = np.zeros(state.rows, I64)
    return counts[target[0]]


ReadA = Callable[[Group], Callable[[Group, np.ndarray], np.ndarray]]


def _a_in_registers(registers: list[int], kind: str) -> ReadA:
    def at_issue(g: Group):
        for slot in registers:
            g.soften(slot)

        def read(rows: Group, at: np.ndarray) -> np.ndarray:
            for slot in registers:
                rows.soften(slot)
            return layout.a_matrix(gather(rows, registers, checked=False), kind)

        return read

    return at_issue


def _a_in_memory(descriptors, kind: str, turned: bool) -> ReadA:
    def at_issue(g: Group):
        bits = uniform(g, full(g, descriptors(g)), "the descriptor of A")

        def read(rows: Group, at: np.ndarray) -> np.ndarray:
            whole, unwritten = stored_matrix(rows, bits[at], 16 * WARPS, kind, turned)
            if unwritten is not None:
                raise Fault(
                    "rows of A in shared memory that nothing has written",
                    allowed="an A that is written throughout",
                    fix="check the store and the wait before it",
                )
            mine = (rows.warp % WARPS * 16)[:, None] + np.arange(16)
            return np.take_along_axis(whole, mine[:, :, None], axis=1)

        return read

    return at_issue


def stored_matrix(
    rows: Group, bits: np.ndarray, count: int, kind: str, turned: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """An operand in shared memory, float32 [n, count, 32 / size]; what several warps read is read once.

    ``turned``: it is stored by columns of K (MN-major), not by rows.

    Beside it, which of its ``count`` rows hold bytes that nothing has written (bool [n, count]); None: none.
    """
    first, inverse, at = _where(rows, bits, count, turned)
    try:
        data, unwritten = rows.state.shared.look(
            rows.cta[first][:, None, None], at, 16, proxy="async"
        )
    except Fault as fault:
        if fault.lane is not None:
            fault.lane = int(first[fault.lane // (2 * count)]) * LANES
        raise
    words = np.ascontiguousarray(data).view(U32)
    if turned:
        if unwritten is not None:
            unwritten = unwritten.reshape(len(first), 16, count, 2).any((1, 3))[inverse]
        values = layout.decode(words.reshape(len(first), 16, count // 2), kind)
        return values.transpose(0, 2, 1)[inverse], unwritten
    if unwritten is not None:
        unwritten = unwritten.any((2, 3))[inverse]
    return layout.decode(words.reshape(len(first), count, 8), kind)[inverse], unwritten


def _where(
    rows: Group, bits: np.ndarray, count: int, turned: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """:func:`_alike` of the rows, and the addresses of what differs, in pieces of 16 bytes [len(first), ...]."""
    first, inverse = _alike(rows, bits)
    try:
        found = layout.descriptor(bits[first])
    except ValueError as error:
        raise Fault(
            str(error), allowed="one swizzle for all warps", fix="check the descriptors"
        ) from None
    if turned and not found.swizzle:
        raise Fault(
            "a transposed operand without a swizzle",
            allowed="swizzles of 32, 64 and 128 bytes",
            fix="add its layout to nvptx/matrix_layout.py",
        )
    find = layout.transposed_addresses if turned else layout.operand_addresses
    return first, inverse, find(found, count)


def _alike(rows: Group, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of rows whose (CTA, descriptor) differ, and for every row which of them is its own."""
    cta = rows.cta
    count = int((rows.warp == rows.warp[0]).sum())
    if rows.n % count == 0:  # rows are ordered by warp
        parts, same = cta.reshape(-1, count), bits.reshape(-1, count)
        if (parts == parts[0]).all() and (same == same[0]).all():
            return np.arange(count), np.tile(np.arange(count), rows.n // count)
    keys = np.stack([cta.astype(np.uint64), bits])
    _, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _wgmma_fence(instruction: Instruction) -> Operation:
    """Orders registers and products. That one stands where it must is checked in the text (``matrix_order``)."""
    return lambda g: whole_warps(g, "wgmma.fence")


def _wgmma_commit(instruction: Instruction) -> Operation:
    return lambda g: g.state.tasks.commit("wgmma", g)


def _wgmma_wait(instruction: Instruction) -> Operation:
    (count,) = operands(instruction, 1)
    at_most = int(constant(instruction, count, "u32"))
    return lambda g: g.state.tasks.wait("wgmma", g, at_most)


TABLE = {
    "mma": _mma,
    "wgmma.mma_async": _wgmma,
    "wgmma.fence": _wgmma_fence,
    "wgmma.commit_group": _wgmma_commit,
    "wgmma.wait_group": _wgmma_wait,
}
