"""What `execute` runs: a file that gives a kernel's grid and each of its arguments.

TOML (or JSON with the same keys):

    kernel = "scale_rows"          # may be left out if the text has one kernel
    grid = [4, 1, 1]               # workgroups
    block = [256, 1, 1]            # work-items a workgroup; left out: the kernel's most, along x
    lds_bytes = 0                  # left out: what the text states

    [[arguments]]                  # one for each argument, in the order of the kernel's metadata
    name = "x"                     # for messages and `same_as`
    in = "x.npy"                   # its bytes are placed in memory, and the argument is their address

    [[arguments]]
    name = "y"
    reserve = 4096                 # bytes nothing has written; `zeros` in its place: bytes of value 0
    out = "y.npy"                  # written after the run ...
    dtype = "uint16"               # ... as this (bf16 has no numpy dtype: its bits)
    shape = [32, 64]

    [[arguments]]
    name = "alpha"
    value = 1.702
    type = "f32"                   # i8 to i64, u8 to u64, f32, f64; several numbers as a list: a struct of them

    [[arguments]]
    name = "nothing"
    null = true

    [[arguments]]
    name = "half_of_x"
    same_as = "x"                  # the address of another argument ...
    offset = 2048                  # ... plus bytes

Paths are relative to the file.
"""

from __future__ import annotations

import json
import struct
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_aiter_moe.amdgpu import kernarg, machine
from sglang_aiter_moe.amdgpu.assembly import Program, parse
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.errors import ContractError

TYPES = {
    "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q",
    "f32": "<f", "f64": "<d",
}  # fmt: skip
_OUTPUT = {"out", "dtype", "shape"}
SOURCES = {
    "in": {"read_only", *_OUTPUT}, "reserve": _OUTPUT, "zeros": _OUTPUT, "value": {"type"}, "null": set(),
    "same_as": {"offset"},
}  # fmt: skip
"""What an argument can be, and which keys may stand beside it."""
_KINDS = {
    "name": (str, "text"), "in": (str, "a path"), "out": (str, "a path"), "dtype": (str, "a numpy dtype"),
    "same_as": (str, "another argument's name"), "offset": (int, "bytes"), "read_only": (bool, "true or false"),
    "null": (bool, "true"), "shape": (list, "a list of sizes"),
}  # fmt: skip
TOP_KEYS = {"kernel", "grid", "block", "lds_bytes", "arguments"}


@dataclass(frozen=True)
class Spec:
    """The parsed file. ``folder``: what its paths are relative to."""

    folder: Path
    grid: tuple[int, int, int]
    arguments: list[dict[str, Any]]
    kernel: str | None = None
    block: tuple[int, int, int] | None = None
    lds_bytes: int | None = None


@dataclass
class Ran:
    """What ran, and the files written: path -> array."""

    kernel: str
    statistics: machine.Statistics
    left_out: int = 0
    """How many pointers at the end the file does not give: they are null."""
    outputs: dict[Path, np.ndarray] = field(default_factory=dict)


def _refuse(what: str, allowed: str, fix: str) -> ContractError:
    return ContractError(what, allowed=allowed, fix=fix)


def _triple(name: str, value: Any) -> tuple[int, int, int]:
    good = isinstance(value, list) and 1 <= len(value) <= 3
    if not good or any(type(v) is not int or v < 1 for v in value):
        raise _refuse(f"{name} is {value!r}", "one to three positive integers", f"set {name}")
    return tuple([*value, 1, 1][:3])


