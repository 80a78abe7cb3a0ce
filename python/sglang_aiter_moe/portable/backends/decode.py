"""Which weight and which scale a kernel reads where: one expert at a time, out of flat bytes.

The bytes are taken for what the layout says, whatever they really are: a wrong layout gives garbage, as it does on
the GPU. Formulas: docs/contract.md sections a.1 and a.3; they are written out here from the kernel's side
(address to row and column), apart from the packing functions.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.numerics.e8m0 import decode_e8m0
from sglang_aiter_moe.numerics.mxfp4 import E2M1_VALUES
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
BLOCK = 32


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


_PAIRS: dict[torch.device, torch.Tensor] = {}


def _pair_table(device: torch.device) -> torch.Tensor:
    """int64 ``[256]``: for each packed byte its two values as float32, low nibble first, side by side."""
    if device not in _PAIRS:
        values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32)
        byte = torch.arange(256)
        pairs = torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1)
        _PAIRS[device] = pairs.contiguous().view(torch.int64).view(-1).to(device)
    return _PAIRS[device]


def dequantise(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows, K]`` from ``[rows, K/2]`` bytes and ``[rows, K/32]`` E8M0 scales.

    The values of ``numerics.mxfp4.dequantize_mxfp4``, in place where that one copies: weights are decoded
    at every call, and no more than one expert's should be in memory.
    """
    rows, columns = scales.shape
    table = _pair_table(packed.device)
    values = table.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    values = values.view(rows, columns, BLOCK)
    values *= decode_e8m0(scales).unsqueeze(-1)
    return values.view(rows, columns * BLOCK)
