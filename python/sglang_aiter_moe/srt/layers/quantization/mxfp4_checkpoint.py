"""A layer's raw checkpoint tensors: are they what the plan was made for, and brought to its padded sizes.

Raw means as SGLang's loaders leave them: ``w13_weight`` uint8 ``[E, 2I, H/2]`` (two E2M1 codes a byte),
``w13_weight_scale`` uint8 ``[E, 2I, H/32]`` (E8M0), ``w2_weight`` ``[E, H, I/2]``, ``w2_weight_scale``
``[E, H, I/32]``, and biases ``[E, 2I]`` and ``[E, H]``. ``I`` and ``H`` are either the model's or already
padded.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_aiter_moe.contract.scale_layouts import NAN_SCALE, PAD_SCALE
from sglang_aiter_moe.contract.spec import BLOCK
from sglang_aiter_moe.errors import ContractError

_BYTE_DTYPES = (
    torch.uint8,
    torch.int8,
    *(
        getattr(torch, name)
        for name in ("float4_e2m1fn_x2", "float8_e8m0fnu")
        if hasattr(torch, name)
    ),
)
_PER_BYTE = 2  # E2M1 codes


def check_and_pad(layer: Any, plan: Any) -> None:
    """Checks a layer's raw tensors against a plan and pads those that are not padded yet.

    Padding is zero bytes for weights, 0x7F (1.0) for scales and 0 for biases, at the end of each of
    gate, up, ``I`` and ``H``. Parameters stay the same objects; a padded one gets new storage, one
    expert at a time beside the old one. Biases become float32 (AITER: "MoE bias must be fp32").

    Args:
        layer: with the tensors above; biases may be missing or None.
        plan: the layer's plan.

    Raises:
        ContractError: a tensor of another dtype, rank, size or expert count than the plan's, one that
            is not contiguous, or a NaN scale. Nothing has been changed then.
    """
    spec = plan.spec
    experts, interleaved = spec.num_experts, spec.gate_up_interleaved
    hidden = (spec.hidden_size, plan.padded_hidden_size)
    inter = (spec.intermediate_size, plan.padded_intermediate_size)
    halves = "alternating" if interleaved else "halves"
    work = [
        ("w13_weight", inter, halves, hidden, _PER_BYTE, 0),
        ("w13_weight_scale", inter, halves, hidden, BLOCK, PAD_SCALE),
        ("w2_weight", hidden, "plain", inter, _PER_BYTE, 0),
        ("w2_weight_scale", hidden, "plain", inter, BLOCK, PAD_SCALE),
    ]
    found = []
    for name, rows, kind, columns, per, fill in work:
        tensor = _byte_tensor(layer, name)
        doubled = 1 if kind == "plain" else 2
        sizes = [
            (experts, doubled * r, c // per)
            for r in dict.fromkeys(rows)
            for c in dict.fromkeys(columns)
        ]
        if tuple(tensor.shape) not in sizes:
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)}",
                allowed=" or ".join(map(str, dict.fromkeys(sizes)))
                + f" for {experts} experts, I={spec.intermediate_size}, H={spec.hidden_size}",
                fix="make the plan from the sizes and the expert count that the loader fills",
            )
        if not tensor.is_contiguous():
            raise ContractError(
                f"{name} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()})",
                allowed="a contiguous tensor: it is packed where it lies",
                fix=f"allocate {name} whole, not as a transposed or sliced view",
            )
        if per == BLOCK:
            refuse_nan(tensor, name)
        target = (experts, doubled * rows[1], columns[1] // per)
        found.append((name, tensor, target, kind, fill))
    biases = [
        (name, _bias(layer, name, spec, sizes), sizes, kind)
        for name, sizes, kind in (
            ("w13_weight_bias", inter, halves),
            ("w2_weight_bias", hidden, "plain"),
        )
    ]
    for name, tensor, target, kind, fill in found:
        if tuple(tensor.shape) != target:
            tensor = padded_tensor(tensor, target, kind, fill)
        getattr(layer, name).data = tensor
    for name, bias, sizes, kind in biases:
        if bias is not None:
            doubled = 1 if kind == "plain" else 2
            target = (experts, doubled * sizes[1], 1)
            padded = padded_tensor(bias.float().unsqueeze(-1), target, kind, 0).squeeze(-1)
            getattr(layer, name).data = padded


def _byte_tensor(layer: Any, name: str) -> torch.Tensor:
    parameter = getattr(layer, name, None)
    if not isinstance(parameter, torch.Tensor):
        raise ContractError(
            f"the layer has no tensor {name} (it is {type(parameter).__name__})",
            allowed="w13_weight, w13_weight_scale, w2_weight and w2_weight_scale",
            fix="load the checkpoint into the layer before preparing it",
        )
    if parameter.dtype not in _BYTE_DTYPES:
        raise ContractError(
            f"{name} has dtype {parameter.dtype}",
            allowed="packed bytes: " + ", ".join(str(d) for d in _BYTE_DTYPES),
            fix="load the MXFP4 bytes as they are in the checkpoint, without casting them",
        )
    data = parameter.data
    return data if data.dtype == torch.uint8 else data.view(torch.uint8)


def refuse_nan(scale: torch.Tensor, name: str) -> None:
    """Raises ContractError, naming the place, for uint8 scales ``[E, N, C]`` that hold a NaN."""
    if scale.numel() and int(scale.max()) == NAN_SCALE:
        expert, row, column = (int(i) for i in (scale == NAN_SCALE).nonzero()[0])
        raise ContractError(
            f"{name}[{expert}, {row}, {column}] is 0xFF, an E8M0 NaN",
            allowed="0x00 to 0xFE",
            fix="the checkpoint is damaged, or its scales are not E8M0: load it again",
        )


def _bias(layer: Any, name: str, spec: Any, sizes: tuple[int, int]) -> torch.Tensor | None:
    bias = getattr(layer, name, None)
    if not spec.has_bias:
        return None
    if bias is None:
        raise ContractError(
            f"the layer has no {name}, but its plan was made for biases",
            allowed="both biases, or a plan without",
            fix="load the biases, or plan with has_bias=False",
        )
    doubled = 2 if name.startswith("w13") else 1
    allowed = [(spec.num_experts, doubled * size) for size in dict.fromkeys(sizes)]
    if tuple(bias.shape) not in allowed or not bias.dtype.is_floating_point:
        raise ContractError(
            f"{name} is {tuple(bias.shape)} {bias.dtype}",
            allowed=" or ".join(map(str, allowed)) + ", floating point",
            fix="load the checkpoint's bias for this rank",
        )
    return bias.data


def padded_tensor(
    tensor: torch.Tensor, target: tuple[int, ...], kind: str, fill: int
) -> torch.Tensor:
    """``tensor`` ``[E, R, C]`` in the corner of a ``target``-sized one; gate and up each in theirs."""
    if tuple(tensor.shape) == target:
        return tensor
    out = tensor.new_full(target, fill)
    for expert, raw in enumerate(tensor):
        place = out[expert]
        if kind == "halves":
            raw, place = raw.unflatten(0, (2, -1)), place.unflatten(0, (2, -1))
        place[..., : raw.shape[-2], : raw.shape[-1]].copy_(raw)
    return out
