"""The fp8 form: prepare, stage 1, stage 2, combine. A16W4 as pairs of e4m3 columns, A8W4 as it is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_aiter_moe.errors import ContractError
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
from sglang_aiter_moe.portable.triton.hopper.ring import ring_quads
from sglang_aiter_moe.portable.triton.workspace import carve, state

RULES = {
    REQUANT_EPILOGUE: ("epilogue", False),
    REQUANT_ROUNDUP_FP32: ("roundup", False),
    REQUANT_ROUNDUP_BF16: ("roundup", True),
}


MOST_COLUMNS = 10240
"""Of H and of I: the tokens of a block and a ring must fit one SM."""


@dataclass(frozen=True)
class Ring:
    """One stage: ``w`` warps that multiply (16 rows each), ``sb`` K blocks a slot (``w * sb >= 64``: a slot's scales
    fill eight rows of 128 bytes), ``slots`` a program, ``programs`` an SM. ``tail``: row tiles a program that are not
    shared out but taken by whoever is free, ``unit`` at a time."""

    w: int
    sb: int
    slots: int
    programs: int
    tail: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        if self.tail < 0 or self.unit < 1:
            raise ContractError(
                f"a ring's queue of {self.tail} row tiles a program, {self.unit} at a time, would never end",
                allowed="tail of 0 or more, unit of 1 or more",
                fix="tail=0 for no queue",
            )

    @property
    def maxnreg(self) -> int:
        """Registers of a thread if all programs of an SM are resident; the warp that copies takes a warp group."""
        return min(65536 // (self.programs * (self.w + 4) * 32) // 8 * 8, 255)

    def shared(self, columns: int, n: int, parts: int) -> int:
        """Bytes of shared memory of a program beside ``n`` columns of ``columns`` bytes."""
        return self.slots * self.w * self.sb * 272 + n * columns + 64 * self.w * n // parts + 256


@dataclass(frozen=True)
class Fp8Config:
    """``n`` columns of a product (A16W4: two a token), and the stages' rings.

    ``by_row``: A8W4's columns are coded again with one scale a row, so that the loop has none (exact but for what is
    below 2**-13 of a row's largest).
    """

    n: int
    one: Ring
    two: Ring
    combine: int = 512
    by_row: bool = False

    def __post_init__(self) -> None:
        for name in ("one", "two"):
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, Ring(**getattr(self, name)))
        if self.combine < 64 or self.combine & (self.combine - 1):
            raise ContractError(
                f"the sum has {self.combine} columns a program, which are no whole lines of 128 bytes",
                allowed="powers of two from 64 on",
                fix="combine=1024",
            )


def supports(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    fits = max(r.hidden_size, r.intermediate_size) <= MOST_COLUMNS
    return fits and r.mode in (A16W4, A8W4) and supports_but_mode(r, w1_scale, w2_scale)


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


def descriptors(weight, scale, outer: int, both: int, rows: int, columns: int, ring: Ring):
    """What a slot is copied from, the layouts of contract.md a.1 and a.3 as bulk copies see them: words
    ``[outer, 16-row tiles, half blocks, 128 bytes]``, scales ``[outer, 32-row groups, .., 32 words]``.

    Args:
        outer: experts, or halves of experts where gate and up are separate (``both`` is 2, else 1).
        rows, columns: of one of them.
    """
    kb, kq = columns // 16, -(-columns // 256) * 2
    w_box, s_box = (
        [both, ring.w // both, 2 * ring.sb, 128],
        [both, ring.w // 2 // both, ring.sb // 4, 32],
    )
    return (
        TensorDescriptor(
            weight, [outer, rows // 16, kb, 128], [rows * columns // 2, columns * 8, 128, 1], w_box,
            gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4),
        ),
        TensorDescriptor(
            scale, [outer, rows // 32, kq, 32], [rows * kq, kq * 32, 32, 1], s_box,
            gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4),
        ),
    )  # fmt: skip


def bulk_copies_reach(**operands: torch.Tensor) -> None:
    """Refuses operands (by name) where bulk copies cannot read them."""
    for name, t in operands.items():
        if t.data_ptr() % 16:
            raise ContractError(
                f"{name} begins at address {t.data_ptr():#x}",
                allowed="a multiple of 16, which bulk copies need",
                fix=f"pass {name}.clone()",
            )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """SMs of ``device``; with tensors on the CPU, of the GPU that Triton's active driver interprets (``nvptx``)."""
    if device.type == "cpu":
        return triton.runtime.driver.active.utils.get_device_properties(0)["multiprocessor_count"]
    return _multiprocessors(device)


