"""The Hopper bf16 forms: two launches for a few tokens, four over a list of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_aiter_moe.portable.request import A16W4, GU_INTERLEAVED, SEPARATED, KernelRequest
from sglang_aiter_moe.portable.triton.hopper.prepare import combine_hopper, prepare_kernel
from sglang_aiter_moe.portable.triton.hopper.stage1 import stage1_hopper
from sglang_aiter_moe.portable.triton.hopper.stage2 import stage2_list, stage2_token
from sglang_aiter_moe.portable.triton.workspace import carve, state

COLUMNS = 8
"""Tokens of one block: the N of ``mma.m16n8k16``."""


@dataclass(frozen=True)
class TokenConfig:
    """Up to 8 tokens. Stage 1: r1 rows (half gate, half up), g1 warps over K, u1 steps loaded together. Stage 2: r2
    rows, parts
    of K beside the slots, u2 steps, w2 warps. ``prefetch``: stage 1 starts w2 on its way to L2."""

    r1: int
    g1: int
    u1: int
    r2: int
    parts: int
    u2: int
    w2: int
    prefetch: bool = False


@dataclass(frozen=True)
class ListConfig:
    """More tokens. Stage 1 as above; stage 2: r2 rows a warp, g2 warps, u2 steps. ``maxnreg``: None or a register
    cap of stage 1."""

    r1: int
    g1: int
    u1: int
    r2: int
    g2: int
    u2: int
    combine: int = 512
    maxnreg: int | None = None


def supports(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    """Whether this form computes ``r``; what it does not (rare layouts, ragged pads) the portable form does."""
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    skips = (r.hidden_skip_k, r.hidden_skip_n, r.intermediate_skip_n, r.intermediate_skip_k)
    return (
        r.mode == A16W4
        and r.w13_layout in (SEPARATED, GU_INTERLEAVED)
        and r.w13_scale_layout == r.w13_layout
        and r.w2_layout == r.w2_scale_layout == SEPARATED
        and r.weight_on_output
        and not r.weight_on_input
        and r.intermediate_skip_n <= r.intermediate_skip_k
        and not any(s % 32 for s in skips)
        and w1_scale.numel() >= E * 2 * I * (-(-H // 256) * 8)
        and w2_scale.numel() >= E * H * (-(-I // 256) * 8)
    )


def supports_tokens(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    return r.expert_mask is None and r.num_local_tokens is None and supports(r, w1_scale, w2_scale)


def _padded(columns: int) -> int:
    return -(-columns // 128) * 128


def run_tokens(r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config, *, asm=True):
    """Two launches. No mask, no ``num_local_tokens``."""
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    pairs = M * topk
    a_stride = _padded(I)
    a = carve(x.device, {"a": ((pairs, a_stride), torch.bfloat16)})["a"]
    nothing = topk_weights
    c = config
    launch = {"num_stages": 1}
    pdl = {"launch_pdl": True} if asm else {}
    stage1_hopper[(pairs * triton.cdiv(I, c.r1 // 2),)](
        x, w1.view(torch.int32), w2.view(torch.int32), w1_scale, nothing if r.bias13 is None else r.bias13,
        topk_weights,
        topk_ids, topk_ids, topk_ids, topk_ids, a, pairs, topk, E,
        r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
        H=H, I=I, H_USED=H - r.hidden_skip_k, I_USED=I - r.intermediate_skip_k, X_STRIDE=H, A_STRIDE=a_stride,
        LAYOUT=r.w13_layout,
        ACTIVATION=r.activation, HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None,
        WEIGHTED=True, LIST=False, PERMUTED=False, PDL=asm, PREFETCH=asm and c.prefetch, T=COLUMNS, R=c.r1, G=c.g1,
        U=c.u1, ASM=asm,
        num_warps=c.g1, **launch,
    )  # fmt: skip
    stage2_token[(M * triton.cdiv(H, c.r2),)](
        a, w2.view(torch.int32), w2_scale, nothing if r.bias2 is None else r.bias2, topk_weights, topk_ids,
        out, out.stride(0), topk, E,
        H=H, I=I, H_USED=H - r.hidden_skip_n, I_USED=I - r.intermediate_skip_k, A_STRIDE=a_stride,
        HAS_BIAS=r.bias2 is not None, PDL=asm, T=COLUMNS, R=c.r2,
        SLOTS=triton.next_power_of_2(topk), PARTS=c.parts, U=c.u2, ASM=asm,
        num_warps=c.w2, **launch, **pdl,
    )  # fmt: skip


def run_list(r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config, *, asm=True):
    """Four launches: prepare, stage 1, stage 2, combine."""
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    pairs = M * topk
    blocks = min(pairs, (pairs + E * (COLUMNS - 1)) // COLUMNS)
    x_stride, a_stride = _padded(H), _padded(I)
    ws = carve(
        x.device,
        {
            "pairs": ((blocks, COLUMNS), torch.int32),
            "experts": ((blocks,), torch.int32),
            "x": ((M, x_stride), torch.bfloat16),
            "a": ((pairs, a_stride), torch.bfloat16),
            "part": ((pairs, H), torch.bfloat16),
        },
    )
    counter = state(x.device)
    mask, tokens = r.expert_mask, r.num_local_tokens
    groups = E if mask is None else mask.numel()
    nothing = topk_ids
    sort_args = (topk_ids, nothing if mask is None else mask, nothing if tokens is None else tokens)
    flags = {"HAS_MASK": mask is not None, "HAS_TOKENS": tokens is not None}
    c = config
    pdl = {"launch_pdl": True} if asm else {}
    try:
        prepare_kernel[(groups + M,)](
            x, ws["x"], *sort_args, ws["pairs"], ws["experts"], counter, M, topk, groups, E,
            H=H, H_USED=H - r.hidden_skip_k, X_STRIDE=x_stride, **flags, PDL=asm,
            GROUPS=triton.next_power_of_2(groups), T=COLUMNS,
            BLOCK=min(2048, triton.next_power_of_2(pairs)), WIDTH=1024, num_warps=4,
        )  # fmt: skip
        stage1_hopper[(blocks * triton.cdiv(I, c.r1 // 2),)](
            ws["x"], w1.view(torch.int32), w2.view(torch.int32), w1_scale,
            topk_weights if r.bias13 is None else r.bias13, topk_weights,
            topk_ids, ws["pairs"], ws["experts"], counter, ws["a"], pairs, topk, E,
            r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
            H=H, I=I, H_USED=H - r.hidden_skip_k, I_USED=I - r.intermediate_skip_k, X_STRIDE=x_stride,
            A_STRIDE=a_stride, LAYOUT=r.w13_layout,
            ACTIVATION=r.activation, HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None,
            WEIGHTED=False, LIST=True, PERMUTED=True, PDL=asm, PREFETCH=False, T=COLUMNS, R=c.r1, G=c.g1, U=c.u1,
            ASM=asm,
            num_warps=c.g1, num_stages=1, **({"maxnreg": c.maxnreg} if c.maxnreg else {}), **pdl,
        )  # fmt: skip
        stage2_list[(blocks * triton.cdiv(H, c.r2 * c.g2),)](
            ws["a"], w2.view(torch.int32), w2_scale, topk_weights if r.bias2 is None else r.bias2,
            topk_weights, ws["pairs"], ws["experts"], counter, ws["part"], pairs,
            H=H, I=I, I_USED=I - r.intermediate_skip_k, A_STRIDE=a_stride, HAS_BIAS=r.bias2 is not None,
            PDL=asm, T=COLUMNS, R=c.r2, G=c.g2, U=c.u2, ASM=asm, num_warps=c.g2, num_stages=1, **pdl,
        )  # fmt: skip
        combine_hopper[(M, triton.cdiv(H, c.combine))](
            ws["part"], *sort_args, counter, topk_weights, out, out.stride(0), M, groups,
            H=H, H_USED=H - r.hidden_skip_n, WEIGHTED=False, TOPK=topk, SLOTS=triton.next_power_of_2(topk), **flags,
            PDL=asm, BLOCK_H=c.combine, DOT="bf16" if asm else "f32", num_warps=4, **pdl,
        )  # fmt: skip
    except BaseException:
        counter.zero_()  # a chain that broke off must not leave its count to the next call
        raise
