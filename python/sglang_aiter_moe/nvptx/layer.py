"""A whole MoE layer of a Hopper form on an interpreted GPU.

The launches are those of ``portable/triton/hopper``, which are told nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.nvptx.launch import Device, Launch
from sglang_aiter_moe.portable.request import KernelRequest
from sglang_aiter_moe.portable.triton import launch, workspace
from sglang_aiter_moe.portable.triton.checks import check

Runner = Callable[..., None]


def run_layer(
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
    form: tuple[Runner, object] | None = None,
    device: Callable[..., Device] = Device,
    keep_state: bool = False,
    **options,
) -> list[Launch]:
    """Executes ``request`` into ``out`` as ``portable.triton.run`` would on an H200.

    Operands as there, on the CPU. Memory that no kernel has written yet counts as uninitialised: reading it raises.

    Args:
        form: a launch function of ``portable/triton/hopper`` and its configuration; None: what the table takes.
        device: makes the device; ``options``: for it.
        keep_state: counters are as an earlier layer left them, as on a GPU; else the layer is the first of its process.

    Returns:
        The launches, in order.
    """
    weights = (w1, w2, w1_scale, w2_scale)
    check(request, hidden_states, *weights, topk_weights, topk_ids, out)
    if not keep_state:
        workspace.clear()
    fresh = {(out.data_ptr(), out.numel())}

    def scratch(tensor: torch.Tensor) -> bool:
        return (tensor.data_ptr(), tensor.numel()) in fresh or workspace.holds(tensor)

    with device(scratch=scratch, **options) as entered:
        if form is None:
            operands = (hidden_states, *weights, topk_weights, topk_ids, out)
            launch.dispatch(request, *operands, arch="sm90")
        else:
            runner, config = form
            request, x, topk_weights, topk_ids, out = launch.first_tokens(
                request, hidden_states, topk_weights, topk_ids, out
            )
            fresh.add((out.data_ptr(), out.numel()))
            w1, w2, w1_scale, w2_scale = (t.view(torch.uint8) for t in weights)
            runner(request, x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, out, config)
        _check_output(entered, out)
    return entered.launches


def _check_output(device: Device, out: torch.Tensor) -> None:
    """Refuses a result of which a byte is what no kernel wrote, or wrote as what came of nothing.

    Raises:
        ContractError: where.
    """
    address = device.placing.address_of(out)
    if address is None:
        return
    rows = device.memory.written(address, out.numel() * out.element_size())
    bad = np.flatnonzero(~rows)
    if bad.size:
        at = int(bad[0]) // out.element_size()
        raise ContractError(
            f"element {at} of out is what nothing has computed",
            allowed="an output that the kernels write throughout, from what was written",
            fix="look at the last launch, and at what it read",
        )
