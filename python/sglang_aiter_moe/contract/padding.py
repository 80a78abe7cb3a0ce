"""How big a rank's weights are allocated, and which pads the kernels are told of.

Source: docs/contract.md section c (hidden_pad, intermediate_pad), section f (sizes per model).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_aiter_moe.contract.spec import MoeSpec
from sglang_aiter_moe.contract.tuned import has_rows
from sglang_aiter_moe.numerics.activations import Activation

#: FlyDSL's N tile and the smallest K tile of stage 2.
KERNEL_MULTIPLE = 128
#: What SGLang pads to, and what gpt-oss's tuned rows have.
SGLANG_MULTIPLE = 256
#: CK-tile takes pads of N in multiples of 64 and drops the rest (section c).
PAD_UNIT = 64


@dataclass(frozen=True)
class Padding:
    """Allocated sizes, and the pads passed to ``fused_moe``."""

    hidden_size: int
    intermediate_size: int
    hidden_pad: int
    intermediate_pad: int
    reason: str


def choose_padding(spec: MoeSpec, arch: str) -> Padding:
    """The sizes to allocate and the pads to state.

    A pad is only ever understated: columns that the loader fills are never declared padding (the
    fault behind sglang#27201), and what stays undeclared is zero data.
    """
    hidden = _round_up(spec.hidden_size, SGLANG_MULTIPLE)
    multiple = SGLANG_MULTIPLE if spec.activation is Activation.SWIGLU else KERNEL_MULTIPLE
    size = _round_up(spec.intermediate_size, KERNEL_MULTIPLE)
    if not has_rows(spec.activation, hidden, size):
        size = _round_up(spec.intermediate_size, multiple)
    stated = (_pad(hidden - spec.hidden_size), _pad(size - spec.intermediate_size))
    if arch == "gfx1250":
        stated = (0, 0)
    return Padding(
        hidden,
        size,
        *stated,
        reason=_reason(spec, hidden, size, stated, arch),
    )


def _pad(pad: int) -> int:
    return pad // PAD_UNIT * PAD_UNIT


def _reason(spec: MoeSpec, hidden: int, size: int, stated: tuple[int, int], arch: str) -> str:
    parts = []
    for name, real, padded, pad in (
        ("hidden", spec.hidden_size, hidden, stated[0]),
        ("intermediate", spec.intermediate_size, size, stated[1]),
    ):
        if real == padded:
            parts.append(f"{name} {real} fits the kernels' tiles and stays")
        elif arch == "gfx1250":
            parts.append(
                f"{name} {real} is padded to {padded}; gfx1250 ignores pads, which are zero data"
            )
        else:
            parts.append(
                f"{name} {real} is padded to {padded}, of which {pad} columns are stated "
                f"(multiples of {PAD_UNIT}; the rest is zero data)"
            )
    return "; ".join(parts)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
