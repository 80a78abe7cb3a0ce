"""A Triton driver without a GPU: kernels are compiled for an AMD target, and a launch hands over assembly text.

Triton asks its active driver which target to compile for, to load a binary and to launch it. This one answers for a
GPU that is not here, so ``kernel[grid](...)`` with CPU tensors specialises and compiles exactly what the same call
compiles on that GPU (alignment and size of the tensors included), and ends in :meth:`Driver.launched` with the
kernel's assembly text, its arguments and its grid.

Must not be used in a process with TRITON_INTERPRET=1, where ``triton.jit`` makes no compilable kernels.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from sglang_aiter_moe.amdgpu.assembly import LDS_BYTES
from sglang_aiter_moe.errors import ContractError

WAVEFRONT = 64
_FORMATS = {
    "fp32": "<f", "fp64": "<d", "i1": "<B", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i",
    "u32": "<I", "i64": "<q", "u64": "<Q",
}  # fmt: skip


@dataclass(frozen=True)
class Scalar:
    """An argument by value: its bytes in the kernarg segment, and the number for messages."""

    data: bytes
    value: Any


@dataclass(frozen=True)
class Call:
    """One launch.

    Attributes:
        arguments: name -> tensor or :class:`Scalar`, in the order of the kernarg segment, constants left out.
        warps: waves a workgroup.
        lds_bytes: LDS a workgroup; the text of a Triton kernel states 0.
    """

    name: str
    assembly: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    warps: int
    lds_bytes: int


def scalar(value: Any, kind: str) -> Scalar:
    """``value`` as the kernarg segment holds it; ``kind`` is Triton's name of the type."""
    if kind not in _FORMATS:
        raise ContractError(
            f"an argument of a launch has the type {kind}",
            allowed="tensors, " + ", ".join(_FORMATS),
            fix="give the kernel arguments of these types",
        )
    return Scalar(struct.pack(_FORMATS[kind], value), value)


@dataclass
class _Function:
    """What stands for a loaded kernel: the files of its compilation."""

    files: dict[str, str]

    @property
    def assembly(self) -> str:
        return next(Path(p).read_text() for n, p in self.files.items() if n.endswith(".amdgcn"))


class _Utils:
    """Triton's view of the device."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.loading: dict[str, str] = {}

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": LDS_BYTES[self.arch], "multiprocessor_count": 256}

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any):
        return None, _Function(self.loading), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass


class Driver:
    """Stands in for the HIP driver of ``arch``; ``launched`` receives each :class:`Call`."""

    def __init__(self, arch: str, launched: Callable[[Call], None]) -> None:
        if arch not in LDS_BYTES:
            raise ContractError(
                f"the architecture is {arch!r}",
                allowed=", ".join(LDS_BYTES),
                fix="choose one of the targets whose instructions the interpreter has",
            )
        self.arch, self.launched = arch, launched
        self.utils = _Utils(arch)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, WAVEFRONT)

    def get_current_device(self) -> str:
        return f"interpreted {self.arch}"  # the key of Triton's caches of compiled kernels

    def get_current_stream(self, device: Any) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """What Triton calls to launch. Triton keeps it with the kernel, so it asks which driver is active *then*."""
        kinds = list(src.signature.items())

        def launch(x, y, z, stream, function, packed, extra, enter, leave, *values):
            arguments = {
                name: value if kind.startswith("*") else scalar(value, kind)
                for (name, kind), value in zip(kinds, values, strict=True)
                if kind != "constexpr"
            }
            triton.runtime.driver.active.launched(
                Call(
                    metadata.name,
                    function.assembly,
                    (x, y, z),
                    arguments,
                    metadata.num_warps,
                    metadata.shared,
                )
            )

        return launch


@contextlib.contextmanager
def active(driver: Driver) -> Iterator[None]:
    """Makes ``driver`` the one that Triton compiles for and launches on, and puts back what there was."""

    def loading(module, function, name, files, key):
        driver.utils.loading = files

    config = triton.runtime.driver
    before = config._active
    config.set_active(driver)
    knobs.runtime.kernel_load_start_hook.add(loading)
    try:
        yield
    finally:
        knobs.runtime.kernel_load_start_hook.remove(loading)
        config._active = before
