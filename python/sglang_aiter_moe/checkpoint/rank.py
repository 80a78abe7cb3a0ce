"""One rank's share of a checkpoint's layer, as SGLang's loaders leave it in a layer's parameters."""

from __future__ import annotations

import torch

from sglang_aiter_moe.checkpoint.files import Layer
from sglang_aiter_moe.contract.scale_layouts import PAD_SCALE
from sglang_aiter_moe.contract.spec import BLOCK, MoeSpec
from sglang_aiter_moe.errors import ContractError

PARAMETERS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
BIASES = ("w13_weight_bias", "w2_weight_bias")


def rank_tensors(
    layer: Layer, spec: MoeSpec, *, tp_rank: int = 0, ep_rank: int = 0
) -> dict[str, torch.Tensor]:
    """The raw tensors of one rank, whatever the checkpoint's format.

    Args:
        layer: in the checkpoint, all experts and all columns.
        spec: one rank's layer: its experts, and its columns as ``spec.shard`` divides them.
        tp_rank: which of the ranks that share the columns.
        ep_rank: which of the ranks that share the experts.

    Returns:
        By parameter name: uint8 weights and E8M0 scales ``[E, N, C]``, biases ``[E, N]``. Rows of w13
        are in the order that ``spec.gate_up_interleaved`` says. Where the last rank has fewer columns
        than the others its rest weighs nothing (zeros, scales of 1.0). The down projection's bias
        belongs to rank 0 alone, because the ranks' results are added.

    Raises:
        ContractError: the checkpoint does not divide into such ranks, or a tensor has another shape.
    """
    experts = range(ep_rank * spec.num_experts, (ep_rank + 1) * spec.num_experts)
    if experts.stop > layer.experts or layer.experts % spec.num_experts:
        raise ContractError(
            f"{layer.prefix} has {layer.experts} experts for ranks of {spec.num_experts}",
            allowed=f"ranks 0 to {max(0, layer.experts // spec.num_experts - 1)} that divide them",
            fix="pass the --ep and the rank of the launch command",
        )
    names = (*PARAMETERS, *(BIASES if spec.has_bias else ()))
    return {name: _parameter(layer, spec, name, experts, tp_rank) for name in names}


def _parameter(
    layer: Layer, spec: MoeSpec, name: str, experts: range, tp_rank: int
) -> torch.Tensor:
    bias = name.endswith("bias")
    scale = name.endswith("scale")
    per = 1 if bias else BLOCK if scale else 2
    inter, hidden = spec.intermediate_size, spec.hidden_size
    if name.startswith("w13"):
        shape = (2 * inter,) if bias else (2 * inter, hidden // per)
    else:
        shape = (hidden,) if bias else (hidden, inter // per)
    first = _bytes_of(layer.expert(name, experts[0]), bias)
    out = torch.full((len(experts), *shape), PAD_SCALE if scale else 0, dtype=first.dtype)
    for local, expert in enumerate(experts):
        stored = first if expert == experts[0] else _bytes_of(layer.expert(name, expert), bias)
        if name.startswith("w13"):
            _check(
                stored.shape[1:] == shape[1:] and stored.shape[0] % 2 == 0,
                layer,
                name,
                stored,
                shape,
            )
            _fill_w13(out[local], stored, layer.alternating, spec.gate_up_interleaved, tp_rank)
        elif bias:
            _check(stored.shape == shape, layer, name, stored, shape)
            if tp_rank == 0:
                out[local].copy_(stored)
        else:
            _check(stored.shape[0] == shape[0], layer, name, stored, shape)
            part = stored[:, tp_rank * shape[1] : (tp_rank + 1) * shape[1]]
            out[local][:, : part.shape[1]].copy_(part)
    return out


def _fill_w13(
    out: torch.Tensor, stored: torch.Tensor, alternating: bool, wanted: bool, tp_rank: int
) -> None:
    """Gate and up rows of one rank; both as ``[2, rows, ...]`` views, whatever their order."""
    source = (
        stored.unflatten(0, (-1, 2)).transpose(0, 1)
        if alternating
        else stored.unflatten(0, (2, -1))
    )
    target = out.unflatten(0, (-1, 2)).transpose(0, 1) if wanted else out.unflatten(0, (2, -1))
    rows = target.shape[1]
    part = source[:, tp_rank * rows : (tp_rank + 1) * rows]
    target[:, : part.shape[1]].copy_(part)


def _bytes_of(tensor: torch.Tensor, bias: bool) -> torch.Tensor:
    return tensor if bias or tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _check(
    fits: bool, layer: Layer, name: str, stored: torch.Tensor, shape: tuple[int, ...]
) -> None:
    if not fits:
        raise ContractError(
            f"{layer.prefix} {name} has shape {tuple(stored.shape)} per expert",
            allowed=f"what divides into {shape} per rank",
            fix="pass the config.json that belongs to the checkpoint, and its --tp",
        )
