"""Single PTX instructions on a small batch, for tests of their semantics."""

from __future__ import annotations

import numpy as np

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.nvptx import text
from sglang_aiter_moe.nvptx.asynchronous import Tasks
from sglang_aiter_moe.nvptx.mbarrier import Barriers
from sglang_aiter_moe.nvptx.shared import Shared
from sglang_aiter_moe.nvptx.state import Group, State


class Piece:
    """A kernel's body of registers and instructions, executed one by one by the given tables.

    Args:
        body: declarations and instructions.
        tables: opcode -> builder.
        ctas, warps: of the batch; ``shared_bytes`` a CTA.
        late: when asynchronous effects land.
    """

    def __init__(
        self,
        body: str,
        *tables: dict,
        ctas: int = 2,
        warps: int = 4,
        shared_bytes: int = 8192,
        late: bool = True,
    ) -> None:
        source = f".version 8.7\n.target sm_90a\n.visible .entry k()\n{{\n{body}\n}}\n"
        self.kernel = text.parse(source).kernels["k"]
        self.state = State(ctas, warps, self.kernel.registers, checked=True, late=late)
        self.state.shared = Shared(ctas, shared_bytes, checked=True)
        self.state.memory = Memory()
        self.state.tasks = Tasks(self.state)
        self.state.barriers = Barriers(self.state)
        known = {opcode: build for table in tables for opcode, build in table.items()}
        self.operations = [self._build(i, known) for i in self.kernel.instructions]

    @staticmethod
    def _build(instruction: text.Instruction, known: dict):
        opcode = max((o for o in known if f"{instruction.name}.".startswith(f"{o}.")), key=len)
        return known[opcode](text.with_opcode(instruction, opcode))

    @property
    def everyone(self) -> Group:
        return self.state.group((1 << self.state.rows) - 1)

    def slot(self, name: str) -> int:
        return [n for n, _ in self.kernel.registers].index(name)

    def set(self, name: str, value: np.ndarray) -> None:
        """``value`` broadcasts to [rows, 32]."""
        slot = self.slot(name)
        held = self.state.values[slot]
        self.everyone.put(slot, np.broadcast_to(np.asarray(value).astype(held.dtype), held.shape))

    def get(self, name: str) -> np.ndarray:
        """[rows, 32], checked."""
        slot = self.slot(name)
        self.everyone.check(slot)
        return self.everyone.get(slot).copy()

    def run(self, *numbers: int, group: Group | None = None) -> None:
        """Executes the instructions of these numbers, or all."""
        with np.errstate(all="ignore"):
            for number in numbers or range(len(self.operations)):
                self.operations[number](group or self.everyone)
                self.state.unknown = None
