"""The layouts' moves on a GPU: Triton kernels, imported by ``layouts`` and ``scale_layouts`` for GPU tensors only.

A program reads what it is going to write into registers. In place it takes whole packed units, tiles of 16 rows of
weights or blocks of 32 rows of scales, which have the bytes of as many raw rows, so it overwrites nothing that
another one reads. Where a unit takes its rows from elsewhere in its expert, the programs of one expert meet
between reading and writing. An expert that does not fit into the registers of the GPU's processors takes one
expert of scratch instead.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sglang_aiter_moe.contract._device_kernels import move_tiles, move_tiles_apart
from sglang_aiter_moe.contract._device_scale_kernels import move_n32k4, move_swizzled

logger = logging.getLogger(__name__)

#: Rows of a unit.
TILE, BLOCK_ROWS = 16, 32


@dataclass(frozen=True)
class Limits:
    """How a move is divided.

    Attributes:
        held: bytes that a program holds at most; if it can do with less, one unit.
        warps: of a program.
        beside: programs on one processor at the same time, of those that wait for each other.
        ahead: these read their next expert before they wait.
        registers: of a thread at most, so that more programs run beside each other.
    """

    held: int
    warps: int
    beside: int = 1
    ahead: bool = False
    registers: int | None = None


#: By the bytes that one access moves of the packed form: 16 of weights, 4 of scales, 8 of n32k4's (two words). Programs
#: apart from all others, packing and unpacking, and together with those of their expert. Measured on an H200
#: (docs/performance.md); an expert's scales fit into one program of 128 KiB, which waits for nobody.
PACK = {16: Limits(32 << 10, 4), 4: Limits(16 << 10, 4)}
UNPACK = {16: Limits(8 << 10, 2), 4: Limits(4 << 10, 4)}
TOGETHER = {
    16: Limits(64 << 10, 8, 2, registers=128),
    4: Limits(128 << 10, 32),
    8: Limits(16 << 10, 8, 3, ahead=True, registers=80),
}
for _limits in (PACK, UNPACK):
    _limits[8] = _limits[4]


def takes_weights(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can move these: contiguous rows of whole 16-byte words, at most 64 KiB a tile."""
    return all(
        tensor.is_contiguous()
        and tensor.shape[-1] % 16 == 0
        and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] <= 4096
        for tensor in tensors
    )


