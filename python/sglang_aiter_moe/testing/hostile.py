"""NaN, Inf, 0 and 255 in tokens, scales, biases and every padding: what each form must make of them.

A spoil changes a layer before it is packed; the oracle is told nothing and says what must come out. Where it gives NaN
or Inf a kernel must give one of the two, and elsewhere the same number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from sglang_aiter_moe.numerics.oracle import RawExperts

NAN_BYTE = 0xFF


@dataclasses.dataclass
class Layer:
    """Operands of a call before packing, changed in place; ``scale_pad``: the byte of a scale row's padding;
    ``tokens``: of ``num_local_tokens``, those after it come out as zeros."""

    experts: RawExperts
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    pad: int = 0
    scale_pad: int = 0x7F
    tokens: int | None = None


def _bf16(bits: int) -> torch.Tensor:
    return torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16)[0]


def scale_pads(v: Layer) -> None:
    v.scale_pad = NAN_BYTE


def token_nan(v: Layer) -> None:
    """As NVIDIA makes it: all bits of exponent and mantissa."""
    v.x[1, 5] = _bf16(0x7FFF)


def token_nan_of_amd(v: Layer) -> None:
    v.x[2, 37] = _bf16(0xFFC0)


def token_inf(v: Layer) -> None:
    v.x[3, v.x.shape[1] - 1] = float("inf")


def token_zero(v: Layer) -> None:
    v.x[4] = 0.0
    v.x[5, :32] = -0.0


def token_large(v: Layer) -> None:
    """A16W4: SiTUv2 makes 100 of it, which lies in the middle of two E4M3 numbers."""
    v.x[0] *= 2.0**100


def token_small(v: Layer) -> None:
    v.x[0] *= 2.0**-100


def w13_nan(v: Layer) -> None:
    """A gate row's block: one column between the stages, and so all of the expert's tokens. No code of it is 0, so that
    nothing but the scale can give NaN."""
    e = v.ids[0, 0]
    v.experts.w13[e, 3, 32:48] |= 0x11
    v.experts.w13_scale[e, 3, 2] = NAN_BYTE


def w2_nan(v: Layer) -> None:
    """One column of the output."""
    e = v.ids[1, 1]
    v.experts.w2[e, 7, 16:32] |= 0x11
    v.experts.w2_scale[e, 7, 1] = NAN_BYTE


def scales_zero(v: Layer) -> None:
    """Blocks, and a whole row: 2**-127, or nothing."""
    e = v.ids[2, 0]
    v.experts.w13_scale[e, 1, 1] = 0
    v.experts.w2_scale[e, 9] = 0


def weight_zero_of_nan(v: Layer) -> None:
    """A slot of no weight whose expert gives NaN: 0 times NaN."""
    w13_nan(v)
    v.weights[v.ids == v.ids[0, 0]] = 0.0


def weight_zero(v: Layer) -> None:
    v.weights[1, 0] = 0.0
    v.weights[3, 1] = -0.0


def absent_slots(v: Layer) -> None:
    """Slots without an expert have a NaN for a weight; expert 0, which kernels read in their place, has one for a
    bias and scale, and no token."""
    v.ids[v.ids == 0] = -1
    v.weights[v.ids < 0] = float("nan")
    v.experts.w13_scale[0] = NAN_BYTE
    v.experts.w2_scale[0] = NAN_BYTE
    for b in (v.experts.b13, v.experts.b2):
        if b is not None:
            b[0] = float("nan")


def bias13_nan(v: Layer) -> None:
    v.experts.b13[v.ids[1, 0], 2] = float("nan")


def bias13_inf(v: Layer) -> None:
    """Of an up row."""
    v.experts.b13[v.ids[3, 0], v.experts.intermediate_size + 2] = float("inf")


def bias2_nan(v: Layer) -> None:
    v.experts.b2[v.ids[4, 0], 11] = float("nan")


def pads(v: Layer) -> None:
    """Columns that the call says are padding hold NaN wherever a number can be one."""
    scale_pads(v)
    e, pad = v.experts, v.pad
    hidden, inter = e.hidden_size - pad, e.intermediate_size - pad
    v.x[:, hidden:] = float("nan")
    e.w13_scale[:, :, hidden // 32 :] = NAN_BYTE
    for half in (0, 1):
        rows = slice(half * e.intermediate_size + inter, (half + 1) * e.intermediate_size)
        e.w13_scale[:, rows] = NAN_BYTE
        if e.b13 is not None:
            e.b13[:, rows] = float("nan")
    e.w2_scale[:, hidden:] = NAN_BYTE
    e.w2_scale[:, :, inter // 32 :] = NAN_BYTE
    if e.b2 is not None:
        e.b2[:, hidden:] = float("nan")


def local_tokens(v: Layer) -> None:
    """Tokens past ``num_local_tokens`` hold NaN."""
    v.tokens = 2
    v.x[2:] = float("nan")
    v.weights[2:] = float("nan")


SPOILS: dict[str, Callable[[Layer], None]] = {
    f.__name__: f
    for f in (
        scale_pads,
        token_nan,
        token_nan_of_amd,
        token_inf,
        token_zero,
        token_large,
        token_small,
        w13_nan,
        w2_nan,
        scales_zero,
        weight_zero,
        weight_zero_of_nan,
        absent_slots,
        bias13_nan,
        bias13_inf,
        bias2_nan,
        pads,
        local_tokens,
    )
}
NEEDS: dict[str, dict] = {"pads": {"pad": 64}, "bias13_inf": {"activation": "silu"}}
"""What of a layer, beside biases, a spoil needs."""


TOGETHER = {
    "tokens": "scale_pads token_nan token_nan_of_amd token_inf token_zero token_small",
    "experts": "scale_pads w13_nan w2_nan scales_zero weight_zero",
    "slots": "scale_pads weight_zero_of_nan absent_slots",
    "biases": "bias13_nan bias2_nan",
    "columns": "pads",
    "after": "local_tokens",
}
"""Spoils of one layer that leave numbers to compare beside what they spoil (six tokens, six experts), for where a layer
takes seconds."""


def needs(spoils: str) -> dict:
    """What of a layer the spoils need."""
    return {k: v for spoil in spoils.split() for k, v in NEEDS.get(spoil, {}).items()}


def spoiled(spoils: str, experts: RawExperts, x, ids, weights, pad: int) -> Layer:
    """A layer after ``spoils``, names with spaces between them; without any the one given."""
    layer = Layer(experts, x, ids, weights, pad)
    for spoil in spoils.split():
        SPOILS[spoil](layer)
    return layer
