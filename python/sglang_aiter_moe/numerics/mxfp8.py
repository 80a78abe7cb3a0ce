"""MXFP8: E4M3 elements with one E8M0 scale for each 32 (OCP Microscaling Formats v1.0).

E4M3 is torch's ``float8_e4m3fn``: bias 7, largest magnitude 448, 0x7F and 0xFF are NaN, no Inf. AITER quantises
the activations of A8W4 to it (docs/contract.md section d). gfx942's ``float8_e4m3fnuz`` (bias 8, largest 240, 0x80 is
its only NaN) is here because AITER's scale rules cover it; no MXFP4 MoE mode uses it.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.e8m0 import (
    BLOCK,
    E4M3FN,
    E4M3FNUZ,
    E8M0_NAN,
    ElementFormat,
    ScaleRounding,
    as_bytes,
    decode_e8m0,
    epilogue_scale,
    float_blocks,
    scale_from_amax,
)

E4M3_MAX = E4M3FN.max_normal
E4M3_NAN = 0x7F
_DTYPE = {E4M3FN: torch.float8_e4m3fn, E4M3FNUZ: torch.float8_e4m3fnuz}
_NAN_CODE = {E4M3FN: E4M3_NAN, E4M3FNUZ: 0x80}


def quantize_mxfp8(
    x: torch.Tensor,
    rounding: ScaleRounding = ScaleRounding.UP,
    *,
    element: ElementFormat = E4M3FN,
    name: str = "x",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dimension, bit for bit as AITER's ``per_1x32_f8_scale_f8_quant``.

    Rounds to nearest, ties to even. Saturates, which can happen under ``DOWN`` and ``EVEN`` only.

    Args:
        x: ``[..., K]`` floating point, K a multiple of 32, any strides.
        rounding: the scale rule.
        element: E4M3FN or E4M3FNUZ.
        name: what to call ``x`` in an error.

    Returns:
        codes ``[..., K]``, float8_e4m3fn or float8_e4m3fnuz, and E8M0 scales uint8 ``[..., K/32]``.

    Raises:
        ContractError: wrong dtype or K, or an unknown rule or element format.
    """
    if element not in _DTYPE:
        raise ContractError(
            f"element is {element!r}",
            allowed="E4M3FN or E4M3FNUZ",
            fix="use quantize_mxfp4 for E2M1",
        )
    blocks = float_blocks(x, name)
    scales = scale_from_amax(blocks.abs().amax(-1), element, rounding)
    # Conversion to an MX format saturates (OCP MX v1.0 section 6.3); whether torch's own does depends on its version.
    scaled = (blocks / decode_e8m0(scales).unsqueeze(-1)).clamp_(
        -element.max_normal, element.max_normal
    )
    return _encode(scaled, scales, element), scales


def quantize_mxfp8_epilogue(
    x: torch.Tensor, *, name: str = "x"
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_mxfp8` with the scale of the fused stage-1 epilogue, see :func:`e8m0.epilogue_scale`.

    Its scaled values never pass 384, so none saturates; Inf, under its finite scale, becomes a NaN code.
    """
    blocks = float_blocks(x, name)
    scales = epilogue_scale(blocks.abs().amax(-1), E4M3FN)
    scaled = blocks / decode_e8m0(scales).unsqueeze(-1)
    scaled.masked_fill_(scaled.isinf(), torch.nan)
    return _encode(scaled, scales, E4M3FN), scales


def _encode(scaled: torch.Tensor, scales: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    codes = scaled.to(_DTYPE[element]).view(torch.uint8)
    # One NaN for all: what a NaN divided by a NaN looks like differs between processors.
    codes.masked_fill_((scales == E8M0_NAN).unsqueeze(-1), _NAN_CODE[element])
    return codes.flatten(-2).view(_DTYPE[element])


def dequantize_mxfp8(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Codes ``[..., K]`` and E8M0 scales ``[..., K/32]`` to values ``[..., K]``.

    Exact in float64; in float32 too, but for products from 2**128 on (Inf) and below 2**-149.

    Args:
        codes: float8_e4m3fn, float8_e4m3fnuz, or uint8, which is read as float8_e4m3fn.
        scales: uint8 or float8_e8m0fnu.
        dtype: float64 or float32.
    """
    if codes.dtype not in _DTYPE.values():
        codes = as_bytes(codes, "codes").view(torch.float8_e4m3fn)
    scales = as_bytes(scales, "scales", torch.float8_e8m0fnu)
    if scales.dim() == 0 or list(codes.shape) != [*scales.shape[:-1], scales.shape[-1] * BLOCK]:
        raise ContractError(
            f"codes has shape {list(codes.shape)} and scales {list(scales.shape)}",
            allowed="codes [..., K] with scales [..., K/32]",
            fix="pass the scales that belong to these codes, unshuffled and without padding",
        )
    factor = decode_e8m0(scales, dtype).unsqueeze(-1)
    return (codes.to(dtype).reshape(*scales.shape, BLOCK) * factor).flatten(-2)
