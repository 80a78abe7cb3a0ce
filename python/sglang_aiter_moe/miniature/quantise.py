"""MXFP4 and MXFP8 rounding inside training: the same values as ``numerics``, in a form that is quick on a GPU.

Straight-through: the forward pass rounds, the backward pass takes rounding for the identity. Blocks are 32 elements of
the last dimension, scales the smallest power of two that does not saturate (RoundUp, docs/contract.md section d).
"""

from __future__ import annotations

import torch

BLOCK = 32
E2M1_MAX, E4M3_MAX = 6.0, 448.0


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, rounding) -> torch.Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


def _scale(blocks: torch.Tensor, largest: float) -> torch.Tensor:
    """The smallest power of two with amax / scale <= largest; 1 for a block of zeros. float32."""
    amax = blocks.abs().amax(-1, keepdim=True).float() / largest
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(amax > 0, torch.exp2(exponent.clamp(-127, 127).float()), 1.0)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """``x`` after MXFP4, in its dtype (every MXFP4 value that is no subnormal is a bfloat16)."""
    blocks = _blocks(x)
    scale = _scale(blocks, E2M1_MAX).to(x.dtype)
    y = blocks / scale
    size = y.abs()
    # E2M1's spacing is 1/2 below 2, 1 below 4, 2 up to 6; torch.round takes ties to the even code.
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return (torch.round(y / spacing) * spacing * scale).reshape(x.shape)


def round_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """``x`` after MXFP8 (E4M3), in its dtype."""
    blocks = _blocks(x)
    scale = _scale(blocks, E4M3_MAX).to(x.dtype)
    return ((blocks / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).reshape(x.shape)


ROUNDING = {"A16W4": None, "A8W4": round_mxfp8, "A4W4": round_mxfp4}


def fake_weight(w: torch.Tensor) -> torch.Tensor:
    """A weight as the exported checkpoint will have it, with the gradient of the unrounded one."""
    return _StraightThrough.apply(w, round_mxfp4)


def fake_activation(x: torch.Tensor, mode: str) -> torch.Tensor:
    """What a mode's kernels multiply with in place of ``x``, with the gradient of ``x``."""
    rounding = ROUNDING[mode]
    return x if rounding is None else _StraightThrough.apply(x, rounding)
