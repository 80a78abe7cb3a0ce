"""What a request must fulfil, checked before any launch."""

from __future__ import annotations

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.request import (
    A16W4,
    GU_INTERLEAVED,
    GU_INTERLEAVED_GFX1250,
    N32K4,
    N32K4_GU,
    RAW,
    REQUANT_NONE,
    SEPARATED,
    KernelRequest,
)

_W13 = (RAW, SEPARATED, GU_INTERLEAVED, GU_INTERLEAVED_GFX1250)
_W13_SCALE = (RAW, SEPARATED, GU_INTERLEAVED, N32K4, N32K4_GU)
_W2 = (RAW, SEPARATED)
_W2_SCALE = (RAW, SEPARATED, N32K4)
_MODES = ("A16W4", "A8W4", "A4W4")
_MAX_PAIRS = 1 << 30


def _one_of(name: str, value, allowed: tuple) -> None:
    if value not in allowed:
        raise ContractError(
            f"{name} is {value!r}",
            allowed=", ".join(map(str, allowed)),
            fix=f"choose one of them for {name}",
        )


def _dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise ContractError(
            f"{name} has dtype {tensor.dtype}",
            allowed=", ".join(map(str, allowed)),
            fix=f"convert {name} before the call",
        )


def _shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ContractError(
            f"{name} has shape {list(tensor.shape)}",
            allowed=str(list(expected)),
            fix=f"pass {name} of that shape",
        )


def _bytes(name: str, tensor: torch.Tensor, expected: int, exact: bool) -> None:
    if tensor.element_size() != 1 or not tensor.is_contiguous():
        raise ContractError(
            f"{name} is {tensor.dtype} with strides {list(tensor.stride())}",
            allowed="contiguous one-byte elements",
            fix=f"pass the stored bytes of {name}, contiguous",
        )
    if tensor.numel() < expected or (exact and tensor.numel() != expected):
        raise ContractError(
            f"{name} holds {tensor.numel()} bytes",
            allowed=f"{'' if exact else 'at least '}{expected} for these sizes",
            fix=f"pass the {name} of the same experts and sizes",
        )


_MASKS = 64
_masks_seen: dict[tuple[int, int, int, int], torch.Tensor] = {}
"""(address, version, size, experts) of masks that fit; the tensors are held so that no other one gets their address."""


def _mask_fits(mask: torch.Tensor, experts: int) -> None:
    """Refuses a mask with more local experts than there are weights: kernels would skip the surplus silently.

    Looking at a GPU tensor waits for the device, so a mask is looked at when it, or a new content of it, is first
    seen, and not while a graph is captured.
    """
    key = (
        mask.data_ptr(),
        -1 if mask.is_inference() else mask._version,
        mask.numel(),
        experts,
    )
    if mask.is_cuda and (key in _masks_seen or torch.cuda.is_current_stream_capturing()):
        return
    local = int((mask != 0).sum())
    if local > experts:
        raise ContractError(
            f"expert_mask names {local} local experts and the weights hold {experts}",
            allowed=f"at most {experts} entries that are not 0",
            fix="pass the mask of this rank, and the weights of all its experts",
        )
    if mask.is_cuda:
        if len(_masks_seen) >= _MASKS:
            _masks_seen.pop(next(iter(_masks_seen)))
        _masks_seen[key] = mask


