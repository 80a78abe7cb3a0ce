"""Which weight and which scale a kernel reads where: one expert at a time, out of flat bytes.

The bytes are taken for what the layout says, whatever they really are: a wrong layout gives garbage, as it does on
the GPU. Formulas: docs/contract.md sections a.1 and a.3; they are written out here from the kernel's side
(address to row and column), apart from the packing functions.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.portable.request import (
    GU_INTERLEAVED,
    GU_INTERLEAVED_GFX1250,
    N32K4,
    N32K4_GU,
    RAW,
    SEPARATED,
)

PAST_THE_END = 0xFF
"""What a scale byte beyond the tensor reads as (NaN); on the GPU it is whatever lies there."""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in memory order, uint8, without a copy if it is contiguous."""
    return tensor.contiguous().view(torch.uint8).view(-1)


def expert_weight_bytes(
    flat: torch.Tensor, expert: int, rows: int, k_bytes: int, layout: str
) -> torch.Tensor:
    """Packed E2M1 bytes ``[rows, k_bytes]`` of one expert, in plain row order (gate half, then up half)."""
    size = rows * k_bytes
    block = flat[expert * size : (expert + 1) * size]
    if layout == RAW:
        return block.view(rows, k_bytes)
    # 16 bytes move together; as two 8-byte words where the memory allows it.
    wide = block.storage_offset() % 8 == 0
    unit = block.view(torch.int64) if wide else block
    width = 2 if wide else 16
    tiles = unit.view(rows // 16, k_bytes // 16, 16, width)  # row tile, K step, row, bytes
    if layout in (SEPARATED, GU_INTERLEAVED_GFX1250):
        plain = tiles.transpose(1, 2)
    elif layout == GU_INTERLEAVED:
        pairs = tiles.view(rows // 32, 2, k_bytes // 16, 16, width)
        plain = pairs.permute(1, 0, 3, 2, 4)
    else:
        raise ValueError(f"unknown weight layout {layout!r}")
    plain = plain.reshape(rows, -1).view(torch.uint8)
    if layout == GU_INTERLEAVED_GFX1250:
        plain = plain.view(rows // 2, 2, k_bytes).transpose(0, 1).reshape(rows, k_bytes)
    return plain


def expert_scales(
    flat: torch.Tensor, expert: int, rows: int, columns: int, layout: str
) -> torch.Tensor:
    """E8M0 bytes ``[rows, columns]`` of one expert, in plain row order; ``columns`` = K/32."""
    unit = {RAW: 1, N32K4: 4, N32K4_GU: 4}.get(layout, 8)
    stride = -(-columns // unit) * unit
    tall = rows if layout == RAW else -(-rows // 32) * 32
    start = expert * rows * stride
    block = flat[start : start + tall * stride]
    if block.numel() < tall * stride:
        missing = tall * stride - block.numel()
        block = torch.cat((block, block.new_full((missing,), PAST_THE_END)))
    if layout == SEPARATED:
        # 32 rows: [column / 8][column % 4][row % 16][column % 8 / 4][row / 16]
        block = block.view(tall // 32, stride // 8, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2)
    elif layout == GU_INTERLEAVED:
        # 16 gate and 16 up rows: the same, with gate / up in the place of row / 16
        block = block.view(tall // 32, stride // 8, 4, 16, 2, 2).permute(5, 0, 3, 1, 4, 2)
    elif layout in (N32K4, N32K4_GU):
        block = block.view(tall // 32, stride // 4, 32, 4).transpose(1, 2)
    elif layout != RAW:
        raise ValueError(f"unknown scale layout {layout!r}")
    plain = block.reshape(tall, stride)
    if layout == N32K4_GU:
        plain = plain.view(tall // 2, 2, stride).transpose(0, 1).reshape(tall, stride)
    return plain[:rows, :columns]
