"""The layouts' moves on a GPU: Triton kernels, imported by ``layouts`` and ``scale_layouts`` for GPU tensors only.

Weights in place: a packed tile of 16 rows has the bytes of 16 consecutive raw rows, so a layout moves whole
tiles along the cycles of a permutation and reorders 16-byte pieces within each. A program follows one
cycle with one tile in registers, so no memory is needed besides. Rows that alternate gate and up, and
gfx1250's single-row order, are not such a permutation: those take one expert of scratch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

TILE_ROWS = 16
WARPS = 8


@triton.jit
def _rotate_tiles(
    data_ptr,  # [E, TILES, 16 * KP, 4] int32, moved in place
    tiles_ptr,  # the cycles one after another: content of each tile goes to the next one's place
    starts_ptr,  # where each cycle begins, and the end of the last
    TILES,
    KP,  # pieces of 16 bytes a row
    PADDED: tl.constexpr,  # a power of two >= 16 * KP
    UNPACK: tl.constexpr,
):
    cycle = tl.program_id(0)
    size = 16 * KP * 4
    base = data_ptr + tl.program_id(1).to(tl.int64) * TILES * size
    piece = tl.arange(0, PADDED)
    word = tl.arange(0, 4)[None, :]
    inside = (piece < 16 * KP)[:, None]
    packed = piece[:, None] * 4 + word  # a packed tile is [K/32][16 rows] pieces
    raw = ((piece % 16) * KP + piece // 16)[:, None] * 4 + word
    if UNPACK:
        source, target = packed, raw
    else:
        source, target = raw, packed
    first = tl.load(starts_ptr + cycle)
    last = tl.load(starts_ptr + cycle + 1)
    start = tl.load(tiles_ptr + first)
    held = tl.load(base + start * size + source, mask=inside)
    for k in range(first + 1, last):
        tile = tl.load(tiles_ptr + k)
        following = tl.load(base + tile * size + source, mask=inside)
        tl.debug_barrier()  # every thread has read the tile before one overwrites it
        tl.store(base + tile * size + target, held, mask=inside)
        held = following
    tl.debug_barrier()
    tl.store(base + start * size + target, held, mask=inside)


@triton.jit
def _copy_tiles(
    raw_ptr,  # [E, N, KP, 4] int32
    packed_ptr,  # [E, N/16, 16 * KP, 4] int32
    rows_ptr,  # [N] int32: raw row at each packed row position
    N,
    KP,
    PADDED: tl.constexpr,
    UNPACK: tl.constexpr,
):
    tile = tl.program_id(0)
    offset = tl.program_id(1).to(tl.int64) * N * KP * 4
    piece = tl.arange(0, PADDED)
    word = tl.arange(0, 4)[None, :]
    valid = piece < 16 * KP
    inside = valid[:, None]
    row = tl.load(rows_ptr + tile * 16 + piece % 16, mask=valid, other=0)
    raw = raw_ptr + offset + (row * KP + piece // 16)[:, None] * 4 + word
    packed = packed_ptr + offset + (tile * 16 * KP + piece)[:, None] * 4 + word
    if UNPACK:
        tl.store(raw, tl.load(packed, mask=inside), mask=inside)
    else:
        tl.store(packed, tl.load(raw, mask=inside), mask=inside)


@triton.jit
def _gather_bytes(
    source_ptr,  # [E, SOURCE] uint8
    target_ptr,  # [E, TARGET] uint8
    index_ptr,  # [TARGET] int32: source byte of each target byte; SOURCE and above: padding
    SOURCE,
    TARGET,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < TARGET
    index = tl.load(index_ptr + i, mask=inside, other=0)
    real = inside & (index < SOURCE)
    byte = tl.load(source_ptr + expert * SOURCE + index, mask=real, other=PAD)
    tl.store(target_ptr + expert * TARGET + i, byte, mask=inside)


@triton.jit
def _permute_blocks(
    data_ptr,  # [BLOCKS, SIZE] uint8, moved in place
    index_ptr,  # [SIZE] int32: source byte of each target byte within a block
    SIZE,
    PADDED: tl.constexpr,
):
    base = data_ptr + tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, PADDED)
    inside = i < SIZE
    byte = tl.load(base + tl.load(index_ptr + i, mask=inside, other=0), mask=inside)
    tl.debug_barrier()
    tl.store(base + i, byte, mask=inside)


def takes_weights(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the kernels can move these: contiguous rows of whole 16-byte words, at most 64 KiB a tile."""
    return (
        source.is_contiguous()
        and target.is_contiguous()
        and source.shape[-1] % 16 == 0
        and source.data_ptr() % 16 == 0
        and target.data_ptr() % 16 == 0
        and source.shape[-1] <= 4096
    )


