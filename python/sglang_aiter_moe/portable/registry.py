"""Registering portable as ``aiter`` in ``sys.modules``, and taking it out again."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.mxfp4 import ScaleRounding, quantize_mxfp4
from sglang_aiter_moe.portable import sorting, topk
from sglang_aiter_moe.portable.dispatch import Dispatcher
from sglang_aiter_moe.portable.entry import make_fused_moe
from sglang_aiter_moe.portable.enums import GateMode, QuantType, activation_type, dtypes
from sglang_aiter_moe.portable.machine import Machine
from sglang_aiter_moe.portable.shuffle import Shuffles

ORIGIN = "sglang_aiter_moe.portable"


class PortableAiter:
    """AITER as one machine has it: its functions, and the modules that hold them.

    Attributes:
        machine: what it pretends to be.
        dispatcher: its dispatch, which caches as AITER's does.
        fused_moe: see ``portable.fused_moe``.
        shuffles: the layout functions.
        modules: by full name, ready for ``sys.modules``.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.dispatcher = Dispatcher(machine)
        self.fused_moe = make_fused_moe(machine, self.dispatcher)
        self.shuffles = Shuffles(machine.arch, machine.release)
        self.modules: dict[str, ModuleType] = {}
        self._build()

    def _build(self) -> None:
        release, shuffles = self.machine.release, self.shuffles
        self._module(
            "aiter",
            ActivationType=activation_type(release),
            QuantType=QuantType,
            dtypes=dtypes(self.machine.arch),
            biased_grouped_topk=_biased_grouped_topk,
            __version__=release.label.removeprefix("v"),
        )
        self._module(
            "aiter.fused_moe",
            fused_moe=self.fused_moe,
            moe_sorting=sorting.moe_sorting,
            fused_topk=topk.fused_topk,
        )
        self._module("aiter.ops")
        self._module("aiter.ops.shuffle", **{n: getattr(shuffles, n) for n in shuffles.names})
        self._module("aiter.utility")
        self._module(
            "aiter.utility.fp4_utils",
            e8m0_shuffle=shuffles.e8m0_shuffle,
            moe_mxfp4_sort=sorting.moe_mxfp4_sort,
        )
        self._module("aiter.ops.triton")
        self._module("aiter.ops.triton.quant", dynamic_mxfp4_quant=dynamic_mxfp4_quant)
        self._module("aiter.jit")
        self._module("aiter.jit.utils")
        self._module("aiter.jit.utils.chip_info", get_gfx=lambda: self.machine.arch)
        if release.gate_mode_decides and self.machine.flydsl:
            self._module("aiter.ops.flydsl")
            self._module("aiter.ops.flydsl.moe_common", GateMode=GateMode)

    def _module(self, name: str, **members: Any) -> None:
        module = ModuleType(
            name, f"{ORIGIN}: AITER {self.machine.release.label} on {self.machine.arch}."
        )
        spec = importlib.machinery.ModuleSpec(name, None, origin=ORIGIN, is_package=True)
        module.__spec__, module.__path__ = spec, []
        vars(module).update(members)
        parent, _, leaf = name.rpartition(".")
        if parent:
            # aiter.fused_moe names the module here, as after `import aiter.fused_moe` there.
            setattr(self.modules[parent], leaf, module)
        self.modules[name] = module


def dynamic_mxfp4_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``aiter.ops.triton.quant.dynamic_mxfp4_quant``: MXFP4 with scale mode Even, packed and scales."""
    return quantize_mxfp4(x, ScaleRounding.EVEN)


def _biased_grouped_topk(*args, **kwargs):
    from sglang_aiter_moe.portable.routing import biased_grouped_topk

    return biased_grouped_topk(*args, **kwargs)


_installed: list[tuple[PortableAiter, dict[str, ModuleType]]] = []
"""Installations in force, the last one on top, each with what it displaced."""
_default: PortableAiter | None = None


def current() -> PortableAiter:
    """The installation in force; without one, AITER 0.1.20 on gfx950, not registered anywhere."""
    global _default
    if _installed:
        return _installed[-1][0]
    if _default is None:
        _default = PortableAiter(Machine.make())
    return _default


def is_portable(module: ModuleType | None) -> bool:
    """Whether a module is one of ours."""
    return getattr(getattr(module, "__spec__", None), "origin", None) == ORIGIN


def real_aiter() -> str | None:
    """Where AMD's AITER is installed (told by ``aiter/ops/shuffle.py``; PyPI's aiter is another project), or None."""
    loaded = sys.modules.get("aiter")
    if loaded is not None and not is_portable(loaded):
        folders = list(getattr(loaded, "__path__", []))
    else:
        spec = importlib.machinery.PathFinder.find_spec("aiter")
        folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if os.path.exists(os.path.join(folder, "ops", "shuffle.py")):
            return folder
    return None


def install(
    *,
    arch: str = "gfx950",
    aiter: str = "0.1.20",
    a16w4_kernel: str = "separated",
    force: bool = False,
    flydsl: bool = True,
    extensions: tuple[str, ...] = (),
) -> PortableAiter:
    """Registers portable as ``aiter``; these arguments and AITER's own variables alone decide what it does.

    A second call replaces the first. Functions imported before keep the machine that they came from.

    Args:
        arch: "gfx942", "gfx950" or "gfx1250".
        aiter: release ("0.1.20") or commit named in docs/contract.md ("6dc26b7a8").
        a16w4_kernel: how the A16W4 SiTUv2 kernel is built, see :class:`Machine`.
        force: hide a real AITER.
        flydsl: whether flydsl counts as installed.
        extensions: ``fused_moe`` arguments that no release has yet ("output", "no_combine").

    Raises:
        ContractError: a real AITER is installed and ``force`` is not set.
        ValueError: unknown arch, release, kernel or extension; a variable that AITER reads at import is junk.
    """
    new = _make(
        force,
        arch=arch,
        aiter=aiter,
        a16w4_kernel=a16w4_kernel,
        flydsl=flydsl,
        extensions=extensions,
    )
    while _installed:
        uninstall()
    _push(new)
    return new


def uninstall() -> None:
    """Takes the last installation out and puts back what it displaced. Without one it does nothing."""
    if not _installed:
        return
    _, displaced = _installed.pop()
    for name in _aiter_modules():
        del sys.modules[name]
    sys.modules.update(displaced)


@contextlib.contextmanager
def installed(**arguments: Any) -> Iterator[PortableAiter]:
    """:func:`install` for the length of a ``with`` block; restores an installation around it."""
    outer = len(_installed)
    new = _make(arguments.pop("force", False) or outer > 0, **arguments)
    _push(new)
    try:
        yield new
    finally:
        while len(_installed) > outer:
            uninstall()


def _make(force: bool, **arguments: Any) -> PortableAiter:
    found = real_aiter()
    if found is not None and not force:
        raise ContractError(
            f"a real AITER is installed at {found}, and portable.install() would hide it",
            allowed="portable where there is no AITER, or force=True",
            fix="use that AITER, or call portable.install(force=True)",
        )
    return PortableAiter(Machine.make(**arguments))


def _push(new: PortableAiter) -> None:
    displaced = {name: sys.modules.pop(name) for name in _aiter_modules()}
    sys.modules.update(new.modules)
    _installed.append((new, displaced))


def _aiter_modules() -> list[str]:
    return [name for name in sys.modules if name == "aiter" or name.startswith("aiter.")]
