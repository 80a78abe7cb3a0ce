"""Between a layer's packed tensors and the raw ones that loaders write, in the same memory.

Raw bytes are never more than packed ones, so the raw form of a parameter is a view on the first bytes
of its packed storage: same address, no second copy of the weights. Experts are unpacked in ascending
and packed in descending order, so that no expert is overwritten before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.contract.identity import Sizes
from sglang_aiter_moe.contract.layouts import (
    deinterleave_gate_up_rows,
    interleave_gate_up_rows,
    weight_layout,
)
from sglang_aiter_moe.contract.scale_layouts import PAD_SCALE, scale_layout
from sglang_aiter_moe.srt.layers.quantization.mxfp4_checkpoint import padded_tensor


@dataclass(frozen=True)
class RawForm:
    """What a parameter was when the loader filled it for the first time.

    Attributes:
        name: of the parameter.
        shape: ``[E, N, C]``, a bias ``[E, N]``.
        dtype: as allocated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_bias(self) -> bool:
        return self.name.endswith("bias")

    @property
    def is_scale(self) -> bool:
        return self.name.endswith("scale")


def raw_forms(layer: Any, plan: Any) -> dict[str, RawForm]:
    """The raw form of each parameter of a layer that is still raw."""
    names = ["w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"]
    if plan.spec.has_bias:
        names += ["w13_weight_bias", "w2_weight_bias"]
    found = {}
    for name in names:
        parameter = getattr(layer, name, None)
        if isinstance(parameter, torch.Tensor):  # else check_and_pad says what is missing
            found[name] = RawForm(name, tuple(parameter.shape), parameter.dtype)
    return found


def unpacked(form: RawForm, packed: torch.Tensor, plan: Any) -> torch.Tensor:
    """The raw form of a packed tensor.

    Args:
        form: what it was.
        packed: the parameter's data. Its bytes are rewritten, except a bias's.
        plan: by which it was packed.

    Returns:
        A view on ``packed``; of a bias a new tensor.
    """
    if form.is_bias:
        return _raw_bias(form, packed, plan)
    flat = _flat(packed)
    raw = _raw_view(form, flat)
    padded = Sizes.of_plan(plan).raw_shape(form.name, padded=True)
    layout, alternating = _layout(form, plan)
    if (block := _same_bytes(form, flat, padded, layout)) is not None:
        shape = (padded,) if form.is_scale else ()
        layout.unpack(block, *shape, raw, gate_up_interleaved=alternating, what=form.name)
        return _as_loaded(raw, form)
    one = (1, *padded[1:])
    size = _block_bytes(layout, one)
    for expert in range(padded[0]):
        block = flat[expert * size : (expert + 1) * size].view(layout.packed_shape(one))
        if form.is_scale:
            whole = layout.unpack(block, one, gate_up_interleaved=alternating, what=form.name)
        else:
            whole = layout.unpack(block, gate_up_interleaved=alternating, what=form.name)
        raw[expert].copy_(_corner(whole[0], form, alternating))
    return _as_loaded(raw, form)


def pack(form: RawForm, raw: torch.Tensor, home: torch.Tensor, plan: Any) -> None:
    """Lays a raw tensor out into its packed storage.

    Args:
        form: of the parameter.
        raw: of ``form.shape``; may be the view of :func:`unpacked` on ``home``.
        home: the packed tensor to write.
        plan: by which it is laid out.
    """
    if form.is_bias:
        home.copy_(_packed_bias(form, raw, plan))
        return
    raw = raw if raw.dtype == torch.uint8 else raw.view(torch.uint8)
    flat = _flat(home)
    padded = Sizes.of_plan(plan).raw_shape(form.name, padded=True)
    layout, alternating = _layout(form, plan)
    if (block := _same_bytes(form, flat, padded, layout)) is not None:
        layout.pack(raw, block, gate_up_interleaved=alternating, what=form.name)
        flat[block.numel() :].fill_(PAD_SCALE)
        return
    one = (1, *padded[1:])
    size = _block_bytes(layout, one)
    kind = _kind(form, alternating)
    fill = PAD_SCALE if form.is_scale else 0
    for expert in reversed(range(padded[0])):
        # Both steps read the raw expert before anything is written; together two experts of memory.
        whole = padded_tensor(raw[expert : expert + 1], one, kind, fill)
        block = layout.pack(whole, gate_up_interleaved=alternating, what=form.name)
        flat[expert * size : (expert + 1) * size] = block.view(-1)
    flat[padded[0] * size :].fill_(PAD_SCALE)


