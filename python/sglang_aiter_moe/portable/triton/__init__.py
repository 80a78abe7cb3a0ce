"""The MXFP4 mixture of experts in Triton, straight from AITER's packed bytes.

One entry, :func:`run`, which executes a ``KernelRequest``. The portable form (``launch.py``) has no inline
assembly and runs on AMD GPUs, NVIDIA GPUs and, for small shapes, under Triton's interpreter on a CPU.
``hopper/`` holds the forms that an H100 or H200 runs instead.
"""

from __future__ import annotations

import torch

from sglang_aiter_moe.portable.request import KernelRequest


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
    """Executes ``request`` into ``out``, deterministically.

    No host synchronisation, and no allocation once a shape has been seen: a CUDA graph can capture it.

    Args:
        hidden_states: bf16 ``[M, H]``.
        w1, w2: ``E*2I*H/2`` and ``E*H*I/2`` bytes.
        w1_scale, w2_scale: E8M0 bytes.
        topk_weights: fp32 ``[M, K]``.
        topk_ids: int32 ``[M, K]``; ids that name no local expert contribute nothing.
        out: ``[M, H]`` bf16, fp16 or fp32, overwritten completely; ``[M, K, H]``: the experts' weighted results
        unsummed.

    Raises:
        ContractError: before any launch, for a shape, dtype, layout or device that the kernels would misread.
    """
    from sglang_aiter_moe.portable.triton.checks import check
    from sglang_aiter_moe.portable.triton.launch import dispatch

    operands = (hidden_states, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out)
    check(request, *operands)
    dispatch(request, *operands)
