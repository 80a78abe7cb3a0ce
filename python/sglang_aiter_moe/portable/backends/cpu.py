"""Executes a ``KernelRequest`` in torch: float32 products, one expert at a time, only experts with tokens.

Besides the packed weights it holds one expert's decoded matrix, the quantised input in 16 bits and a float32
accumulator of the output.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.numerics.activations import apply_gate_up
from sglang_aiter_moe.numerics.e8m0 import BLOCK, ScaleRounding
from sglang_aiter_moe.numerics.mxfp4 import (
    dequantize_mxfp4,
    quantize_mxfp4,
    quantize_mxfp4_epilogue,
)
from sglang_aiter_moe.numerics.mxfp8 import (
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_epilogue,
)
from sglang_aiter_moe.portable.backends.decode import (
    expert_scales,
    expert_weight_bytes,
    flat_bytes,
)
from sglang_aiter_moe.portable.request import (
    A4W4,
    A8W4,
    A16W4,
    REQUANT_EPILOGUE,
    REQUANT_EVEN_BF16,
    REQUANT_ROUNDUP_BF16,
    REQUANT_ROUNDUP_FP32,
    KernelRequest,
)
from sglang_aiter_moe.portable.sorting import check_expert_ids, local_expert_index

MAX_ROWS = 4096  # rows of one expert that are computed together
_QUANTISE = {A8W4: quantize_mxfp8, A4W4: quantize_mxfp4}
_QUANTISE_FUSED = {A8W4: quantize_mxfp8_epilogue, A4W4: quantize_mxfp4_epilogue}
_DEQUANTISE = {A8W4: dequantize_mxfp8, A4W4: dequantize_mxfp4}
_ROUNDING = {"roundup": ScaleRounding.UP, "even": ScaleRounding.EVEN}


def run(
    request: KernelRequest,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Computes the layer into ``out`` ``[M, H]``, or ``[M, K, H]`` to leave the sum over slots to the caller.

    Raises:
        IndexError: an expert id out of range; AITER would read out of bounds.
    """
    experts = _Experts(request, w1, w2, w1_scale, w2_scale)
    mask = request.expert_mask
    total = request.num_experts if mask is None else mask.numel()
    check_expert_ids(topk_ids, total)
    local = local_expert_index(total, mask, topk_ids.device)[topk_ids.to(torch.int64)]
    if request.num_local_tokens is not None:
        local[max(0, int(torch.as_tensor(request.num_local_tokens).reshape(-1)[0])) :] = -1

    per_slot = out.dim() == 3
    accumulator = out.zero_() if per_slot else torch.zeros(out.shape, dtype=torch.float32)
    between = torch.float16 if out.dtype == torch.float16 else torch.bfloat16
    xq = quantise_input(request, hidden_states)
    active = torch.unique(local)
    for expert in active[active >= 0].tolist():
        tokens, slots = torch.nonzero(local == expert, as_tuple=True)
        weights = topk_weights[tokens, slots].to(torch.float32).unsqueeze(-1)
        parts = [slice(i, i + MAX_ROWS) for i in range(0, len(tokens), MAX_ROWS)]
        w13 = experts.w13(expert)
        stage1_out = [
            stage1(request, expert, xq[tokens[p]].to(torch.float32), w13, weights[p], between)
            for p in parts
        ]
        del w13
        w2 = experts.w2(expert)
        for part, y in zip(parts, stage1_out, strict=True):
            result = stage2(request, expert, y, w2, weights[part])
            if per_slot:
                accumulator[tokens[part], slots[part]] = result.to(out.dtype)
            else:
                accumulator.index_add_(0, tokens[part], result)
    if not per_slot:
        out.copy_(accumulator)


