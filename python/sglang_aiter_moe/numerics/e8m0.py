"""E8M0 block scales: decoding, and the rules that choose a scale from a block's largest magnitude.

E8M0 is an exponent alone: byte ``b`` means ``2**(b - 127)``, 255 means NaN, and there is neither a
sign nor a zero (OCP Microscaling Formats v1.0, section 5.4.1). One scale covers 32 elements (section 5.2).

AITER has four rules for the choice ("rounding modes"), here :class:`ScaleRounding`; its default is
``UP`` (docs/contract.md section d). A kernel that quantises in its epilogue uses a fifth,
:func:`epilogue_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from sglang_aiter_moe.errors import ContractError

BLOCK = 32
"""Elements that share a scale (OCP MX v1.0 section 5.2, ``k``)."""
E8M0_BIAS = 127
E8M0_NAN = 0xFF
E8M0_ONE = E8M0_BIAS
"""The byte that means 1.0; AITER's defined scale padding (docs/contract.md section a.3)."""

_F32_MANTISSA_BITS = 23
_F32_MANTISSA_MASK = (1 << _F32_MANTISSA_BITS) - 1
_F32_EXPONENT_ALL_ONES = 0xFF
_F32_TWO_POW_MINUS_127 = 0x00400000  # a float32 subnormal
_F32_NAN = 0x7F800001  # the pattern that AITER decodes byte 255 to (test/golden/tables.npz)
_EPILOGUE_HALF_ULP = 0x400000  # bumps the exponent once the mantissa reaches 1.5


@dataclass(frozen=True)
class ElementFormat:
    """What a scale rule must know of the element format.

    Attributes:
        name: for messages.
        emax: exponent of the largest normal number (OCP MX v1.0 table 1).
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
"""gfx942's FP8 (bias 8, no Inf, no -0); not an OCP format, part of AITER's scale rules."""


class ScaleRounding(IntEnum):
    """How a scale is chosen from ``amax``, the block's largest magnitude (AITER's numbering).

    With ``max`` the format's largest magnitude and ``emax`` its exponent:

    - ``DOWN``: ``2**(floor(log2(amax)) - emax)``. OCP MX v1.0 section 6.3. The largest elements may
      saturate.
    - ``UP``: the smallest power of two that is at least ``amax / max``. Nothing saturates. AITER's default
      since v0.1.16 (AITER #3212).
    - ``EVEN``: ``DOWN`` of ``amax`` rounded to the format's mantissa (a half rounds up). AITER's Triton
      ``dynamic_mxfp4_quant``, which SGLang uses for linear layers.
    - ``CEIL``: the smallest power of two that is at least ``amax / 2**emax``.
    """

    DOWN = 0
    UP = 1
    EVEN = 2
    CEIL = 3


def as_bytes(t: torch.Tensor, name: str, *also: torch.dtype) -> torch.Tensor:
    """The bytes of ``t`` as uint8; accepts uint8 and the one-byte dtypes in ``also``."""
    if t.dtype == torch.uint8:
        return t
    if t.dtype in also:
        return t.view(torch.uint8)
    raise ContractError(
        f"{name} has dtype {t.dtype}",
        allowed=" or ".join(str(d) for d in (torch.uint8, *also)),
        fix=f"pass the stored bytes of {name}, for example {name}.view(torch.uint8)",
    )


def float_blocks(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x [..., K]`` as float32 blocks ``[..., K/32, 32]``.

    Wider input is rounded to float32 first, as the kernels' accumulators are.

    Raises:
        ContractError: ``x`` is not floating point, has no dimension, or K is not a multiple of 32.
    """
    if not x.dtype.is_floating_point or x.element_size() < 2:
        raise ContractError(
            f"{name} has dtype {x.dtype}",
            allowed="bfloat16, float16, float32 or float64",
            fix=f"convert {name} to one of these before quantising",
        )
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ContractError(
            f"{name} has shape {list(x.shape)}",
            allowed=f"a last dimension that is a multiple of {BLOCK} (one E8M0 scale per {BLOCK} elements)",
            fix=f"pad {name} with zeros to a multiple of {BLOCK} along its last dimension",
        )
    return x.to(torch.float32).unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))


