"""Many tokens in A8W4 and A4W4, tokens and words through rings: rank, blocks, place, stage 1, fold, stage 2, sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.request import A8W4, SEPARATED
from sglang_aiter_moe.portable.triton.hopper import mx_prefill_launch, prefill_launch
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import (
    RULES,
    bulk_copies_reach,
    multiprocessors,
)
from sglang_aiter_moe.portable.triton.hopper.prefill_launch import (
    block_lists,
    list_tensors,
    padded,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_prepare import (
    fold_rows_kernel,
    rank_rows_kernel,
)
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_stage1 import stage1_shared, tiles_of
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_stage2 import items_of, stage2_shared
from sglang_aiter_moe.portable.triton.workspace import carve


@dataclass(frozen=True)
class Rings:
    """Slots of tokens and of packed words (two or more: a step's are loaded before those before are released); warps
    that load tokens; registers of a loader's thread; steps of 128 columns in one accumulator. For some widths and
    numbers of them ptxas of CUDA 12.8 ends with a signal (``table.give_up``).

    ``groups``: of consumers, four warps and 64 rows each: two up to 160 columns, in stage 2 up to 512 columns of ``a``
    three as well, and four up to 96 (48 where sums are kept beside ``steps``). ``looped``: the loop has one step, not
    ``steps`` of them."""

    tokens: int = 4
    words: int = 4
    loaders: int = 2
    loader_regs: int = 64
    steps: int = 4
    groups: int = 2
    looped: bool = False

    def __post_init__(self) -> None:
        if self.groups not in (2, 3, 4):
            raise ContractError(
                f"a ring of {self.groups} groups of consumers would wait for groups that do not run",
                allowed="2, 3 or 4",
                fix="groups=2",
            )

    @property
    def warp_groups(self) -> int:
        return self.groups + -(-(self.loaders + 2) // 4)

    @property
    def maxnreg(self) -> int:
        """Registers of a thread at the launch, all roles alike; the warps of roles fill whole warp groups."""
        return 65536 // (self.warp_groups * 128) // 8 * 8

    @property
    def consumer_regs(self) -> int:
        """What the others leave to a consumer's thread."""
        left = self.maxnreg * self.warp_groups - self.loader_regs * (self.warp_groups - self.groups)
        return min(left // self.groups // 8 * 8, 240)

    def shared(self, n: int) -> int:
        """Bytes of shared memory of blocks of ``n`` tokens, without barriers and what conversions exchange."""
        facts = 2048 + 1024 * (-(-self.groups // 2))
        return self.words * self.groups * 4608 + self.tokens * n * 128 + 4 * facts

    def constants(self) -> dict:
        return {
            "maxnreg": self.maxnreg, "G": self.groups, "P": self.steps, "LOOPED": self.looped, "TS": self.tokens,
            "PS": self.words, "LW": self.loaders, "CREGS": self.consumer_regs, "LREGS": self.loader_regs,
        }  # fmt: skip


@dataclass(frozen=True)
class SharedPrefillConfig:
    """``n``: most tokens a block; ``tiles``: row tiles of a stage-2 item, ``kept``: whose tokens stay in their
    ring from tile to tile where all their columns fit."""

    n: int
    one: Rings = Rings()
    two: Rings = Rings()
    tiles: int = 1
    kept: bool = False
    combine: int = 1024

    def __post_init__(self) -> None:
        for name in ("one", "two"):
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, Rings(**getattr(self, name)))


supports = mx_prefill_launch.supports


def descriptors(weight, scale, outer: int, both: int, rows: int, columns: int):
    """Words ``[outer, 16-row tiles, half blocks, 32]`` of one consumers' group and 128 columns, as ``fp8_launch`` sees
    them; scales ``[outer, 32-row groups, blocks, 16]`` of the group, and of 256 columns."""
    L = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
    kb, kq = columns // 16, -(-columns // 256) * 2
    return (
        TensorDescriptor(
            weight, [outer, rows // 16, kb, 32], [rows * columns // 8, columns * 2, 32, 1], [both, 4 // both, 8, 32], L
        ),
        TensorDescriptor(
            scale, [outer, rows // 32, kq * 2, 16], [rows * kq, kq * 32, 16, 1], [both, 2 // both, 4, 16],
            gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=4),
        ),
    )  # fmt: skip


def run_shared_prefill(
    r, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config: SharedPrefillConfig
) -> None:
    """Seven launches. Operands as in ``portable.triton.run``."""
    bulk_copies_reach(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale)
    c = config
    M, topk = topk_ids.shape
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    pairs = M * topk
    x_stride, a_stride = padded(H), padded(I)
    ws = carve(
        x.device,
        list_tensors(r, topk_ids, c.n)
        | {
            "x": ((M, x_stride), torch.float8_e4m3fn),
            "x_scale": ((M,), torch.float32),
            "a": ((pairs, a_stride), torch.float8_e4m3fn),
            "a_block_scale": ((pairs, a_stride // 32), torch.uint8),
            "a_scale": ((pairs,), torch.float32),
        },
    )
    fmt = "e4m3" if r.mode == A8W4 else "e2m1"
    rule, via_bf16 = RULES[r.requantization]
    wide = max(M * x_stride, pairs * a_stride) >= 1 << 31
    blocks = len(ws["pairs"])
    sms = multiprocessors(x.device)
    prefill_launch.list_rows(
        r, x, topk_ids, ws, c.n, rank_rows_kernel, (ws["x"].view(torch.uint8), ws["x_scale"]),
        {"X_STRIDE": x_stride, "FORMAT": fmt}, triton.next_power_of_2(x_stride),
    )  # fmt: skip
    both = 2 if r.w13_layout == SEPARATED else 1
    s1, s2 = (s.view(-1).view(torch.int32) for s in (w1_scale, w2_scale))
    stage1_shared[(min(blocks * tiles_of(I, c.one.groups), sms),)](
        *descriptors(w1.view(torch.int32), s1, E * both, both, 2 // both * I, H),
        ws["x"], ws["x_scale"], s1, topk_weights if r.bias13 is None else r.bias13, *block_lists(ws), ws["a"],
        ws["a_block_scale"], pairs, topk, r.limit or 0.0, r.alpha, r.beta, r.linear_beta,
        H=H, I=I, X_STRIDE=x_stride, A_STRIDE=a_stride, LAYOUT=r.w13_layout, ACTIVATION=r.activation,
        HAS_LIMIT=r.limit is not None, HAS_BIAS=r.bias13 is not None, FORMAT=fmt, RULE=rule, VIA_BF16=via_bf16,
        WIDE=wide, T=c.n, **c.one.constants(), num_warps=4,
    )  # fmt: skip
    rows = max(1, 8192 // a_stride)
    rows = 1 << (rows.bit_length() - 1)
    fold_rows_kernel[(triton.cdiv(pairs, rows),)](
        ws["a"].view(torch.uint8), ws["a_block_scale"], ws["a_scale"], pairs, I=I, A_STRIDE=a_stride,
        SHIFT=0 if fmt == "e4m3" else 6, ROWS=rows, BLOCKS=triton.next_power_of_2(a_stride // 32), num_warps=4,
    )  # fmt: skip
    kept = c.kept and a_stride // 128 <= c.two.tokens  # or the ring would wait for itself
    stage2_shared[(min(blocks * items_of(H, c.two.groups, c.tiles), sms),)](
        *descriptors(w2.view(torch.int32), s2, E, 1, H, I),
        ws["a"], ws["a_scale"], s2, topk_weights if r.bias2 is None else r.bias2, *block_lists(ws), ws["part"], pairs,
        H=H, I=I, A_STRIDE=a_stride, HAS_BIAS=r.bias2 is not None, WIDE=wide, TILES=c.tiles, KEPT=kept, T=c.n,
        **c.two.constants(), num_warps=4,
    )  # fmt: skip
    prefill_launch.combine(r, ws, topk_weights, topk_ids, out, c.combine, streamed=True)
