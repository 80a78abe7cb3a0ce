"""A kernel's straight pieces, decoded to functions of a group: what the machine executes one after another."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_aiter_moe.nvptx import control, semantics
from sglang_aiter_moe.nvptx.decode import Operation
from sglang_aiter_moe.nvptx.errors import ExecutionError
from sglang_aiter_moe.nvptx.text import Kernel, Program


@dataclass
class Block:
    """Straight-line code from ``start`` to a branch, an end, or a position that is branched to."""

    start: int
    operations: list[Operation]
    leave: control.Leave | None
    following: int


class Code:
    """A kernel's blocks, decoded when they are first reached; one serves any number of launches."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._blocks: dict[int, Block] = {}
        self._operations: dict[int, Operation] = {}
        self._leaders = {
            to
            for i in kernel.instructions
            if control.is_terminator(i.name)
            for to in control.targets(i)
        }

    def block(self, start: int) -> Block:
        found = self._blocks.get(start)
        if found is None:
            found = self._blocks[start] = self._build(start)
        return found

    def _build(self, start: int) -> Block:
        instructions, operations, at = self.kernel.instructions, [], start
        while True:
            if at >= len(instructions):
                raise ExecutionError(
                    f"the code from instruction {start} of {self.kernel.name} on runs past its end",
                    allowed="code that ends in ret",
                    fix="pass the whole text",
                )
            instruction = instructions[at]
            if control.is_terminator(instruction.name):
                return Block(start, operations, control.build(instruction, at + 1), at + 1)
            if at not in self._operations:
                self._operations[at] = control.guarded(instruction, semantics.build(instruction))
            operations.append(self._operations[at])
            at += 1
            if at in self._leaders:
                return Block(start, operations, None, at)


def check(program: Program) -> None:
    """Raises PtxError unless every instruction of every kernel is modelled."""
    for kernel in program.kernels.values():
        for at, instruction in enumerate(kernel.instructions):
            if control.is_terminator(instruction.name):
                control.build(instruction, at + 1)
            else:
                semantics.build(instruction)
