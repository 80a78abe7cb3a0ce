"""Executes a grid of a parsed kernel: waves of 64 lanes, many workgroups in lock-step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sglang_aiter_moe.amdgpu.assembly import Program
from sglang_aiter_moe.amdgpu.memory import Memory


@dataclass
class Statistics:
    """What a launch did.

    Attributes:
        wave_instructions: instructions executed, each wave counted by itself.
        seconds: wall clock of the interpreter.
        opcodes: opcode -> wave-instructions.
    """

    wave_instructions: int = 0
    seconds: float = 0.0
    opcodes: Counter = field(default_factory=Counter)


def run(
    program: Program,
    kernel: str,
    memory: Memory,
    kernargs: bytes,
    grid: tuple[int, int, int],
    *,
    block: tuple[int, int, int] | None = None,
    lds_bytes: int | None = None,
    lockstep: int = 64,
    max_instructions: int = 50_000_000_000,
    checked: bool = True,
) -> Statistics:
    """Executes ``grid`` workgroups of ``kernel``; what it stores is in ``memory`` afterwards.

    Args:
        kernargs: the kernarg segment, laid out by the kernel's ``arguments``.
        grid: workgroups in x, y, z.
        block: work-items of a workgroup in x, y, z; None: ``Kernel.workgroup_size`` in x.
        lds_bytes: LDS of a workgroup; None: the kernel's static size. Triton states it beside the text
            (``compiled.metadata.shared``), and the text says 0.
        lockstep: workgroups that are executed side by side.
        max_instructions: wave-instructions after which a launch is taken to hang.
        checked: report reads of registers, LDS and memory that nothing wrote.

    Raises:
        ExecutionError: names source line, opcode, workgroup, wave and lane.
    """
    raise NotImplementedError
