"""The kernels' quantisation of blocks (``codecs.quantize_blocks``) under Triton's interpreter, against ``numerics``.

``TRITON_INTERPRET=1 python -m sglang_aiter_moe.testing.codec_cases`` prints one JSON object a format and rule: the
names of the blocks whose scale, or whose values, differ.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from sglang_aiter_moe.numerics.e8m0 import ScaleRounding
from sglang_aiter_moe.numerics.mxfp4 import (
    dequantize_mxfp4,
    pack_e2m1,
    quantize_mxfp4,
    quantize_mxfp4_epilogue,
)
from sglang_aiter_moe.numerics.mxfp8 import (
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_epilogue,
)
from sglang_aiter_moe.portable.triton.codecs import quantize_blocks

SPECIAL = {
    "nan of nvidia": 0x7FFFFFFF,
    "nan of a bf16": 0x7FFF0000,
    "nan of amd": 0x7FC00000,
    "negative nan": -1,
    "signalling nan": 0x7F800001,
    "inf": 0x7F800000,
    "minus inf": -0x800000,
    "largest": 0x7F7FFFFF,
    "zero": 0,
    "minus zero": -(1 << 31),
    "smallest": 1,
    "ordinary": 0x3FC00000,
}
"""float32 bits of one element; the others of its block are standard normal, or 0 where it is small."""
RULES = {
    "epilogue": None,
    "roundup": ScaleRounding.UP,
    "even": ScaleRounding.EVEN,
}


@triton.jit
def _kernel(
    x_ptr, codes_ptr, scale_ptr, ROWS: tl.constexpr, FORMAT: tl.constexpr, RULE: tl.constexpr
):
    at = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes, scale = quantize_blocks(tl.load(x_ptr + at), FORMAT, RULE)
    tl.store(codes_ptr + at, codes.to(tl.uint8))
    tl.store(scale_ptr + tl.arange(0, ROWS)[:, None], scale.to(tl.uint8))


def blocks() -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
    for row, (name, bits) in enumerate(SPECIAL.items()):
        if name in ("zero", "minus zero", "smallest"):
            x[row] = 0.0
        x[row, 7] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    return x


def run(fmt: str, rule: str) -> dict:
    x = blocks()
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scale = torch.zeros(len(x), 1, dtype=torch.uint8)
    _kernel[(1,)](x, codes, scale, ROWS=len(x), FORMAT=fmt, RULE=rule)
    rounding = RULES[rule]
    if fmt == "e4m3":
        expected = quantize_mxfp8_epilogue(x) if rounding is None else quantize_mxfp8(x, rounding)
        got = dequantize_mxfp8(codes, scale, torch.float64)
        value = dequantize_mxfp8(*expected, torch.float64)
    else:
        expected = quantize_mxfp4_epilogue(x) if rounding is None else quantize_mxfp4(x, rounding)
        got = dequantize_mxfp4(pack_e2m1(codes), scale, torch.float64)
        value = dequantize_mxfp4(*expected, torch.float64)
    same = (got == value) | (got.isnan() & value.isnan())
    names = [*SPECIAL, *("random",) * (len(x) - len(SPECIAL))]
    return {
        "case": f"{fmt}-{rule}",
        "scales": [n for n, a, b in zip(names, scale, expected[1], strict=True) if a != b],
        "values": [n for n, ok in zip(names, same.all(1), strict=True) if not ok],
    }


def main() -> None:
    for fmt in ("e4m3", "e2m1"):
        for rule in RULES:
            print(json.dumps(run(fmt, rule)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