def move_weights(
    source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, *, packing: bool
) -> None:
    """Packs or unpacks ``[E, N, K/2]`` uint8.

    Args:
        source, target: the same tensor, or two that do not overlap.
        rows: int64 ``[N]``: the raw row at each packed row position.
        packing: raw to packed; else packed to raw.
    """
    order = tuple(rows.tolist())
    experts, count, k_bytes = source.shape
    pieces = k_bytes // 16
    padded = triton.next_power_of_2(16 * pieces)
    if source.data_ptr() != target.data_ptr():
        _copy(source, target, order, packing, pieces, padded)
        return
    cycles = _cycles(order, packing, source.device)
    if cycles is None:
        scratch = torch.empty_like(source[:1])
        for expert in range(experts):
            scratch.copy_(source[expert : expert + 1])
            _copy(scratch, target[expert : expert + 1], order, packing, pieces, padded)
        return
    tiles, starts = cycles
    grid = (starts.numel() - 1, experts)
    _rotate_tiles[grid](
        source.view(torch.int32),
        tiles,
        starts,
        count // TILE_ROWS,
        pieces,
        PADDED=padded,
        UNPACK=not packing,
        num_warps=WARPS,
    )


def gather_bytes(
    source: torch.Tensor, target: torch.Tensor, index: torch.Tensor, *, experts: int, pad: int
) -> None:
    """``target[e, i] = source[e, index[i]]`` for flat uint8 tensors that do not overlap.

    Args:
        source, target: ``experts`` equal parts each.
        index: int32; values from a part's size on stand for ``pad``.
        experts: how many parts.
        pad: the byte for padding.
    """
    size, block = target.numel() // experts, 4096
    grid = (triton.cdiv(size, block), experts)
    _gather_bytes[grid](
        source,
        target,
        index,
        source.numel() // experts,
        size,
        PAD=pad,
        BLOCK=block,
        num_warps=WARPS,
    )


def permute_blocks(data: torch.Tensor, index: torch.Tensor) -> None:
    """``block[i] = block[index[i]]`` in place for every block of a flat uint8 tensor; index int32."""
    size = index.numel()
    grid = (data.numel() // size,)
    _permute_blocks[grid](data, index, size, PADDED=triton.next_power_of_2(size), num_warps=4)


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    order: tuple[int, ...],
    packing: bool,
    pieces: int,
    padded: int,
) -> None:
    raw, packed = (source, target) if packing else (target, source)
    _copy_tiles[(len(order) // TILE_ROWS, source.shape[0])](
        raw.view(torch.int32),
        packed.view(torch.int32),
        _int32(order, source.device),
        len(order),
        pieces,
        PADDED=padded,
        UNPACK=not packing,
        num_warps=WARPS,
    )


@functools.lru_cache(maxsize=32)
def _int32(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=32)
def _cycles(
    order: tuple[int, ...], packing: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The cycles of the permutation of tiles, and where each starts; None if it moves parts of tiles."""
    goes_to = {}
    for tile in range(len(order) // TILE_ROWS):
        rows = order[tile * TILE_ROWS : (tile + 1) * TILE_ROWS]
        if rows[0] % TILE_ROWS or rows != tuple(range(rows[0], rows[0] + TILE_ROWS)):
            return None
        raw = rows[0] // TILE_ROWS
        goes_to[raw if packing else tile] = tile if packing else raw
    tiles, starts, left = [], [0], set(goes_to)
    while left:
        tile = min(left)
        while tile in left:
            left.discard(tile)
            tiles.append(tile)
            tile = goes_to[tile]
        starts.append(len(tiles))
    return _int32(tuple(tiles), device), _int32(tuple(starts), device)
