"""The oracle: a routed mixture of experts from raw checkpoint tensors, in float64 or float32.

Weights are decoded exactly, products and sums stay in the chosen dtype, and activations are quantised only where a
mode's kernels quantise them: the input, and what passes between the two stages. The oracle knows no weight layout
and imports nothing of plan, layouts or portable, so that it cannot repeat a mistake of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from sglang_aiter_moe.numerics.e8m0 import BLOCK, as_bytes, check_float
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

MODES = ("A16W4", "A8W4", "A4W4")
REQUANTIZATIONS = ("epilogue", "roundup", "roundup_fp32")


@dataclass(frozen=True)
class RawExperts:
    """Expert tensors as a checkpoint stores them: E local experts, intermediate size I, width H.

    Attributes:
        w13: uint8 ``[E, 2I, H/2]``, two E2M1 codes a byte, element 2j in the low nibble.
        w13_scale: uint8 E8M0 ``[E, 2I, H/32]``.
        w2: uint8 ``[E, H, I/2]``.
        w2_scale: uint8 E8M0 ``[E, H, I/32]``.
        b13: floating point ``[E, 2I]`` or None, in the row order of w13.
        b2: floating point ``[E, H]`` or None.
        gate_up_interleaved: rows of w13 (and b13) are g0, u0, g1, u1, ... as in gpt-oss, not all gate rows first.

    Raises:
        ContractError: a tensor whose dtype, rank or shape does not fit the others.
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
            as_bytes(
                tensor, name, torch.float8_e8m0fnu if "scale" in name else torch.float4_e2m1fn_x2
            )
            if tensor.dim() != 3:
                raise ContractError(
                    f"{name} has shape {list(tensor.shape)}",
                    allowed="three dimensions, experts first",
                    fix=f"pass {name} of all experts as the checkpoint stores it",
                )
        experts, rows = self.w13.shape[:2]
        hidden, inter = self.hidden_size, self.intermediate_size
        if rows % 2 or hidden % BLOCK or inter % BLOCK:
            raise ContractError(
                f"w13 has shape {list(self.w13.shape)}",
                allowed=f"[E, 2I, H/2] with H and I multiples of {BLOCK}",
                fix="pad with zero bytes, and the scales with 0x7F",
            )
        shapes = {
            "w13_scale": [experts, rows, hidden // BLOCK],
            "w2": [experts, hidden, inter // 2],
            "w2_scale": [experts, hidden, inter // BLOCK],
            "b13": [experts, rows],
            "b2": [experts, hidden],
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if list(tensor.shape) != shape:
                raise ContractError(
                    f"{name} has shape {list(tensor.shape)}",
                    allowed=f"{shape}, to fit w13 of shape {list(self.w13.shape)}",
                    fix=f"pass the raw {name} of the same experts",
                )
            if name in ("b13", "b2"):
                check_float(tensor, name)

    def gate_up_weights(self, e: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded gate and up weights of expert ``e``, ``[I, H]`` each."""
        return self._split(dequantize_mxfp4(self.w13[e], self.w13_scale[e], dtype))

    def gate_up_biases(self, e: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up bias of expert ``e``, ``[I]`` each; b13 must not be None."""
        return self._split(self.b13[e].to(dtype))

    def down_weights(self, e: int, dtype: torch.dtype) -> torch.Tensor:
        """Decoded down weights of expert ``e``, ``[H, I]``."""
        return dequantize_mxfp4(self.w2[e], self.w2_scale[e], dtype)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gate_up_interleaved:
            return rows[0::2], rows[1::2]
        return rows[: self.intermediate_size], rows[self.intermediate_size :]


def quantize_input(
    x: torch.Tensor, mode: str | None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """What stage 1 of a mode multiplies with in place of ``x [M, H]``, as values of ``dtype``.

    None: ``x``. A16W4: ``x``, rounded to bfloat16 if it is wider. A8W4 and A4W4: ``x`` quantised per 32 with RoundUp
    scales, which every kernel family takes (docs/contract.md section d).
    """
    if mode == "A8W4":
        return dequantize_mxfp8(*quantize_mxfp8(x), dtype)
    if mode == "A4W4":
        return dequantize_mxfp4(*quantize_mxfp4(x), dtype)
    if mode == "A16W4" and x.element_size() > 2:
        x = x.to(torch.bfloat16)
    return x.detach().to(dtype)


def requantize(
    y: torch.Tensor, mode: str | None, requantization: str, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """What stage 2 of a mode multiplies with in place of the stage-1 output ``y [n, I]``, as values of ``dtype``.

    None: ``y``. A16W4: ``y`` rounded to bfloat16. A8W4 and A4W4: ``y`` quantised per 32, by a rule that depends on
    the kernel family (docs/contract.md section d):

    - "epilogue": from float32, by the fused stage-1 rule (kernels named ``*_fp4`` and ``*_fp8``).
    - "roundup": RoundUp from bfloat16 (kernels without such a suffix, and AITER's torch reference).
    - "roundup_fp32": RoundUp from float32 (mxmoe).
    """
    if mode is None:
        return y.to(dtype)
    if mode == "A16W4":
        return y.to(torch.bfloat16).to(dtype)
    y = y.to(torch.bfloat16 if requantization == "roundup" else torch.float32)
    fused = requantization == "epilogue"
    if mode == "A8W4":
        return dequantize_mxfp8(
            *(quantize_mxfp8_epilogue(y) if fused else quantize_mxfp8(y)), dtype
        )
    return dequantize_mxfp4(*(quantize_mxfp4_epilogue(y) if fused else quantize_mxfp4(y)), dtype)


def local_expert_ids(
    topk_ids: torch.Tensor, num_experts: int, expert_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Local expert of each slot, -1 where there is nothing to compute. int64, same shape.

    Args:
        topk_ids: integer, global expert ids, -1 for an unused slot.
        num_experts: E, how many experts the weights hold.
        expert_mask: AITER's: ``[global E]`` of 0 and 1, 1 for a local expert, whose local index is the number of
            local experts before it (docs/contract.md section c). None: all experts are local.

    Raises:
        ContractError: ids out of range, a mask that is no mask or does not fit the weights.
    """
    if topk_ids.dtype.is_floating_point or topk_ids.dtype == torch.bool:
        raise ContractError(
            f"topk_ids has dtype {topk_ids.dtype}", allowed="an integer dtype", fix="pass int32 ids"
        )
    ids = topk_ids.to(torch.int64)
    total = num_experts if expert_mask is None else expert_mask.numel()
    if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= total):
        raise ContractError(
            f"topk_ids holds ids from {int(ids.min())} to {int(ids.max())}",
            allowed=f"0 to {total - 1}, or -1 for an unused slot",
            fix="pass global expert ids, and under expert parallelism the expert_mask",
        )
    if expert_mask is None:
        return ids
    mask = expert_mask.to(torch.int64)
    if mask.dim() != 1 or bool(((mask != 0) & (mask != 1)).any()):
        raise ContractError(
            f"expert_mask of shape {list(mask.shape)} holds values other than 0 and 1",
            allowed="one 0 or 1 for each global expert",
            fix="pass (expert_map >= 0).int() in place of a global-to-local map",
        )
    if int(mask.sum()) != num_experts:
        raise ContractError(
            f"expert_mask marks {int(mask.sum())} of {total} experts as local",
            allowed=f"exactly the {num_experts} experts that the weights hold",
            fix="pass the mask of the rank that these weights belong to",
        )
    local = torch.where(mask == 1, mask.cumsum(0) - 1, -1)
    return torch.cat((local, local.new_tensor([-1])))[ids]  # the appended entry answers id -1


def _slots_by_expert(local_ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(expert, flat slot numbers), for each expert that has any, in ascending order."""
    flat = local_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for e, slots in zip(experts.tolist(), order.split(counts.tolist()), strict=True):
        if e >= 0:
            yield e, slots


def _check_call(x, experts, topk_ids, topk_weights, mode, dtype, requantization, pads) -> None:
    check_float(x, "x")
    if x.dim() != 2 or x.shape[1] != experts.hidden_size:
        raise ContractError(
            f"x has shape {list(x.shape)}",
            allowed=f"[M, {experts.hidden_size}], to fit w13 of shape {list(experts.w13.shape)}",
            fix="pass the layer's input with its padding",
        )
    if topk_ids.dim() != 2 or len(topk_ids) != len(x) or topk_weights.shape != topk_ids.shape:
        raise ContractError(
            f"topk_ids has shape {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)}",
            allowed=f"[M, K] for both, with M = {len(x)} as in x",
            fix="pass the routing of the same tokens",
        )
    choices = (
        ("mode", mode, (None, *MODES)),
        ("requantization", requantization, REQUANTIZATIONS),
        ("dtype", dtype, (torch.float64, torch.float32)),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise ContractError(
                f"{name} is {value!r}",
                allowed=", ".join(map(str, allowed)),
                fix=f"pass one of these {name}s",
            )
    for name, pad, size in pads:
        if not 0 <= pad < size:
            raise ContractError(
                f"{name} is {pad}",
                allowed=f"0 to {size - 1}",
                fix="pass the number of padding columns",
            )


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
    stage1: torch.Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """The layer's output ``[M, H]`` in ``dtype``.

    Experts are decoded one at a time, and only those that have a token. A NaN in ``x``, in a weight scale (0xFF) or in
    a bias reaches the tokens that use it and no others.

    Args:
        x: floating point ``[M, H]``.
        experts: the raw weights.
        topk_ids, topk_weights: ``[M, K]``. A slot of id -1 or of a masked expert contributes nothing, whatever
            its weight.
        activation, limit, alpha, beta, linear_beta: see :func:`~.activations.apply_gate_up`.
        mode: None leaves activations as they are; "A16W4", "A8W4" and "A4W4" quantise as those modes do.
        dtype: float64 or float32, of every product and sum.
        expert_mask: see :func:`local_expert_ids`.
        weight_on_input: the routing weight multiplies the stage-1 product, before bias and activation, in place of the
            output (AITER's doweight_stage1, docs/contract.md section c).
        requantization: see :func:`requantize`.
        hidden_pad, intermediate_pad: how many of the last columns of H and of I are padding. Nothing reads them,
            whatever they hold; the output's padding columns are zero.
        stage1: ``[M, K, I]``, filled with what stage 2 multiplies with; slots without contribution are left alone.
        progress: called with (experts done, experts to do) after each expert.

    Raises:
        ContractError: shapes, dtypes, ids or options that do not fit.
    """
    hidden, inter = experts.hidden_size - hidden_pad, experts.intermediate_size - intermediate_pad
    pads = (
        ("hidden_pad", hidden_pad, experts.hidden_size),
        ("intermediate_pad", intermediate_pad, experts.intermediate_size),
    )
    _check_call(x, experts, topk_ids, topk_weights, mode, dtype, requantization, pads)
    local = local_expert_ids(topk_ids, experts.num_experts, expert_mask)
    if hidden_pad:
        x = x.clone()
        x[:, hidden:] = 0
    x = quantize_input(x, mode, dtype)[:, :hidden]
    out = torch.zeros(len(x), experts.hidden_size, dtype=dtype, device=x.device)
    groups = list(_slots_by_expert(local))
    for done, (e, slots) in enumerate(groups, start=1):
        tokens = slots // topk_ids.shape[1]
        weights = topk_weights.reshape(-1)[slots].to(dtype).unsqueeze(-1)
        gate, up = (x[tokens] @ w[:, :hidden].T for w in experts.gate_up_weights(e, dtype))
        if weight_on_input:
            gate, up = gate * weights, up * weights
        if experts.b13 is not None:
            gate, up = (
                v + b for v, b in zip((gate, up), experts.gate_up_biases(e, dtype), strict=True)
            )
        y = apply_gate_up(
            activation, gate, up, limit=limit, alpha=alpha, beta=beta, linear_beta=linear_beta
        )
        y[:, inter:] = 0
        y = requantize(y, mode, requantization, dtype)
        if stage1 is not None:
            stage1[tokens, slots % topk_ids.shape[1]] = y.to(stage1.dtype)
        result = y[:, :inter] @ experts.down_weights(e, dtype)[:, :inter].T
        if experts.b2 is not None:
            result = result + experts.b2[e].to(dtype)
        out.index_add_(0, tokens, result if weight_on_input else result * weights)
        if progress is not None:
            progress(done, len(groups))
    out[:, hidden:] = 0
    return out