def run_fp8(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: Fp8Config
) -> None:
    """Four launches. Operands as in ``portable.triton.run``.

    Raises:
        ContractError: weights or scales that bulk copies cannot read where they are.
    """
    bulk_copies_reach(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    parts = 2 if r.mode == A16W4 else 1
    by_row = config.by_row or parts == 2  # and ``a`` is bf16
    rows = config.n // parts
    pairs = M * topk
    blocks = min(pairs, (pairs + E * (rows - 1)) // rows)
    quads1, quads2 = ring_quads(H // 32, config.one.sb), ring_quads(I // 32, config.two.sb)
    one, two = config.one, config.two
    x_stride, a_stride = quads1 * 128, quads2 * 128
    ws = carve(
        x.device,
        {
            "pairs": ((E * pairs,), torch.int32),
            "starts": ((blocks,), torch.int32),
            "x": ((M, parts, x_stride), torch.uint8),
            "x_scale": ((M, x_stride // 32), torch.float32),
            "a": ((pairs, I), torch.bfloat16) if by_row else ((pairs, a_stride), torch.uint8),
            "a_scale": ((1 if by_row else pairs, a_stride // 32), torch.float32),
            "part": ((pairs, H), torch.bfloat16),
        },
    )
    lines = H % 64 == 0  # a row of parts is whole lines of L2
    counter = state(x.device, 3 + E)  # blocks, pairs of each expert, two queues
    mask, tokens = r.expert_mask, r.num_local_tokens
    groups = E if mask is None else mask.numel()
    nothing = topk_ids
    sort_args = (topk_ids, nothing if mask is None else mask, nothing if tokens is None else tokens)
    flags = {"HAS_MASK": mask is not None, "HAS_TOKENS": tokens is not None}
    rule, via_bf16 = RULES.get(r.requantization, ("none", False))
    x8, a = ws["x"].view(torch.float8_e4m3fn), ws["a"]
    a = a if by_row else a.view(torch.float8_e4m3fn)
    try:
        prepare_fp8[(triton.cdiv(pairs, 128) + M,)](
            x, ws["x"], ws["x_scale"], *sort_args, ws["pairs"], ws["starts"], counter, M, topk, groups, E,
            H=H, X_STRIDE=x_stride, PARTS=parts, RULE=r.input_rounding, **flags, PDL=True,
            T=rows, BLOCK=128, WIDTH=triton.next_power_of_2(x_stride), BY_ROW=by_row,
            num_warps=4,
        )  # fmt: skip
        both = 2 if r.w13_layout == SEPARATED else 1
        weights1 = descriptors(
            w1, w1_scale.view(-1).view(torch.int32), E * both, both, 2 // both * I, H, one
        )
        weights2 = descriptors(w2, w2_scale.view(-1).view(torch.int32), E, 1, H, I, two)
        sms = multiprocessors(x.device)
        stage1_fp8[(min(blocks * triton.cdiv(I, 8 * one.w), sms * one.programs),)](
            *weights1, x8, ws["x_scale"], topk_weights if r.bias13 is None else r.bias13,
            ws["pairs"], ws["starts"], counter, a, ws["a_scale"], pairs, topk,
            r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
            H=H, I=I, LAYOUT=r.w13_layout, ACTIVATION=r.activation, HAS_LIMIT=r.limit is not None,
            HAS_BIAS=r.bias13 is not None, RULE=rule, VIA_BF16=via_bf16, PARTS=parts, PDL=True, QUADS2=quads2,
            N=config.n, W=one.w, SB=one.sb, SLOTS=one.slots, BY_ROW=by_row, TAIL=one.tail, UNIT=one.unit,
            QUEUE=1 + E, num_warps=one.w, maxnreg=one.maxnreg, launch_pdl=True,
        )  # fmt: skip
        stage2_fp8[(min(blocks * triton.cdiv(H, 16 * two.w), sms * two.programs),)](
            *weights2, a, ws["a_scale"], topk_weights if r.bias2 is None else r.bias2,
            topk_weights, ws["pairs"], ws["starts"], counter, ws["part"], pairs,
            H=H, I=I, HAS_BIAS=r.bias2 is not None, PARTS=parts, PDL=True, N=config.n,
            W=two.w, SB=two.sb, SLOTS=two.slots, BY_ROW=by_row, TAIL=two.tail, UNIT=two.unit,
            QUEUE=2 + E, DISCARDED=lines, num_warps=two.w, maxnreg=two.maxnreg, launch_pdl=True,
        )  # fmt: skip
        combine_hopper[(M, triton.cdiv(H, config.combine))](
            ws["part"], *sort_args, counter, topk_weights, out, out.stride(0), M, groups,
            H=H, H_USED=H, WEIGHTED=False, TOPK=topk, SLOTS=triton.next_power_of_2(topk), **flags,
            PDL=True, BLOCK_H=config.combine, DOT="bf16", COUNTERS=3 + E, DISCARD=lines, num_warps=4,
            launch_pdl=True,
        )  # fmt: skip
    except BaseException:
        counter.zero_()  # a chain that broke off must not leave its count to the next call
        raise
