"""An AMD GPU that is interpreted: run Triton kernels for gfx942 or gfx950 on CPU tensors.

    with Device("gfx950") as device:
        kernel[grid](x, y, n, BLOCK=64)
    device.launches[0].statistics

Each launch compiles the kernel for the target, interprets its assembly text, and writes what it wrote into the
tensors. docs/amd-execution.md says what is modelled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.amdgpu import kernarg, machine, triton_driver
from sglang_aiter_moe.amdgpu.assembly import Program, parse
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.amdgpu.placing import Placing


@dataclass(frozen=True)
class Launch:
    """A launch that ran.

    Attributes:
        grid: workgroups along x, y, z; ``warps``: waves each.
        arguments: the tensors themselves, and numbers, by name.
    """

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    assembly: str
    arguments: dict[str, Any]
    statistics: machine.Statistics

    @property
    def workgroups(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@functools.lru_cache(maxsize=128)
def program_of(assembly: str) -> Program:
    return parse(assembly)


class Device:
    """Runs launches on interpreted memory while it is entered.

    Tensors are on the CPU. Their bytes are copied in before a launch, and out after it. Arguments may be the same
    tensor twice, but not overlap otherwise.

    Args:
        arch: "gfx942" or "gfx950".
        scratch: tells of a tensor whether its bytes mean nothing before a kernel has written them; reading them is
            then an error, also in a later launch.
        edit: takes a kernel's name and assembly text and returns the text to run (mutations).
        lockstep: workgroups that advance together.
        max_instructions: wave-instructions of one launch before it counts as one that does not end.
    """

    def __init__(
        self,
        arch: str,
        *,
        scratch: Callable[[torch.Tensor], bool] = lambda tensor: False,
        edit: Callable[[str, str], str] = lambda name, text: text,
        lockstep: int = 64,
        max_instructions: int = 1 << 28,
    ) -> None:
        self.memory = Memory()
        self.launches: list[Launch] = []
        self._driver = triton_driver.Driver(arch, self.launched)
        self.placing, self._edit = Placing(self.memory, scratch), edit
        self._limits = {"lockstep": lockstep, "max_instructions": max_instructions}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Device:
        self._stack.enter_context(triton_driver.active(self._driver))
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def launched(self, call: triton_driver.Call) -> None:
        """Runs one launch; Triton calls this, and a replay of a call may."""
        text = self._edit(call.name, call.assembly)
        program = program_of(text)
        kernel = program.kernels[call.name]
        tensors = {n: a for n, a in call.arguments.items() if isinstance(a, torch.Tensor)}
        addresses = {name: self.placing.address(tensor, name) for name, tensor in tensors.items()}
        values = [
            argument.data if isinstance(argument, triton_driver.Scalar) else addresses[name]
            for name, argument in call.arguments.items()
        ]
        segment = kernarg.pack(kernel, values, list(call.arguments))
        statistics = machine.run(
            program,
            call.name,
            self.memory,
            segment,
            call.grid,
            block=(call.warps * triton_driver.WAVEFRONT, 1, 1),
            lds_bytes=call.lds_bytes,
            **self._limits,
        )
        self.placing.copy_back(tensors.values())
        arguments = {
            name: value.value if isinstance(value, triton_driver.Scalar) else value
            for name, value in call.arguments.items()
        }
        self.launches.append(Launch(call.name, call.grid, call.warps, text, arguments, statistics))
