"""``moe_sorting`` and the scale sort: tokens by expert, in blocks (docs/contract.md section d)."""

from __future__ import annotations

import torch

from sglang_aiter_moe.errors import ContractError, check_integer

SLOT_SHIFT = 24  # an entry is slot << 24 | token
_IDS = (torch.int32, torch.int64)


def check_local_tokens(count: torch.Tensor | int) -> None:
    """Refuses what is neither an integer nor one in a tensor.

    Raises:
        ContractError: naming ``num_local_tokens``.
    """
    if not isinstance(count, torch.Tensor):
        check_integer("num_local_tokens", count, least=0, fix="pass the number of real tokens")
    elif not count.numel() or count.dtype not in _IDS:
        raise ContractError(
            f"num_local_tokens is {count.dtype} {tuple(count.shape)}",
            allowed="an integer, or one int32 or int64",
            fix="pass the number of real tokens",
        )


def check_expert_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """AITER indexes with an id before it looks at any mask: out of range reads foreign memory there.

    Raises:
        IndexError: an id is negative or not below ``num_experts`` (the global count under a mask).
    """
    if not topk_ids.numel():
        return
    low, high = (int(v) for v in torch.aminmax(topk_ids))
    if low < 0 or high >= num_experts:
        raise IndexError(
            f"topk_ids has {low if low < 0 else high}, outside 0..{num_experts - 1}: AITER would read "
            "out of bounds"
        )


def local_expert_index(num_experts: int, expert_mask: torch.Tensor | None, device) -> torch.Tensor:
    """int64 ``[global E]``: local index of each expert (count of local ones before it), -1 where masked."""
    if expert_mask is None:
        return torch.arange(num_experts, device=device)
    local = expert_mask.to(device).reshape(-1) != 0
    return torch.where(local, local.to(torch.int64).cumsum(0) - 1, -1)


def moe_sorting(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = 32,
    expert_mask: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    dispatch_policy: int = 0,
    return_local_topk_ids: bool = False,
    accumulate: bool = True,
    flat: bool = False,
    output_aux: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Routes by expert: experts ascending, tokens ascending within, each expert padded to whole blocks.

    Args:
        topk_ids: int ``[M, K]``, global expert ids.
        topk_weights: fp32 ``[M, K]``.
        num_experts: experts that ids may name (global count).
        model_dim: width of ``moe_buf``.
        block_size: rows of a block.
        expert_mask: int ``[num_experts]``; experts with 0 are left out.
        num_local_tokens: tokens from there on are left out.

    Returns:
        sorted_ids int32 (``slot << 24 | token``, pads ``K << 24 | M``), sorted_weights fp32 (pads 0),
        sorted_expert_ids int32 per block (local index, unused blocks -1), num_valid_ids int32 ``[2]``
        (padded rows, tokens), moe_buf ``[M, model_dim]`` of zeros.

    Raises:
        ContractError: counts or ids that are no integers, ids that are no matrix.
        IndexError: an id outside 0..num_experts-1.
        NotImplementedError: ``flat`` or ``output_aux``, which only AITER's own kernels use.
    """
    if flat or output_aux:
        raise NotImplementedError("portable moe_sorting has neither flat nor output_aux")
    for name, value in (
        ("num_experts", num_experts),
        ("model_dim", model_dim),
        ("block_size", block_size),
    ):
        check_integer(name, value, least=1, fix="pass the layer's size")
    if topk_ids.dim() != 2 or topk_ids.dtype not in _IDS:
        raise ContractError(
            f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}",
            allowed="int32 or int64 [tokens, topk]",
            fix="pass the ids of the router",
        )
    tokens, topk = topk_ids.shape
    device = topk_ids.device
    check_expert_ids(topk_ids, num_experts)
    kept = tokens
    if num_local_tokens is not None:
        check_local_tokens(num_local_tokens)
        kept = max(0, min(tokens, int(torch.as_tensor(num_local_tokens).reshape(-1)[0])))
    index = local_expert_index(num_experts, expert_mask, device)

    pad_entry = topk << SLOT_SHIFT | tokens
    length = tokens * topk + num_experts * block_size - topk
    sorted_ids = torch.full((length,), pad_entry, dtype=torch.int32, device=device)
    sorted_weights = torch.zeros(length, dtype=torch.float32, device=device)
    blocks = -(-length // block_size)
    sorted_expert_ids = torch.full((blocks,), -1, dtype=torch.int32, device=device)

    local = index[topk_ids[:kept].to(torch.int64)].reshape(-1)
    pairs = torch.nonzero(local >= 0).reshape(-1)  # token * K + slot, of local experts
    pairs = pairs[torch.argsort(local[pairs], stable=True)]
    experts = local[pairs]
    counts = torch.bincount(experts, minlength=num_experts)
    expert_blocks = -(-counts // block_size)
    first_pair = counts.cumsum(0) - counts
    first_row = (expert_blocks.cumsum(0) - expert_blocks) * block_size
    row = first_row[experts] + torch.arange(len(pairs), device=device) - first_pair[experts]
    token, slot = pairs // topk, pairs % topk
    sorted_ids[row] = (slot << SLOT_SHIFT | token).to(torch.int32)
    sorted_weights[row] = topk_weights[token, slot].to(torch.float32)
    of_block = torch.repeat_interleave(torch.arange(num_experts, device=device), expert_blocks)
    sorted_expert_ids[: len(of_block)] = of_block.to(torch.int32)
    num_valid = torch.tensor(
        [int(expert_blocks.sum()) * block_size, kept], dtype=torch.int32, device=device
    )
    empty = not accumulate and expert_mask is None
    shape = (0, 0) if empty else (tokens, model_dim)
    moe_buf = torch.zeros(shape, dtype=moebuf_dtype, device=device)
    result = (sorted_ids, sorted_weights, sorted_expert_ids, num_valid, moe_buf)
    if return_local_topk_ids:
        result += (index[topk_ids.to(torch.int64)].to(torch.int32),)
    return result


def moe_mxfp4_sort(
    blockscale_e8m0: torch.Tensor,
    sorted_ids: torch.Tensor,
    num_valid_ids: torch.Tensor,
    token_num: int,
    block_size: int = 32,
) -> torch.Tensor:
    """Activation scales ``[M, K/32]`` (or ``[M*topk, K/32]``) in sorted order, swizzled as weight scales are.

    Rows are the sorted rows up to ``num_valid_ids[0]``, in whole blocks of 32; columns are padded to 8. Pad
    rows and pad columns are 0 (AITER's HIP kernel leaves them uninitialised).
    """
    scale = blockscale_e8m0.view(torch.uint8)
    columns = scale.shape[1]
    valid = int(num_valid_ids[0])
    rows = -(-valid // 32) * 32
    width = -(-columns // 8) * 8
    token = sorted_ids[:valid].to(torch.int64) & 0xFFFFFF
    slot = sorted_ids[:valid].to(torch.int64) >> SLOT_SHIFT
    slots = scale.shape[0] // token_num
    source = token * slots + slot if slots > 1 else token
    real = torch.nonzero(token < token_num).reshape(-1)
    padded = scale.new_zeros(rows, width)
    padded[real, :columns] = scale[source[real]]
    blocks = padded.view(rows // 32, 2, 16, width // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
    return blocks.contiguous().view(rows, width).view(blockscale_e8m0.dtype)
