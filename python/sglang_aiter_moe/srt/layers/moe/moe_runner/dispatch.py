"""From what the dispatchers deliver to the runner's input, one way for all formats.

The three formats of ``sglang.srt.layers.moe.token_dispatcher``: standard carries ``topk_output``;
DeepEP normal and low-latency carry ``topk_ids`` and ``topk_weights`` themselves. The tuples here stand
in for SGLang's where SGLang is not installed; only attributes are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterMoeQuantInfo, AiterRunnerInput


class StandardTopKOutput(NamedTuple):
    """Routing: float ``[M, K]`` weights, integer ``[M, K]`` ids, and what they were chosen from."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None = None


class StandardDispatchOutput(NamedTuple):
    """Tokens that stayed on their rank: ``[M, H]`` and their routing over all experts."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: StandardTopKOutput


class DeepEPNormalDispatchOutput(NamedTuple):
    """Received tokens ``[M, H]``; ids are local, -1 where an expert is not here."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: list[int]


class DeepEPLLDispatchOutput(NamedTuple):
    """As DeepEP normal, with a fixed number of rows of which ``masked_m`` are in use."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int


def runner_input_from(
    dispatch_output: Any, quant_info: AiterMoeQuantInfo, config: Any
) -> AiterRunnerInput:
    """The runner's input of any dispatch format.

    Args:
        dispatch_output: one of the tuples above, or SGLang's.
        quant_info: the layer's weights.
        config: the runner's configuration.

    Raises:
        ContractError: ``hidden_states`` is not ``[M, H]``, comes with a scale, or the routing weight
            goes on the input with more than one expert a token.
    """
    hidden_states = dispatch_output.hidden_states
    routing = getattr(dispatch_output, "topk_output", dispatch_output)
    topk_ids, topk_weights = routing.topk_ids, routing.topk_weights
    _check(dispatch_output, topk_ids)
    topk_weights = topk_weights.to(torch.float32)
    if config.apply_router_weight_on_input and not quant_info.doweight_stage1:
        if topk_ids.shape[-1] != 1:
            raise ContractError(
                f"apply_router_weight_on_input with top-{topk_ids.shape[-1]} routing",
                allowed="top-1: one weight for a token's input",
                fix="route to one expert, or weight the output",
            )
        hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
        topk_weights = torch.ones_like(topk_weights)
    return AiterRunnerInput(
        hidden_states=hidden_states,
        topk_ids=topk_ids.to(torch.int32),
        topk_weights=topk_weights,
        quant_type=quant_info.quant_type,
    )


def _check(dispatch_output: Any, topk_ids: torch.Tensor) -> None:
    hidden_states = dispatch_output.hidden_states
    if (
        hidden_states.dim() != 2
        or topk_ids.dim() != 2
        or hidden_states.shape[0] != topk_ids.shape[0]
    ):
        raise ContractError(
            f"hidden_states is {tuple(hidden_states.shape)}, topk_ids {tuple(topk_ids.shape)}",
            allowed="[M, H] and [M, K] with the same M",
            fix="flatten the expert dimension of the dispatch output before the runner",
        )
    if dispatch_output.hidden_states_scale is not None:
        raise ContractError(
            f"hidden_states_scale is {tuple(dispatch_output.hidden_states_scale.shape)}: the "
            "dispatcher has quantised the tokens",
            allowed="bf16 tokens: AITER quantises them itself",
            fix="switch the dispatcher's quantisation off (SGLANG_DEEPEP_BF16_DISPATCH=1)",
        )
