"""Executes a grid of a parsed kernel: warps of 32 lanes, several CTAs side by side.

The warps of a batch of CTAs are divided into fragments: lanes that stand at one instruction. Of those that do not wait,
the fragments at the smallest position execute a block together; a branch or a wait on which they differ splits them,
and they meet again where their positions do. Where an instruction completes an mbarrier's phase, all others go on until
they wait, before the instruction behind it: what is read after its slot was released meets the next copy.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sglang_aiter_moe.amdgpu.errors import Fault
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.nvptx import control
from sglang_aiter_moe.nvptx.asynchronous import Tasks
from sglang_aiter_moe.nvptx.code import Block, Code
from sglang_aiter_moe.nvptx.errors import DeadlockError, ExecutionError
from sglang_aiter_moe.nvptx.launch_state import specials
from sglang_aiter_moe.nvptx.mbarrier import Barriers
from sglang_aiter_moe.nvptx.named_barrier import NamedBarriers
from sglang_aiter_moe.nvptx.races import Races
from sglang_aiter_moe.nvptx.shared import Shared
from sglang_aiter_moe.nvptx.state import LANES, Group, State, bits_of
from sglang_aiter_moe.nvptx.text import Instruction, Kernel, Program

SHARED_LIMIT = 232448
"""Bytes of shared memory that a CTA of sm_90 may have (CUDA C++ Programming Guide, compute capabilities)."""
_SPINS = 64
"""How often warps that spin may look again while nobody does anything, before that is a deadlock."""


@dataclass
class Statistics:
    """What a launch did.

    Attributes:
        warp_instructions: instructions executed, each warp counted by itself.
        steps: operations executed, whatever the number of warps.
        seconds: wall clock of the interpreter; ``processor_seconds``: processor time of this process in it.
        opcodes: full name -> warp-instructions; ``lines``: line of the text -> warp-instructions.
    """

    warp_instructions: int = 0
    steps: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    opcodes: Counter = field(default_factory=Counter)
    lines: Counter = field(default_factory=Counter)


def run(
    program: Program,
    kernel: str,
    memory: Memory,
    params: bytes,
    grid: tuple[int, int, int],
    *,
    shared_bytes: int = 0,
    block: tuple[int, int, int] | None = None,
    cooperative: bool = False,
    late: bool = True,
    lockstep: int | None = None,
    max_instructions: int | None = None,
    max_seconds: float = math.inf,
    checked: bool = True,
    follow: bool = False,
    fp8_bits: int | None = None,
    code: Code | None = None,
) -> Statistics:
    """Executes ``grid`` CTAs of ``kernel``; what it stores is in ``memory`` afterwards.

    Args:
        params: the kernel's parameters, laid out by ``Kernel.params``.
        shared_bytes: dynamic shared memory of a CTA.
        block: threads of a CTA in x, y, z; None: what ``.reqntid`` says.
        cooperative: all CTAs run at once (a grid-wide barrier); else ``lockstep`` at a time.
        late: an asynchronous result lands when it is waited for; False: when it is issued.
        lockstep: CTAs that are executed side by side; None: about 2048 threads.
        max_instructions, max_seconds: when a launch is taken to hang.
        checked: report reads of registers, shared and global memory that nothing wrote.
        follow: let kernels load what nothing wrote, and store what came of it (``State.follow``).
        fp8_bits: how many bits sums of fp8 products keep (``matrix_sums``); None: all.
        code: what ``Code(program.kernels[kernel])`` made, to decode once for many launches.

    Raises:
        PtxError: an instruction that is not modelled was reached.
        ExecutionError: names line, instruction, CTA, warp and lane.
        DeadlockError: all warps wait; says which and for what.
    """
    if kernel not in program.kernels:
        raise ExecutionError(
            f"the kernel {kernel} is not in the text",
            allowed=", ".join(program.kernels) or "a text with an .entry",
            fix="name one of them",
        )
    described = program.kernels[kernel]
    threads = block or described.threads
    _check(described, params, threads, shared_bytes)
    started, used = time.perf_counter(), time.process_time()
    address = memory.place(np.frombuffer(params or b"\0" * 8, np.uint8), "params", writable=False)
    memory.settle()
    total, per_cta = math.prod(grid), math.prod(threads)
    if cooperative:
        lockstep = total
    lockstep = lockstep or max(1, 2048 // per_cta)
    runner = _Runner(code or Code(described), memory, address, grid, threads)
    runner.late, runner.checked, runner.follow = late, checked, follow
    runner.fp8_bits = fp8_bits
    runner.shared_bytes = described.static_shared + shared_bytes
    runner.limits = (max_instructions or sys.maxsize, started + max_seconds)
    with np.errstate(all="ignore"):
        for first in range(0, total, lockstep):
            runner.run(range(first, min(first + lockstep, total)))
    made = runner.statistics()
    made.seconds = time.perf_counter() - started
    made.processor_seconds = time.process_time() - used
    return made


def _check(kernel: Kernel, params: bytes, threads, shared_bytes: int) -> None:
    if len(params) < kernel.param_bytes:
        raise ExecutionError(
            f"{len(params)} bytes of parameters",
            allowed=f"{kernel.param_bytes}, as {kernel.name} declares",
            fix="lay them out by Kernel.params",
        )
    if threads is None or not 1 <= math.prod(threads) <= 1024 or math.prod(threads) % LANES:
        raise ExecutionError(
            f"a CTA of {threads} threads",
            allowed="a multiple of 32 up to 1024",
            fix="pass block; .reqntid may not say it",
        )
    if kernel.threads is not None and tuple(threads) != tuple(kernel.threads):
        raise ExecutionError(
            f"a CTA of {list(threads)} threads",
            allowed=f"{list(kernel.threads)}: .reqntid of {kernel.name}",
            fix="correct block",
        )
    if kernel.static_shared + shared_bytes > SHARED_LIMIT:
        raise ExecutionError(
            f"{kernel.static_shared + shared_bytes} bytes of shared memory",
            allowed=f"at most {SHARED_LIMIT}",
            fix="correct shared_bytes",
        )


class _Fragment:
    """Lanes at ``pc``; ``parked`` is the number of events when they began to wait, or -1."""

    __slots__ = ("group", "parked", "pc")

    def __init__(self, pc: int, group: Group, parked: int = -1) -> None:
        self.pc, self.group, self.parked = pc, group, parked


class _Runner:
    """One launch: batch after batch of CTAs."""

    late = checked = True
    follow = False
    fp8_bits: int | None = None
    shared_bytes = 0
    limits = (sys.maxsize, math.inf)

    def __init__(self, code: Code, memory: Memory, params: int, grid, threads) -> None:
        self._code, self._memory, self._params = code, memory, params
        self._grid, self._threads = grid, threads
        self._counts: Counter = Counter()
        self._executed = self._steps = 0

    def run(self, ctas: range) -> None:
        warps = math.prod(self._threads) // LANES
        registers = self._code.kernel.registers
        self._ctas = ctas
        self._state = s = State(len(ctas), warps, registers, checked=self.checked, late=self.late)
        s.memory = self._memory
        s.shared = Shared(s.ctas, self.shared_bytes, checked=self.checked)
        s.tasks, s.barriers, s.named = Tasks(s), Barriers(s), NamedBarriers(s)
        s.races = Races(s) if self.checked else None
        s.params = np.uint64(self._params)
        s.follow, s.fp8_bits = self.follow, self.fp8_bits
        s.specials = specials(ctas, self._grid, self._threads, self.shared_bytes)
        self._fragments = [_Fragment(0, s.group((1 << s.rows) - 1))]
        spins = 0
        while self._fragments:
            events = s.events
            ready = [f for f in self._fragments if f.parked != events]
            if not ready:
                spins += 1
                if spins > _SPINS or not s.seen:
                    raise self._deadlock()
                s.seen.clear()
                ready = self._fragments
            elif s.events != self._last_events:
                spins = 0
            self._last_events = s.events
            if self._hurried:
                first = [f for f in ready if f.group.bits & self._hurried]
                self._hurried = self._hurried if first else 0
                ready = first or ready
            pc = min(f.pc for f in ready)
            together = [f for f in ready if f.pc == pc]
            for f in together:
                self._fragments.remove(f)
            self._execute(pc, self._merged(together))

    _last_events = -1
    _hurried = 0
    """Rows (as bits) that go on before others until they wait again."""

    def _merged(self, fragments: list[_Fragment]) -> Group:
        if len(fragments) == 1:
            return fragments[0].group
        bits = 0
        for f in fragments:
            bits |= f.group.bits
        if all(f.group.mask is None for f in fragments):
            return self._state.group(bits)
        lanes = np.zeros((self._state.rows, LANES), bool)
        for f in fragments:
            lanes[f.group.rows] |= f.group.lanes
        return self._made(bits, lanes)

    def _made(self, bits: int, lanes: np.ndarray) -> Group:
        """The group of these rows with these lanes, of bool [rows, 32]."""
        group = self._state.group(bits)
        mask = lanes[group.rows]
        return group if mask.all() else Group(self._state, bits, mask)

    def _part(self, group: Group, lanes: np.ndarray) -> Group | None:
        """The lanes [n, 32] of a group, or None if there are none."""
        positions = lanes.any(1)
        if not positions.any():
            return None
        mask = lanes[positions]
        bits = bits_of(group.ids[positions])
        return self._state.group(bits) if mask.all() else Group(self._state, bits, mask)

    def _execute(self, pc: int, group: Group) -> None:
        block = self._code.block(pc)
        operation, passed, state = -1, None, self._state
        turns = state.turns
        try:
            for operation, function in enumerate(block.operations):  # noqa: B007
                passed = function(group)
                if state.unknown is not None:
                    state.unknown = None
                if state.turns != turns and passed is None:
                    passed = group.lanes
                    self._hurried = ((1 << state.rows) - 1) & ~group.bits
                if passed is not None:
                    break
            else:
                self._count(block, group.n, len(block.operations) + (block.leave is not None))
                if block.leave is None:
                    self._fragments.append(_Fragment(block.following, group))
                    return
                operation = len(block.operations)
                for to, lanes in block.leave(group):
                    part = group if lanes is None else self._part(group, lanes)
                    if part is None:
                        continue
                    if to == control.ENDED:
                        state.live[part.rows] &= ~part.lanes
                        state.event()
                    else:
                        self._fragments.append(_Fragment(to, part))
                return
        except Fault as fault:
            raise self._error(fault, pc + operation, group) from None
        at = pc + operation
        self._count(block, group.n, operation + 1)
        if passed.ndim == 1:
            passed = np.broadcast_to(passed[:, None], (group.n, LANES))
        lanes = group.lanes
        if (on := self._part(group, passed & lanes)) is not None:
            self._fragments.append(_Fragment(at + 1, on))
        if (rest := self._part(group, ~passed & lanes)) is not None:
            self._hurried &= ~rest.bits
            self._fragments.append(_Fragment(at, rest, self._state.events))

    def _count(self, block: Block, rows: int, operations: int) -> None:
        self._counts[block.start, operations] += rows
        self._steps += operations
        self._executed += rows * operations
        late = time.perf_counter() > self.limits[1]
        if late or self._executed > self.limits[0]:
            line = self._code.kernel.instructions[block.start].line
            raise ExecutionError(
                f"line {line}: {self._executed:,} warp-instructions, and the kernel has not ended",
                allowed="max_seconds" if late else f"max_instructions: {self.limits[0]:,}",
                fix="check the loop's condition, or allow more",
            )

    def statistics(self) -> Statistics:
        made = Statistics(steps=self._steps)
        instructions = self._code.kernel.instructions
        for (start, count), rows in self._counts.items():
            for instruction in instructions[start : start + count]:
                made.opcodes[instruction.name] += rows
                made.lines[instruction.line] += rows
        made.warp_instructions = sum(made.opcodes.values())
        return made

    # Errors.

    def _place(self, row: int) -> tuple[tuple[int, int, int], int]:
        x, y, _ = self._grid
        warp, cta = divmod(int(row), self._state.ctas)
        n = self._ctas[cta]
        return (n % x, n // x % y, n // (x * y)), warp

    def _error(self, fault: Fault, at: int, group: Group) -> ExecutionError:
        instruction = self._code.kernel.instructions[at]
        where = _where(instruction)
        cta = warp = lane = None
        position = fault.wave
        if fault.lane is not None:
            position, lane = divmod(int(fault.lane), LANES)
        if position is not None and position < group.n:
            cta, warp = self._place(group.ids[position])
            where += f" (CTA {cta}, warp {warp}" + (")" if lane is None else f", lane {lane})")
        error = ExecutionError(f"{where}: {fault.what}", allowed=fault.allowed, fix=fault.fix)
        error.line, error.opcode, error.source = (
            instruction.line,
            instruction.name,
            instruction.source,
        )
        error.cta, error.warp, error.lane = cta, warp, lane
        return error

    def _deadlock(self) -> DeadlockError:
        told = []
        for f in sorted(self._fragments, key=lambda f: f.pc):
            instruction = self._code.kernel.instructions[f.pc]
            places: dict[tuple, list[int]] = {}
            for row in f.group.ids:
                cta, warp = self._place(row)
                places.setdefault(cta, []).append(warp)
            who = "; ".join(f"warps {w} of CTA {c}" for c, w in list(places.items())[:4])
            more = f" and {len(places) - 4} CTAs more" if len(places) > 4 else ""
            reason = self._state.reasons.get(instruction.place)
            told.append(
                f"{who}{more} at {_where(instruction)}" + (f": {reason()}" if reason else "")
            )
        error = DeadlockError(
            "every warp that has not ended waits: " + " | ".join(told),
            allowed="for every wait an arrival, a copy or a store that ends it",
            fix="check counts and parities of the barriers named",
        )
        error.line = self._code.kernel.instructions[self._fragments[0].pc].line
        return error


def _where(instruction: Instruction) -> str:
    source = f", {instruction.source}" if instruction.source else ""
    return f"line {instruction.line}{source}: {instruction.text[:160]}"
