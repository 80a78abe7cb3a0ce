"""A whole MoE layer of the Triton backend on an interpreted AMD GPU: sort, quantise, stage 1, stage 2, combine.

The launches are those of ``portable/triton/launch.py``, which is told nothing but the architecture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_aiter_moe.amdgpu.launch import Device, Launch
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.portable.triton import launch, table, workspace
from sglang_aiter_moe.portable.triton.checks import check


def run_layer(
    arch: str,
    request: KernelRequest,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    config: table.Config | None = None,
    device: Callable[..., Device] = Device,
    **options,
) -> list[Launch]:
    """Executes ``request`` into ``out`` as ``portable.triton.run`` would on a GPU of ``arch``.

    Operands as there, on the CPU. Memory that no kernel has written yet counts as uninitialised: reading it raises.

    Args:
        config: tiles; None: those of the table of ``arch``.
        device: makes the device.
        options: for it.

    Returns:
        The launches, in order.
    """
    weights = (w1, w2, w1_scale, w2_scale)
    check(request, hidden_states, *weights, topk_weights, topk_ids, out)
    request, hidden_states, topk_weights, topk_ids, out = launch.first_tokens(
        request, hidden_states, topk_weights, topk_ids, out
    )
    operands = (hidden_states, *weights, topk_weights, topk_ids, out)
    workspace.clear()
    fresh = {id(out)}

    def scratch(tensor: torch.Tensor) -> bool:
        return id(tensor) in fresh or workspace.holds(tensor)

    with device(arch, scratch=scratch, **options) as entered:
        launch.run_portable(request, *operands, arch=arch, config=config)
    return entered.launches
