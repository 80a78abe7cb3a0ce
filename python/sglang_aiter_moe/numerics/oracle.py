"""The oracle: a routed MoE from raw checkpoint tensors, in float64 or float32.

It decodes weights exactly, keeps every product and sum in the chosen dtype, and applies the activation
quantisation of a mode only where the kernels do: on the input, and between the two stages. It knows
no weight layout and imports nothing of plan, layouts or portable, so that none of their mistakes can repeat here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import (
    SITUV2_BETA,
    SITUV2_LINEAR_BETA,
    SWIGLU_ALPHA,
    Activation,
    apply_gate_up,
)
from sglang_aiter_moe.numerics.mxfp4 import (
    BLOCK,
    dequantize_mxfp4,
    quantize_mxfp4,
    quantize_mxfp4_epilogue,
)
from sglang_aiter_moe.numerics.mxfp8 import (
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_epilogue,
)

MODES = ("A16W4", "A8W4", "A4W4")
REQUANTIZATIONS = ("epilogue", "roundup", "roundup_fp32")


@dataclass(frozen=True)
class RawExperts:
    """Expert tensors as a checkpoint stores them; E local experts, I intermediate size, H width.

    Attributes:
        w13: ``[E, 2I, H/2]`` uint8, two E2M1 codes a byte, element 2j in the low nibble.
        w13_scale: ``[E, 2I, H/32]`` uint8 E8M0.
        w2: ``[E, H, I/2]`` uint8.
        w2_scale: ``[E, H, I/32]`` uint8 E8M0.
        b13: float ``[E, 2I]`` or None, its entries ordered as the rows of w13.
        b2: float ``[E, H]`` or None.
        gate_up_interleaved: rows of w13 are g0, u0, g1, u1, ... (gpt-oss) and not the gate half, then the up half.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    gate_up_interleaved: bool = False

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def intermediate_size(self) -> int:
        return self.w13.shape[1] // 2

    @property
    def hidden_size(self) -> int:
        return self.w13.shape[2] * 2

    def __post_init__(self) -> None:
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            tensor = getattr(self, name)
            if tensor.dim() != 3 or tensor.element_size() != 1:
                raise ContractError(
                    f"{name} is {tensor.dtype} of shape {list(tensor.shape)}",
                    allowed="raw uint8 bytes of rank 3",
                    fix=f"pass {name} as the checkpoint stores it, unshuffled",
                )
        experts, rows = self.w13.shape[:2]
        hidden, inter = self.hidden_size, self.intermediate_size
        if rows % 2 or hidden % BLOCK or inter % BLOCK:
            raise ContractError(
                f"w13 has shape {list(self.w13.shape)}",
                allowed=f"[E, 2I, H/2] with H and I multiples of {BLOCK}",
                fix="pad the weights with zero codes (and scale bytes 0x7F) first",
            )
        expected = {
            "w13_scale": [experts, rows, hidden // BLOCK],
            "w2": [experts, hidden, inter // 2],
            "w2_scale": [experts, hidden, inter // BLOCK],
            "b13": [experts, rows],
            "b2": [experts, hidden],
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and list(tensor.shape) != shape:
                raise ContractError(
                    f"{name} has shape {list(tensor.shape)}",
                    allowed=f"{shape} for w13 of shape {list(self.w13.shape)}",
                    fix=f"pass the {name} of the same {experts} experts",
                )

    def gate_up_rows(self, e: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up weights of expert ``e``, decoded: two ``[I, H]``."""
        return self._split(dequantize_mxfp4(self.w13[e], self.w13_scale[e], dtype))

    def gate_up_bias(self, e: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gate and up bias of expert ``e``: two ``[I]``, or None."""
        return None if self.b13 is None else self._split(self.b13[e].to(dtype))

    def down_rows(self, e: int, dtype: torch.dtype) -> torch.Tensor:
        """Down weights of expert ``e``, decoded: ``[H, I]``."""
        return dequantize_mxfp4(self.w2[e], self.w2_scale[e], dtype)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gate_up_interleaved:
            return rows[0::2], rows[1::2]
        half = rows.shape[0] // 2
        return rows[:half], rows[half:]


def quantize_input(x: torch.Tensor, mode: str | None, dtype: torch.dtype) -> torch.Tensor:
    """What stage 1 of a mode multiplies with, in place of ``x [M, H]``, in ``dtype``.

    None: ``x``. A16W4: ``x`` in at most 16 bits. A8W4, A4W4: ``x`` quantised per 32 by RoundUp.
    """
    if mode is None:
        return x.to(dtype)
    if mode == "A16W4":
        return (x if x.element_size() == 2 else x.to(torch.bfloat16)).to(dtype)
    if mode == "A8W4":
        return dequantize_mxfp8(*quantize_mxfp8(x), dtype)
    return dequantize_mxfp4(*quantize_mxfp4(x), dtype)


def requantize(
    y: torch.Tensor, mode: str | None, requantization: str, dtype: torch.dtype
) -> torch.Tensor:
    """What stage 2 of a mode multiplies with, in place of the stage-1 output ``y [n, I]``, in ``dtype``.

    None: ``y``. A16W4: ``y`` rounded to bfloat16. A8W4, A4W4: ``y`` quantised per 32, by which rule depends
    on the kernel family (docs/contract.md section d): "epilogue" from float32 by the fused stage-1
    rule; "roundup" from bfloat16 by RoundUp (a separate quantisation kernel, and AITER's torch reference);
    "roundup_fp32" from float32 by RoundUp.
    """
    if mode is None:
        return y.to(dtype)
    if mode == "A16W4":
        return y.to(torch.bfloat16).to(dtype)
    y = y.to(torch.bfloat16 if requantization == "roundup" else torch.float32)
    fused = requantization == "epilogue"
    if mode == "A8W4":
        return dequantize_mxfp8(*(quantize_mxfp8_epilogue if fused else quantize_mxfp8)(y), dtype)
    return dequantize_mxfp4(*(quantize_mxfp4_epilogue if fused else quantize_mxfp4)(y), dtype)


def local_expert_ids(
    topk_ids: torch.Tensor, num_experts: int, expert_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Routing ids to local expert indices, -1 where nothing is to be computed. int64, same shape.

    Args:
        topk_ids: int, global ids, -1 for an unused slot.
        num_experts: E, local experts.
        expert_mask: AITER's expert-parallel mask, int ``[global E]``, non-zero for a local expert, whose index is
            the count of local experts before it (docs/contract.md section c).
    """
    ids = topk_ids.to(torch.int64)
    total = num_experts if expert_mask is None else expert_mask.numel()
    if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= total):
        raise ContractError(
            f"topk_ids holds values from {int(ids.min())} to {int(ids.max())}",
            allowed=f"-1 (unused) or 0..{total - 1}",
            fix="pass global expert ids, and expert_mask under expert parallelism",
        )
    if expert_mask is None:
        return ids
    local = expert_mask.flatten() != 0
    if int(local.sum()) != num_experts:
        raise ContractError(
            f"expert_mask marks {int(local.sum())} of {total} experts as local",
            allowed=f"as many as the weights hold: {num_experts}",
            fix="pass this rank's mask with this rank's weights",
        )
    index = torch.where(local, local.to(torch.int64).cumsum(0) - 1, -1)
    index = torch.cat((index, index.new_full((1,), -1)))  # so that id -1 finds -1
    return index[ids]


def routed_moe(
    x: torch.Tensor,
    experts: RawExperts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: Activation | str,
    mode: str | None = None,
    dtype: torch.dtype = torch.float64,
    limit: float | None = None,
    alpha: float = SWIGLU_ALPHA,
    beta: float = SITUV2_BETA,
    linear_beta: float = SITUV2_LINEAR_BETA,
    expert_mask: torch.Tensor | None = None,
    weight_on_input: bool = False,
    requantization: str = "epilogue",
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """The layer's output ``[M, H]`` in ``dtype``.

    Args:
        x: ``[M, H]`` floating point.
        topk_ids, topk_weights: ``[M, K]``; id -1 and masked experts contribute nothing, whatever their weight.
        mode: None (activations are not quantised) or "A16W4", "A8W4", "A4W4".
        dtype: float64 or float32, of all products and sums.
        limit, alpha, beta, linear_beta: see :func:`apply_gate_up`.
        weight_on_input: the routing weight multiplies the stage-1 product, before bias and activation, and not
            the output (AITER's doweight_stage1).
        requantization: see :func:`requantize`.
        hidden_pad, intermediate_pad: how many of the last columns of H and of I are padding. Their contents
            are never used; the output's padding columns are zero.
        progress: called with (experts done, experts to do) after each expert.
    """
    out = torch.zeros(x.shape[0], experts.hidden_size, dtype=dtype, device=x.device)
    local = local_expert_ids(topk_ids, experts.num_experts, expert_mask)
    activation_args = {"limit": limit, "alpha": alpha, "beta": beta, "linear_beta": linear_beta}
    hidden = experts.hidden_size - hidden_pad
    inter = experts.intermediate_size - intermediate_pad
    x = x.clone()
    x[:, hidden:] = 0
    xq = quantize_input(x, mode, dtype)
    active = [e for e in torch.unique(local).tolist() if e >= 0]
    for done, e in enumerate(active, start=1):
        tokens, slots = torch.nonzero(local == e, as_tuple=True)
        weights = topk_weights[tokens, slots].to(dtype).unsqueeze(-1)
        gate_w, up_w = experts.gate_up_rows(e, dtype)
        gate = xq[tokens, :hidden] @ gate_w[:, :hidden].T
        up = xq[tokens, :hidden] @ up_w[:, :hidden].T
        if weight_on_input:
            gate, up = gate * weights, up * weights
        bias = experts.gate_up_bias(e, dtype)
        if bias is not None:
            gate, up = gate + bias[0], up + bias[1]
        y = apply_gate_up(activation, gate, up, **activation_args)
        y[:, inter:] = 0
        y = requantize(y, mode, requantization, dtype)
        result = y[:, :inter] @ experts.down_rows(e, dtype)[:, :inter].T
        if experts.b2 is not None:
            result = result + experts.b2[e].to(dtype)
        if not weight_on_input:
            result = result * weights
        out.index_add_(0, tokens, result)
        if progress is not None:
            progress(done, len(active))
    out[:, hidden:] = 0
    return out
