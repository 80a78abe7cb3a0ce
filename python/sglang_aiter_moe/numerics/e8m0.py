"""E8M0 block scales: decoding, and the rules that choose a scale from a block's largest magnitude.

E8M0 is an exponent alone: byte ``b`` means ``2**(b - 127)``, 255 means NaN, and there is neither a sign nor
a zero (OCP Microscaling Formats v1.0, the scale data type of all concrete formats). One scale covers 32 elements.

AITER has four rules for the choice, which it calls rounding modes: :class:`ScaleRounding`. Its default is ``UP``
(docs/contract.md section d). A kernel that quantises in its epilogue uses a fifth, :func:`epilogue_scale`.

Float32 subnormals count in full, so ``torch.set_flush_denormal`` has to stay off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch

from sglang_aiter_moe.errors import ContractError

BLOCK = 32
"""Elements that share a scale (OCP MX v1.0, table of concrete formats)."""
E8M0_BIAS = 127
E8M0_NAN = 0xFF
E8M0_ONE = E8M0_BIAS
"""The byte that means 1.0: what AITER pads scales with where it defines the padding (docs/contract.md section a.3)."""

_F32_MANTISSA_BITS = 23
_F32_MANTISSA_MASK = (1 << _F32_MANTISSA_BITS) - 1
_F32_EXPONENT_ALL_ONES = 0xFF
_F32_TWO_POW_MINUS_127 = 0x00400000  # a float32 subnormal
_F32_NAN = 0x7F800001  # the pattern that AITER decodes byte 255 to (test/golden/tables.npz)
_EPILOGUE_HALF = 0x400000  # carries into the exponent once the mantissa reaches 1.5


@dataclass(frozen=True)
class ElementFormat:
    """What a scale rule must know of the element format.

    Attributes:
        name: for messages.
        emax: exponent of the largest normal number; the fused epilogue's "headroom".
        mantissa_bits: stored mantissa bits.
        max_normal: largest magnitude.
    """

    name: str
    emax: int
    mantissa_bits: int
    max_normal: float


E2M1 = ElementFormat("E2M1", emax=2, mantissa_bits=1, max_normal=6.0)
E4M3FN = ElementFormat("E4M3FN", emax=8, mantissa_bits=3, max_normal=448.0)
E4M3FNUZ = ElementFormat("E4M3FNUZ", emax=7, mantissa_bits=3, max_normal=240.0)
"""gfx942's FP8 (bias 8, no Inf, no -0). Not an OCP format, but AITER's scale rules know it."""


class ScaleRounding(IntEnum):
    """How a scale is chosen from ``amax``, the block's largest magnitude. AITER's numbers.

    With ``max`` the element format's largest magnitude and ``emax`` its exponent:

    - ``DOWN``: ``2**(floor(log2(amax)) - emax)``, the conversion of OCP MX v1.0 section 6.3. Elements above
      ``max`` times the scale saturate.
    - ``UP``: the smallest power of two that is at least ``amax / max``. Nothing saturates. AITER's default since
      v0.1.16 (AITER #3212).
    - ``EVEN``: ``DOWN`` of ``amax`` rounded to the element format's mantissa, a half upwards. AITER's Triton
      ``dynamic_mxfp4_quant``, which SGLang uses for linear layers.
    - ``CEIL``: the smallest power of two that is at least ``amax / 2**emax``.
    """

    DOWN = 0
    UP = 1
    EVEN = 2
    CEIL = 3


def as_bytes(tensor: torch.Tensor, name: str, *also: torch.dtype) -> torch.Tensor:
    """``tensor`` as uint8, if it is that already or one of the one-byte dtypes ``also``; else a ContractError."""
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype in also:
        return tensor.view(torch.uint8)
    raise ContractError(
        f"{name} has dtype {tensor.dtype}",
        allowed=" or ".join(str(d) for d in (torch.uint8, *also)),
        fix=f"pass the stored bytes, for example {name}.view(torch.uint8)",
    )


def check_float(tensor: torch.Tensor, name: str) -> None:
    """Raises a ContractError unless ``tensor`` is bfloat16, float16, float32 or float64."""
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise ContractError(
            f"{name} has dtype {tensor.dtype}",
            allowed="bfloat16, float16, float32 or float64",
            fix=f"convert {name} to one of these first",
        )


def float_blocks(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x [..., K]`` as float32 blocks ``[..., K/32, 32]``.

    float64 is rounded to float32 first, which is what a kernel's accumulator holds.

    Raises:
        ContractError: ``x`` is not floating point, has no dimension, or K is not a multiple of 32.
    """
    check_float(x, name)
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ContractError(
            f"{name} has shape {list(x.shape)}",
            allowed=f"a last dimension that is a multiple of {BLOCK}, one E8M0 scale for each {BLOCK} elements",
            fix=f"pad the last dimension of {name} with zeros to a multiple of {BLOCK}",
        )
    return x.detach().to(torch.float32).unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))


