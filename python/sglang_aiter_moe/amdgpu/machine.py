"""Executes a grid of a parsed kernel: waves of 64 lanes, many workgroups in lock-step.

The waves of ``lockstep`` workgroups are one batch. All waves at the smallest program counter execute a basic block
together; a branch on which they differ splits them, and they meet again where their counters do. A barrier holds a wave
until every wave of its workgroup that has not ended waits too.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sglang_aiter_moe.amdgpu import control, semantics
from sglang_aiter_moe.amdgpu.assembly import LDS_BYTES, Instruction, Kernel, Program
from sglang_aiter_moe.amdgpu.control import BARRIER, BRANCH, CONDITIONS, END, TERMINATORS
from sglang_aiter_moe.amdgpu.errors import ExecutionError, Fault
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.amdgpu.state import LANES, Batch
from sglang_aiter_moe.errors import ContractError

_ENDED, _NEVER = np.int64(1 << 40), np.int64(1 << 41)


@dataclass
class Statistics:
    """What a launch did.

    Attributes:
        wave_instructions: instructions executed, each wave counted by itself.
        seconds: wall clock of the interpreter.
        processor_seconds: processor time of this process in it.
        opcodes: opcode -> wave-instructions.
        lines: line of the text -> wave-instructions.
    """

    wave_instructions: int = 0
    seconds: float = 0.0
    opcodes: Counter = field(default_factory=Counter)
    lines: Counter = field(default_factory=Counter)
    processor_seconds: float = 0.0


@dataclass
class _Block:
    """Straight-line code: from a label or after a branch, to the next branch, barrier, end or label."""

    start: int
    operations: list[Callable[[Batch], None]]
    last: Instruction | None
    """The branch, barrier or end; None where the block runs into a label."""
    next: int
    target: int | None = None
    waves: int = 0
    """How many waves have executed it."""


@dataclass(frozen=True)
class _Launch:
    program: Program
    kernel: Kernel
    memory: Memory
    kernarg_address: int
    kernargs: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    lds_bytes: int
    checked: bool
    scratch_address: int
    registers: tuple[int, int]
    """How many vector and accumulation registers the text uses."""


@dataclass
class _Limit:
    """When a launch is taken to hang, and how far it is."""

    instructions: int
    seconds: float
    deadline: float
    executed: int = 0

    def add(self, count: int, line: int) -> None:
        self.executed += count
        late = time.perf_counter() > self.deadline
        if late or self.executed > self.instructions:
            raise ExecutionError(
                f"line {line}: {self.executed:,} wave-instructions"
                + (f" in {self.seconds:g} s" if late else "")
                + ", and the kernel has not ended",
                allowed=f"max_seconds: {self.seconds:g}"
                if late
                else f"max_instructions: {self.instructions:,}",
                fix="check the loop's condition, or allow more: "
                + ("--max-seconds" if late else "--max-instructions")
                + " of execute",
            )


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
    max_instructions: int | None = None,
    max_seconds: float = math.inf,
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
        max_instructions: wave-instructions after which a launch is taken to hang; None: as many as it takes.
        max_seconds: the same by the clock.
        checked: report reads of registers, LDS and memory that nothing wrote.

    Raises:
        AssemblyError: the kernel has an opcode, modifier or operand that is not modelled.
        ContractError: a grid or a workgroup larger than the kernel's metadata or the target's LDS allows.
        ExecutionError: names source line, opcode, workgroup, wave and lane.
    """
    if kernel not in program.kernels:
        raise ExecutionError(
            f"the kernel {kernel} is not in the text",
            allowed=", ".join(program.kernels) or "a text with an .amdhsa_kernel directive",
            fix="name one of them",
        )
    described = program.kernels[kernel]
    if len(kernargs) < described.kernarg_size:
        raise ExecutionError(
            f"{len(kernargs)} bytes of kernel arguments",
            allowed=f"{described.kernarg_size} bytes, as {kernel} declares",
            fix="lay them out by Kernel.arguments",
        )
    started, used = time.perf_counter(), time.process_time()
    shape = block or (described.workgroup_size, 1, 1)
    lds = described.lds_bytes if lds_bytes is None else lds_bytes
    _check_size(described, grid, shape, lds)
    blocks = _blocks(program, described.entry)
    address = memory.place(
        np.frombuffer(kernargs or b"\0" * 8, np.uint8), "kernargs", writable=False
    )
    for argument in described.arguments:
        if argument.value_kind.startswith("hidden"):  # what a runtime fills in is not known here
            memory.forget(address + argument.offset, argument.size)
    scratch = 0
    if described.scratch_bytes:
        waves = min(lockstep, int(np.prod(grid))) * -(-int(np.prod(shape)) // LANES)
        scratch = memory.reserve(waves * LANES * described.scratch_bytes, "scratch")
    memory.settle()
    launch = _Launch(
        program, described, memory, address, kernargs, grid,
        shape, lds, checked, scratch,
        (max(1, _highest(program, "v")), _highest(program, "a")),
    )  # fmt: skip
    total = int(np.prod(grid))
    limit = _Limit(max_instructions or sys.maxsize, max_seconds, time.perf_counter() + max_seconds)
    with np.errstate(all="ignore"):
        for first in range(0, total, lockstep):
            groups = np.arange(first, min(first + lockstep, total))
            _Runner(launch, blocks, groups).run(limit)
    opcodes, lines = Counter(), Counter()
    for b in blocks.values():
        if b.waves:
            end = b.start + len(b.operations) + (b.last is not None)
            for instruction in program.instructions[b.start : end]:
                opcodes[instruction.opcode] += b.waves
                lines[instruction.line] += b.waves
    return Statistics(
        sum(opcodes.values()),
        time.perf_counter() - started,
        opcodes,
        lines,
        time.process_time() - used,
    )


def _check_size(
    kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], lds_bytes: int
) -> None:
    """Refuses a grid or a workgroup that the hardware would not start."""
    if any(n * m >= 1 << 32 for n, m in zip(grid, block, strict=True)):
        raise ContractError(
            f"the grid of {kernel.name} is {list(grid)} workgroups of {list(block)}",
            allowed="less than 2**32 work-items along each of x, y and z, as a dispatch packet holds",
            fix="correct grid",
        )
    items = int(np.prod(block))
    if items > kernel.workgroup_size or max(block) > 1024:
        raise ContractError(
            f"a workgroup of {kernel.name} is given {items} work-items ({list(block)})",
            allowed=f"at most {kernel.workgroup_size}: .max_flat_workgroup_size in its metadata",
            fix="correct block",
        )
    most = LDS_BYTES[kernel.target]
    if lds_bytes > most:
        raise ContractError(
            f"a workgroup of {kernel.name} is given {lds_bytes} bytes of LDS",
            allowed=f"at most {most} on {kernel.target}",
            fix="correct lds_bytes",
        )


