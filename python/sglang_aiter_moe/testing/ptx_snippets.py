"""Runs a few lines of PTX on given values, a thread each: what the tests of the PTX interpreter are made of.

    run_lines("add.s32 %y0, %x0, %x1;", {"x0": a, "x1": b}, {"y0": np.int32})

makes a kernel that loads each thread's inputs, executes the lines and stores the outputs.
"""

from __future__ import annotations

import struct

import numpy as np

from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.nvptx import machine
from sglang_aiter_moe.nvptx.text import Program, parse

_CLASSES = {"b": "pred", 1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def module(body: str, params: int = 1, *, threads: int = 32, shared: str = "") -> str:
    """A module with kernel ``k``: parameters p0, p1, ... of 64 bits, 64 registers each of %r, %rd, %rs, %f, %p."""
    listed = ", ".join(f".param .u64 p{i}" for i in range(params))
    return f""".version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
{shared}
.visible .entry k({listed})
.reqntid {threads}
{{
    .reg .pred %p<64>;
    .reg .b16 %rs<64>;
    .reg .b32 %r<64>;
    .reg .f32 %f<64>;
    .reg .b64 %rd<64>;
{body}
}}
"""


def run_module(
    text: str | Program,
    params: list[int],
    memory: Memory,
    grid: tuple[int, int, int] = (1, 1, 1),
    **options,
) -> machine.Statistics:
    """Runs kernel ``k`` with 64-bit parameters."""
    program = parse(text) if isinstance(text, str) else text
    return machine.run(
        program, "k", memory, struct.pack(f"<{len(params)}Q", *params), grid, **options
    )


def run_lines(
    lines: str,
    inputs: dict[str, np.ndarray],
    outputs: dict[str, type],
    *,
    declare: str = "",
    **options,
) -> dict[str, np.ndarray]:
    """Executes ``lines`` in one CTA of as many threads as an input has elements (a multiple of 32).

    Args:
        inputs: register name without % -> values; bool becomes a predicate, 8 bits a 16-bit register.
        outputs: register name without % -> dtype of what is stored.
        declare: further lines before the loads.
    """
    threads = max((v.size for v in inputs.values()), default=32)
    memory, body = Memory(), [declare, "    mov.u32 %r0, %tid.x;"]
    params: list[int] = []

    def address(size: int) -> None:
        body.append(f"    ld.param.u64 %rd0, [p{len(params) - 1}];")
        body.append(f"    mad.wide.u32 %rd0, %r0, {size}, %rd0;")

    declared = []
    for name, values in inputs.items():
        kind = _CLASSES["b" if values.dtype.kind == "b" else values.itemsize]
        declared.append(f"    .reg .{kind} %{name};")
        params.append(
            memory.place(values.astype(np.uint8) if values.dtype.kind == "b" else values, name)
        )
        address(values.itemsize)
        if values.dtype.kind == "b":
            body.append(f"    ld.global.u8 %r1, [%rd0]; setp.ne.u32 %{name}, %r1, 0;")
        else:
            body.append(f"    ld.global.b{8 * values.itemsize} %{name}, [%rd0];")
    body.append(lines)
    for name, dtype in outputs.items():
        dtype = np.dtype(dtype)
        kind = _CLASSES["b" if dtype.kind == "b" else dtype.itemsize]
        if name not in inputs:
            declared.append(f"    .reg .{kind} %{name};")
        params.append(memory.reserve(threads * dtype.itemsize, name))
        address(dtype.itemsize)
        if dtype.kind == "b":
            body.append(f"    selp.u32 %r1, 1, 0, %{name}; st.global.u8 [%rd0], %r1;")
        else:
            body.append(f"    st.global.b{8 * dtype.itemsize} [%rd0], %{name};")
    body.append("    ret;")
    text = module("\n".join(declared + body), len(params), threads=threads)
    run_module(text, params, memory, **options)
    return {
        name: memory.read(at, dtype, threads)
        for (name, dtype), at in zip(outputs.items(), params[len(inputs) :], strict=True)
    }