@lru_cache(maxsize=64)
def _e8m0_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    bits = torch.arange(256, dtype=torch.int32) << _F32_MANTISSA_BITS
    bits[0] = _F32_TWO_POW_MINUS_127
    bits[E8M0_NAN] = _F32_NAN
    return bits.view(torch.float32).to(device=device, dtype=dtype)


def decode_e8m0(scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """E8M0 bytes to ``2**(b - 127)``: 0 gives 2**-127 exactly, 255 gives NaN. Same shape.

    Args:
        scales: uint8 or float8_e8m0fnu, any shape.
        dtype: float32, float64 or bfloat16, each of which holds every value exactly.
    """
    scales = as_bytes(scales, "scales", torch.float8_e8m0fnu)
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ContractError(
            f"dtype for decoded E8M0 scales is {dtype}",
            allowed="float32, float64 or bfloat16, which hold 2**-127 to 2**127",
            fix="decode to float32 and convert the product",
        )
    table = _e8m0_table(dtype, scales.device)
    return table.index_select(0, scales.reshape(-1).to(torch.int32)).view(scales.shape)


def scale_from_amax(
    amax: torch.Tensor, element: ElementFormat, rounding: ScaleRounding = ScaleRounding.UP
) -> torch.Tensor:
    """The E8M0 bytes for blocks of largest magnitude ``amax``. uint8, same shape.

    Zero gives 0; Inf and NaN give 255, and so does a finite ``amax`` that ``EVEN`` rounds up to 2**128. A scale that
    would be too small becomes 2**-127 under ``DOWN`` and ``EVEN``; under ``UP`` and ``CEIL``, whose quotient is then a
    float32 subnormal, it becomes 2**-126.

    AITER's HIP and FlyDSL kernels multiply by the reciprocal of ``max`` where its reference divides. The quotient
    can differ in its last bit, the byte never does (``test_reciprocal_gives_the_same_scale``).

    Args:
        amax: floating point, any shape, taken as float32; the sign is ignored.
        element: the element format.
        rounding: the rule.
    """
    try:
        rounding = ScaleRounding(rounding)
    except ValueError:
        raise ContractError(
            f"rounding is {rounding!r}",
            allowed=", ".join(f"{mode.value} ({mode.name})" for mode in ScaleRounding),
            fix="pass a ScaleRounding",
        ) from None
    check_float(amax, "amax")
    amax = amax.detach().to(torch.float32).abs()
    if rounding in (ScaleRounding.UP, ScaleRounding.CEIL):
        # The exponent of the quotient, rounded to float32 as AITER's is, and one more unless it is a power of two.
        divisor = element.max_normal if rounding is ScaleRounding.UP else 2.0**element.emax
        exponent = ((amax / divisor).view(torch.int32) + _F32_MANTISSA_MASK) >> _F32_MANTISSA_BITS
    else:
        bits = amax.view(torch.int32)
        if rounding is ScaleRounding.EVEN:
            bits = bits + (1 << (_F32_MANTISSA_BITS - element.mantissa_bits - 1))
        exponent = bits >> _F32_MANTISSA_BITS
        overflow = exponent >= _F32_EXPONENT_ALL_ONES
        exponent = (exponent - element.emax).clamp_(min=0).masked_fill_(overflow, E8M0_NAN)
    return exponent.masked_fill_(~amax.isfinite(), E8M0_NAN).to(torch.uint8)


def epilogue_scale(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The E8M0 bytes that AITER's fused stage-1 epilogue writes for ``amax``. uint8, same shape.

    ``((bits(amax) + 0x400000) >> 23) - emax``, at least 0 (docs/contract.md section d). For E2M1 that is ``UP`` but
    for ``amax = 1.5 * 2**k``, where it is one exponent larger, for values so small that ``UP`` gives 2**-126, and for
    Inf, which does not become 255. For E4M3 it is one exponent larger than ``UP`` wherever the mantissa of
    ``amax`` lies in [1.5, 1.75].

    What the kernels write for NaN is not established; here it is 255, so that it stays a NaN.
    """
    check_float(amax, "amax")
    amax = amax.detach().to(torch.float32).abs()
    exponent = ((amax.view(torch.int32) + _EPILOGUE_HALF) >> _F32_MANTISSA_BITS) - element.emax
    return exponent.clamp_(min=0).masked_fill_(amax.isnan(), E8M0_NAN).to(torch.uint8)