def takes_scales(raw: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether the kernels can move these: contiguous, blocks of 32 rows, words of 4 bytes on multiples of 8."""
    return (
        raw.is_contiguous()
        and packed.is_contiguous()
        and raw.shape[-2] % BLOCK_ROWS == 0
        and raw.shape[-1] % 4 == 0
        and raw.shape[-1] <= 1024
        and raw.data_ptr() % 8 == 0
        and packed.data_ptr() % 8 == 0
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
    raw, packed = (source, target) if packing else (target, source)
    pieces = source.shape[2] // 16
    work = _Work(raw, packed, tuple(rows.tolist()), TILE, TILE, pieces, 16, packing)

    def launch(raw: torch.Tensor, packed: torch.Tensor, part: _Part) -> None:
        pointers = raw.view(torch.int32), packed.view(torch.int32), work.rows
        sizes = len(raw), raw.shape[1], pieces, part.members, part.groups
        options = part.options | {"IN_ORDER": work.in_order, "UNPACK": not packing}
        grid = (part.members * part.groups,)
        if part.step:
            move_tiles_apart[grid](*pointers, *sizes, part.step, **options)
        else:
            move_tiles[grid](*pointers, part.counters, *sizes, **options)

    work.run(launch)


def move_scales(
    raw: torch.Tensor,
    packed: torch.Tensor,
    rows: torch.Tensor,
    *,
    swizzled: bool,
    pad: int,
    packing: bool,
) -> None:
    """Packs or unpacks the E8M0 scales of experts.

    Args:
        raw: ``[E, N, K/32]`` uint8.
        packed: flat uint8, the experts' packed scales one after another. May be the memory of ``raw``
            where nothing is padded.
        rows: int64 ``[N]``: the raw row at each packed position, in blocks of 32.
        swizzled: blocks of 32 rows x 8 columns (separated, a16w4); else 32 x 4 (n32k4).
        pad: the byte of columns up to a multiple of 8.
        packing: raw to packed; else packed to raw.
    """
    experts, _, k = raw.shape
    words = k // 4
    # An item is two words of a row; swizzled, of two rows.
    high, item_bytes = (BLOCK_ROWS // 2, 16) if swizzled else (BLOCK_ROWS, 8)
    wide = triton.cdiv(words, 2)
    packed = packed.view(experts, -1)
    order = tuple(rows.tolist())
    kind = 4 if swizzled else 8
    work = _Work(raw, packed, order, BLOCK_ROWS, high, wide, item_bytes, packing, kind=kind)
    kernel, pads = (
        (move_swizzled, {"PAD": pad * 0x01010101})
        if swizzled
        else (move_n32k4, {})  # no column to pad
    )
    even = words % 2 == 0
    word = torch.int64 if even else torch.int32

    def launch(raw: torch.Tensor, packed: torch.Tensor, part: _Part) -> None:
        kernel[(part.members * part.groups,)](
            raw.view(word),
            packed.view(torch.int32),
            work.rows,
            part.counters,
            len(raw),
            raw.shape[1],
            words,
            part.members,
            part.groups,
            IN_ORDER=work.in_order,
            UNPACK=not packing,
            EVEN=even,
            **pads,
            **part.options,
        )

    work.run(launch)


@dataclass
class _Part:
    """How one launch is divided.

    Attributes:
        members: programs of one expert.
        groups: experts at a time.
        options: of the launch.
        step: items of a program of ``move_tiles_apart``; 0 for the other kernels.
        counters: where the members of each group meet before they write; None if they need not.
    """

    members: int
    groups: int
    options: dict[str, Any]
    step: int = 0
    counters: torch.Tensor | None = None


class _Work:
    """One move of all experts: which programs do it, in place or through scratch."""

    def __init__(
        self,
        raw: torch.Tensor,
        packed: torch.Tensor,
        order: tuple[int, ...],
        unit_rows: int,
        high: int,
        wide: int,
        item_bytes: int,
        packing: bool,
        *,
        kind: int = 16,
    ) -> None:
        self.raw, self.packed, self.packing, self.kind = raw, packed, packing, kind
        self.high, self.wide, self.item_bytes = high, wide, item_bytes
        self.units = len(order) // unit_rows
        self.rows = _int32(order, raw.device)
        self.in_order = order == tuple(range(len(order)))
        self.in_place = raw.data_ptr() == packed.data_ptr()

    def run(self, launch: Callable[[torch.Tensor, torch.Tensor, _Part], None]) -> None:
        if not self.in_place or self.in_order:
            launch(self.raw, self.packed, self._apart(len(self.raw)))
            return
        if self._run_together(launch):
            return
        source, target = (self.raw, self.packed) if self.packing else (self.packed, self.raw)
        scratch = torch.empty_like(source[:1])
        self.in_place = False
        for expert in range(len(source)):
            scratch.copy_(source[expert : expert + 1])
            one = target[expert : expert + 1]
            raw, packed = (scratch, one) if self.packing else (one, scratch)
            launch(raw, packed, self._apart(1))

    def _apart(self, groups: int) -> _Part:
        limits = (PACK if self.packing else UNPACK)[self.kind]
        if self.kind != 16:
            return self._part(limits, groups)
        unit, items = self.high * self.wide, self.units * self.high * self.wide
        step = min(limits.held // self.item_bytes, items)
        if self.in_place:  # whole units
            step = max(step // unit, 1) * unit
        options = {"ITEMS": triton.next_power_of_2(step), "num_warps": limits.warps}
        return _Part(triton.cdiv(items, step), groups, options, step)

    def _part(self, limits: Limits, groups: int) -> _Part:
        wide = triton.next_power_of_2(self.wide)
        unit = self.high * wide
        most = max(limits.held // self.item_bytes, 1)
        items = min(1 << most.bit_length() - 1, triton.next_power_of_2(self.units * unit))
        # Eight rows at least of one column; in place whole units.
        items = max(items, unit if self.in_place else 8)
        options = {
            "ITEMS": items,
            "WIDE": wide,
            "LANES": min(32 * limits.warps, items),
            "MEET": False,
            "AHEAD": False,
            "num_warps": limits.warps,
        }
        return _Part(triton.cdiv(self.units * unit, items), groups, options)

    def _run_together(self, launch: Callable[[torch.Tensor, torch.Tensor, _Part], None]) -> bool:
        """Launches programs that are all on the GPU at once, so that they may wait for each other."""
        limits = TOGETHER[self.kind]
        part = self._part(limits, len(self.raw))
        if part.members == 1:
            launch(self.raw, self.packed, part)
            return True
        # The interpreter runs one program after another. On AMD nobody has seen programs wait for each other
        # yet, and one that waits for ever would hang the load.
        if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip:
            return False
        part.options |= {"MEET": True, "AHEAD": limits.ahead, "launch_cooperative_grid": True}
        if limits.registers:
            part.options["maxnreg"] = limits.registers
        for beside in range(limits.beside, 0, -1):
            at_once = beside * _processors(self.raw.device)
            part.groups = min(at_once // part.members, len(self.raw))
            if part.groups < 1:
                return False
            part.counters = torch.zeros(part.groups, dtype=torch.int32, device=self.raw.device)
            try:
                launch(self.raw, self.packed, part)
            except RuntimeError as error:
                if "cooperative" not in str(error):
                    raise
                logger.debug("%d programs do not run at once: %s", at_once, error)
            else:
                return True
        return False


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=32)
def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
