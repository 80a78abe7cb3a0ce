"""AITER's packed forms by reshape and permute, for tests of code that indexes bytes.

Written from docs/contract.md sections a.1 and a.3 as whole-tensor permutations; the kernels compute byte
offsets instead, so a mistake in one is not in the other. Checked against the golden vectors where it is used.
"""

from __future__ import annotations

import torch


def _rows(t: torch.Tensor, form: str) -> torch.Tensor:
    experts, rows, cols = t.shape
    if form == "gu_interleaved":
        return t.view(experts, 2, rows // 32, 16, cols).transpose(1, 2).reshape(t.shape)
    if form in ("gu_interleaved_gfx1250", "n32k4_gu"):
        return t.view(experts, 2, rows // 2, cols).transpose(1, 2).reshape(t.shape)
    return t


def pack_weight(raw: torch.Tensor, form: str) -> torch.Tensor:
    """``raw [E, N, K/2]`` uint8 (w13: gate half, then up half) to ``form``; same shape."""
    if form == "raw":
        return raw.clone()
    experts, rows, kbytes = raw.shape
    tiles = _rows(raw, form).view(experts, rows // 16, 16, kbytes // 16, 16)
    return tiles.permute(0, 1, 3, 2, 4).contiguous().view(raw.shape)


def pack_scale(raw: torch.Tensor, form: str, pad: int = 0x7F) -> torch.Tensor:
    """``raw [E, N, K/32]`` uint8 to ``form``, flat per expert: ``[E, N * columns]``."""
    experts, rows, cols = raw.shape
    if form == "raw":
        return raw.reshape(experts, -1).clone()
    if form.startswith("n32k4"):
        blocks = _rows(raw, form).view(experts, rows // 32, 32, cols // 4, 4)
        return blocks.permute(0, 1, 3, 2, 4).reshape(experts, -1).contiguous()
    padded = torch.full(
        (experts, rows, -(-cols // 8) * 8), pad, dtype=torch.uint8, device=raw.device
    )
    padded[..., :cols] = raw
    # [row tile of 32][two 16-row halves or gate/up][16 rows][8 columns = 2 x 4]
    if form == "gu_interleaved":
        tiles = padded.view(experts, 2, rows // 32, 16, -1, 2, 4).permute(0, 2, 4, 6, 3, 5, 1)
    else:
        tiles = padded.view(experts, rows // 32, 2, 16, -1, 2, 4).permute(0, 1, 4, 6, 3, 5, 2)
    return tiles.reshape(experts, -1).contiguous()
