"""The tokens and the routing of a layer, and what the oracle makes of them.

All cases of a layer share one stream: a case of M tokens takes its first M rows. The oracle works token
by token, so one pass over the longest batch serves every shorter one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_aiter_moe.numerics.oracle import RawExperts, routed_moe
from sglang_aiter_moe.verify.layers import Layer

# From here on the oracle works in float32: on K3 its outputs then differ from float64 by a logits_diff
# below 1e-9, where the strictest threshold is 1e-4.
FLOAT64_TOKENS = 1024
_CHUNK = 2048


@dataclass(frozen=True)
class Batch:
    """Tokens and routing.

    Attributes:
        hidden_states: bfloat16 `[M, H]`.
        topk_ids: int32 `[M, K]`, global ids, all of one row different, -1 for an unused slot.
        topk_weights: float32 `[M, K]`, each row adding up to 1 before slots were taken away.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def first(self, tokens: int) -> Batch:
        """The batch of the first `tokens` rows."""
        return Batch(
            self.hidden_states[:tokens], self.topk_ids[:tokens], self.topk_weights[:tokens]
        )


def make_batch(layer: Layer, tokens: int, *, unused_slots: int = 0) -> Batch:
    """The layer's stream, cut at `tokens`; a longer cut begins with the shorter one.

    Args:
        layer: fixes the seed, the widths and the number of experts to choose from.
        tokens: M.
        unused_slots: every how many-th slot, counted over the batch, gets id -1; 0 for none.
    """
    seed = layer.shape.seed
    normal = np.random.Generator(np.random.PCG64([seed, 1]))
    uniform = np.random.Generator(np.random.PCG64([seed, 2]))
    hidden_states = torch.empty(tokens, layer.shape.hidden, dtype=torch.bfloat16)
    topk_ids = torch.empty(tokens, layer.topk, dtype=torch.int32)
    topk_weights = torch.empty(tokens, layer.topk)
    for start in range(0, tokens, _CHUNK):
        rows = slice(start, min(start + _CHUNK, tokens))
        count = rows.stop - start
        values = normal.standard_normal((count, layer.shape.hidden), dtype=np.float32)
        hidden_states[rows] = torch.from_numpy(values)
        scores = torch.from_numpy(uniform.random((count, layer.routed_experts), dtype=np.float32))
        top, ids = scores.topk(layer.topk, dim=1)
        topk_ids[rows] = ids
        topk_weights[rows] = top / top.sum(1, keepdim=True)
    if unused_slots:
        topk_ids.view(-1)[::unused_slots] = -1
    return Batch(hidden_states, topk_ids, topk_weights)


def expert_mask(layer: Layer) -> torch.Tensor | None:
    """AITER's mask of the experts on this rank: int32 `[global experts]`, or None.

    AITER's convention is one masked slot at the end; SGLang leaves it out, and masked experts of other
    ranks serve as well.
    """
    if layer.global_experts is None:
        return None
    mask = torch.zeros(layer.global_experts, dtype=torch.int32)
    mask[layer.first_expert : layer.first_expert + layer.shape.experts] = 1
    return mask


def oracle_output(
    layer: Layer,
    experts: RawExperts,
    batch: Batch,
    mode: str | None,
    requantization: str,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The layer's output by the oracle: float64 or (above FLOAT64_TOKENS) float32 `[M, H]`, on the CPU.

    Args:
        layer: activation, limit and constants.
        experts: raw checkpoint tensors, without padding.
        batch: tokens and routing.
        mode: which activation quantisation to apply; None for none.
        requantization: the rule between the stages.
        progress: see `routed_moe`.
        device: where the oracle computes; a large layer takes minutes on a CPU.
    """
    tokens = batch.hidden_states.shape[0]
    mask = expert_mask(layer)
    output = routed_moe(
        batch.hidden_states.to(device),
        experts,
        batch.topk_ids.to(device),
        batch.topk_weights.to(device),
        activation=layer.activation,
        mode=mode,
        dtype=torch.float64 if tokens <= FLOAT64_TOKENS else torch.float32,
        limit=layer.limit,
        beta=layer.beta,
        linear_beta=layer.linear_beta,
        expert_mask=None if mask is None else mask.to(device),
        requantization=requantization,
        progress=progress,
    )
    return output.cpu()
