"""Weight layouts of AITER's MXFP4 MoE kernels: one tile, three row orders.

Raw weights are ``uint8 [E, N, K/2]`` (two E2M1 codes a byte, element 2j in the low nibble). Packed
weights have the same shape and hold, per expert, tiles of 16 rows x 16 bytes in the order
``[N/16][K/32][16 rows][16 bytes]``; one layout differs from another only in which row comes where.
Source: docs/contract.md section a.1; requirements: section a.2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from sglang_aiter_moe.contract import _bytes
from sglang_aiter_moe.errors import ContractError

TILE_ROWS = 16
TILE_BYTES = 16


class WeightLayout(ABC):
    """A byte order of packed weights.

    ``pack`` and ``unpack`` move one expert at a time, on as many cores as torch uses. Besides the
    result they need no memory, or that of at most two experts when they work in place.
    """

    #: The name that plans, the command line and the docs use.
    name: str
    #: Whether the rows are two halves, gate and up, that the layout mixes.
    mixes_gate_up: bool
    #: Rows have to be a multiple of this.
    row_multiple: int
    #: K/2 has to be a multiple of this many bytes.
    k_bytes_multiple: int

    @abstractmethod
    def source_rows(self, rows: int) -> torch.Tensor:
        """int64 ``[rows]``: the raw row at each packed row position ``16 * tile + row in tile``."""

    @abstractmethod
    def _tiles(self, rows: torch.Tensor, gate_up: torch.Tensor | None) -> torch.Tensor:
        """A strided view of raw rows in packed order.

        Args:
            rows: ``[N, K/32, w]`` words of one expert, gate half first.
            gate_up: the same rows as ``[2, N/2, K/32, w]``, gate first; None if N is odd.
        """

    def check(
        self, shape: Sequence[int], *, what: str = "weight", a16w4_form: bool = False
    ) -> None:
        """Raises unless AITER can lay out a raw tensor of this shape.

        Args:
            shape: ``[E, N, K/2]`` in bytes.
            what: the tensor's name, for the message.
            a16w4_form: hold to the stricter rule of ``shuffle_weight_a16w4``, which takes K in
                multiples of 128 also for the separated row order.

        Raises:
            ContractError: for a wrong rank, a size that is no integer, an empty dimension, rows that do not
                fill tiles of 16 (interleaved: pairs of tiles), or K that is not a multiple of 64
                (interleaved: 128).
        """
        shape = _bytes.sizes(shape, what)
        if len(shape) != 3:
            raise ContractError(
                f"{what} has shape {tuple(shape)}, {len(shape)} dimensions",
                allowed="[experts, rows, K/2] bytes, 3 dimensions",
                fix=f"reshape {what} to one matrix per expert before laying it out",
            )
        _, rows, k_bytes = shape
        if min(shape) < 1:
            raise ContractError(
                f"{what} has shape {tuple(shape)}, with an empty dimension",
                allowed="at least one expert, one tile of rows and one of K",
                fix=f"skip the layout step for {what} on a rank that holds no experts",
            )
        unit = self.row_multiple
        if rows % unit:
            raise ContractError(
                f"{what} has {rows} rows, {rows % unit} over a multiple of {unit} "
                f"(layout {self.name})",
                allowed=f"rows in multiples of {unit}",
                fix=f"pad {what} to {-(-rows // unit) * unit} rows with zero bytes",
            )
        multiple = max(self.k_bytes_multiple, 64 if a16w4_form else 0)
        if k_bytes % multiple:
            padded = -(-k_bytes // multiple) * multiple
            raise ContractError(
                f"{what} has K/2 = {k_bytes} bytes, {k_bytes % multiple} over a multiple of "
                f"{multiple} (layout {self.name})",
                allowed=f"K in multiples of {2 * multiple}",
                fix=f"pad K of {what} from {2 * k_bytes} to {2 * padded} with zero bytes",
            )

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The packed shape: the raw one."""
        return _bytes.sizes(shape, "weight")

    def pack(
        self,
        raw: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        gate_up_interleaved: bool = False,
        what: str = "weight",
    ) -> torch.Tensor:
        """Lays raw weights out for the kernel, expert by expert.

        Args:
            raw: ``[E, N, K/2]`` uint8 or float4_e2m1fn_x2.
            out: where to write, of the same shape; may be ``raw`` itself. A new tensor by default.
            gate_up_interleaved: the raw rows alternate gate and up (gpt-oss checkpoints) instead of
                holding all gate rows first.
            what: the tensor's name, for messages.

        Returns:
            ``out``, or a new tensor with the dtype of ``raw``.

        Raises:
            ContractError: see :meth:`check`; also for a wrong dtype or a wrong ``out``.
        """
        return self._move(raw, out, gate_up_interleaved, what, packing=True)

    def unpack(
        self,
        packed: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        gate_up_interleaved: bool = False,
        what: str = "weight",
    ) -> torch.Tensor:
        """The inverse of :meth:`pack`, with the same arguments and errors."""
        return self._move(packed, out, gate_up_interleaved, what, packing=False)

    def index_map(self, shape: Sequence[int], *, gate_up_interleaved: bool = False) -> torch.Tensor:
        """Where each packed byte comes from.

        Args:
            shape: ``[N, K/2]`` of one expert, or ``[E, N, K/2]``.
            gate_up_interleaved: see :meth:`pack`.

        Returns:
            int64 of the shape's size: for each flat packed byte its flat raw byte.
        """
        shape = _bytes.sizes(shape, "weight")
        shape = shape if len(shape) == 3 else (1, *shape)
        self.check(shape)
        experts, rows, k_bytes = shape
        order = self.source_rows(rows)
        if gate_up_interleaved:
            order = interleaved_row(order, rows)
        row = order.view(1, rows // TILE_ROWS, 1, TILE_ROWS, 1)
        byte = torch.arange(k_bytes).view(1, 1, k_bytes // TILE_BYTES, 1, TILE_BYTES)
        expert = torch.arange(experts).view(experts, 1, 1, 1, 1)
        return ((expert * rows + row) * k_bytes + byte).reshape(-1)

    def _move(
        self,
        given: torch.Tensor,
        out: torch.Tensor | None,
        interleaved: bool,
        what: str,
        *,
        packing: bool,
    ) -> torch.Tensor:
        source = _bytes.as_bytes(given, what)
        self.check(source.shape, what=what)
        if interleaved and source.shape[1] % (2 * TILE_ROWS):
            raise ContractError(
                f"{what} has {source.shape[1]} rows that alternate gate and up",
                allowed=f"multiples of {2 * TILE_ROWS} rows",
                fix=f"pad gate and up of {what} to a multiple of {TILE_ROWS} rows each",
            )
        target = _bytes.output_for(source, source.shape, out, what)
        in_place = _bytes.overlaps(source, target)
        kernels = _bytes.gpu_moves(source, target)
        if kernels is not None and kernels.takes_weights(source, target):
            order = self.source_rows(source.shape[1])
            order = interleaved_row(order, source.shape[1]) if interleaved else order
            kernels.move_weights(source, target, order, packing=packing)
            return _result(given, target, out)

        def move(experts: range) -> None:
            scratch = torch.empty_like(source[0]) if in_place else None
            for expert in experts:
                taken = source[expert]
                if scratch is not None:
                    _bytes.copy(scratch, taken)
                    taken = scratch
                raw, packed = (taken, target[expert]) if packing else (target[expert], taken)
                view, tiles = self._views(raw, packed, interleaved)
                if packing:
                    _bytes.copy(tiles, view)
                else:
                    _bytes.copy(view, tiles)

        _bytes.for_each(source.shape[0], move, source, most=2 if in_place else None)
        return _result(given, target, out)

    def _views(
        self, raw: torch.Tensor, packed: torch.Tensor, interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tiles = _bytes.words16(raw, packed)
        gate_up = None
        if interleaved:
            gate_up = rows.unflatten(0, (-1, 2)).transpose(0, 1)
        elif self.mixes_gate_up:
            gate_up = rows.unflatten(0, (2, -1))
        view = self._tiles(rows, gate_up)
        return view, tiles.view(view.shape)


class Separated(WeightLayout):
    """Tile t holds rows 16t to 16t + 15: all gate rows, then all up rows; also every w2.

    The bytes of AITER's ``shuffle_weight(w, (16, 16))`` and ``shuffle_weight_a16w4(w, 16, False)``.
    """

    name = "separated"
    mixes_gate_up = False
    row_multiple = TILE_ROWS
    k_bytes_multiple = 32

    def source_rows(self, rows: int) -> torch.Tensor:
        return torch.arange(rows)

    def _tiles(self, rows: torch.Tensor, gate_up: torch.Tensor | None) -> torch.Tensor:
        if gate_up is None:
            return rows.unflatten(0, (-1, TILE_ROWS)).transpose(1, 2)
        return gate_up.unflatten(1, (-1, TILE_ROWS)).transpose(2, 3)


class GateUpInterleaved(WeightLayout):
    """Tiles of 16 rows alternate gate and up: what the gfx950 A8W4 kernels read.

    The bytes of AITER's ``shuffle_weight_a16w4(w, 16, True)``.
    """

    name = "gu_interleaved"
    mixes_gate_up = True
    row_multiple = 2 * TILE_ROWS
    k_bytes_multiple = 64

    def source_rows(self, rows: int) -> torch.Tensor:
        return torch.arange(rows).view(2, -1, TILE_ROWS).transpose(0, 1).reshape(-1)

    def _tiles(self, rows: torch.Tensor, gate_up: torch.Tensor | None) -> torch.Tensor:
        return gate_up.unflatten(1, (-1, TILE_ROWS)).permute(1, 0, 3, 2, 4)


class GateUpInterleavedGfx1250(WeightLayout):
    """Single rows alternate gate and up, then tiles of 16: what the gfx1250 grouped kernels read.

    The bytes of AITER's ``moe_shuffle_weight(is_guinterleave=True, gate_up=True)`` on gfx1250, which
    are not those of :class:`GateUpInterleaved`.
    """

    name = "gu_interleaved_gfx1250"
    mixes_gate_up = True
    row_multiple = TILE_ROWS
    k_bytes_multiple = 32

    def source_rows(self, rows: int) -> torch.Tensor:
        return torch.arange(rows).view(2, -1).transpose(0, 1).reshape(-1)

    def _tiles(self, rows: torch.Tensor, gate_up: torch.Tensor | None) -> torch.Tensor:
        return gate_up.unflatten(1, (-1, TILE_ROWS // 2)).permute(1, 3, 2, 0, 4)


def _result(given: torch.Tensor, target: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is not None:
        return out
    return target if given.dtype == torch.uint8 else target.view(given.dtype)


SEPARATED = Separated()
GU_INTERLEAVED = GateUpInterleaved()
GU_INTERLEAVED_GFX1250 = GateUpInterleavedGfx1250()

WEIGHT_LAYOUTS: Mapping[str, WeightLayout] = {
    layout.name: layout for layout in (SEPARATED, GU_INTERLEAVED, GU_INTERLEAVED_GFX1250)
}


def weight_layout(name: str) -> WeightLayout:
    """The weight layout of a name.

    Raises:
        ContractError: for an unknown name.
    """
    try:
        return WEIGHT_LAYOUTS[name]
    except (KeyError, TypeError):
        raise ContractError(
            f"unknown weight layout {name!r}",
            allowed=", ".join(WEIGHT_LAYOUTS),
            fix="use the name that the plan gives",
        ) from None


def interleaved_row(row: torch.Tensor | int, rows: int) -> torch.Tensor | int:
    """Where a gate-half-first row stands in a checkpoint whose rows alternate gate and up."""
    half = rows // 2
    return (row % half) * 2 + row // half


def interleave_gate_up_rows(raw: torch.Tensor) -> torch.Tensor:
    """``[..., 2I, C]`` gate half first to alternating rows g0, u0, g1, u1 (a new tensor)."""
    return raw.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2).contiguous()


def deinterleave_gate_up_rows(raw: torch.Tensor) -> torch.Tensor:
    """``[..., 2I, C]`` alternating rows g0, u0, g1, u1 to gate half first (a new tensor)."""
    return raw.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2).contiguous()
