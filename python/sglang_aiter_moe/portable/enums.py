"""AITER's enumerations and dtype names, with its numbering."""

from __future__ import annotations

import functools
from enum import Enum
from types import SimpleNamespace

import torch

from sglang_aiter_moe.portable.releases import Release

SILU, GELU, SWIGLU, SITUV2 = 0, 1, 2, 3
"""Values of ActivationType (csrc/include/aiter_enum.h)."""
ACTIVATION_NAMES = {SILU: "silu", GELU: "gelu", SWIGLU: "swiglu", SITUV2: "situv2"}


class QuantType(Enum):
    """How weights and activations are quantised; MXFP4 experts are ``per_1x32``."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class GateMode(str, Enum):  # noqa: UP042 (as AITER declares it: its str() is not the value)
    """Row order of w13 that a caller states. (aiter.ops.flydsl.moe_common)"""

    SEPARATED = "separated"
    MOCK_GATE_ONLY = "mock_gate_only"
    GATE_ONLY = "gate_only"
    INTERLEAVE = "interleave"


@functools.cache
def _activation_type(with_situv2: bool) -> type[Enum]:
    members = {"No": -1, "Silu": SILU, "Gelu": GELU, "Swiglu": SWIGLU}
    if with_situv2:
        members["Situv2"] = SITUV2
    return Enum("ActivationType", members, module=__name__)


def activation_type(release: Release) -> type[Enum]:
    """``ActivationType`` of a release: without Situv2 before 0.1.19."""
    return _activation_type(release.has_situv2)


ActivationType = _activation_type(True)

FP4X2 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)


def dtypes(arch: str) -> SimpleNamespace:
    """``aiter.dtypes``: torch dtypes by AITER's names. fp8 is the FNUZ form on gfx942."""
    return SimpleNamespace(
        fp4x2=FP4X2,
        fp8=torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn,
        fp8_e8m0=getattr(torch, "float8_e8m0fnu", torch.uint8),
        bf16=torch.bfloat16,
        fp16=torch.float16,
        fp32=torch.float32,
        i32=torch.int32,
        i16=torch.int16,
        i8=torch.int8,
        u8=torch.uint8,
    )
