"""Scale layouts of AITER's MXFP4 MoE kernels: where each E8M0 byte goes, and what pads are filled with.

Raw scales are ``uint8 [E, N, K/32]`` E8M0 (or float8_e8m0fnu). Padding is always 0x7F, which decodes
to 1.0; AITER leaves it uninitialised in its separated form. Source: docs/contract.md section a.3.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from sglang_aiter_moe.contract import _bytes
from sglang_aiter_moe.contract.layouts import interleaved_row
from sglang_aiter_moe.errors import ContractError

#: E8M0 for 1.0 (OCP MX spec: 2**(byte - 127)).
PAD_SCALE = 0x7F
#: E8M0 has one special value, NaN.
NAN_SCALE = 0xFF
SUPER_ROW = 32


class ScaleLayout(ABC):
    """A byte order of packed scales, and its padding."""

    #: The name that plans, the command line and the docs use.
    name: str
    #: Whether the rows are two halves, gate and up, that the layout mixes.
    mixes_gate_up = False

    @abstractmethod
    def check(self, shape: Sequence[int], *, what: str = "scale") -> None:
        """Raises ContractError unless AITER can lay out raw scales of shape ``[E, N, K/32]``."""

    @abstractmethod
    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the packed scales of raw scales ``[E, N, K/32]``."""

    @abstractmethod
    def _block(self, rows: torch.Tensor) -> torch.Tensor:
        """A strided view of one expert's ``[N, columns]``, gate half first, in packed order."""

    @abstractmethod
    def columns(self, k: int) -> int:
        """Columns per row after padding, of ``k`` raw ones."""

    def pack(
        self,
        raw: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        gate_up_interleaved: bool = False,
        what: str = "scale",
    ) -> torch.Tensor:
        """Lays raw scales out for the kernel, expert by expert; every pad byte is 0x7F.

        Args:
            raw: ``[E, N, K/32]`` uint8 or float8_e8m0fnu.
            out: where to write, of :meth:`packed_shape`. A new tensor by default.
            gate_up_interleaved: the raw rows alternate gate and up instead of gate half first.
            what: the tensor's name, for messages.

        Raises:
            ContractError: see :meth:`check`; also for a wrong dtype or a wrong ``out``.
        """
        source = _bytes.as_bytes(raw, what)
        self.check(source.shape, what=what)
        target = _bytes.output_for(source, self.packed_shape(source.shape), out, what)
        if self._moved_on_gpu(source, target, gate_up_interleaved, packing=True):
            return _result(raw, target, out)
        units = self._units(source, gate_up_interleaved)
        index = _index(self, tuple(units.shape[1:]), gate_up_interleaved).to(source.device)
        flat = target.view(-1)
        size = index.numel()

        def move(experts: range) -> None:
            taken = torch.empty(units[0].numel() + 1, dtype=torch.uint8, device=source.device)
            taken[-1] = PAD_SCALE
            for expert in experts:
                _bytes.copy(taken[:-1].view(units[expert].shape), units[expert])
                _bytes.gather(taken, index, flat[expert * size : (expert + 1) * size])

        _bytes.for_each(len(units), move, source, most=2)
        flat[len(units) * size :].fill_(PAD_SCALE)
        return _result(raw, target, out)

    def unpack(
        self,
        packed: torch.Tensor,
        shape: Sequence[int],
        out: torch.Tensor | None = None,
        *,
        gate_up_interleaved: bool = False,
        what: str = "scale",
    ) -> torch.Tensor:
        """The inverse of :meth:`pack`.

        Args:
            packed: packed scales.
            shape: the raw shape ``[E, N, K/32]``, which padding hides.
            out: where to write, of that shape. A new tensor by default.
            gate_up_interleaved: write rows that alternate gate and up.
            what: the tensor's name, for messages.

        Raises:
            ContractError: see :meth:`check`; also if ``packed`` does not have the packed shape of ``shape``.
        """
        source = _bytes.as_bytes(packed, what)
        self.check(shape, what=what)
        if tuple(source.shape) != self.packed_shape(shape):
            raise ContractError(
                f"packed {what} has shape {tuple(source.shape)} for raw {tuple(shape)}",
                allowed=f"{self.packed_shape(shape)} in layout {self.name}",
                fix="pass the raw shape and layout that the plan gives",
            )
        target = _bytes.output_for(source, shape, out, what)
        if self._moved_on_gpu(target, source, gate_up_interleaved, packing=False):
            return _result(packed, target, out)
        units = self._units(target, gate_up_interleaved)
        shape_of_one = tuple(units.shape[1:])
        index = _inverse(self, shape_of_one, gate_up_interleaved).to(source.device)
        flat = source.reshape(-1)
        size = _index(self, shape_of_one, gate_up_interleaved).numel()
        count = units[0].numel()

        def move(experts: range) -> None:
            restored = torch.empty(count, dtype=torch.uint8, device=source.device)
            for expert in experts:
                rows = units[expert]
                _bytes.gather(flat[expert * size : (expert + 1) * size], index, restored)
                _bytes.copy(rows, restored.view(rows.shape))

        _bytes.for_each(len(units), move, source, most=2)
        return _result(packed, target, out)

    def index_map(self, shape: Sequence[int], *, gate_up_interleaved: bool = False) -> torch.Tensor:
        """Where each packed byte of raw scales ``[E, N, K/32]`` comes from.

        Returns:
            int64, flat, of the packed size: the flat raw byte, -1 for padding.
        """
        self.check(shape)
        raw = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
        units = self._units(raw, gate_up_interleaved)
        one = _index(self, tuple(units.shape[1:]), gate_up_interleaved)
        count = units[0].numel()
        parts = [torch.where(one < count, one + unit * count, -1) for unit in range(len(units))]
        missing = torch.Size(self.packed_shape(shape)).numel() - len(units) * one.numel()
        return torch.cat([*parts, torch.full((missing,), -1)])

    def source_rows(self, rows: int) -> torch.Tensor:
        """int64 ``[rows]``: the raw row, gate half first, at each position in blocks of 32 packed rows."""
        return torch.arange(rows)

    def _moved_on_gpu(
        self, raw: torch.Tensor, packed: torch.Tensor, interleaved: bool, *, packing: bool
    ) -> bool:
        """Whether the GPU's kernels took these."""
        kernels = _bytes.gpu_moves(raw, packed)
        if kernels is None or not kernels.takes_scales(raw, packed):
            return False
        experts, rows, k = raw.shape
        order = self.source_rows(rows)
        flat = packed.view(-1)
        size = experts * rows * self.columns(k)
        kernels.move_scales(
            raw,
            flat[:size],
            interleaved_row(order, rows) if interleaved else order,
            swizzled=isinstance(self, _Swizzled),
            pad=PAD_SCALE,
            packing=packing,
        )
        if packing:
            flat[size:].fill_(PAD_SCALE)
        return True

    def _units(self, raw: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """The raw tensor as the blocks that are laid out one after another: one per expert."""
        return raw


class _Swizzled(ScaleLayout):
    """Blocks of 32 rows x 8 columns (AITER's ``mx_scale_shuffle_idx``)."""

    def check(self, shape: Sequence[int], *, what: str = "scale") -> None:
        _check_rank(shape, what)
        _check_rows(shape[1], SUPER_ROW, what)

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        experts, rows, k = _check_rank(shape, "scale")
        return experts * rows, self.columns(k)

    def columns(self, k: int) -> int:
        return _round_up(k, 8)

    def _block(self, rows: torch.Tensor) -> torch.Tensor:
        split = rows.unflatten(0, (-1, 2, 16)).unflatten(3, (-1, 2, 4))
        return split.permute(0, 3, 5, 2, 4, 1)


class SeparatedScale(_Swizzled):
    """The separated form: swizzled over all E*N rows, rows padded to 256, columns to 8.

    The bytes of AITER's ``shuffle_scale`` and ``e8m0_shuffle`` wherever those are defined.

    Args:
        allow_shared_rows: accept N that is no multiple of 32. AITER lays it out, but then two experts
            share a block of 32 rows, which no kernel that looks experts up one by one can read.
    """

    name = "separated"

    def __init__(self, *, allow_shared_rows: bool = False) -> None:
        self.allow_shared_rows = allow_shared_rows

    def check(self, shape: Sequence[int], *, what: str = "scale") -> None:
        if self.allow_shared_rows:
            _check_rank(shape, what)
        else:
            super().check(shape, what=what)

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        experts, rows, k = _check_rank(shape, "scale")
        return _round_up(experts * rows, 256), self.columns(k)

    def _units(self, raw: torch.Tensor, interleaved: bool) -> torch.Tensor:
        if raw.shape[1] % SUPER_ROW == 0:
            return raw
        if interleaved:
            raise ContractError(
                f"scale rows that alternate gate and up in experts of {raw.shape[1]} rows",
                allowed=f"rows in multiples of {SUPER_ROW}, or gate rows first",
                fix="deinterleave the rows first (layouts.deinterleave_gate_up_rows)",
            )
        return raw.flatten(0, 1).unsqueeze(0)


class A16W4Scale(_Swizzled):
    """``shuffle_scale_a16w4(s, E, gate_up=False)``: the separated bytes, columns padded to 8 only."""

    name = "a16w4"


class A16W4GateUpScale(_Swizzled):
    """``shuffle_scale_a16w4(s, E, gate_up=True)``: a gate and its up scale side by side."""

    name = "a16w4_gate_up"
    mixes_gate_up = True

    def source_rows(self, rows: int) -> torch.Tensor:
        return torch.arange(rows).view(2, -1, 16).transpose(0, 1).reshape(-1)

    def _block(self, rows: torch.Tensor) -> torch.Tensor:
        split = rows.unflatten(0, (2, -1, 16)).unflatten(3, (-1, 2, 4))
        return split.permute(1, 3, 5, 2, 4, 0)


class N32K4Scale(ScaleLayout):
    """gfx1250: blocks of 32 rows x 4 columns (``shuffle_scale_n32k4``); no padding."""

    name = "n32k4"

    def check(self, shape: Sequence[int], *, what: str = "scale") -> None:
        _check_rank(shape, what)
        _check_rows(shape[1], SUPER_ROW, what)
        if shape[2] % 4:
            raise ContractError(
                f"{what} has {shape[2]} columns, {shape[2] % 4} over a multiple of 4",
                allowed="K/32 in multiples of 4 (K in multiples of 128)",
                fix=f"pad K from {shape[2] * 32} to {_round_up(shape[2], 4) * 32}",
            )

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        experts, rows, k = _check_rank(shape, "scale")
        return experts, rows // SUPER_ROW, k * SUPER_ROW

    def columns(self, k: int) -> int:
        return k

    def _block(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, SUPER_ROW)).unflatten(2, (-1, 4)).transpose(1, 2)


