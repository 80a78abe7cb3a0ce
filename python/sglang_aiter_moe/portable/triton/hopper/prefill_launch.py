"""Many tokens: prepare, stage 1, stage 2, combine, with blocks of N tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.portable.triton.hopper import fp8_launch
from sglang_aiter_moe.portable.triton.hopper.prefill import stage1_prefill, stage2_prefill
from sglang_aiter_moe.portable.triton.hopper.prepare import combine_hopper, prepare_kernel
from sglang_aiter_moe.portable.triton.workspace import carve, state


@dataclass(frozen=True)
class PrefillConfig:
    """``n`` tokens a block in both stages."""

    n: int
    combine: int = 512


FORMATS = {"A16W4": "bf16", "A8W4": "e4m3", "A4W4": "e2m1"}


def supports(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    """All three modes: quantised activations are rounded as the mode rounds them and multiplied in bf16, exactly."""
    return fp8_launch.supports_but_mode(r, w1_scale, w2_scale)


def run_prefill(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: PrefillConfig
) -> None:
    """Four launches. Operands as in ``portable.triton.run``."""
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    pairs = M * topk
    blocks = min(pairs, (pairs + E * (config.n - 1)) // config.n)
    x_stride, a_stride = -(-H // 128) * 128, -(-I // 128) * 128
    ws = carve(
        x.device,
        {
            "pairs": ((blocks, config.n), torch.int32),
            "experts": ((blocks,), torch.int32),
            "x": ((M, x_stride), torch.bfloat16),
            "a": ((pairs, a_stride), torch.bfloat16),
            "part": ((pairs, H), torch.bfloat16),
        },
    )
    counter = state(x.device)
    fmt = FORMATS[r.mode]
    rule, via_bf16 = fp8_launch.RULES.get(r.requantization, ("none", False))
    mask, tokens = r.expert_mask, r.num_local_tokens
    groups = E if mask is None else mask.numel()
    nothing = topk_ids
    sort_args = (topk_ids, nothing if mask is None else mask, nothing if tokens is None else tokens)
    flags = {"HAS_MASK": mask is not None, "HAS_TOKENS": tokens is not None}
    try:
        prepare_kernel[(groups + M,)](
            x, ws["x"], *sort_args, ws["pairs"], ws["experts"], counter, M, topk, groups, E,
            H=H, H_USED=H, X_STRIDE=x_stride, ORDER="prefill", FORMAT=fmt, RULE=r.input_rounding, **flags, PDL=False,
            GROUPS=triton.next_power_of_2(groups), T=config.n,
            BLOCK=min(4096, triton.next_power_of_2(pairs)), WIDTH=1024, num_warps=4,
        )  # fmt: skip
        stage1_prefill[(blocks * (I // 32),)](
            ws["x"], w1.view(torch.int32), w1_scale, topk_weights if r.bias13 is None else r.bias13,
            ws["pairs"], ws["experts"], counter, ws["a"], pairs, topk,
            r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
            H=H, I=I, X_STRIDE=x_stride, A_STRIDE=a_stride, LAYOUT=r.w13_layout, ACTIVATION=r.activation,
            HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None, N=config.n,
            FORMAT=fmt, RULE=rule, VIA_BF16=via_bf16, num_warps=4,
        )  # fmt: skip
        stage2_prefill[(blocks * triton.cdiv(H, 64),)](
            ws["a"], w2.view(torch.int32), w2_scale, topk_weights if r.bias2 is None else r.bias2,
            topk_weights, ws["pairs"], ws["experts"], counter, ws["part"], pairs,
            H=H, I=I, A_STRIDE=a_stride, HAS_BIAS=r.bias2 is not None, N=config.n, num_warps=4,
        )  # fmt: skip
        combine_hopper[(M, triton.cdiv(H, config.combine))](
            ws["part"], *sort_args, counter, out, out.stride(0), M, groups,
            H=H, H_USED=H, TOPK=topk, SLOTS=triton.next_power_of_2(topk), **flags,
            PDL=False, BLOCK_H=config.combine, DOT="bf16", num_warps=4,
        )  # fmt: skip
    except BaseException:
        counter.zero_()  # a chain that broke off must not leave its count to the next call
        raise
