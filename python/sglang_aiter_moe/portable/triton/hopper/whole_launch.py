"""The one-launch form: a layer of a few tokens in one kernel (``whole.py``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.request import A16W4, SEPARATED, KernelRequest
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import (
    bulk_copies_reach,
    multiprocessors,
    supports_but_mode,
)
from sglang_aiter_moe.portable.triton.hopper.whole import KEPT, whole_layer
from sglang_aiter_moe.portable.triton.hopper.whole_copy import UNITS, scale_rows
from sglang_aiter_moe.portable.triton.hopper.whole_meeting import MEETING
from sglang_aiter_moe.portable.triton.workspace import carve, state

BLOCKS = 16
"""K blocks of a slot."""
SHARED = 227 << 10
"""Bytes of shared memory that one program may have."""
LEAST_SLOTS = 2


def _most_topk(inter: int) -> int:
    """Experts a token for which there is room: their activations stand in shared memory together."""
    return 64 if inter <= 512 else 8


@dataclass(frozen=True)
class WholeConfig:
    """``slots`` of the ring (32 KB of weights each), fewer where a layer's columns leave less room. The table takes
    the form up to ``most_tokens``. ``halves``: stage 1 with both halves of K side by side (``whole_halves``).
    ``narrow``: stage 2 in tiles of 16 rows, its halves of K side by side (``whole_narrow``): up to four experts a
    token."""

    slots: int = 3
    most_tokens: int = 4
    halves: bool = False
    narrow: bool = False

    def fits(self, r: KernelRequest, topk: int) -> bool:
        """Whether there is room for a token of ``topk`` experts; ``narrow``: and no slot is half empty."""
        whole = not self.narrow or -(-r.intermediate_size // (32 * BLOCKS)) % 2 == 0
        return whole and self.has_room(r.hidden_size, r.intermediate_size, topk)

    def has_room(self, hidden: int, inter: int, topk: int) -> bool:
        few = not self.narrow or topk <= UNITS.value
        return few and _fits(hidden, inter, topk, self.narrow)


def fitting_slots(hidden: int, inter: int, topk: int, apart: bool, narrow: bool = False) -> int:
    """How many slots fit beside a token's columns (stage 1), or all its slots' activations (stage 2).

    ``apart``: gate and up have scale groups of their own.
    """
    slot = 8 * BLOCKS * 256 + 4 * scale_rows(2 if apart else 1, narrow) * BLOCKS * 32 + 16
    quads = -(-hidden // (32 * BLOCKS)) * BLOCKS // 4
    pairs = max(4, triton.next_power_of_2(topk))
    chunks = -(-inter // 1024) * 2 if narrow else -(-inter // 512)
    wide = triton.next_power_of_2(chunks)
    chunks = wide if pairs * wide <= KEPT.value else chunks
    columns = max(triton.next_power_of_2(quads) * 1024, chunks * pairs * 1024 + 4 * pairs)
    return (SHARED - columns - 2048) // slot


def _fits(hidden: int, inter: int, topk: int, narrow: bool = False) -> bool:
    return fitting_slots(hidden, inter, topk, True, narrow) >= LEAST_SLOTS


def supports(r: KernelRequest, w1_scale: torch.Tensor, w2_scale: torch.Tensor) -> bool:
    """No mask and no ``num_local_tokens``: with them most slots have no expert here, and the list knows which."""
    return (
        r.mode == A16W4
        and r.expert_mask is None
        and r.num_local_tokens is None
        and _fits(r.hidden_size, r.intermediate_size, _most_topk(r.intermediate_size))
        and supports_but_mode(r, w1_scale, w2_scale)
    )


def _descriptors(weight, scale, outer: int, both: int, rows: int, columns: int, tiles: int = 2):
    """As ``fp8_launch.descriptors``, ``tiles`` of 16 rows at a time; scale words in rows of 16, one K block each."""
    kb, kq = columns // 16, -(-columns // 256) * 4
    return (
        TensorDescriptor(
            weight, [outer, rows // 16, kb, 128], [rows * columns // 2, columns * 8, 128, 1],
            [both, tiles // both, 2 * BLOCKS, 128],
            gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4),
        ),
        TensorDescriptor(
            scale, [outer, rows // 32, kq, 16], [rows * kq // 2, kq * 16, 16, 1], [both, 1, BLOCKS // 2, 16],
            gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=4),
        ),
    )  # fmt: skip


def run_whole(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: WholeConfig
) -> None:
    """One launch. Operands as in ``portable.triton.run``.

    The grid's programs wait for each other, so it is launched as a cooperative one, of one program an SM at most:
    the driver starts all of them or none. A GPU with fewer SMs gives each program a larger share.

    Raises:
        ContractError: weights or scales that bulk copies cannot read where they are; more experts a token than fit.
    """
    bulk_copies_reach(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    if not config.has_room(H, I, topk):
        raise ContractError(
            f"topk_ids names {topk} experts a token of {I} columns each",
            allowed=f"{UNITS.value if config.narrow else _most_topk(I)} or fewer for the one-launch form",
            fix="take another form for this layer: bound the row's pairs in tables/hopper.json",
        )
    both = 2 if r.w13_layout == SEPARATED else 1
    a = carve(x.device, {"a": ((M * topk, I), torch.bfloat16)})["a"]
    nothing = topk_weights
    whole_layer[(min(multiprocessors(x.device), topk * I // 16, MEETING.value),)](
        *_descriptors(w1, w1_scale.view(-1).view(torch.int32), E * both, both, 2 // both * I, H),
        *_descriptors(w2, w2_scale.view(-1).view(torch.int32), E, 1, H, I, 1 if config.narrow else 2),
        x, topk_ids, topk_weights, nothing if r.bias13 is None else r.bias13,
        nothing if r.bias2 is None else r.bias2, a, state(x.device, 1, "meeting"), out, out.stride(0), M, E,
        r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
        H=H, I=I, LAYOUT=r.w13_layout, ACTIVATION=r.activation, HAS_LIMIT=r.limit is not None,
        HAS_BIAS13=r.bias13 is not None, HAS_BIAS2=r.bias2 is not None, TOPK=topk, SB=BLOCKS,
        SLOTS=min(config.slots, fitting_slots(H, I, topk, both == 2, config.narrow)), HALVES=config.halves,
        NARROW=config.narrow, ONE=M == 1, num_warps=8, launch_cooperative_grid=True,
    )  # fmt: skip
