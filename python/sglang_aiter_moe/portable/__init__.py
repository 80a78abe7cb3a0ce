"""AITER's MXFP4 MoE, executed anywhere: its public functions with its dispatch rules and its ignorance.

``install()`` registers this as ``aiter``; the functions below are those of the installation in force (AITER
0.1.20 on gfx950 when there is none). See docs/contract.md for what is reproduced.
"""

from __future__ import annotations

from typing import Any

from sglang_aiter_moe.portable.enums import GateMode, QuantType
from sglang_aiter_moe.portable.explanation import explain
from sglang_aiter_moe.portable.registry import current, install, installed, is_portable, uninstall
from sglang_aiter_moe.portable.sorting import moe_sorting
from sglang_aiter_moe.portable.topk import fused_topk

_FROM_SHUFFLES = {
    "shuffle_weight",
    "shuffle_weight_a16w4",
    "shuffle_scale",
    "shuffle_scale_a16w4",
    "shuffle_scale_n32k4",
    "moe_shuffle_weight",
    "moe_shuffle_scale",
    "interleave_gate_up_rows",
    "e8m0_shuffle",
}


def __getattr__(name: str) -> Any:
    if name == "fused_moe":
        return current().fused_moe
    if name in ("ActivationType", "dtypes", "biased_grouped_topk"):
        return getattr(current().modules["aiter"], name)
    if name in _FROM_SHUFFLES:
        return getattr(current().shuffles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "GateMode",
    "QuantType",
    "current",
    "explain",
    "fused_topk",
    "install",
    "installed",
    "is_portable",
    "moe_sorting",
    "uninstall",
]