def load(path: Path) -> Spec:
    """Reads and checks a spec.

    Raises:
        ContractError: a file that cannot be read or parsed, an unknown key, an argument without or with two sources.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise _refuse(
            f"{path} cannot be read: {error}", "a TOML or .json file", "correct the file"
        ) from error
    if not isinstance(data, dict):
        raise _refuse(
            f"{path} holds a {type(data).__name__}", "a table", "see docs/amd-execution.md"
        )
    unknown = sorted(set(data) - TOP_KEYS)
    if unknown:
        raise _refuse(
            f"{path} has the key {unknown[0]!r}", ", ".join(sorted(TOP_KEYS)), "rename it"
        )
    if "grid" not in data:
        raise _refuse(f"{path} has no grid", "grid = [x, y, z], in workgroups", "add it")
    arguments = data.get("arguments", [])
    if not isinstance(arguments, list) or not all(isinstance(a, dict) for a in arguments):
        raise _refuse(f"arguments is {arguments!r}", "a list of tables", "write [[arguments]]")
    names = [str(argument.get("name", f"number {i}")) for i, argument in enumerate(arguments)]
    for argument, name in zip(arguments, names, strict=True):
        _check(argument, name)
        if names.count(name) > 1:
            raise _refuse(f"two arguments are named {name!r}", "names of their own", "rename one")
    lds = data.get("lds_bytes")
    if lds is not None and (type(lds) is not int or lds < 0):
        raise _refuse(f"lds_bytes is {lds!r}", "a number of bytes", "set lds_bytes")
    return Spec(
        folder=path.parent,
        grid=_triple("grid", data["grid"]),
        arguments=arguments,
        kernel=data.get("kernel"),
        block=None if "block" not in data else _triple("block", data["block"]),
        lds_bytes=lds,
    )


def _check(argument: dict[str, Any], label: str) -> None:
    sources = [key for key in SOURCES if key in argument]
    if len(sources) != 1:
        raise _refuse(
            f"argument {label} has {' and '.join(sources) or 'no source'}",
            "exactly one of " + ", ".join(SOURCES),
            f"say what {label} is",
        )
    keys = {"name", sources[0], *SOURCES[sources[0]]}
    unknown = sorted(set(argument) - keys)
    if unknown:
        raise _refuse(
            f"argument {label} has the key {unknown[0]!r}",
            f"beside {sources[0]}: " + ", ".join(sorted(keys - {sources[0]})),
            "rename or drop it",
        )
    for key, value in argument.items():
        kind, meant = _KINDS.get(key, (object, ""))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _refuse(f"{key} of argument {label} is {value!r}", meant, f"set {key}")
    for key in ("reserve", "zeros"):
        if key in argument and (type(argument[key]) is not int or argument[key] < 1):
            raise _refuse(f"{key} of argument {label} is {argument[key]!r}", "bytes", "set it")
    if argument.get("null") is False:
        raise _refuse(f"null of argument {label} is false", "true", "drop null and say what it is")
    if any(type(size) is not int or size < 0 for size in argument.get("shape", ())):
        raise _refuse(
            f"shape of argument {label} is {argument['shape']!r}", "a list of sizes", "set it"
        )
    if "value" in argument and argument.get("type") not in TYPES:
        raise _refuse(
            f"argument {label} has the type {argument.get('type')!r}", ", ".join(TYPES), "set type"
        )
    if "out" in argument and "in" not in argument and not {"dtype", "shape"} <= set(argument):
        raise _refuse(
            f"argument {label} has out without dtype and shape",
            "both, or in",
            "add dtype and shape",
        )


def _read(path: Path, label: str) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _refuse(
            f"argument {label}: {path} cannot be read: {error}",
            "a .npy file",
            "write it with np.save",
        ) from error


def execute(text: str, spec: Spec, **options: Any) -> Ran:
    """Runs one kernel of the assembly ``text``; the caller writes ``outputs``.

    Args:
        options: for ``machine.run``.

    Raises:
        ContractError: a kernel, argument or file that does not fit.
        ExecutionError: the kernel did what the interpreter refuses.
    """
    program = parse(text)
    name = _kernel(program, spec)
    kernel = program.kernels[name]
    memory = Memory()
    addresses: dict[str, int] = {}
    values: list[kernarg.Value] = []
    labels: list[str] = []
    wanted = []
    for i, argument in enumerate(spec.arguments):
        label = str(argument.get("name", f"number {i}"))
        labels.append(label)
        try:
            value, array = _place(argument, label, spec, memory, addresses)
        except MemoryError as error:
            raise _refuse(
                f"argument {label} does not fit into this machine's memory: {error}",
                "what fits beside the other arguments",
                "correct its bytes",
            ) from error
        values.append(value)
        if isinstance(value, int):
            addresses[label] = value
        if "out" in argument:
            wanted.append((label, *_output(argument, label, spec, value, array)))
            if wanted[-1][1] in [other[1] for other in wanted[:-1]]:
                raise _refuse(
                    f"two arguments are written to {argument['out']!r}", "a file each", "rename one"
                )
    segment = kernarg.pack(kernel, values, labels)
    statistics = machine.run(
        program,
        name,
        memory,
        segment,
        spec.grid,
        block=spec.block,
        lds_bytes=spec.lds_bytes,
        **options,
    )
    ran = Ran(name, statistics, len(kernarg.visible(kernel)) - len(values))
    for label, path, address, dtype, shape in wanted:
        ran.outputs[path] = _written(memory, label, address, dtype, shape)
    return ran


def _written(
    memory: Memory, label: str, address: int, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    missing = np.flatnonzero(
        ~memory.written(address, dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    )
    if missing.size:
        raise _refuse(
            f"the kernel left {missing.size} bytes of argument {label} unwritten, the first is byte {missing[0]}",
            "an out that the kernel writes whole",
            "correct grid or shape, or give zeros in place of reserve",
        )
    return memory.read(address, dtype, shape)


def _kernel(program: Program, spec: Spec) -> str:
    names = list(program.kernels)
    if spec.kernel is None and len(names) == 1:
        return names[0]
    if spec.kernel not in program.kernels:
        raise _refuse(
            f"kernel is {spec.kernel!r}",
            ", ".join(names) or "a text with .amdhsa_kernel",
            "name one of the text's kernels",
        )
    return spec.kernel


def _place(
    argument: dict, label: str, spec: Spec, memory: Memory, addresses: dict[str, int]
) -> tuple[kernarg.Value, np.ndarray | None]:
    """The argument's value, and what was read from its file."""
    if "in" in argument:
        array = _read(spec.folder / argument["in"], label)
        if not array.nbytes or array.dtype.hasobject:
            raise _refuse(
                f"argument {label} is {array.dtype} {list(array.shape)}",
                "numbers, at least one",
                "save it so",
            )
        return memory.place(array, label, writable=not argument.get("read_only")), array
    if "zeros" in argument:
        return memory.place(np.zeros(argument["zeros"], np.uint8), label), None
    if "reserve" in argument:
        return memory.reserve(argument["reserve"], label), None
    if "null" in argument:
        return 0, None
    if "same_as" in argument:
        if argument["same_as"] not in addresses:
            raise _refuse(
                f"argument {label} is the same as {argument['same_as']!r}",
                "an earlier argument in memory: " + (", ".join(addresses) or "there is none"),
                "name one of them",
            )
        return addresses[argument["same_as"]] + argument.get("offset", 0), None
    numbers = argument["value"] if isinstance(argument["value"], list) else [argument["value"]]
    try:
        return b"".join(struct.pack(TYPES[argument["type"]], number) for number in numbers), None
    except (struct.error, TypeError, OverflowError) as error:
        raise _refuse(
            f"argument {label} is {argument['value']!r} as {argument['type']}: {error}",
            "a number that the type holds",
            "change value or type",
        ) from error


def _output(
    argument: dict, label: str, spec: Spec, address: int, array: np.ndarray | None
) -> tuple[Path, int, np.dtype, tuple[int, ...]]:
    try:
        dtype = np.dtype(argument["dtype"]) if "dtype" in argument else array.dtype
    except TypeError as error:
        raise _refuse(
            f"argument {label} has the dtype {argument['dtype']!r}",
            "a numpy dtype, such as float32 or uint16",
            "bf16 and fp8 are written as their bits: uint16 and uint8",
        ) from error
    shape = tuple(argument["shape"]) if "shape" in argument else array.shape
    size = argument.get("reserve", argument.get("zeros", 0)) if array is None else array.nbytes
    if dtype.itemsize * int(np.prod(shape, dtype=np.int64)) > size:
        raise _refuse(
            f"argument {label} is written as {dtype} {list(shape)}",
            f"at most the {size} bytes that it has",
            "correct dtype, shape or the bytes",
        )
    return spec.folder / argument["out"], address, dtype, shape