def _blocks(program: Program, entry: int) -> dict[int, _Block]:
    """The basic blocks that can be reached from ``entry``, by the index of their first instruction."""
    leaders = set(program.labels.values())
    blocks: dict[int, _Block] = {}
    todo = [entry]
    while todo:
        start = todo.pop()
        if start in blocks:
            continue
        operations, at = [], start
        while True:
            if at >= len(program.instructions):
                raise ExecutionError(
                    f"the code from instruction {start} on runs past the end of the text",
                    allowed="code that ends in s_endpgm",
                    fix="pass the whole text",
                )
            instruction = program.instructions[at]
            if instruction.opcode in TERMINATORS:
                control.check(instruction)
                block = _Block(start, operations, instruction, at + 1)
                break
            operations.append(semantics.build(instruction))
            at += 1
            if at in leaders:
                block = _Block(start, operations, None, at)
                break
        blocks[start] = block
        if block.last is None or block.last.opcode != END:
            if block.last is not None and block.last.opcode in (BRANCH, *CONDITIONS):
                block.target = program.labels[block.last.operands[0].value]
                todo.append(block.target)
            if block.last is None or block.last.opcode != BRANCH:
                todo.append(block.next)
    return blocks


def _highest(program: Program, kind: str) -> int:
    used = [o.index + o.count for i in program.instructions for o in i.operands if o.kind == kind]
    return max(used, default=0)


