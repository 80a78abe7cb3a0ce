"""The one place of the patch set that looks AITER up at run time.

AITER is found through the module paths that its callers use, so that a real AITER, ``portable`` or a
test's fake serves alike. The lookup is renewed when another ``fused_moe`` is installed: SGLang's own
start-up wraps it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from sglang_aiter_moe.errors import ContractError

_FUSED_MOE = "aiter.fused_moe"
#: What the modules of the portable AITER name as their origin. It is no part of the patch set.
STAND_IN = "sglang_aiter_moe.portable"

# Activation names -> aiter.ActivationType members; "situ" is SGLang's name, "situv2" a plan's.
ACTIVATION_TYPES = {
    "silu": "Silu",
    "gelu": "Gelu",
    "swiglu": "Swiglu",
    "situ": "Situv2",
    "situv2": "Situv2",
}


class AiterApi:
    """AITER as one ``fused_moe`` offers it.

    Attributes:
        fused_moe: the callable.
        takes_gate_mode: whether it knows ``gate_mode`` (from AITER v0.1.13). A catch-all
            ``**kwargs`` counts as knowing it.
        takes_output, takes_no_combine, takes_quant_dtype_a: whether its signature names
            ``output``, ``no_combine``, ``quant_dtype_a``. No release does yet (docs/contract.md
            section c); a catch-all does not count, as it may only pass on to one that does not.
        activations, quant_types: enum members looked up so far.
    """

    def __init__(self, package: Any, fused_moe: Callable[..., torch.Tensor]) -> None:
        parameters = inspect.signature(fused_moe).parameters
        catch_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.package = package
        self.fused_moe = fused_moe
        self.takes_gate_mode = "gate_mode" in parameters or catch_all
        self.takes_output = "output" in parameters
        self.takes_no_combine = "no_combine" in parameters
        self.takes_quant_dtype_a = "quant_dtype_a" in parameters
        self.activations: dict[str, Any] = {}
        self.quant_types: dict[str, Any] = {}


_api: AiterApi | None = None


@torch.compiler.assume_constant_result
def refresh(activation: str | None = None, quant_type: str | None = None) -> bool:
    """Makes :func:`current` valid and the named enum members present in it.

    Returns True, as a constant for torch.compile: lookups in ``sys.modules`` and signatures cannot be
    traced, reading the result from a global can.

    Args:
        activation: a key of ACTIVATION_TYPES.
        quant_type: a name of ``aiter.QuantType``.

    Raises:
        ContractError: no AITER is importable, or it lacks one of the enum members.
    """
    global _api
    module = sys.modules.get(_FUSED_MOE) or _import(_FUSED_MOE)
    package = sys.modules.get("aiter") or _import("aiter")
    api = _api
    if api is None or api.fused_moe is not module.fused_moe or api.package is not package:
        api = _api = AiterApi(package, module.fused_moe)
    if activation is not None and activation not in api.activations:
        name = ACTIVATION_TYPES[activation]
        api.activations[activation] = _member(package, "ActivationType", name)
    if quant_type is not None and quant_type not in api.quant_types:
        api.quant_types[quant_type] = _member(package, "QuantType", quant_type)
    return True


def current() -> AiterApi:
    """AITER as the last :func:`refresh` found it."""
    return _api


def is_stand_in() -> bool:
    """Whether the portable AITER is registered as ``aiter``."""
    spec = getattr(sys.modules.get("aiter"), "__spec__", None)
    return getattr(spec, "origin", None) == STAND_IN


def architecture() -> str:
    """What AITER builds its kernels for: the GPU's architecture, or the one that a stand-in pretends."""
    if is_stand_in():
        return sys.modules["aiter.jit.utils.chip_info"].get_gfx()
    return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ContractError(
            f"AITER is not importable: import {name} says {error}",
            allowed="a ROCm build of AITER, or the portable one",
            fix="install AITER (https://github.com/ROCm/aiter), or set "
            "SGLANG_AITER_MOE_BACKEND=portable",
        ) from error


def _member(package: Any, enum_name: str, member: str) -> Any:
    enum = getattr(package, enum_name)
    try:
        return getattr(enum, member)
    except AttributeError:
        known = [name for name in dir(enum) if not name.startswith("_")]
        raise ContractError(
            f"aiter.{enum_name}.{member} does not exist in the installed AITER",
            allowed=f"one of {', '.join(known)}",
            fix="install a newer AITER (Situv2 came with v0.1.19)",
        ) from None