class N32K4GateUpScale(N32K4Scale):
    """gfx1250, w13: gate and up rows alternate one by one, then n32k4."""

    name = "n32k4_gate_up"
    mixes_gate_up = True

    def source_rows(self, rows: int) -> torch.Tensor:
        return torch.arange(rows).view(2, -1).transpose(0, 1).reshape(-1)

    def _block(self, rows: torch.Tensor) -> torch.Tensor:
        split = rows.unflatten(0, (2, -1, SUPER_ROW // 2)).unflatten(3, (-1, 4))
        return split.permute(1, 3, 2, 0, 4)


SCALE_LAYOUTS: Mapping[str, ScaleLayout] = {
    layout.name: layout
    for layout in (
        SeparatedScale(),
        A16W4Scale(),
        A16W4GateUpScale(),
        N32K4Scale(),
        N32K4GateUpScale(),
    )
}


def scale_layout(name: str) -> ScaleLayout:
    """The scale layout of a name.

    Raises:
        ContractError: for an unknown name.
    """
    try:
        return SCALE_LAYOUTS[name]
    except (KeyError, TypeError):
        raise ContractError(
            f"unknown scale layout {name!r}",
            allowed=", ".join(SCALE_LAYOUTS),
            fix="use the name that the plan gives",
        ) from None


@functools.lru_cache(maxsize=16)
def _index(layout: ScaleLayout, shape: tuple[int, int], interleaved: bool) -> torch.Tensor:
    """int64: for each packed byte of one expert ``[N, K/32]`` its raw byte, N*K/32 for padding."""
    rows, k = shape
    # Kept for every caller, whatever torch's default device is when the first one comes.
    with torch.device("cpu"):
        block = torch.full((_round_up(rows, SUPER_ROW), layout.columns(k)), rows * k)
        raw = torch.arange(rows * k).view(rows, k)
    if interleaved:
        raw = raw.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
    block[:rows, :k] = raw
    return layout._block(block).reshape(-1).contiguous()


@functools.lru_cache(maxsize=4)
def _inverse(layout: ScaleLayout, shape: tuple[int, int], interleaved: bool) -> torch.Tensor:
    """int64: where each raw byte of one expert is among the packed ones."""
    forward = _index(layout, shape, interleaved)
    with torch.device("cpu"):  # as in _index
        index = torch.empty(shape[0] * shape[1] + 1, dtype=torch.int64)  # the last is for padding
        index[forward] = torch.arange(forward.numel())
    return index[:-1]


def _result(given: torch.Tensor, target: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is not None:
        return out
    return target if given.dtype == torch.uint8 else target.view(given.dtype)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_rank(shape: Sequence[int], what: str) -> tuple[int, ...]:
    shape = _bytes.sizes(shape, what)
    if len(shape) != 3 or min(shape) < 1:
        raise ContractError(
            f"{what} has shape {shape}",
            allowed="[experts, rows, K/32], 3 dimensions, none of them empty",
            fix=f"view {what} as one matrix of E8M0 bytes per expert",
        )
    return shape


def _check_rows(rows: int, multiple: int, what: str) -> None:
    if rows % multiple:
        raise ContractError(
            f"{what} has {rows} rows per expert, {rows % multiple} over a multiple of {multiple}",
            allowed=f"rows in multiples of {multiple}, so that no two experts share a block",
            fix=f"pad every expert to {_round_up(rows, multiple)} rows (scale bytes 0x7F)",
        )
