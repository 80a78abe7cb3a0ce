"""Whether ``wgmma.fence`` stands where it must: found in the text, since an execution in order does not show it.

A register of A or of the accumulator that an ordinary instruction wrote may be used by ``wgmma.mma_async`` only after a
``wgmma.fence`` (PTX ISA 8.7, "wgmma.fence"); registers that only products of the same shape wrote may follow on.
"""

from __future__ import annotations

from collections import deque

from sglang_aiter_moe.nvptx import control
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.nvptx.operands import Operand
from sglang_aiter_moe.nvptx.text import Instruction, Kernel

_PRODUCT, _FENCE = "wgmma.mma_async", "wgmma.fence"
_NO_RESULT = (
    "st",
    "bra",
    "brx",
    "bar",
    "barrier",
    "fence",
    "red",
    "prefetch",
    "discard",
    "wgmma",
    "stmatrix",
    "ret",
    "exit",
)


def _registers(operand: Operand) -> int:
    bits = 1 << operand.slot if operand.kind == "reg" else 0
    for item in operand.items:
        bits |= _registers(item)
    return bits


def _written(instruction: Instruction) -> int:
    """The registers that an ordinary instruction writes: those of its first operand, unless it is an address."""
    if instruction.name.split(".")[0] in _NO_RESULT or not instruction.operands:
        return 0
    first = instruction.operands[0]
    return 0 if first.kind == "address" else _registers(first)


def check(kernel: Kernel) -> None:
    """Follows every path through the kernel.

    Raises:
        PtxError: names the product, and a register that was written since the last fence.
    """
    instructions = kernel.instructions
    if not any(i.name.startswith(_PRODUCT) for i in instructions):
        return
    leaders = {0}
    for at, instruction in enumerate(instructions):
        if control.is_terminator(instruction.name):
            leaders.update(control.targets(instruction))
            leaders.add(at + 1)
    unfenced: dict[int, int] = {0: (1 << len(kernel.registers)) - 1}
    todo = deque([0])
    while todo:
        at = todo.popleft()
        dirty = unfenced[at]
        while at < len(instructions):
            instruction = instructions[at]
            if instruction.name.startswith(_PRODUCT):
                _product(kernel, instruction, dirty)
            elif instruction.name.startswith(_FENCE):
                dirty = 0
            else:
                dirty |= _written(instruction)
            at += 1
            ends = control.is_terminator(instruction.name)
            follows = [at] if at in leaders and not ends else []
            if ends:
                follows = control.targets(instruction)
                if instruction.guard is not None:
                    follows = [*follows, at]
            for to in follows:
                before = unfenced.get(to)
                if before is None or dirty & ~before:
                    unfenced[to] = dirty | (before or 0)
                    todo.append(to)
            if ends or follows:
                break


def _product(kernel: Kernel, instruction: Instruction, dirty: int) -> None:
    result, left, _, scale = instruction.operands[:4]
    used = _registers(left) if left.kind == "vector" else 0
    if not (scale.kind == "int" and not scale.value):
        used |= _registers(result)
    bad = used & dirty
    if bad:
        name = kernel.registers[(bad & -bad).bit_length() - 1][0]
        raise PtxError(
            f"line {instruction.line}: {instruction.name} uses {name}, written since the last wgmma.fence",
            allowed="a wgmma.fence between them on every path",
            fix="check the fence before this product",
        )
