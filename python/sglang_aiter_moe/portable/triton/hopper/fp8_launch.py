"""The fp8 form: prepare, stage 1, stage 2, combine. A16W4 as pairs of e4m3 columns, A8W4 as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_aiter_moe.portable.request import (
    A8W4,
    A16W4,
    GU_INTERLEAVED,
    REQUANT_EPILOGUE,
    REQUANT_ROUNDUP_BF16,
    REQUANT_ROUNDUP_FP32,
    SEPARATED,
    KernelRequest,
)
from sglang_aiter_moe.portable.triton.hopper.fp8_stage1 import stage1_fp8
from sglang_aiter_moe.portable.triton.hopper.fp8_stage2 import stage2_fp8
from sglang_aiter_moe.portable.triton.hopper.prepare import combine_hopper, prepare_fp8
from sglang_aiter_moe.portable.triton.workspace import carve, state

RULES = {
    REQUANT_EPILOGUE: ("epilogue", False),
    REQUANT_ROUNDUP_FP32: ("roundup", False),
    REQUANT_ROUNDUP_BF16: ("roundup", True),
}


@dataclass(frozen=True)
class Fp8Config:
    """``n`` columns of a product (A16W4: two a token); warps of stages 1 and 2; stage-2 row tiles (16 rows a warp)
    a program."""

    n: int
    w1: int = 4
    w2: int = 4
    tiles: int = 4
    combine: int = 512


def supports(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    return r.mode in (A16W4, A8W4) and supports_but_mode(r, w1_scale, w2_scale)


def supports_but_mode(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    """Layouts, activation and sizes that this form and the prefill form have; pads and rarer rules the portable
    form does."""
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    skips = (r.hidden_skip_k, r.hidden_skip_n, r.intermediate_skip_n, r.intermediate_skip_k)
    return (
        (r.mode == A16W4 or r.requantization in RULES)
        and r.activation in ("situv2", "swiglu", "silu")
        and r.w13_layout in (SEPARATED, GU_INTERLEAVED)
        and r.w13_scale_layout == r.w13_layout
        and r.w2_layout == r.w2_scale_layout == SEPARATED
        and r.weight_on_output
        and not r.weight_on_input
        and not any(skips)
        and w1_scale.numel() >= E * 2 * I * (-(-H // 256) * 8)
        and w2_scale.numel() >= E * H * (-(-I // 256) * 8)
    )


def _padded(columns: int) -> int:
    return -(-columns // 128) * 128


def run_fp8(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: Fp8Config
) -> None:
    """Four launches. Operands as in ``portable.triton.run``."""
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    parts = 2 if r.mode == A16W4 else 1
    rows = config.n // parts
    pairs = M * topk
    blocks = min(pairs, (pairs + E * (rows - 1)) // rows)
    x_stride, a_stride = _padded(H), _padded(I)
    ws = carve(
        x.device,
        {
            "pairs": ((blocks, rows), torch.int32),
            "experts": ((blocks,), torch.int32),
            "x": ((M, parts, x_stride), torch.uint8),
            "x_scale": ((M, x_stride // 32), torch.float32),
            "a": ((pairs, parts, a_stride), torch.uint8),
            "a_scale": ((pairs, a_stride // 32), torch.float32),
            "part": ((pairs, H), torch.bfloat16),
        },
    )
    counter = state(x.device)
    mask, tokens = r.expert_mask, r.num_local_tokens
    groups = E if mask is None else mask.numel()
    nothing = topk_ids
    sort_args = (topk_ids, nothing if mask is None else mask, nothing if tokens is None else tokens)
    flags = {"HAS_MASK": mask is not None, "HAS_TOKENS": tokens is not None}
    rule, via_bf16 = RULES.get(r.requantization, ("pair", True))
    x8, a8 = ws["x"].view(torch.float8_e4m3fn), ws["a"].view(torch.float8_e4m3fn)
    try:
        prepare_fp8[(groups + M,)](
            x, ws["x"], ws["x_scale"], *sort_args, ws["pairs"], ws["experts"], counter, M, topk, groups, E,
            H=H, X_STRIDE=x_stride, PARTS=parts, RULE=r.input_rounding, **flags, PDL=True,
            GROUPS=triton.next_power_of_2(groups), T=rows,
            BLOCK=min(2048, triton.next_power_of_2(pairs)), WIDTH=triton.next_power_of_2(x_stride), num_warps=4,
        )  # fmt: skip
        stage1_fp8[(blocks * triton.cdiv(I, 8 * config.w1),)](
            x8, ws["x_scale"], w1.view(torch.uint8), w1_scale.view(-1).view(torch.int32), topk_weights if r.bias13
            is None else r.bias13,
            ws["pairs"], ws["experts"], counter, a8, ws["a_scale"], pairs, topk,
            r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
            H=H, I=I, LAYOUT=r.w13_layout, ACTIVATION=r.activation, HAS_LIMIT=r.limit is not None,
            HAS_BIAS=r.bias13 is not None, RULE=rule, VIA_BF16=via_bf16, PARTS=parts, PDL=True,
            N=config.n, W=config.w1, num_warps=config.w1, launch_pdl=True,
        )  # fmt: skip
        stage2_fp8[(blocks * triton.cdiv(H, 16 * config.w2 * config.tiles),)](
            a8, ws["a_scale"], w2.view(torch.uint8), w2_scale.view(-1).view(torch.int32), topk_weights if r.bias2 is
            None else r.bias2,
            topk_weights, ws["pairs"], ws["experts"], counter, ws["part"], pairs,
            H=H, I=I, HAS_BIAS=r.bias2 is not None, PARTS=parts, PDL=True, N=config.n,
            TILES=config.tiles, W=config.w2, num_warps=config.w2, launch_pdl=True,
        )  # fmt: skip
        combine_hopper[(M, triton.cdiv(H, config.combine))](
            ws["part"], *sort_args, counter, topk_weights, out, out.stride(0), M, groups,
            H=H, H_USED=H, WEIGHTED=False, TOPK=topk, SLOTS=triton.next_power_of_2(topk), **flags,
            PDL=True, BLOCK_H=config.combine, DOT="bf16", num_warps=4, launch_pdl=True,
        )  # fmt: skip
    except BaseException:
        counter.zero_()  # a chain that broke off must not leave its count to the next call
        raise
