"""MXFP4: E2M1 elements, two to a byte, one E8M0 scale per 32 (OCP Microscaling Formats v1.0).

E2M1 has a sign, two exponent bits (bias 1) and one mantissa bit: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6,
and neither Inf nor NaN (section 5.3.3). Conversion rounds to nearest, a tie to the even mantissa, and
saturates at 6; -0 is kept.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.e8m0 import (
    BLOCK,
    E2M1,
    E8M0_BIAS,
    E8M0_NAN,
    E8M0_ONE,
    ScaleRounding,
    as_bytes,
    decode_e8m0,
    epilogue_scale,
    float_blocks,
    scale_from_amax,
)

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0..7; codes 8..15 are their negatives."""
E2M1_SIGN = 0x8
E2M1_MAX = 6.0
E2M1_NAN_CODE = 3
"""What AITER's reference conversion makes of a NaN, plus its sign (E2M1 has none of its own;
test/golden/tables.npz). It never shows: the scale of such a block is NaN."""

# (midpoint between two neighbouring magnitudes, whether the midpoint itself goes to the upper one:
# it does where the upper code has an even mantissa bit)
_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code of each element, ties to even, saturating. uint8 codes 0..15, same shape.

    The comparison is made in the dtype of ``x``, so that no second rounding takes place. Inf saturates
    to 6; NaN gives :data:`E2M1_NAN_CODE` with its sign.
    """
    if not x.dtype.is_floating_point or x.element_size() < 2:
        raise ContractError(
            f"x has dtype {x.dtype}",
            allowed="bfloat16, float16, float32 or float64",
            fix="convert x before encoding it as E2M1",
        )
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for midpoint, tie_goes_up in _MIDPOINTS:
        code += magnitude >= midpoint if tie_goes_up else magnitude > midpoint
    code.masked_fill_(x.isnan(), E2M1_NAN_CODE)
    return code.bitwise_or_(x.signbit().to(torch.uint8) << 3)


def _check_codes(codes: torch.Tensor) -> torch.Tensor:
    codes = as_bytes(codes, "codes")
    if codes.numel() and int(codes.max()) > 0xF:
        raise ContractError(
            f"codes has a value of {int(codes.max())}",
            allowed="E2M1 codes 0..15, one a byte",
            fix="use unpack_e2m1 for packed bytes",
        )
    return codes


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Codes 0..15 (uint8, one a byte) to their values, exactly, in any floating dtype. Same shape."""
    codes = _check_codes(codes)
    values = E2M1_VALUES + tuple(-v for v in E2M1_VALUES)
    table = torch.tensor(values, dtype=dtype, device=codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` codes to ``[..., K/2]`` bytes: element 2j in the low nibble, 2j+1 in the high one."""
    codes = _check_codes(codes)
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ContractError(
            f"codes has shape {list(codes.shape)}",
            allowed="an even last dimension (two codes a byte)",
            fix="append a zero code",
        )
    return _pack(codes)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """``[..., K/2]`` bytes to ``[..., K]`` codes, low nibble first."""
    packed = as_bytes(packed, "packed", torch.float4_e2m1fn_x2)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantize_mxfp4(
    x: torch.Tensor, rounding: ScaleRounding = ScaleRounding.UP, *, name: str = "x"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dimension as AITER's ``per_1x32_f4_quant`` does.

    Args:
        x: ``[..., K]`` floating point, K a multiple of 32, any strides.
        rounding: the scale rule.
        name: what to call ``x`` in an error.

    Returns:
        packed ``[..., K/2]`` uint8 and scales ``[..., K/32]`` uint8 E8M0.
    """
    blocks = float_blocks(x, name)
    return _quantize(blocks, scale_from_amax(blocks.abs().amax(-1), E2M1, rounding))


def quantize_mxfp4_epilogue(
    x: torch.Tensor, *, name: str = "x"
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_mxfp4` with the scale rule of the fused stage-1 epilogue (see ``epilogue_scale``)."""
    blocks = float_blocks(x, name)
    return _quantize(blocks, epilogue_scale(blocks.abs().amax(-1), E2M1))


def _quantize(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Dividing by a power of two is exact, but for results too small to matter to E2M1.
    codes = encode_e2m1(blocks / decode_e8m0(scales).unsqueeze(-1))
    # Under a NaN scale the codes mean nothing; make them the same on every machine.
    codes.masked_fill_((scales == E8M0_NAN).unsqueeze(-1), E2M1_NAN_CODE)
    return _pack(codes.flatten(-2)), scales


def dequantize_mxfp4(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``[..., K/2]`` bytes and ``[..., K/32]`` E8M0 scales to ``[..., K]`` values.

    Exact in float64. In float32 a product above the largest float32 becomes Inf (scale 254 with magnitudes
    from 2 on). Every element under a scale of 255 is NaN.
    """
    packed = as_bytes(packed, "packed", torch.float4_e2m1fn_x2)
    scales = as_bytes(scales, "scales", torch.float8_e8m0fnu)
    if packed.dim() == 0 or list(packed.shape) != [
        *scales.shape[:-1],
        scales.shape[-1] * BLOCK // 2,
    ]:
        raise ContractError(
            f"packed has shape {list(packed.shape)} and scales {list(scales.shape)}",
            allowed="packed [..., K/2] with scales [..., K/32]",
            fix="pass the scales that belong to these weights, unshuffled and without padding",
        )
    low_high = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((low_high[byte & 0xF], low_high[byte >> 4]), dim=-1).to(packed.device)
    values = pairs.index_select(0, packed.reshape(-1).to(torch.int32))
    values = values.view(*scales.shape, BLOCK)
    return (values * decode_e8m0(scales, dtype).unsqueeze(-1)).flatten(-2)


__all__ = [
    "BLOCK",
    "E2M1_MAX",
    "E2M1_NAN_CODE",
    "E2M1_SIGN",
    "E2M1_VALUES",
    "E8M0_BIAS",
    "E8M0_NAN",
    "E8M0_ONE",
    "ScaleRounding",
    "decode_e2m1",
    "decode_e8m0",
    "dequantize_mxfp4",
    "encode_e2m1",
    "pack_e2m1",
    "quantize_mxfp4",
    "quantize_mxfp4_epilogue",
    "unpack_e2m1",
]