def check(
    r: KernelRequest,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Raises ContractError for any operand that the kernels would misread.

    Short scale tensors are let through: AITER reads what lies there, and the kernels read NaN.
    """
    E, H, I = r.num_experts, r.hidden_size, r.intermediate_size
    _one_of("mode", r.mode, _MODES)
    _one_of("w13_layout", r.w13_layout, _W13)
    _one_of("w13_scale_layout", r.w13_scale_layout, _W13_SCALE)
    _one_of("w2_layout", r.w2_layout, _W2)
    _one_of("w2_scale_layout", r.w2_scale_layout, _W2_SCALE)
    _one_of("activation", r.activation, ("silu", "gelu", "swiglu", "situv2"))
    if (r.requantization == REQUANT_NONE) != (r.mode == A16W4):
        raise ContractError(
            f"requantization is {r.requantization!r} in mode {r.mode}",
            allowed=f"{REQUANT_NONE!r} in A16W4 and one of the other rules in A8W4 and A4W4",
            fix="let portable.dispatch resolve the request",
        )
    for name, extent in (("hidden_size", H), ("intermediate_size", I)):
        if extent <= 0 or extent % 32:
            raise ContractError(
                f"{name} is {extent}",
                allowed="a positive multiple of 32 (one E8M0 scale per 32 columns)",
                fix=f"pad the weights along {name} with zero codes",
            )
    for name in ("hidden_skip_k", "hidden_skip_n", "intermediate_skip_n", "intermediate_skip_k"):
        extent = H if name.startswith("hidden") else I
        if not 0 <= getattr(r, name) < extent:
            raise ContractError(
                f"{name} is {getattr(r, name)}",
                allowed=f"0 to {extent - 1}",
                fix="pass how many of the last columns are padding",
            )
    if hidden_states.dim() != 2 or topk_ids.dim() != 2:
        raise ContractError(
            f"hidden_states has shape {list(hidden_states.shape)} and topk_ids {list(topk_ids.shape)}",
            allowed="[M, H] and [M, K]",
            fix="flatten the batch and sequence dimensions",
        )
    M, K = topk_ids.shape
    _dtype("hidden_states", hidden_states, (torch.bfloat16,))
    _dtype("topk_ids", topk_ids, (torch.int32,))
    _dtype("topk_weights", topk_weights, (torch.float32,))
    _dtype("out", out, (torch.bfloat16, torch.float16, torch.float32))
    _shape("hidden_states", hidden_states, (M, H))
    _shape("topk_weights", topk_weights, (M, K))
    _shape("out", out, (M, K, H) if out.dim() == 3 else (M, H))
    for name, tensor in (
        ("hidden_states", hidden_states),
        ("topk_ids", topk_ids),
        ("topk_weights", topk_weights),
    ):
        if not tensor.is_contiguous():
            raise ContractError(
                f"{name} has strides {list(tensor.stride())}",
                allowed="contiguous rows",
                fix=f"pass {name}.contiguous()",
            )
    if out.numel() and (out.stride(-1) != 1 or (out.dim() == 3 and not out.is_contiguous())):
        raise ContractError(
            f"out has strides {list(out.stride())}",
            allowed="unit stride along H, and contiguous if it is [M, K, H]",
            fix="pass a contiguous output",
        )
    if M * K >= _MAX_PAIRS:
        raise ContractError(
            f"topk_ids has shape {list(topk_ids.shape)}",
            allowed=f"fewer than {_MAX_PAIRS} token-slot pairs",
            fix="split the batch",
        )
    _bytes("w1", w1, E * I * H, exact=True)
    _bytes("w2", w2, E * H * I // 2, exact=True)
    _bytes("w1_scale", w1_scale, 1, exact=False)
    _bytes("w2_scale", w2_scale, 1, exact=False)
    for name, bias, shape in (("bias13", r.bias13, (E, 2 * I)), ("bias2", r.bias2, (E, H))):
        if bias is not None:
            _dtype(name, bias, (torch.float32,))
            _shape(name, bias, shape)
    if r.expert_mask is not None:
        _dtype("expert_mask", r.expert_mask, (torch.int32, torch.int64, torch.bool, torch.uint8))
        _mask_fits(r.expert_mask, E)
    tensors = {"w1": w1, "w2": w2, "w1_scale": w1_scale, "w2_scale": w2_scale, "out": out}
    tensors |= {"topk_ids": topk_ids, "topk_weights": topk_weights}
    tensors |= {"bias13": r.bias13, "bias2": r.bias2, "expert_mask": r.expert_mask}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != hidden_states.device:
            raise ContractError(
                f"{name} is on {tensor.device} and hidden_states on {hidden_states.device}",
                allowed="one device",
                fix=f"move {name}",
            )
