"""Many tokens in A8W4 and A4W4: rank, blocks, place, stage 1, fold, stage 2, combine on fp8 tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_aiter_moe.portable.request import A8W4, A16W4, KernelRequest
from sglang_aiter_moe.portable.triton.hopper import prefill_launch
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import RULES
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_prepare import (
    fold_kernel,
    rank_mx_kernel,
)
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_stage1 import stage1_mx_prefill
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_stage2 import stage2_mx_prefill
from sglang_aiter_moe.portable.triton.hopper.prefill_launch import (
    SHORT,
    PrefillConfig,
    block_lists,
    cap,
    list_tensors,
    padded,
)
from sglang_aiter_moe.portable.triton.workspace import carve

FOLD = 16
"""Groups of 128 columns of one program of the folding between the stages."""


@dataclass(frozen=True)
class MxPrefillConfig(PrefillConfig):
    """As ``PrefillConfig``."""


def supports(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    """Scales are read as words; where they begin, ``table.reach`` looks at."""
    return (
        r.mode != A16W4
        and prefill_launch.supports(r, w1_scale, w2_scale)
        and not any(s.numel() % 4 for s in (w1_scale, w2_scale))
    )


def run_mx_prefill(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: MxPrefillConfig
) -> None:
    """Seven launches. Operands as in ``portable.triton.run``."""
    c = config
    M, topk = topk_ids.shape
    H, I = r.hidden_size, r.intermediate_size
    pairs = M * topk
    x_stride, a_stride = padded(H), padded(I)
    ws = carve(
        x.device,
        list_tensors(r, topk_ids, c.n)
        | {
            "x": ((M, x_stride), torch.float8_e4m3fn),
            "x_scale": ((M, x_stride // 128), torch.float32),
            "a": ((pairs, a_stride), torch.float8_e4m3fn),
            "a_block_scale": ((pairs, a_stride // 32), torch.uint8),
            "a_scale": ((pairs, a_stride // 128), torch.float32),
        },
    )
    fmt = "e4m3" if r.mode == A8W4 else "e2m1"
    rule, via_bf16 = RULES[r.requantization]
    tiles = c.tiles or int(a_stride <= SHORT)
    wide = max(M * x_stride, pairs * a_stride) >= 1 << 31
    blocks = len(ws["pairs"])
    prefill_launch.list_rows(
        r, x, topk_ids, ws, c.n, rank_mx_kernel, (ws["x"].view(torch.uint8), ws["x_scale"]),
        {"X_STRIDE": x_stride, "FORMAT": fmt},
    )  # fmt: skip
    stage1_mx_prefill[(blocks * triton.cdiv(a_stride, c.r1 // 2),)](
        ws["x"], ws["x_scale"], w1.view(torch.int32), w1_scale.view(-1).view(torch.int32),
        topk_weights if r.bias13 is None else r.bias13, *block_lists(ws), ws["a"], ws["a_block_scale"], pairs, topk,
        r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
        H=H, I=I, X_STRIDE=x_stride, A_STRIDE=a_stride, LAYOUT=r.w13_layout, ACTIVATION=r.activation,
        HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None, FORMAT=fmt, RULE=rule, VIA_BF16=via_bf16,
        WIDE=wide, R=c.r1, T=c.n, W=c.w1, num_warps=c.w1, **cap(c.regs1),
    )  # fmt: skip
    count = pairs * a_stride // 128
    fold_kernel[(triton.cdiv(count, FOLD),)](
        ws["a"].view(torch.uint8), ws["a_block_scale"], ws["a_scale"], count, SHIFT=0 if fmt == "e4m3" else 6,
        GROUPS=FOLD, num_warps=4,
    )  # fmt: skip
    stage2_mx_prefill[(blocks * triton.cdiv(H, c.r2 * max(tiles, 1)),)](
        ws["a"], ws["a_scale"], w2.view(torch.int32), w2_scale.view(-1).view(torch.int32),
        topk_weights if r.bias2 is None else r.bias2, *block_lists(ws), ws["part"], pairs,
        H=H, I=I, A_STRIDE=a_stride, HAS_BIAS=r.bias2 is not None, WIDE=wide, TILES=tiles, R=c.r2, T=c.n,
        W=c.w2, num_warps=c.w2, **cap(c.regs2),
    )  # fmt: skip
    prefill_launch.combine(r, ws, topk_weights, topk_ids, out, c.combine)
