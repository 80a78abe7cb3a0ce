"""MXFP8: E4M3 elements with one E8M0 scale per 32 (OCP Microscaling Formats v1.0, section 5.3.1).

E4M3 is ``float8_e4m3fn``: bias 7, largest 448, 0x7F and 0xFF NaN, no Inf. AITER quantises A8W4 activations
to it (docs/contract.md section d). gfx942's FNUZ variant takes part in the scale rules.
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

E4M3_NAN = 0x7F
_TORCH_DTYPE = {E4M3FN: torch.float8_e4m3fn, E4M3FNUZ: torch.float8_e4m3fnuz}
_NAN_CODE = {E4M3FN: E4M3_NAN, E4M3FNUZ: 0x80}


def quantize_mxfp8(
    x: torch.Tensor,
    rounding: ScaleRounding = ScaleRounding.UP,
    *,
    element: ElementFormat = E4M3FN,
    name: str = "x",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x [..., K]`` along its last dimension as AITER's ``per_1x32_f8_scale_f8_quant`` does.

    Rounds to nearest even and saturates (it can saturate only under ``DOWN`` and ``EVEN``).

    Returns:
        codes ``[..., K]`` float8_e4m3fn (or float8_e4m3fnuz) and scales ``[..., K/32]`` uint8 E8M0.
    """
    blocks = float_blocks(x, name)
    return _quantize(blocks, scale_from_amax(blocks.abs().amax(-1), element, rounding), element)


def quantize_mxfp8_epilogue(
    x: torch.Tensor, *, name: str = "x"
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_mxfp8` with the scale rule of the fused stage-1 epilogue (see ``epilogue_scale``)."""
    blocks = float_blocks(x, name)
    return _quantize(blocks, epilogue_scale(blocks.abs().amax(-1), E4M3FN), E4M3FN)


def _quantize(
    blocks: torch.Tensor, scales: torch.Tensor, element: ElementFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = blocks / decode_e8m0(scales).unsqueeze(-1)
    # torch converts what is too large to NaN; the format's conversion saturates (OCP MX v1.0 section 6.3).
    scaled = scaled.clamp(-element.max_normal, element.max_normal)
    codes = scaled.to(_TORCH_DTYPE[element]).view(torch.uint8)
    codes.masked_fill_((scales == E8M0_NAN).unsqueeze(-1), _NAN_CODE[element])
    return codes.flatten(-2).view(_TORCH_DTYPE[element]), scales


def dequantize_mxfp8(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``[..., K]`` codes (float8, or uint8 meaning E4M3FN) and ``[..., K/32]`` scales to values. Exact in float64."""
    if codes.dtype not in _TORCH_DTYPE.values():
        codes = as_bytes(codes, "codes", *_TORCH_DTYPE.values()).view(torch.float8_e4m3fn)
    scales = as_bytes(scales, "scales", torch.float8_e8m0fnu)
    if codes.dim() == 0 or list(codes.shape) != [*scales.shape[:-1], scales.shape[-1] * BLOCK]:
        raise ContractError(
            f"codes has shape {list(codes.shape)} and scales {list(scales.shape)}",
            allowed="codes [..., K] with scales [..., K/32]",
            fix="pass the scales that belong to these codes, unshuffled and without padding",
        )
    values = codes.to(torch.float32).to(dtype).view(*scales.shape, BLOCK)
    return (values * decode_e8m0(scales, dtype).unsqueeze(-1)).flatten(-2)