def _same_bytes(
    form: RawForm, flat: torch.Tensor, padded: tuple[int, ...], layout: Any
) -> torch.Tensor | None:
    """The packed experts, where nothing is padded: they have the bytes of the raw ones, all together."""
    shape = layout.packed_shape(padded)
    if form.shape != padded or torch.Size(shape).numel() != torch.Size(padded).numel():
        return None
    return flat[: torch.Size(shape).numel()].view(shape)


def _layout(form: RawForm, plan: Any) -> tuple[Any, bool]:
    """The layout, per expert, and whether raw rows alternate gate and up."""
    w13 = form.name.startswith("w13")
    alternating = w13 and plan.spec.gate_up_interleaved
    if not form.is_scale:
        return weight_layout(plan.w13_layout if w13 else plan.w2_layout), alternating
    name = plan.w13_scale_layout if w13 else plan.w2_scale_layout
    # One expert of "separated" has a16w4's bytes; the tail comes after the last expert.
    return scale_layout("a16w4" if name == "separated" else name), alternating


def _block_bytes(layout: Any, one: tuple[int, int, int]) -> int:
    return torch.Size(layout.packed_shape(one)).numel()


def _flat(packed: torch.Tensor) -> torch.Tensor:
    data = packed.detach()
    return (data if data.dtype == torch.uint8 else data.view(torch.uint8)).view(-1)


def _raw_view(form: RawForm, flat: torch.Tensor) -> torch.Tensor:
    return flat[: torch.Size(form.shape).numel()].view(form.shape)


def _as_loaded(raw: torch.Tensor, form: RawForm) -> torch.Tensor:
    return raw if raw.dtype == form.dtype else raw.view(form.dtype)


def _kind(form: RawForm, alternating: bool) -> str:
    if not form.name.startswith("w13"):
        return "plain"
    return "alternating" if alternating else "halves"


def _corner(whole: torch.Tensor, form: RawForm, alternating: bool) -> torch.Tensor:
    """The loaded rows and columns of one padded expert ``[N, C]``."""
    rows, columns = form.shape[1], form.shape[2]
    if _kind(form, alternating) == "halves":
        return whole.unflatten(0, (2, -1))[:, : rows // 2, :columns].flatten(0, 1)
    return whole[:rows, :columns]


def _raw_bias(form: RawForm, packed: torch.Tensor, plan: Any) -> torch.Tensor:
    bias = packed.detach()
    rows = form.shape[1]
    if form.name.startswith("w13"):
        bias = bias.unflatten(1, (2, -1))[:, :, : rows // 2].flatten(1)
        if plan.spec.gate_up_interleaved:
            bias = interleave_gate_up_rows(bias.unsqueeze(-1)).squeeze(-1)
    return bias[:, :rows].to(form.dtype).contiguous()


def _packed_bias(form: RawForm, raw: torch.Tensor, plan: Any) -> torch.Tensor:
    bias = raw.float().unsqueeze(-1)
    w13 = form.name.startswith("w13")
    if w13 and plan.spec.gate_up_interleaved:
        bias = deinterleave_gate_up_rows(bias)
    rows = 2 * plan.padded_intermediate_size if w13 else plan.padded_hidden_size
    target = (form.shape[0], rows, 1)
    return padded_tensor(bias, target, "halves" if w13 else "plain", 0).squeeze(-1)
