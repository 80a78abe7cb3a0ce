"""Expert ids that name no expert: sent to a masked slot, or refused.

Routing marks a slot without expert by a negative id (DeepEP's empty slots, padded tokens). AITER
indexes with the id before it looks at the mask (aiter#4636), so the id has to be in range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_aiter_moe.errors import ContractError

_SLOT = "_aiter_moe_masked_slot"


def reroute_invalid(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    quant_info: Any,
    running_state: Mapping[str, Any] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces negative ids by an index whose expert is masked off.

    Args:
        topk_ids: int32 ``[M, K]``.
        topk_weights: float32 ``[M, K]``.
        quant_info: with ``expert_mask``: either global ``[E_global]``, or DeepEP's ``[E + 1]`` with
            the last slot masked.
        running_state: SGLang's DeepEP permute leaves ``aiter_combine_is_mori`` False in it when it
            has replaced the ids itself.

    Returns:
        ids and weights to call with.

    Raises:
        ContractError: a global mask that marks more experts than there are weights.
    """
    if running_state and running_state.get("aiter_combine_is_mori") is False:
        return topk_ids, topk_weights
    mask = quant_info.expert_mask
    if mask.shape[0] == quant_info.w13_weight.shape[0] + 1:
        return torch.where(topk_ids < 0, mask.shape[0] - 1, topk_ids), topk_weights
    if _may_read(mask):
        slot = _masked_slot(mask, quant_info.w13_weight.shape[0])
        if slot is None:
            return topk_ids, topk_weights
        return torch.where(topk_ids < 0, slot, topk_ids), topk_weights
    # Traced or captured: the slot is found on the device. Should no expert be masked it is expert 0,
    # hence the weight of zero.
    invalid = topk_ids < 0
    slot = torch.argmin(mask).to(topk_ids.dtype)
    return torch.where(invalid, slot, topk_ids), topk_weights.masked_fill(invalid, 0.0)


def out_of_range(topk_ids: torch.Tensor, quant_info: Any) -> ContractError:
    """What to raise when the portable ``fused_moe`` finds an id that AITER would read past the end with."""
    mask = quant_info.expert_mask
    slots = quant_info.w13_weight.shape[0] if mask is None else mask.shape[0]
    low, high = int(topk_ids.min()), int(topk_ids.max())
    return ContractError(
        f"topk_ids has values from {low} to {high}, where AITER reads out of bounds",
        allowed=f"0 to {slots - 1}"
        + ("" if mask is None else ", and negative ids if expert_mask masks at least one slot"),
        fix="check the routing; with expert parallelism pass expert_mask, so that negative ids can go "
        "to a masked slot",
    )


def _may_read(mask: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or type(mask) not in (torch.Tensor, torch.nn.Buffer):
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _masked_slot(mask: torch.Tensor, experts: int) -> int | None:
    """The first masked index, read from the device once per content of ``mask``."""
    known = getattr(mask, _SLOT, None)
    if known is None or known[0] != (mask._version, experts):
        zeros = (mask == 0).nonzero()
        here = mask.shape[0] - zeros.shape[0]
        if here > experts:
            raise ContractError(
                f"expert_mask marks {here} experts as here, and w13_weight holds {experts}",
                allowed=f"at most {experts} entries that are not 0",
                fix="build the mask from the experts that this rank has loaded",
            )
        known = ((mask._version, experts), int(zeros[0]) if zeros.numel() else None)
        setattr(mask, _SLOT, known)
    return known[1]
