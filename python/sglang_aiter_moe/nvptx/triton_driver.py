"""What Triton takes for an NVIDIA sm_90 GPU: kernels are compiled for it, and a launch hands over PTX.

As ``amdgpu.triton_driver``, which this uses, with what a launch has here and not there: tensor maps, warps that
``warp_specialize`` adds, cooperative and dependent launches.

Must not be used in a process with TRITON_INTERPRET=1, where ``triton.jit`` makes no compilable kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from sglang_aiter_moe.amdgpu.triton_driver import Scalar, active, scalar
from sglang_aiter_moe.nvptx.tensor_map import SWIZZLE_BYTES, TensorMap

__all__ = ["Call", "Driver", "MapOf", "Scalar", "active"]

WARP = 32
MULTIPROCESSORS = 132
"""Of an H100 SXM and of an H200."""
SHARED_BYTES = 227 << 10
"""The most that one block may have (CUDA C++ Programming Guide, compute capability 9.0)."""


@dataclass(frozen=True)
class MapOf:
    """A tensor map of ``tensor``; its address is filled in where the tensor is placed."""

    tensor: Any
    map: TensorMap


@dataclass(frozen=True)
class Call:
    """One launch.

    Attributes:
        arguments: (name, tensor, :class:`Scalar` or :class:`MapOf`) in the order of the kernel's parameters; Triton's
            two scratch pointers, which come last, left out.
        threads: of a block, specialised warps included.
        shared_bytes: dynamic shared memory of a block.
        cooperative: all blocks are resident at once.
        dependent: the launch may begin before the one before it has ended (``griddepcontrol``).
    """

    name: str
    assembly: str
    grid: tuple[int, int, int]
    arguments: tuple[tuple[str, Any], ...]
    threads: int
    shared_bytes: int
    cooperative: bool
    dependent: bool


@dataclass
class _Function:
    """What stands for a loaded kernel: the files of its compilation."""

    files: dict[str, str]

    @property
    def assembly(self) -> str:
        return next(Path(p).read_text() for n, p in self.files.items() if n.endswith(".ptx"))


class _Utils:
    """Triton's view of the device."""

    def __init__(self, multiprocessors: int) -> None:
        self.loading: dict[str, str] = {}
        self._properties = {
            "max_shared_mem": SHARED_BYTES,
            "multiprocessor_count": multiprocessors,
            "warpSize": WARP,
        }

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return self._properties

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any):
        return None, _Function(self.loading), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass


class Driver:
    """Stands in for the CUDA driver of an H200; ``launched`` receives each :class:`Call`."""

    def __init__(
        self, launched: Callable[[Call], None], multiprocessors: int = MULTIPROCESSORS
    ) -> None:
        self.launched = launched
        self.utils = _Utils(multiprocessors)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, WARP)

    def get_current_device(self) -> str:
        return "interpreted sm_90"  # the key of Triton's caches of compiled kernels

    def get_current_stream(self, device: Any) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """What Triton calls to launch. Triton keeps it with the kernel, so it asks which driver is active *then*."""
        kinds = list(src.signature.items())
        maps = list(getattr(metadata, "tensordesc_meta", None) or ())

        def launch(x, y, z, stream, function, packed, extra, enter, leave, *values):
            arguments, described = [], iter(maps)
            for (name, kind), value in zip(kinds, values, strict=True):
                if kind.startswith("tensordesc"):
                    arguments.extend(_descriptor(name, value, next(described, None)))
                elif kind.startswith("*"):
                    arguments.append((name, value))
                elif kind != "constexpr":
                    arguments.append((name, scalar(value, kind)))
            triton.runtime.driver.active.launched(
                Call(
                    metadata.name,
                    function.assembly,
                    (x, y, z),
                    tuple(arguments),
                    metadata.num_warps * WARP,
                    metadata.shared,
                    bool(metadata.launch_cooperative_grid),
                    bool(metadata.launch_pdl),
                )
            )

        return launch


def _descriptor(name: str, value: Any, described: dict | None):
    """What Triton passes for a tensor descriptor: the map, sizes and strides; without a map, the pointer first."""
    sizes, strides = list(value.shape), list(value.strides)
    plain = [
        *((f"{name}.size{i}", scalar(n, "i32")) for i, n in enumerate(sizes)),
        *((f"{name}.stride{i}", scalar(n, "i64")) for i, n in enumerate(strides)),
    ]
    if described is None:
        long = [(f"{name}.l{i}", scalar(n, "i64")) for i, n in enumerate((*sizes, *strides))]
        return [
            (name, value.base),
            *long,
            (f"{name}.nan", scalar(value.padding == "nan", "i1")),
            *plain,
        ]
    size = described["elem_size"]
    made = TensorMap(
        address=0,
        element_bytes=size,
        sizes=tuple(reversed(sizes)),
        strides=tuple(size * s for s in reversed(strides[:-1])),
        box=tuple(reversed(described["block_size"])),
        element_strides=(1,) * len(sizes),
        swizzle=SWIZZLE_BYTES[described["swizzle"]],
        fill_nan=value.padding == "nan",
    )
    made.check(name)
    return [(name, MapOf(value.base, made)), *plain]
