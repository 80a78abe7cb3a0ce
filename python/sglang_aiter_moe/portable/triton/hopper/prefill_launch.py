"""Many tokens: rank, blocks, place, stage 1, stage 2, combine, with blocks of up to ``n`` tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.portable.triton.hopper import fp8_launch
from sglang_aiter_moe.portable.triton.hopper.prefill_prepare import (
    blocks_kernel,
    place_kernel,
    rank_kernel,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_stage1 import stage1_prefill
from sglang_aiter_moe.portable.triton.hopper.prefill_stage2 import stage2_prefill
from sglang_aiter_moe.portable.triton.hopper.prepare import combine_hopper
from sglang_aiter_moe.portable.triton.workspace import carve, state

CHUNK = 512
"""Pairs of one program of the ranking."""
SHORT = 512
"""Stage 2 keeps its tokens in shared memory up to this many columns: a ring would be longer than they are."""


@dataclass(frozen=True)
class PrefillConfig:
    """Most tokens a block (``prefill_blocks.column_choices``); rows and warps of stage 1 and of stage 2; row tiles of
    a stage-2 program that keeps its tokens in shared memory, 0: one tile, tokens through a ring; register caps of both
    stages, 0: none."""

    n: int
    r1: int = 128
    w1: int = 8
    r2: int = 128
    w2: int = 8
    tiles: int = 0
    regs1: int = 0
    regs2: int = 0
    combine: int = 1024


FORMATS = {"A16W4": "bf16", "A8W4": "e4m3", "A4W4": "e2m1"}


def supports(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    """All three modes: quantised activations are rounded as the mode rounds them and multiplied in bf16, exactly."""
    return r.hidden_size > 128 and fp8_launch.supports_but_mode(r, w1_scale, w2_scale)


def padded(columns: int) -> int:
    """Columns of a row of x or a: whole steps."""
    return -(-columns // 128) * 128


def cap(registers: int) -> dict:
    return {"maxnreg": registers} if registers else {}


def list_rows(
    r, x, topk_ids, ws, block: int, kernel, rows: tuple, constants: dict, width: int = 1024
) -> None:
    """The three launches before stage 1; ``kernel`` ranks pairs and writes ``rows`` of x, ``width`` columns at once."""
    M, topk = topk_ids.shape
    E, pairs = r.num_experts, M * topk
    mask, tokens = r.expert_mask, r.num_local_tokens
    groups = E if mask is None else mask.numel()
    counts = state(x.device, groups)
    tokens_ptr = topk_ids if tokens is None else tokens
    has_tokens = {"HAS_TOKENS": tokens is not None}
    all_groups = triton.next_power_of_2(groups)
    chunks = triton.cdiv(pairs, CHUNK)
    try:
        kernel[(chunks + M,)](
            x, *rows, topk_ids, tokens_ptr, counts, ws["ranks"], M, topk, groups,
            H=r.hidden_size, RULE=r.input_rounding, **constants, **has_tokens, BLOCK=CHUNK, WIDTH=width, num_warps=4,
        )  # fmt: skip
        blocks_kernel[(groups,)](
            topk_ids if mask is None else mask, counts, ws["first"], *block_lists(ws), pairs, groups, E,
            HAS_MASK=mask is not None, GROUPS=all_groups, T=block, FILL=triton.next_power_of_2(block), num_warps=4,
        )  # fmt: skip
        place_kernel[(chunks,)](
            topk_ids, tokens_ptr, counts, ws["ranks"], ws["first"], ws["pairs"], M, topk, groups,
            **has_tokens, GROUPS=all_groups, BLOCK=CHUNK, num_warps=4,
        )  # fmt: skip
    except BaseException:
        counts.zero_()  # a chain that broke off must not leave its counts to the next call
        raise


def list_tensors(r, topk_ids, block: int) -> dict:
    """What ``list_rows`` writes, and stage 2's parts, as ``carve`` takes them."""
    pairs = topk_ids.numel()
    blocks = min(pairs, (pairs + r.num_experts * (block - 1)) // block)
    groups = r.num_experts if r.expert_mask is None else r.expert_mask.numel()
    return {
        "ranks": ((pairs,), torch.int32),
        "first": ((groups,), torch.int32),
        "pairs": ((blocks, block), torch.int32),
        "experts": ((blocks,), torch.int32),
        "rows": ((blocks,), torch.int32),
        "blocks": ((1,), torch.int32),
        "part": ((pairs, r.hidden_size), torch.bfloat16),
    }


def block_lists(ws: dict) -> tuple:
    return ws["pairs"], ws["experts"], ws["rows"], ws["blocks"]


def combine(r, ws, topk_weights, topk_ids, out, columns: int, streamed: bool = False) -> None:
    """The last launch: parts times routing weights, summed. ``streamed``: there are more than L2 holds."""
    M, topk = topk_ids.shape
    mask, tokens = r.expert_mask, r.num_local_tokens
    H, nothing = r.hidden_size, topk_ids
    combine_hopper[(M, triton.cdiv(H, columns))](
        ws["part"], topk_ids, nothing if mask is None else mask, nothing if tokens is None else tokens, ws["blocks"],
        topk_weights, out, out.stride(0), M, r.num_experts if mask is None else mask.numel(),
        H=H, H_USED=H, WEIGHTED=True, TOPK=topk, SLOTS=triton.next_power_of_2(topk), HAS_MASK=mask is not None,
        HAS_TOKENS=tokens is not None, PDL=False, BLOCK_H=columns, DOT="bf16", STREAMED=streamed, num_warps=4,
    )  # fmt: skip


def run_prefill(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: PrefillConfig
) -> None:
    """Six launches. Operands as in ``portable.triton.run``."""
    c = config
    M, topk = topk_ids.shape
    H, I = r.hidden_size, r.intermediate_size
    pairs = M * topk
    x_stride, a_stride = padded(H), padded(I)
    ws = carve(
        x.device,
        list_tensors(r, topk_ids, c.n)
        | {
            "x": ((M, x_stride), torch.bfloat16),
            "a": ((pairs, a_stride), torch.bfloat16),
        },
    )
    fmt = FORMATS[r.mode]
    rule, via_bf16 = fp8_launch.RULES.get(r.requantization, ("none", False))
    tiles = c.tiles or int(a_stride <= SHORT)
    wide = max(M * x_stride, pairs * a_stride) >= 1 << 31
    blocks = len(ws["pairs"])
    list_rows(
        r, x, topk_ids, ws, c.n, rank_kernel, (ws["x"],), {"X_STRIDE": x_stride, "FORMAT": fmt}
    )
    stage1_prefill[(blocks * triton.cdiv(a_stride, c.r1 // 2),)](
        ws["x"], w1.view(torch.int32), w1_scale, topk_weights if r.bias13 is None else r.bias13,
        *block_lists(ws), ws["a"], pairs, topk, r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
        H=H, I=I, X_STRIDE=x_stride, A_STRIDE=a_stride, LAYOUT=r.w13_layout, ACTIVATION=r.activation,
        HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None, FORMAT=fmt, RULE=rule, VIA_BF16=via_bf16,
        WIDE=wide, R=c.r1, T=c.n, W=c.w1, num_warps=c.w1, **cap(c.regs1),
    )  # fmt: skip
    stage2_prefill[(blocks * triton.cdiv(H, c.r2 * max(tiles, 1)),)](
        ws["a"], w2.view(torch.int32), w2_scale, topk_weights if r.bias2 is None else r.bias2,
        *block_lists(ws), ws["part"], pairs,
        H=H, I=I, A_STRIDE=a_stride, HAS_BIAS=r.bias2 is not None, WIDE=wide, TILES=tiles, R=c.r2, T=c.n, W=c.w2,
        num_warps=c.w2, **cap(c.regs2),
    )  # fmt: skip
    combine(r, ws, topk_weights, topk_ids, out, c.combine)