def _e8m0_table(dtype: torch.dtype) -> torch.Tensor:
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ContractError(
            f"dtype of decoded E8M0 scales is {dtype}",
            allowed="float32, float64 or bfloat16 (float16 cannot hold 2**-127 .. 2**127)",
            fix="decode to float32 and convert afterwards",
        )
    bits = torch.arange(256, dtype=torch.int32) << _F32_MANTISSA_BITS
    bits[0] = _F32_TWO_POW_MINUS_127
    bits[E8M0_NAN] = _F32_NAN
    return bits.view(torch.float32).to(dtype)


def decode_e8m0(scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """E8M0 bytes to ``2**(b - 127)``; 0 gives 2**-127 exactly, 255 gives NaN. Same shape.

    Args:
        scales: uint8 or float8_e8m0fnu, any shape.
        dtype: float32, float64 or bfloat16; all of them hold every value exactly.
    """
    scales = as_bytes(scales, "scales", torch.float8_e8m0fnu)
    table = _e8m0_table(dtype).to(scales.device)
    return table.index_select(0, scales.reshape(-1).to(torch.int32)).reshape(scales.shape)


def scale_from_amax(
    amax: torch.Tensor, element: ElementFormat, rounding: ScaleRounding = ScaleRounding.UP
) -> torch.Tensor:
    """The E8M0 byte for blocks whose largest magnitude is ``amax``. uint8, same shape.

    Inf or NaN gives 255, and so does a finite ``amax`` that ``EVEN`` rounds past the largest float32.
    Zero gives 0. Scales below 2**-127 become 2**-127.

    Args:
        amax: float32, any shape; the sign is ignored.
    """
    try:
        rounding = ScaleRounding(rounding)
    except ValueError:
        raise ContractError(
            f"rounding is {rounding!r}",
            allowed=", ".join(f"{m.value} ({m.name})" for m in ScaleRounding),
            fix="pass a ScaleRounding",
        ) from None
    amax = amax.to(torch.float32).abs()
    if rounding in (ScaleRounding.UP, ScaleRounding.CEIL):
        # The quotient is rounded to float32, as AITER's is. Its exponent goes up by one unless the
        # quotient is a power of two.
        divisor = element.max_normal if rounding is ScaleRounding.UP else 2.0**element.emax
        bits = (amax / divisor).contiguous().view(torch.int32)
        exponent = (bits + _F32_MANTISSA_MASK) >> _F32_MANTISSA_BITS
    else:
        bits = amax.contiguous().view(torch.int32)
        if rounding is ScaleRounding.EVEN:
            bits = bits + (1 << (_F32_MANTISSA_BITS - element.mantissa_bits - 1))
        exponent = bits >> _F32_MANTISSA_BITS
        overflow = exponent >= _F32_EXPONENT_ALL_ONES
        exponent = (exponent - element.emax).clamp_(min=0).masked_fill_(overflow, E8M0_NAN)
    return exponent.masked_fill_(~amax.isfinite(), E8M0_NAN).to(torch.uint8)


def epilogue_scale(amax: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """The scale that AITER's fused stage-1 epilogue writes for ``amax``. uint8, same shape.

    ``((bits(amax) + 0x400000) >> 23) - emax``, at least 0 (docs/contract.md section d). For E2M1 it equals
    ``UP`` except at ``amax = 1.5 * 2**k`` exactly (one exponent larger) and at Inf, which does not
    become 255. For E4M3 it is larger than ``UP`` wherever the mantissa of ``amax`` is in [1.5, 1.75].
    A NaN ``amax`` gives 255 here: what the kernel writes then is not established.
    """
    amax = amax.to(torch.float32).abs().contiguous()
    exponent = ((amax.view(torch.int32) + _EPILOGUE_HALF_ULP) >> _F32_MANTISSA_BITS) - element.emax
    return exponent.clamp_(min=0).masked_fill_(amax.isnan(), E8M0_NAN).to(torch.uint8)
