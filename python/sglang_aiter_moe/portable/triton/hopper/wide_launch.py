"""16 to 48 tokens an expert in A8W4 and A4W4: prepare, stage 1, stage 2, combine (``wide`` says how)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.request import A8W4, SEPARATED, KernelRequest
from sglang_aiter_moe.portable.triton.hopper import mx_prefill_launch
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import (
    RULES,
    Ring,
    bulk_copies_reach,
    descriptors,
    multiprocessors,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_launch import padded
from sglang_aiter_moe.portable.triton.hopper.prepare import combine_hopper
from sglang_aiter_moe.portable.triton.hopper.wide import OVERLAPS, SB, product_columns
from sglang_aiter_moe.portable.triton.hopper.wide_prepare import prepare_wide
from sglang_aiter_moe.portable.triton.hopper.wide_stage1 import stage1_wide
from sglang_aiter_moe.portable.triton.hopper.wide_stage2 import stage2_wide
from sglang_aiter_moe.portable.triton.workspace import carve, state


@dataclass(frozen=True)
class WideConfig:
    """A block's tokens are those of two groups of columns, ``n1`` and ``n2`` (or 0), which share one product; the
    stages' rings, whose slots hold 16 K blocks."""

    n1: int
    n2: int
    one: Ring
    two: Ring
    combine: int = 1024

    def __post_init__(self) -> None:
        for name in ("one", "two"):
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, Ring(**getattr(self, name)))
            ring = getattr(self, name)
            if ring.sb != SB.value:
                raise ContractError(
                    f"stage ring {name!r} of the wide form has slots of {ring.sb} K blocks",
                    allowed=str(SB.value),
                    fix=f"sb={SB.value}",
                )
            if ring.tail:
                raise ContractError(
                    f"stage ring {name!r} of the wide form has a queue",
                    allowed="none",
                    fix="tail=0",
                )

    def shared(self, ring: Ring, columns: int, exchange: int) -> int:
        """Bytes of shared memory of a program beside tokens of ``columns`` (H or I). ``exchange``: of those that a warp
        and token need when a tile ends."""
        tokens = self.n1 + self.n2
        product = product_columns(tokens)
        rows = tokens if OVERLAPS.value else product
        rows = rows * padded(columns) + (product - rows) * 128
        slots = ring.slots * (ring.w * ring.sb * 272 + 16)
        return slots + rows + exchange * ring.w * max(self.n1, self.n2)

    def fits(self, r: KernelRequest, topk: int) -> bool:
        """Whether all programs of an SM fit it."""
        one = self.shared(self.one, r.hidden_size, 32)
        two = self.shared(self.two, r.intermediate_size, 64)
        return (
            max(one, two) <= 227 << 10
            and self.one.programs * (one + 1024) <= 228 << 10
            and self.two.programs * (two + 1024) <= 228 << 10
        )


def ahead(ring: Ring) -> bool:
    """Whether the registers of ``ring`` hold two quads of blocks at work."""
    return ring.maxnreg >= 96


supports = mx_prefill_launch.supports


def run_wide(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: WideConfig
) -> None:
    """Four launches. Operands as in ``portable.triton.run``.

    Raises:
        ContractError: weights or scales that bulk copies cannot read where they are.
    """
    bulk_copies_reach(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    one, two, rows = config.one, config.two, config.n1 + config.n2
    pairs = M * topk
    blocks = min(pairs, (pairs + E * (rows - 1)) // rows)
    x_stride, a_stride = padded(H), padded(I)
    ws = carve(
        x.device,
        {
            "pairs": ((E * pairs,), torch.int32),
            "starts": ((blocks,), torch.int32),
            "x": ((M, x_stride), torch.float8_e4m3fn),
            "x_scale": ((M,), torch.float32),
            "a": ((pairs, a_stride), torch.float8_e4m3fn),
            "a_scale": ((pairs, a_stride // 32), torch.uint8),
            "part": ((pairs, H), torch.bfloat16),
        },
    )
    counter = state(x.device, 1 + E)
    mask, tokens = r.expert_mask, r.num_local_tokens
    groups = E if mask is None else mask.numel()
    nothing = topk_ids
    sort_args = (topk_ids, nothing if mask is None else mask, nothing if tokens is None else tokens)
    flags = {"HAS_MASK": mask is not None, "HAS_TOKENS": tokens is not None}
    fmt, shift = ("e4m3", 0) if r.mode == A8W4 else ("e2m1", 6)
    rule, via_bf16 = RULES[r.requantization]
    lists = ws["pairs"], ws["starts"], counter
    both = 2 if r.w13_layout == SEPARATED else 1
    sms = multiprocessors(x.device)
    columns = {"N1": config.n1, "N2": config.n2}
    try:
        prepare_wide[(triton.cdiv(pairs, 128) + M,)](
            x, ws["x"].view(torch.uint8), ws["x_scale"], *sort_args, *lists, M, topk, groups, E,
            H=H, X_STRIDE=x_stride, FORMAT=fmt, RULE=r.input_rounding, SHIFT=shift, **flags, T=rows, BLOCK=128,
            WIDTH=triton.next_power_of_2(x_stride), num_warps=4,
        )  # fmt: skip
        stage1_wide[(min(blocks * triton.cdiv(I, 8 * one.w), sms * one.programs),)](
            *descriptors(w1, w1_scale.view(-1).view(torch.int32), E * both, both, 2 // both * I, H, one),
            ws["x"], ws["x_scale"], topk_weights if r.bias13 is None else r.bias13, *lists, ws["a"], ws["a_scale"],
            pairs, topk, r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
            H=H, I=I, A_STRIDE=a_stride, LAYOUT=r.w13_layout, ACTIVATION=r.activation,
            HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None, FORMAT=fmt, RULE=rule, VIA_BF16=via_bf16,
            **columns, W=one.w, SLOTS=one.slots, AHEAD=ahead(one), num_warps=one.w, maxnreg=one.maxnreg,
            launch_pdl=True,
        )  # fmt: skip
        stage2_wide[(min(blocks * triton.cdiv(H, 16 * two.w), sms * two.programs),)](
            *descriptors(w2, w2_scale.view(-1).view(torch.int32), E, 1, H, I, two),
            ws["a"].view(torch.int32), ws["a_scale"], topk_weights if r.bias2 is None else r.bias2, topk_weights,
            *lists, ws["part"], pairs,
            H=H, I=I, SHIFT=shift, HAS_BIAS=r.bias2 is not None, **columns, W=two.w,
            SLOTS=two.slots, AHEAD=ahead(two), num_warps=two.w, maxnreg=two.maxnreg, launch_pdl=True,
        )  # fmt: skip
        combine_hopper[(M, triton.cdiv(H, config.combine))](
            ws["part"], *sort_args, counter, topk_weights, out, out.stride(0), M, groups,
            H=H, H_USED=H, WEIGHTED=False, TOPK=topk, SLOTS=triton.next_power_of_2(topk), **flags,
            PDL=True, BLOCK_H=config.combine, DOT="bf16", COUNTERS=1 + E, STREAMED=True, num_warps=4,
            launch_pdl=True,
        )  # fmt: skip
    except BaseException:
        counter.zero_()  # a chain that broke off must not leave its count to the next call
        raise
