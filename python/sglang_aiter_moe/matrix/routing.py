"""Who chooses a cell's experts: nobody (they are given), or SGLang's own ``TopK``, with or without a correction bias.

Expected choices and weights are float64's, from the logits and the bias as the checkpoint has them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from sglang_aiter_moe.matrix.cells import BIAS_UPDATE, Cell
from sglang_aiter_moe.matrix.layer import EXPERTS, NEW_SEED, TOPK, batch

#: In a checkpoint, and in the model.
BIAS_NAME = "model.layers.0.mlp.gate.e_score_correction_bias"


@dataclass(frozen=True)
class Routing:
    """Attributes:
    logits: dtype of the router's output.
    bias: dtype of the correction bias; None: softmax routing, which has none.
    """

    logits: torch.dtype
    bias: torch.dtype | None


#: By a value of ``cells.ROUTINGS``. Kimi K3 has the last, DeepSeek-V3's relatives have the one before.
ROUTINGS = {
    "softmax": Routing(torch.bfloat16, None),
    "bf16 bias": Routing(torch.bfloat16, torch.bfloat16),
    "bf16 bias, fp32 logits": Routing(torch.float32, torch.bfloat16),
    "fp32 bias": Routing(torch.bfloat16, torch.float32),
    "fp32 bias and logits": Routing(torch.float32, torch.float32),
}


def has_bias(cell: Cell) -> bool:
    return cell.routing in ROUTINGS and ROUTINGS[cell.routing].bias is not None


def bias_seed(cell: Cell) -> int:
    """Which correction bias has to be in force at the call."""
    return NEW_SEED if cell.update == BIAS_UPDATE or cell.update.startswith("update") else 5


def correction_bias(routing: str, seed: int = 5) -> torch.Tensor:
    """``[E]`` around 7, where bf16 has steps of 2^-5: less than what tells experts apart."""
    generator = torch.Generator().manual_seed(seed)
    bias = 6.8 + 0.26 * torch.rand(EXPERTS, generator=generator)
    return bias.to(ROUTINGS[routing].bias)


def router_logits(routing: str, tokens: int) -> torch.Tensor:
    """``[M, E]``."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(tokens, EXPERTS, generator=generator).to(ROUTINGS[routing].logits)


def make_topk(cell: Cell, bias: torch.Tensor | None) -> Any:
    """SGLang's ``TopK`` as a model makes it."""
    from sglang.srt.layers.moe.topk import TopK

    if bias is None:
        return TopK(top_k=TOPK, layer_id=0, renormalize=True)
    return TopK(
        top_k=TOPK,
        layer_id=0,
        use_grouped_topk=True,
        num_expert_group=1,
        topk_group=1,
        renormalize=True,
        scoring_func="sigmoid",
        correction_bias=bias,
    )


def route(cell: Cell, topk: Any, hidden_states: torch.Tensor) -> Any:
    """SGLang's ``select_experts`` for the cell's tokens."""
    from sglang.srt.layers.moe import topk as module

    logits = router_logits(cell.routing, cell.tokens)
    return module.select_experts(hidden_states, logits, topk.topk_config)


@functools.cache
def expected(routing: str, seed: int, rows: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ids and weights ``[M, K]`` that the experts have to be called with.

    Args:
        seed: of the correction bias (:func:`bias_seed`).
    """
    if routing == "given":
        return batch(rows, tokens)[1:]
    logits = router_logits(routing, tokens).double()
    if ROUTINGS[routing].bias is None:
        scores = choice = logits.softmax(dim=1)
    else:
        scores = logits.sigmoid()
        choice = scores + correction_bias(routing, seed).double()
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :TOPK]
    weights = scores.gather(1, ids)
    return ids.to(torch.int32), weights / weights.sum(dim=1, keepdim=True)


def difference(cell: Cell, ids: torch.Tensor) -> str:
    """How chosen experts ``[M, K]`` differ from float64's: "", "routing", or "old routing".

    The last where more rows have the choice that the correction bias of the load gives.
    """
    new, old = (
        _rows_that_differ(ids, expected(cell.routing, seed, cell.rows, cell.tokens)[0])
        for seed in (bias_seed(cell), 5)
    )
    if new == 0:
        return ""
    return "old routing" if old < new else "routing"


def _rows_that_differ(ids: torch.Tensor, want: torch.Tensor) -> int:
    return int((ids.sort(dim=1).values != want.sort(dim=1).values).any(dim=1).sum())