class _Runner:
    """One batch of workgroups from entry to end."""

    def __init__(self, launch: _Launch, blocks: dict[int, _Block], groups: np.ndarray) -> None:
        self._launch, self._blocks, self._groups = launch, blocks, groups
        x, y, z = launch.block
        self._per_group = -(-x * y * z // LANES)
        waves = groups.size * self._per_group
        self._batch = b = Batch(
            waves, self._per_group, *launch.registers, launch.lds_bytes, launch.checked
        )  # fmt: skip
        b.memory = launch.memory
        if size := launch.kernel.scratch_bytes:
            # One batch after another uses the same bytes.
            launch.memory.forget(launch.scratch_address, waves * LANES * size)
            lanes = np.arange(waves * LANES, dtype=np.uint64).reshape(waves, LANES)
            b.scratch_bytes, b.scratch_at = (
                size,
                np.uint64(launch.scratch_address) + lanes * np.uint64(size),
            )
        self._ids = np.arange(waves)
        self._pc = np.full(waves, launch.kernel.entry, np.int64)
        self._waiting = np.zeros(waves, bool)
        _initialise(b, launch, groups)

    def run(self, limit: _Limit) -> None:
        while True:
            ended = self._pc == _ENDED
            if ended.any():
                if ended.all():
                    return
                self._compact(ended)
            ready = np.where(self._waiting, _NEVER, self._pc)
            pc = int(ready.min())
            active = ready == pc
            b = self._batch
            everyone = bool(active.all())
            if not (everyone and b.active is None):
                b.activate(None if everyone else active)
            block = self._blocks[pc]
            count = b.waves if everyone else int(active.sum())
            i = 0
            try:
                for i, operation in enumerate(block.operations):  # noqa: B007
                    operation(b)
            except Fault as fault:
                raise self._error(
                    fault, self._launch.program.instructions[block.start + i]
                ) from None
            block.waves += count
            self._leave(block, active, everyone)
            limit.add(
                count * (len(block.operations) + (block.last is not None)),
                self._launch.program.instructions[block.start].line,
            )

    def _leave(self, block: _Block, active: np.ndarray, everyone: bool) -> None:
        """Sets the program counters of the waves that executed ``block``."""
        b, pc, opcode = self._batch, self._pc, block.last.opcode if block.last else ""
        if opcode in CONDITIONS:
            try:
                taken = CONDITIONS[opcode](b)
            except Fault as fault:
                raise self._error(fault, block.last) from None
            to = np.where(taken, block.target, block.next)
            self._pc = to if everyone else np.where(active, to, pc)
            return
        to = {BRANCH: block.target, END: _ENDED}.get(opcode, block.next)
        self._pc = np.full_like(pc, to) if everyone else np.where(active, to, pc)
        if opcode == BARRIER and not everyone:
            self._waiting |= active
        if opcode in (BARRIER, END) and self._waiting.any():
            arrived = (self._waiting | (self._pc == _ENDED)).reshape(-1, self._per_group).all(1)
            self._waiting &= ~np.repeat(arrived, self._per_group)

    def _compact(self, ended: np.ndarray) -> None:
        """Drops workgroups that have ended once they are a third of the batch."""
        whole = ended.reshape(-1, self._per_group).all(1)
        if 3 * whole.sum() < whole.size:
            return
        kept = ~np.repeat(whole, self._per_group)
        self._batch.activate(None)
        self._batch.keep(kept)
        self._ids, self._pc, self._waiting = self._ids[kept], self._pc[kept], self._waiting[kept]

    def _error(self, fault: Fault, instruction: Instruction) -> ExecutionError:
        wave, lane = fault.wave, None
        if fault.lane is not None:
            wave, lane = divmod(int(fault.lane), LANES)
        group = None
        where = f"line {instruction.line}: {instruction.text}"
        if wave is not None:
            wave = int(self._ids[wave])
            x, y, _ = self._launch.grid
            n = int(self._groups[wave // self._per_group])
            group, wave = (n % x, n // x % y, n // (x * y)), wave % self._per_group
            where += f" (workgroup {group}, wave {wave}" + (
                f", lane {lane})" if lane is not None else ")"
            )
        error = ExecutionError(f"{where}: {fault.what}", allowed=fault.allowed, fix=fault.fix)
        error.line, error.opcode = instruction.line, instruction.mnemonic
        error.workgroup, error.wave, error.lane = group, wave, lane
        return error


def _initialise(b: Batch, launch: _Launch, groups: np.ndarray) -> None:
    """Registers as the packet processor sets them (LLVM, "Initial Kernel Execution State"; GFX90A and later)."""
    kernel = launch.kernel
    at = 0
    for name, count in kernel.user_sgprs:
        if name == "kernarg_segment_ptr":
            b.set_s64(at, launch.kernarg_address & 0xFFFFFFFF, launch.kernarg_address >> 32)
        at += count  # what else can be asked for is left unwritten, so that a use of it is reported
    first, count = kernel.kernarg_preload
    words = np.frombuffer(
        launch.kernargs.ljust(4 * (first + count) + 4, b"\0"), np.uint32, first + count
    )
    for k in range(count):
        b.set_s(at + k, words[first + k])
    at += count
    x, y, _ = launch.grid
    numbers = (groups % x, groups // x % y, groups // (x * y))
    per_group = b.waves_a_group
    for enabled, number in zip(kernel.workgroup_ids, numbers, strict=True):
        if enabled:
            b.set_s(at, np.repeat(number.astype(np.uint32), per_group))
            at += 1
    bx, by, bz = launch.block
    item = np.arange(per_group * LANES)
    ids = [item % bx, item // bx % by, item // (bx * by)]
    packed = sum((ids[k] << (10 * k) for k in range(kernel.workitem_ids + 1)), np.zeros_like(item))
    lanes = packed.astype(np.uint32).reshape(per_group, LANES)
    b.v[0], b.v_known[0] = np.tile(lanes, (groups.size, 1)), True
    exists = (item < bx * by * bz).reshape(per_group, LANES)
    if not exists.all():
        b.set_bits(126, np.tile(exists, (groups.size, 1)))
