"""MXFP4: E2M1 elements, two to a byte, one E8M0 scale for each 32 (OCP Microscaling Formats v1.0).

E2M1 has a sign, two exponent bits (bias 1) and one mantissa bit. Its magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and
6; it has neither Inf nor NaN. Conversion rounds to nearest, a tie to the even mantissa, and saturates; -0 is kept
(docs/contract.md section d).
"""

from __future__ import annotations

from functools import lru_cache

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
    check_float,
    decode_e8m0,
    epilogue_scale,
    float_blocks,
    scale_from_amax,
)

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0..7; codes 8..15 are their negatives."""
E2M1_MAX = E2M1_VALUES[-1]
E2M1_SIGN_SHIFT = 3
E2M1_NAN_CODE = 3
"""What AITER's reference conversion makes of the default NaN, apart from the sign (test/golden/tables.npz); its
hardware saturates instead. It does not show in values: the scale of such a block is NaN."""

# A dtype as wide as two elements: packed bytes are decoded by one gather of pairs.
_PAIR_DTYPE = {
    torch.bfloat16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code of each element, ties to even, saturating. uint8 codes 0..15, same shape.

    Computed in the dtype of ``x``, exactly, so that nothing is rounded twice. Inf saturates to 6; NaN gives
    :data:`E2M1_NAN_CODE` with its sign.

    Raises:
        ContractError: ``x`` is not floating point of at least 16 bits.
    """
    check_float(x, "x")
    x = x.detach()
    # Between 0 and 2 the codes are the multiples of 1/2, between 2 and 4 the integers plus 2, from 4 on the
    # multiples of 2 plus 4. The spacing only grows, so the right piece is the smallest; in each the even
    # multiples have even codes, so rounding half to even is the tie rule.
    nan, top = E2M1_VALUES[E2M1_NAN_CODE], E2M1_MAX
    magnitude = x.abs().nan_to_num_(nan=nan, posinf=top).clamp_(max=top)
    code = (magnitude * 2).round_()
    code = torch.minimum(code, magnitude.round() + 2)
    code = torch.minimum(code, (magnitude / 2).round_() + 4)
    return code.to(torch.uint8) | (x.signbit().to(torch.uint8) << E2M1_SIGN_SHIFT)


@lru_cache(maxsize=64)
def _value_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor((*E2M1_VALUES, *(-v for v in E2M1_VALUES)), dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _pair_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256]: for each byte its two values, low nibble first, seen as one element of twice the width."""
    values = _value_table(dtype, device)
    byte = torch.arange(256, device=device)
    return (
        torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1)
        .view(_PAIR_DTYPE[dtype])
        .view(-1)
    )


def _check_codes(codes: torch.Tensor) -> torch.Tensor:
    codes = as_bytes(codes, "codes")
    if codes.numel() and int(codes.max()) > 0xF:
        raise ContractError(
            f"codes holds the value {int(codes.max())}",
            allowed="E2M1 codes 0..15, one a byte",
            fix="use unpack_e2m1 on packed bytes",
        )
    return codes


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Codes 0..15 (uint8, one a byte) to their values, exact in every floating dtype. Same shape."""
    codes = _check_codes(codes)
    table = _value_table(dtype, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., K]`` to bytes ``[..., K/2]``: element 2j in the low nibble, 2j + 1 in the high one."""
    codes = _check_codes(codes)
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ContractError(
            f"codes has shape {list(codes.shape)}",
            allowed="an even last dimension, two codes a byte",
            fix="append a zero code",
        )
    return _pack(codes)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., K/2]`` (uint8 or float4_e2m1fn_x2) to codes ``[..., K]``, low nibble first."""
    packed = as_bytes(packed, "packed", torch.float4_e2m1fn_x2)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantize_mxfp4(
    x: torch.Tensor, rounding: ScaleRounding = ScaleRounding.UP, *, name: str = "x"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dimension, bit for bit as AITER's ``per_1x32_f4_quant``.

    Args:
        x: ``[..., K]`` floating point, K a multiple of 32, any strides.
        rounding: the scale rule.
        name: what to call ``x`` in an error.

    Returns:
        packed uint8 ``[..., K/2]`` and E8M0 scales uint8 ``[..., K/32]``.

    Raises:
        ContractError: wrong dtype or K, or an unknown rule.
    """
    blocks = float_blocks(x, name)
    return _quantize(blocks, scale_from_amax(blocks.abs().amax(-1), E2M1, rounding))


def quantize_mxfp4_epilogue(
    x: torch.Tensor, *, name: str = "x"
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_mxfp4` with the scale of the fused stage-1 epilogue, see :func:`e8m0.epilogue_scale`.

    Kernels apply it to float32 accumulators: do not round ``x`` to bfloat16 before.
    """
    blocks = float_blocks(x, name)
    return _quantize(blocks, epilogue_scale(blocks.abs().amax(-1), E2M1))


def _quantize(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The divisor is a power of two: exact, but for quotients so small that E2M1 makes zero of them anyway.
    codes = encode_e2m1(blocks / decode_e8m0(scales).unsqueeze(-1))
    # What a NaN divided by a NaN looks like differs between processors.
    codes.masked_fill_((scales == E8M0_NAN).unsqueeze(-1), E2M1_NAN_CODE)
    return _pack(codes.flatten(-2)), scales


def dequantize_mxfp4(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Bytes ``[..., K/2]`` and E8M0 scales ``[..., K/32]`` to values ``[..., K]``.

    Exact in float64; in float32 and bfloat16 too, but for products from 2**128 on, which become Inf. Everything
    under a scale of 255 is NaN.

    Args:
        packed: uint8 or float4_e2m1fn_x2.
        scales: uint8 or float8_e8m0fnu.
        dtype: float64, float32 or bfloat16.
    """
    packed = as_bytes(packed, "packed", torch.float4_e2m1fn_x2)
    scales = as_bytes(scales, "scales", torch.float8_e8m0fnu)
    half = BLOCK // 2
    if scales.dim() == 0 or list(packed.shape) != [*scales.shape[:-1], scales.shape[-1] * half]:
        raise ContractError(
            f"packed has shape {list(packed.shape)} and scales {list(scales.shape)}",
            allowed="packed [..., K/2] with scales [..., K/32]",
            fix="pass the scales that belong to these bytes, unshuffled and without padding",
        )
    factor = decode_e8m0(scales, dtype).unsqueeze(-1)
    pairs = _pair_table(dtype, packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
    values = torch.view_as_real(pairs) if pairs.is_complex() else pairs.view(dtype)
    return values.view(*scales.shape, BLOCK).mul_(factor).flatten(-2)


__all__ = [
    "BLOCK",
    "E2M1_MAX",
    "E2M1_NAN_CODE",
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
