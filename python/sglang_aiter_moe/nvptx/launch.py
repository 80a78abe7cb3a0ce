"""An NVIDIA Hopper GPU that is interpreted: run Triton kernels for sm_90 on CPU tensors.

    with Device() as device:
        kernel[grid](x, y, n, BLOCK=64)
    device.launches[0].statistics

Each launch compiles the kernel for the target, interprets its PTX, and writes what it wrote into the tensors.
docs/hopper-execution.md says what is modelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.amdgpu.placing import Placing
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.nvptx import machine, matrix_order, triton_driver
from sglang_aiter_moe.nvptx.code import Code
from sglang_aiter_moe.nvptx.text import Kernel, Program, parse
from sglang_aiter_moe.nvptx.triton_driver import MULTIPROCESSORS, Call, MapOf, Scalar


@dataclass(frozen=True)
class Launch:
    """A launch that ran; ``arguments``: the tensors themselves, numbers, and descriptors' tensors, by name."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    assembly: str
    arguments: dict[str, Any]
    statistics: machine.Statistics


@functools.lru_cache(maxsize=128)
def program_of(assembly: str) -> tuple[Program, dict[str, Code]]:
    """A text's program, whose fences are checked, and its kernels' decoded blocks."""
    program = parse(assembly)
    for kernel in program.kernels.values():
        matrix_order.check(kernel)
    return program, {name: Code(kernel) for name, kernel in program.kernels.items()}


def pack(kernel: Kernel, values: list[bytes]) -> bytes:
    """The parameters' bytes. Triton's kernels end in two addresses of scratch memory, which are null.

    Raises:
        ContractError: another number of values, or another size.
    """
    missing = len(kernel.params) - len(values)
    if not 0 <= missing <= 2 or any(p.size != 8 for p in kernel.params[len(values) :]):
        raise ContractError(
            f"{kernel.name} is given {len(values)} arguments",
            allowed=f"{len(kernel.params)}, or two pointers less",
            fix="give one value for each parameter of the kernel",
        )
    out = bytearray(kernel.param_bytes)
    for param, value in zip(kernel.params, values, strict=False):
        if len(value) != param.size:
            raise ContractError(
                f"{param.name} of {kernel.name} is given {len(value)} bytes",
                allowed=str(param.size),
                fix="give a value of the parameter's type",
            )
        out[param.offset : param.offset + param.size] = value
    return bytes(out)


class Device:
    """Runs launches on interpreted memory while it is entered.

    What nothing has written may be read and computed with, and is followed: into registers, shared and global memory
    (:func:`layer.run_layer` refuses an output that holds some).

    Tensors are on the CPU. Their bytes are copied in before a launch, and out after it. Arguments may be the same
    tensor twice, but not overlap otherwise.

    Args:
        scratch: tells of a tensor whether its bytes mean nothing before a kernel has written them; reading them is
            then an error, also in a later launch.
        edit: takes a kernel's name and PTX and returns the text to run (mutations).
        multiprocessors: how many the kernels' launch code finds; fewer make persistent programs take more turns.
        late: asynchronous results land when they are waited for; else when they are issued.
        fp8_bits: how many bits sums of fp8 products keep, about 13 on hardware (``matrix_sums``); None: all.
        lockstep: CTAs that advance together; None: the machine's choice.
        max_instructions: warp-instructions of one launch before it counts as one that does not end.
    """

    def __init__(
        self,
        *,
        scratch: Callable[[torch.Tensor], bool] = lambda tensor: False,
        edit: Callable[[str, str], str] = lambda name, text: text,
        multiprocessors: int = MULTIPROCESSORS,
        late: bool = True,
        fp8_bits: int | None = None,
        lockstep: int | None = None,
        max_instructions: int = 1 << 28,
    ) -> None:
        self.memory = Memory()
        self.launches: list[Launch] = []
        self._driver = triton_driver.Driver(self.launched, multiprocessors)
        self.placing, self._edit = Placing(self.memory, scratch), edit
        self._options = {
            "late": late,
            "fp8_bits": fp8_bits,
            "lockstep": lockstep,
            "max_instructions": max_instructions,
        }
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Device:
        self._stack.enter_context(triton_driver.active(self._driver))
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def launched(self, call: Call) -> None:
        """Runs one launch; Triton calls this, and a replay of a call may."""
        text = self._edit(call.name, call.assembly)
        program, codes = program_of(text)
        tensors: list[torch.Tensor] = []
        values = []
        for name, argument in call.arguments:
            if isinstance(argument, Scalar):
                values.append(argument.data)
                continue
            tensor = argument.tensor if isinstance(argument, MapOf) else argument
            address = self.placing.address(tensor, name)
            tensors.append(tensor)
            if isinstance(argument, MapOf):
                values.append(dataclasses.replace(argument.map, address=address).encode())
            else:
                values.append(address.to_bytes(8, "little"))
        statistics = machine.run(
            program,
            call.name,
            self.memory,
            pack(program.kernels[call.name], values),
            call.grid,
            shared_bytes=call.shared_bytes,
            block=(call.threads, 1, 1),
            cooperative=call.cooperative,
            follow=True,
            code=codes[call.name],
            **self._options,
        )
        self.placing.copy_back(tensors)
        arguments = {
            name: value.value
            if isinstance(value, Scalar)
            else value.tensor
            if isinstance(value, MapOf)
            else value
            for name, value in call.arguments
        }
        self.launches.append(
            Launch(
                call.name, call.grid, call.threads, call.shared_bytes, text, arguments, statistics
            )
        )
