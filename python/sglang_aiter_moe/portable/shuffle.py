"""AITER's layout functions (aiter.ops.shuffle, aiter.utility.fp4_utils), with AITER's requirements and errors.

A wrong shape fails as it does there: an AssertionError that gives only the remainder, or torch's complaint
about a view. What AITER leaves uninitialised is 0xFF (NaN as E8M0) here, so that nobody can rely on it.
Formulas: docs/contract.md sections a.1 and a.3.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.portable.enums import FP4X2
from sglang_aiter_moe.portable.releases import Release

UNINITIALISED = 0xFF
SCALE_ONE = 0x7F


def shuffle_weight(
    x: torch.Tensor,
    layout: tuple[int, int] = (16, 16),
    use_int4: bool = False,
    is_guinterleave: bool = False,
    gate_up: bool = False,
    pad_k_to: int | None = None,
) -> torch.Tensor:
    """Tiles of 16 rows x 16 bytes; same shape and dtype, with the attribute ``is_shuffled``.

    Args:
        x: ``[..., N, K]`` of any dtype; packed FP4 as float4_e2m1fn_x2 or uint8.
        layout: rows of a tile, elements of a K step.
        is_guinterleave: the "a16w4" form, which takes ``[E, N, K/2]`` only.
        gate_up: with it, gate and up tiles alternate.
        pad_k_to: zero-pads the last dimension to a multiple of this.

    Raises:
        AssertionError: rows or bytes that do not fill a tile ("24 % 16 == 8").
        RuntimeError: the same in the a16w4 form ("shape ... is invalid for input of size ...").
        ValueError: the a16w4 form of a tensor that is not 3-D.
        NotImplementedError: ``pad_k_to`` with use_int4 or is_guinterleave.
    """
    dtype = x.dtype
    if pad_k_to:
        for unsupported, name in ((use_int4, "use_int4"), (is_guinterleave, "is_guinterleave")):
            if unsupported:
                raise NotImplementedError(f"pad_k_to is not supported with {name}=True")
    if dtype == FP4X2:
        x = x.view(torch.uint8)
    original_k = x.shape[-1]
    if pad_k_to and original_k % pad_k_to:
        x = torch.nn.functional.pad(x, (0, -original_k % pad_k_to))

    rows, step = layout
    if is_guinterleave:
        experts, n, k_bytes = x.shape
        lanes = 64 // rows
        if gate_up:
            n //= 2
        tiles = (n // rows, rows, k_bytes // (lanes * step), lanes, step)
        if gate_up:
            tiled = x.view(experts, 2, *tiles).permute(0, 2, 1, 4, 5, 3, 6)
        else:
            tiled = x.view(experts, *tiles).permute(0, 1, 3, 4, 2, 5)
    else:
        unit = 32 if use_int4 else 16 // x.element_size()
        n, k, block = x.shape[-2], x.shape[-1], 2 * step
        if n % rows:
            raise AssertionError(f"{n} % {rows} == {n % rows}")
        if k % block:
            raise AssertionError(f"{k} % {block} == {k % block}")
        tiled = x.view(-1, n // rows, rows, k // block, block // unit, unit)
        tiled = tiled.permute(0, 1, 3, 4, 2, 5)
    out = tiled.contiguous().view(x.shape).view(dtype)
    out.is_shuffled = True
    if pad_k_to:
        out.aiter_original_k, out.aiter_padded_k = original_k, x.shape[-1]
    return out


def shuffle_weight_a16w4(src: torch.Tensor, NLane: int, gate_up: bool) -> torch.Tensor:
    """:func:`shuffle_weight` in the a16w4 form."""
    return shuffle_weight(src, (NLane, 16), is_guinterleave=True, gate_up=gate_up)


def interleave_gate_up_rows(w: torch.Tensor) -> torch.Tensor:
    """``[E, 2I, ...]`` gate half, up half -> g0, u0, g1, u1, ..."""
    experts, rows = w.shape[:2]
    halves = w.view(torch.uint8) if w.dtype == FP4X2 else w
    mixed = halves.view(experts, 2, rows // 2, *w.shape[2:]).transpose(1, 2).contiguous()
    return mixed.view(halves.shape).view(w.dtype)


def shuffle_scale_n32k4(
    src: torch.Tensor,
    experts_cnt: int | None = None,
    is_guinterleave: bool = False,
    gate_up: bool = False,
) -> torch.Tensor:
    """gfx1250's scales: blocks of 32 rows x 4 columns. uint8 ``[E, N/32, 32 * K/32]``.

    Args:
        src: ``[E, N, K/32]``, or ``[E*N, K/32]`` with ``experts_cnt``.
        is_guinterleave, gate_up: with both, gate and up rows alternate first.
    """
    scale = src.view(torch.uint8).contiguous()
    if scale.ndim == 2:
        if experts_cnt is None:
            raise ValueError("experts_cnt is required for a 2D n32k4 scale")
        scale = scale.view(experts_cnt, -1, scale.shape[-1])
    elif scale.ndim != 3:
        raise ValueError(f"n32k4 scale must be 2D or 3D, got {scale.ndim}D")
    experts, rows, k = scale.shape
    if rows % 32:
        raise ValueError(f"B-scale rows must be divisible by 32, got {rows}")
    if k % 4:
        raise ValueError(f"B-scale K//32 must be divisible by 4 (K%128==0), got {k}")
    if is_guinterleave and gate_up:
        scale = interleave_gate_up_rows(scale)
    blocks = scale.view(experts, rows // 32, 32, k // 4, 4).permute(0, 1, 3, 2, 4)
    return blocks.contiguous().view(experts, rows // 32, 32 * k)


def _shuffle_scale(
    src: torch.Tensor,
    experts_cnt: int | None,
    is_guinterleave: bool,
    gate_up: bool,
    pads_columns: bool,
) -> torch.Tensor:
    if src is None or src.dtype == torch.float32:
        return src
    if src.ndim != 2:
        raise AssertionError("scale must be a 2D tensor")
    if is_guinterleave and experts_cnt is None:
        raise ValueError("experts_cnt is required when is_guinterleave=True")
    dtype, scale = src.dtype, src.view(torch.uint8)
    if not is_guinterleave:
        rows, k = scale.shape
        padded = scale.new_full((-(-rows // 256) * 256, -(-k // 8) * 8), UNINITIALISED)
        padded[:rows, :k] = scale
        blocks = padded.view(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
        shuffled = blocks.permute(0, 3, 5, 2, 4, 1)
    else:
        if pads_columns and scale.shape[1] % 8:
            scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 8), value=SCALE_ONE)
        padded = scale
        rows, k = scale.shape
        pairs, steps = rows // experts_cnt // 32, k // 8
        if gate_up:
            blocks = scale.view(experts_cnt, 2, pairs, 16, steps, 2, 4)
            shuffled = blocks.permute(0, 2, 4, 6, 3, 5, 1)
        else:
            blocks = scale.view(experts_cnt, pairs, 2, 16, steps, 2, 4)
            shuffled = blocks.permute(0, 1, 4, 6, 3, 5, 2)
    return shuffled.contiguous().view(padded.shape).view(dtype)


class Shuffles:
    """The layout functions as one AITER release has them on one architecture.

    Attributes are functions; ``names`` lists those that the release's ``aiter.ops.shuffle`` exports.
    """

    def __init__(self, arch: str, release: Release) -> None:
        self._arch = arch
        self._release = release
        self.shuffle_weight = shuffle_weight
        self.shuffle_weight_a16w4 = shuffle_weight_a16w4
        self.names = [
            "shuffle_weight",
            "shuffle_weight_a16w4",
            "shuffle_scale",
            "shuffle_scale_a16w4",
        ]
        if release.has_arch_aware_shuffle:
            self.shuffle_scale_n32k4 = shuffle_scale_n32k4
            self.interleave_gate_up_rows = interleave_gate_up_rows
            self.moe_shuffle_weight = self._moe_shuffle_weight
            self.moe_shuffle_scale = self._moe_shuffle_scale
            self.names += [
                "shuffle_scale_n32k4",
                "interleave_gate_up_rows",
                "moe_shuffle_weight",
                "moe_shuffle_scale",
            ]

    def shuffle_scale(
        self,
        src: torch.Tensor,
        experts_cnt: int | None = None,
        is_guinterleave: bool = False,
        gate_up: bool = False,
    ) -> torch.Tensor:
        """Swizzles E8M0 scales ``[E*N, K/32]``; None and fp32 scales come back as they are.

        The separated form pads rows to 256 and columns to 8 and leaves the padding uninitialised; the a16w4
        form pads columns with 0x7F from AITER 0.1.18 on, and not at all before.

        Raises:
            AssertionError: not 2-D.
            ValueError: the a16w4 form without ``experts_cnt``.
            RuntimeError: the a16w4 form with rows per expert that are no multiple of 32.
        """
        pads = self._release.pads_interleaved_scales
        return _shuffle_scale(src, experts_cnt, is_guinterleave, gate_up, pads)

    def shuffle_scale_a16w4(
        self, src: torch.Tensor, experts_cnt: int, gate_up: bool
    ) -> torch.Tensor:
        """:meth:`shuffle_scale` in the a16w4 form."""
        return self.shuffle_scale(src, experts_cnt, True, gate_up)

    def e8m0_shuffle(self, scale: torch.Tensor) -> torch.Tensor:
        """``aiter.utility.fp4_utils.e8m0_shuffle``: :meth:`shuffle_scale` in the separated form."""
        return self.shuffle_scale(scale)

    def _moe_shuffle_weight(
        self,
        src: torch.Tensor,
        experts_cnt: int | None = None,
        is_guinterleave: bool = False,
        gate_up: bool = False,
        layout: tuple[int, int] = (16, 16),
    ) -> torch.Tensor:
        """Expert weights for the installed architecture: on gfx1250 single rows alternate, elsewhere 16-row tiles."""
        if self._arch != "gfx1250":
            return shuffle_weight(src, layout, is_guinterleave=is_guinterleave, gate_up=gate_up)
        if is_guinterleave and gate_up:
            src = interleave_gate_up_rows(src)
        return shuffle_weight(src, layout)

    def _moe_shuffle_scale(
        self,
        src: torch.Tensor,
        experts_cnt: int | None = None,
        is_guinterleave: bool = False,
        gate_up: bool = False,
    ) -> torch.Tensor:
        """Expert scales for the installed architecture: n32k4 on gfx1250, :meth:`shuffle_scale` elsewhere."""
        if self._arch == "gfx1250":
            return shuffle_scale_n32k4(src, experts_cnt, is_guinterleave, gate_up)
        return self.shuffle_scale(src, experts_cnt, is_guinterleave, gate_up)