class _Experts:
    """The packed weights of all experts; decodes one matrix at a time."""

    def __init__(self, request: KernelRequest, w1, w2, w1_scale, w2_scale) -> None:
        self._r = request
        self._w1, self._w2 = flat_bytes(w1), flat_bytes(w2)
        self._s1, self._s2 = flat_bytes(w1_scale), flat_bytes(w2_scale)

    def w13(self, expert: int) -> torch.Tensor:
        """float32 ``[2I, H]``: gate rows, then up rows."""
        r = self._r
        rows, k = 2 * r.intermediate_size, r.hidden_size
        packed = expert_weight_bytes(self._w1, expert, rows, k // 2, r.w13_layout)
        return dequantize_mxfp4(
            packed, expert_scales(self._s1, expert, rows, k // BLOCK, r.w13_scale_layout)
        )

    def w2(self, expert: int) -> torch.Tensor:
        """float32 ``[H, I]``."""
        r = self._r
        rows, k = r.hidden_size, r.intermediate_size
        packed = expert_weight_bytes(self._w2, expert, rows, k // 2, r.w2_layout)
        return dequantize_mxfp4(
            packed, expert_scales(self._s2, expert, rows, k // BLOCK, r.w2_scale_layout)
        )


def quantise_input(request: KernelRequest, x: torch.Tensor) -> torch.Tensor:
    """What stage 1 multiplies with, in place of ``x [M, H]``.

    A16W4: ``x`` itself. A8W4 and A4W4: the quantised values as bfloat16, which holds every product of
    an E4M3 or E2M1 element with a power of two (down to 2**-133).
    """
    if request.mode == A16W4:
        return x
    codes, scales = _QUANTISE[request.mode](
        x, _ROUNDING[request.input_rounding], name="hidden_states"
    )
    return _DEQUANTISE[request.mode](codes, scales, torch.bfloat16)


def stage1(
    request: KernelRequest,
    expert: int,
    x: torch.Tensor,
    w13: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of one expert through gate, up, activation and requantisation: float32 ``[n, I]`` from ``[n, H]``.

    Args:
        x: float32 ``[n, H]``, already quantised.
        w13: float32 ``[2I, H]``, gate rows first.
        weights: float32 ``[n, 1]`` routing weights.
        dtype: the 16-bit dtype between the stages.
    """
    y = activated(request, expert, x, w13, weights)
    if request.mode == A16W4:
        return y.to(dtype).to(torch.float32)
    return _DEQUANTISE[request.mode](*requantise(request, y, dtype))


def activated(
    request: KernelRequest,
    expert: int,
    x: torch.Tensor,
    w13: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Stage 1 up to the activation, float32 ``[n, I]``; arguments as for :func:`stage1`."""
    inter = request.intermediate_size
    k = request.hidden_size - request.hidden_skip_k
    gate_up = x[:, :k] @ w13[:, :k].T
    if request.weight_on_input:
        gate_up = gate_up * weights
    if request.bias13 is not None:
        gate_up = gate_up + request.bias13[expert]
    y = apply_gate_up(
        request.activation,
        gate_up[:, :inter],
        gate_up[:, inter:],
        limit=request.limit,
        alpha=request.alpha,
        beta=request.beta,
        linear_beta=request.linear_beta,
    )
    if request.intermediate_skip_n:
        y[:, inter - request.intermediate_skip_n :] = 0
    return y


def requantise(
    request: KernelRequest, y: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and E8M0 scales of the stage-1 result ``y [n, I]`` (A8W4, A4W4), by the family's rule."""
    rule = request.requantization
    if rule == REQUANT_EPILOGUE:
        return _QUANTISE_FUSED[request.mode](y)
    if rule == REQUANT_ROUNDUP_FP32:
        return _QUANTISE[request.mode](y)
    rounding = {REQUANT_ROUNDUP_BF16: ScaleRounding.UP, REQUANT_EVEN_BF16: ScaleRounding.EVEN}[rule]
    return _QUANTISE[request.mode](y.to(dtype), rounding)


def stage2(
    request: KernelRequest, expert: int, y: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Rows of one expert through the down projection: float32 ``[n, H]`` from ``[n, I]``, weighted."""
    k = request.intermediate_size - request.intermediate_skip_k
    result = y[:, :k] @ w2[:, :k].T
    if request.bias2 is not None:
        result = result + request.bias2[expert]
    if request.weight_on_output:
        result = result * weights
    if request.hidden_skip_n:
        result[:, request.hidden_size - request.hidden_skip_n :] = 0
    return result
