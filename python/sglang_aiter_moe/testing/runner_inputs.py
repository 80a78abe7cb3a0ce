"""What tests of the runner call it with: a small layer's tensors, its tokens and their routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_aiter_moe.contract import Capabilities, MoePlan, MoeSpec, Target, plan_moe
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import (
    AiterMoeQuantInfo,
    AiterQuantType,
    AiterRunnerCore,
    AiterRunnerInput,
)
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig

EXPERTS, HIDDEN, INTER, TOKENS, TOPK = 4, 256, 128, 3, 2


def make_input(
    tokens: int = TOKENS, quant_type: AiterQuantType = AiterQuantType.PER_1X32, **fields: Any
) -> AiterRunnerInput:
    """Tokens that all differ, each routed to expert 0 twice; ``fields`` in their place."""
    values = {
        "hidden_states": torch.arange(tokens * HIDDEN, dtype=torch.float32)
        .view(tokens, HIDDEN)
        .bfloat16(),
        "topk_ids": torch.zeros(tokens, TOPK, dtype=torch.int32),
        "topk_weights": torch.full((tokens, TOPK), 0.5),
        "quant_type": quant_type,
    }
    return AiterRunnerInput(**{**values, **fields})


def make_info(
    quant_type: AiterQuantType = AiterQuantType.PER_1X32, **fields: Any
) -> AiterMoeQuantInfo:
    """Weights of zeros; ``fields`` in their place."""
    values = {
        "w13_weight": torch.zeros(EXPERTS, 2 * INTER, HIDDEN // 2, dtype=torch.uint8),
        "w2_weight": torch.zeros(EXPERTS, HIDDEN, INTER // 2, dtype=torch.uint8),
        "quant_type": quant_type,
    }
    return AiterMoeQuantInfo(**{**values, **fields})


def make_plan(
    activation: str = "situv2", env: Mapping[str, str] | None = None, **spec: Any
) -> MoePlan:
    """The plan of that layer on gfx950; SiTUv2 with K3's constants."""
    if activation == "situv2":
        spec = {"beta": 4.0, "linear_beta": 25.0, **spec}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, **spec}
    made = MoeSpec(activation, EXPERTS, TOPK, **sizes)
    return plan_moe(made, Target("gfx950", Capabilities.for_release("0.1.20"), env or {}))


def run(
    config: Any = None,
    runner_input: AiterRunnerInput | None = None,
    info: AiterMoeQuantInfo | None = None,
    state: dict | None = None,
) -> torch.Tensor:
    """One call of a new runner."""
    core = AiterRunnerCore(config or MoeRunnerConfig())
    return core.run(runner_input or make_input(), info or make_info(), state or {}).hidden_states


def buffer(width: int = HIDDEN, tokens: int = TOKENS) -> torch.Tensor:
    """An output of NaN."""
    return torch.full((tokens, width), float("nan"), dtype=torch.bfloat16)
