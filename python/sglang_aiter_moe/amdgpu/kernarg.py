"""The kernarg segment: the bytes that a kernel reads its arguments from.

Its layout is in the kernel's metadata ("LLVM, User Guide for AMDGPU Backend, Code Object Metadata": ``.args`` with
``.offset``, ``.size`` and ``.value_kind``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from sglang_aiter_moe.amdgpu.assembly import Kernel
from sglang_aiter_moe.errors import ContractError

Value = int | bytes
"""An address, or the bytes of an argument by value."""


def visible(kernel: Kernel) -> tuple:
    """The arguments that a caller gives; hidden ones come from the runtime."""
    return tuple(a for a in kernel.arguments if not a.value_kind.startswith("hidden"))


def pack(kernel: Kernel, values: Sequence[Value], names: Sequence[str] = ()) -> bytes:
    """The segment for ``values``, one for each argument of the kernel in order.

    Triton's kernels end in two addresses of scratch memory; arguments that ``values`` is short of by up to two
    pointers are null. What no argument covers is zero; hidden arguments are left out, and the machine reports a kernel
    that reads one.

    Raises:
        ContractError: another number of values, an address for a number or the reverse, or another size.
    """
    arguments = visible(kernel)
    missing = len(arguments) - len(values)
    scratch = arguments[len(values) :] if 0 < missing <= 2 else ()
    if missing and not (scratch and all(a.value_kind == "global_buffer" for a in scratch)):
        raise ContractError(
            f"{kernel.name} is given {len(values)} arguments",
            allowed=f"{len(arguments)}: "
            + ", ".join(f"{a.value_kind} of {a.size}" for a in arguments),
            fix="give one value for each argument in the kernel's metadata, in that order",
        )
    segment = bytearray(kernel.kernarg_size)
    for i, (argument, value) in enumerate(zip(arguments, values, strict=False)):
        label = names[i] if i < len(names) else f"number {i}"
        pointer = argument.value_kind == "global_buffer"
        if isinstance(value, int) and (pointer or argument.size == 8):
            data = struct.pack("<Q", value)
        elif isinstance(value, bytes):
            data = value
        else:
            data = b""
        if len(data) != argument.size or (pointer and isinstance(value, bytes)):
            kind = "an address" if isinstance(value, int) else f"{len(value)} bytes by value"
            raise ContractError(
                f"argument {label} of {kernel.name} is given {kind}",
                allowed=f"{argument.value_kind} of {argument.size} bytes at offset {argument.offset}",
                fix="give the arguments in the order and with the types of the kernel's metadata",
            )
        segment[argument.offset : argument.offset + argument.size] = data
    return bytes(segment)
