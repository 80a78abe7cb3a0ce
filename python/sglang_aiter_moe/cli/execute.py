"""`execute`: run one AMD kernel's assembly text without an AMD GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_aiter_moe.cli.output import JsonOption, console, write_json
from sglang_aiter_moe.errors import ContractError


def execute(
    kernel: Annotated[
        Path,
        typer.Argument(
            metavar="KERNEL.s",
            help="Assembly text for gfx942 or gfx950: Triton's asm['amdgcn'], FlyDSL's 21_final_isa.s.",
        ),
    ],
    args: Annotated[
        Path,
        typer.Option(
            "--args",
            metavar="SPEC",
            help="TOML or JSON: grid, and each argument as .npy file, bytes or number (docs/amd-execution.md).",
        ),
    ],
    lockstep: Annotated[
        int, typer.Option(min=1, help="Workgroups that advance together: memory against speed.")
    ] = 64,
    max_seconds: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds before the kernel counts as one that hangs."),
    ] = 60,
    max_instructions: Annotated[
        int | None,
        typer.Option(
            min=1, help="The same in wave-instructions, which do not depend on the machine."
        ),
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Execute one AMD kernel on this CPU and write what it wrote.

    Reading memory, registers or LDS that nothing has written, leaving an array, and instructions that are not
    modelled are errors that name the line of the text. Exit status: 1 if the kernel did such a thing, 2 if the input
    was refused.
    """
    import numpy as np

    from sglang_aiter_moe.amdgpu import spec
    from sglang_aiter_moe.amdgpu.errors import ExecutionError

    out = console(json_target)
    wanted = spec.load(args)
    try:
        text = kernel.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ContractError(
            f"{kernel} cannot be read: {error}",
            allowed="the assembly text of a kernel",
            fix="give the file that the compiler wrote",
        ) from error
    try:
        ran = spec.execute(
            text,
            wanted,
            lockstep=lockstep,
            max_seconds=max_seconds,
            max_instructions=max_instructions,
        )
    except ExecutionError as error:
        out.print(f"{kernel}: {error}", markup=False)
        write_json({"error": error.what, "line": error.line, "opcode": error.opcode}, json_target)
        raise typer.Exit(1) from error
    for path, array in ran.outputs.items():
        try:
            with path.open("wb") as file:
                np.save(file, array)
        except OSError as error:
            raise ContractError(
                f"{path} cannot be written: {error.strerror}",
                allowed="files in directories that are there and open to you",
                fix="correct out in the spec",
            ) from error
        out.print(f"wrote {path}: {array.dtype} {list(array.shape)}", markup=False)
    if ran.left_out:
        out.print(
            f"{ran.left_out} pointers at the end are not in {args}: null, as Triton's scratch memory is"
        )
    done = ran.statistics
    out.print(
        f"{ran.kernel}: {done.wave_instructions} wave-instructions in {done.seconds:.2f} s",
        markup=False,
    )
    write_json(
        {
            "kernel": ran.kernel,
            "wave_instructions": done.wave_instructions,
            "seconds": done.seconds,
            "opcodes": dict(done.opcodes),
            "outputs": [str(path) for path in ran.outputs],
        },
        json_target,
    )
