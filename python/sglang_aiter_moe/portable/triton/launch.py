"""From a request to launches: sort (2), quantise (A8W4 and A4W4), stage 1, stage 2, combine."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from sglang_aiter_moe.portable.request import (
    A16W4,
    REQUANT_EPILOGUE,
    REQUANT_EVEN_BF16,
    REQUANT_NONE,
    REQUANT_ROUNDUP_BF16,
    REQUANT_ROUNDUP_FP32,
    KernelRequest,
)
from sglang_aiter_moe.portable.triton import table
from sglang_aiter_moe.portable.triton.combine import combine_kernel
from sglang_aiter_moe.portable.triton.quantize import quantize_input_kernel
from sglang_aiter_moe.portable.triton.sort import count_kernel, place_kernel
from sglang_aiter_moe.portable.triton.stage1 import stage1_kernel
from sglang_aiter_moe.portable.triton.stage2 import stage2_kernel
from sglang_aiter_moe.portable.triton.workspace import carve

X_FORMAT = {"A16W4": "bf16", "A8W4": "e4m3", "A4W4": "e2m1"}
# rule -> (scale rule of the epilogue, whether y is rounded to bf16 first)
REQUANT = {
    REQUANT_NONE: ("none", False),
    REQUANT_EPILOGUE: ("epilogue", False),
    REQUANT_ROUNDUP_FP32: ("roundup", False),
    REQUANT_ROUNDUP_BF16: ("roundup", True),
    REQUANT_EVEN_BF16: ("even", True),
}
SCALED_DOT_ARCHS = ("gfx950", "gfx1250")
"""Targets whose matrix units take E8M0 scales; elsewhere operands are decoded to bf16."""


def dot_kind(arch: str) -> str:
    """How operands are multiplied on ``arch`` (see ``operands.py``)."""
    if arch == "cpu":
        return "f32"
    return "scaled" if arch in SCALED_DOT_ARCHS else "bf16"


@functools.cache
def arch_of(device_type: str, index: int | None) -> str:
    """The table key of a device: gfx950, sm90, ..., or cpu (Triton's interpreter)."""
    if device_type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(index)
    name = properties.gcnArchName if torch.version.hip else ""
    return name.split(":")[0] if name else f"sm{properties.major}{properties.minor}"


def max_blocks(pairs: int, experts: int, block_m: int) -> int:
    """The most blocks that any routing of ``pairs`` pairs can need."""
    return min(pairs, (pairs + experts * (block_m - 1)) // block_m)


def row_format(mode: str, columns: int) -> tuple[int, torch.dtype]:
    """Elements a row and their dtype of an activation matrix with ``columns`` columns."""
    if mode == A16W4:
        return columns, torch.bfloat16
    return (columns if mode == "A8W4" else columns // 2), torch.uint8


def first_tokens(
    r: KernelRequest,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> tuple[KernelRequest, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands without the tokens that a ``num_local_tokens`` on the host leaves out; their output is zeroed."""
    if not isinstance(r.num_local_tokens, int):
        return r, x, topk_weights, topk_ids, out
    n = min(r.num_local_tokens, x.shape[0])
    out[n:].zero_()
    return replace(r, num_local_tokens=None), x[:n], topk_weights[:n], topk_ids[:n], out[:n]


def dispatch(
    r: KernelRequest,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    arch: str | None = None,
) -> None:
    """The form for this device and size; all of them compute the same layer. Operands as in ``run``.

    Where a Hopper form's kernels cannot be built for a layer, the next one runs; that is logged once.

    Args:
        arch: whose tables and forms; None: the device's.
    """
    arch = arch or arch_of(x.device.type, x.device.index)
    r, x, topk_weights, topk_ids, out = first_tokens(r, x, topk_weights, topk_ids, out)
    w1, w2, w1_scale, w2_scale = (t.view(torch.uint8) for t in (w1, w2, w1_scale, w2_scale))
    operands = (w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out)
    if arch == "sm90" and topk_ids.numel() and out.dim() == 2:
        from sglang_aiter_moe.portable.triton.hopper import table as hopper_table

        weights = w1, w2, w1_scale, w2_scale
        while (chosen := hopper_table.choose(r, *topk_ids.shape, *weights)) is not None:
            runner, config = chosen
            try:
                runner(r, x, *operands, config)
            except (PTXASError, OutOfResources) as problem:
                hopper_table.give_up(r, config, problem)
            else:
                return
    run_portable(r, x, *operands, arch=arch)


def run_portable(
    r: KernelRequest,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    config: table.Config | None = None,
    arch: str | None = None,
) -> None:
    """The portable form. Operands as in :func:`sglang_aiter_moe.portable.triton.run`, already checked.

    Args:
        config: tiles; None: from the table.
        arch: whose table and matrix instructions; None: the device's.
    """
    tokens = r.num_local_tokens
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    pairs = M * topk
    if not pairs:
        out.zero_()
        return
    arch = arch or arch_of(x.device.type, x.device.index)
    config = config or table.choose(arch, r.mode, pairs / E)
    blocks = max_blocks(pairs, E, config.m)
    fmt = X_FORMAT[r.mode]
    dot = dot_kind(arch)
    wanted = {
        "counts": ((E,), torch.int32),
        "pairs": ((blocks * config.m,), torch.int32),
        "experts": ((blocks,), torch.int32),
        "blocks": ((1,), torch.int32),
    }
    per_slot = out.dim() == 3
    if not per_slot:
        wanted["part"] = ((pairs, H), torch.bfloat16)
    columns, dtype = row_format(r.mode, I)
    wanted["y"] = ((pairs, columns), dtype)
    wanted["y_scale"] = ((pairs, I // 32), torch.uint8)
    if fmt != "bf16":
        columns, dtype = row_format(r.mode, H)
        wanted["x"] = ((M, columns), dtype)
        wanted["x_scale"] = ((M, H // 32), torch.uint8)
    ws = carve(x.device, wanted)
    part = out.zero_().view(pairs, H) if per_slot else ws["part"]

    mask = r.expert_mask
    total = E if mask is None else mask.numel()
    nothing = ws["blocks"]  # a pointer for arguments that a kernel does not read
    sort_args = (topk_ids, nothing if mask is None else mask, nothing if tokens is None else tokens)
    flags = {"HAS_MASK": mask is not None, "HAS_TOKENS": tokens is not None}
    groups = triton.next_power_of_2(max(total, E))
    chunk = min(1024, triton.next_power_of_2(pairs))
    count_kernel[(total,)](
        *sort_args, ws["counts"], M, topk, total, E, **flags, GROUPS=groups, BLOCK=chunk
    )
    place_kernel[(total,)](
        *sort_args, ws["counts"], ws["pairs"], ws["experts"], ws["blocks"], M, topk, total, E,
        **flags, GROUPS=groups, EXPERTS=triton.next_power_of_2(E), BLOCK_M=config.m, BLOCK=chunk,
    )  # fmt: skip

    hidden_used = H - r.hidden_skip_k
    rows, x_scale = x, nothing
    if fmt != "bf16":
        rows, x_scale = ws["x"], ws["x_scale"]
        quantize_input_kernel[(triton.cdiv(M, 4), triton.cdiv(H, 256))](
            x, rows, x_scale, M, H, hidden_used, fmt, r.input_rounding, BLOCK_M=4, BLOCK_H=256
        )
    rule, via_bf16 = REQUANT[r.requantization]
    t = config.stage1
    stage1_kernel[(blocks * triton.cdiv(I, t.n),)](
        rows, x_scale, w1.view(torch.uint8), w1_scale.view(torch.uint8), w1_scale.numel(),
        nothing if r.bias13 is None else r.bias13, topk_weights,
        ws["pairs"], ws["experts"], ws["blocks"], ws["y"], ws["y_scale"], pairs, topk,
        r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
        H=H, I=I, H_USED=hidden_used, I_USED=I - r.intermediate_skip_n, X_FORMAT=fmt,
        W_LAYOUT=r.w13_layout, W_SCALE_LAYOUT=r.w13_scale_layout, DOT=dot,
        ACTIVATION=r.activation, HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None,
        WEIGHT_ON_INPUT=r.weight_on_input, REQUANT_RULE=rule, Y_VIA_BF16=via_bf16,
        BLOCK_M=config.m, BLOCK_N=t.n, BLOCK_K=t.k, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    t = config.stage2
    stage2_kernel[(blocks * triton.cdiv(H, t.n),)](
        ws["y"], ws["y_scale"], w2.view(torch.uint8), w2_scale.view(torch.uint8), w2_scale.numel(),
        nothing if r.bias2 is None else r.bias2, topk_weights,
        ws["pairs"], ws["experts"], ws["blocks"], part, pairs,
        H=H, I=I, I_USED=I - r.intermediate_skip_k, X_FORMAT=fmt,
        W_LAYOUT=r.w2_layout, W_SCALE_LAYOUT=r.w2_scale_layout, DOT=dot,
        HAS_BIAS=r.bias2 is not None, WEIGHT_ON_OUTPUT=r.weight_on_output,
        BLOCK_M=config.m, BLOCK_N=t.n, BLOCK_K=t.k, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    if per_slot:
        return
    combine_kernel[(M, triton.cdiv(H, 1024))](
        part, *sort_args, out, out.stride(0), M, topk, total,
        H=H, H_USED=H - r.hidden_skip_n, **flags, DOT=dot, BLOCK_H=min(1024, triton.next_power_of_2(H)),
    )  # fmt: skip
