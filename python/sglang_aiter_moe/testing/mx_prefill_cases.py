"""Rows of x, and stage 1's columns, for the fp8 prefill forms under Triton's interpreter, against the oracle's
quantisation.

``TRITON_INTERPRET=1 python -m sglang_aiter_moe.testing.mx_prefill_cases`` prints one JSON object a case: the largest
error of codes times scales, in order, relative to the largest value of their group of 128 columns (of their row, where
names say so); whether every scale is finite; whether the pairs were counted.
"""

from __future__ import annotations

import json
import sys

import torch

from sglang_aiter_moe.numerics.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from sglang_aiter_moe.numerics.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_prepare import (
    fold_kernel,
    rank_mx_kernel,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_prepare import (
    fold_rows_kernel,
    rank_rows_kernel,
)

HIDDEN, STRIDE, TOKENS = 416, 512, 5
SPREADS = {"alike": 0, "spread": 6, "wide": 20}
"""Binades by which blocks of 32 differ, either way."""


def original_order(codes: torch.Tensor) -> torch.Tensor:
    """Stored [i][h][t][j] of 128 columns to [t][i][h][j]."""
    return codes.unflatten(1, (-1, 4, 2, 4, 4)).permute(0, 1, 4, 2, 3, 5).flatten(1)


def quantized(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle's E8M0 bytes, elements as float32, and values of ``x``."""
    codes, scale = quantize_mxfp8(x) if fmt == "e4m3" else quantize_mxfp4(x)
    value = dequantize_mxfp8(codes, scale) if fmt == "e4m3" else dequantize_mxfp4(codes, scale)
    one = torch.full_like(scale, 127)
    element = dequantize_mxfp8(codes, one) if fmt == "e4m3" else dequantize_mxfp4(codes, one)
    return scale, element, value


def values(spread: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, HIDDEN, generator=g)
    power = torch.randint(-spread, spread + 1, (TOKENS, HIDDEN // 32), generator=g)
    x = (x.unflatten(1, (-1, 32)) * 2.0 ** power[:, :, None]).flatten(1).bfloat16()
    x[1, 32:160] = 0.0
    return x


def judged(name: str, codes, scale, exact, counted: bool) -> dict:
    """``codes`` in order, ``scale`` [tokens, groups]: a group is 128 columns, or the whole row."""
    got = codes.view(torch.float8_e4m3fn).float().unflatten(1, (scale.shape[1], -1))
    exact = exact.unflatten(1, (scale.shape[1], -1))
    largest = exact.abs().amax(2, keepdim=True).clamp(min=1e-30)
    return {
        "case": name,
        "error": float(((got * scale[:, :, None] - exact).abs() / largest).max()),
        "finite": bool(scale.isfinite().all()),
        "counted": counted,
    }


def run_x(fmt: str, name: str, rows: bool) -> dict:
    """``rows``: one scale a row, as the shared form has it."""
    x = values(SPREADS[name])
    codes = torch.full((TOKENS, STRIDE), 255, dtype=torch.uint8)
    scale = torch.full((TOKENS, 1 if rows else STRIDE // 128), float("nan"))
    ids = torch.zeros(TOKENS, 1, dtype=torch.int32)
    counts, ranks = torch.zeros(1, dtype=torch.int32), torch.zeros(TOKENS, dtype=torch.int32)
    (rank_rows_kernel if rows else rank_mx_kernel)[(1 + TOKENS,)](
        x, codes, scale, ids, ids, counts, ranks, TOKENS, 1, 1, H=HIDDEN, X_STRIDE=STRIDE, FORMAT=fmt,
        RULE="roundup", HAS_TOKENS=False, BLOCK=8, WIDTH=STRIDE if rows else 256,
    )  # fmt: skip
    _, _, exact = quantized(x.float(), fmt)
    exact = torch.nn.functional.pad(exact, (0, STRIDE - HIDDEN))
    what = "x-rows" if rows else "x"
    return judged(
        f"{what}-{fmt}-{name}", original_order(codes), scale, exact, counts.item() == TOKENS
    )


def run_a(fmt: str, name: str, rows: bool) -> dict:
    x = torch.nn.functional.pad(values(SPREADS[name]).float(), (0, STRIDE - HIDDEN))
    block_scale, element, exact = quantized(x, fmt)
    stored = element.unflatten(1, (-1, 4, 4, 2, 4)).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)
    codes = (element if rows else stored).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.full((TOKENS, 1 if rows else STRIDE // 128), float("nan"))
    count, shift = scale.numel(), 0 if fmt == "e4m3" else 6
    block_scale = block_scale.contiguous()
    operands = codes, block_scale, scale, count
    if rows:
        # Stage 1 leaves alone what lies past a row's columns.
        codes[:, HIDDEN:] = 0x7F
        block_scale[:, HIDDEN // 32 :] = 255
        fold_rows_kernel[(-(-count // 4),)](
            *operands, I=HIDDEN, A_STRIDE=STRIDE, SHIFT=shift, ROWS=4, BLOCKS=STRIDE // 32
        )
    else:
        fold_kernel[(-(-count // 8),)](*operands, SHIFT=shift, GROUPS=8)
    codes = original_order(codes)
    return judged(f"{'a-rows' if rows else 'a'}-{fmt}-{name}", codes, scale, exact, True)


def main() -> None:
    for fmt in ("e4m3", "e2m1"):
        for name in SPREADS:
            for rows in (False, True):
                print(json.dumps(run_x(fmt, name, rows)), flush=True)
                print(json.dumps(run_a(fmt, name, rows)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
