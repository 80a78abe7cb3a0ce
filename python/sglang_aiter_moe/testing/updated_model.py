"""A model of one layer that is laid out, as SGLang's ``WeightUpdater`` has it, and what is sent to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.expert_files import PREFIX, expert_tensors
from sglang_aiter_moe.testing.loaded_layers import (
    load,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
)
from sglang_aiter_moe.testing.raw_layers import make_raw_layer

SPEC = plans.situv2(4, 2, 256, 128)
PLAN = plans.plan(SPEC)
NAME = PREFIX.format(0)
GATE = "model.layers.0.mlp.gate.weight"


class Updater:
    """One layer at ``model.layers.0.mlp.experts``; ``get_model`` as SGLang's updater has it."""

    def __init__(self) -> None:
        self.experts = loaded_layer(PLAN, random_raw(SPEC, 1))
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.model.layers[0].mlp = torch.nn.Module()
        self.model.layers[0].mlp.experts = self.experts
        self.model.layers[0].mlp.gate = torch.nn.Linear(2, 2, bias=False)
        self.model.layers[0].mlp.register_buffer("bias", torch.ones(2))
        self.before = packed_bytes(self.experts)

        self.whole = torch.nn.Module()
        self.whole.model = self.model

    def get_model(self) -> torch.nn.Module:
        return self.whole

    @property
    def gate(self) -> torch.Tensor:
        return self.model.layers[0].mlp.gate.weight

    @property
    def unchanged(self) -> bool:
        """Whether the experts are as they were at first."""
        return same(packed_bytes(self.experts), self.before)


def never(*_: Any, **__: Any) -> NoReturn:
    """SGLang's method where it must not be reached."""
    raise AssertionError("it was called")


def sent(seed: int = 2, kind: str = "compressed_tensors") -> list[tuple[str, torch.Tensor]]:
    """New tensors of all experts by the names of a format."""
    experts = make_raw_layer(SPEC, 1, seed=seed).experts
    return list(expert_tensors(experts, kind, NAME).items())


def half_way(
    updater: Updater, *, success: bool = False, experts: bool = False
) -> Callable[..., tuple[bool, str]]:
    """SGLang's method: writes the router and its buffer, then fails."""

    def run(*_: Any) -> tuple[bool, str]:
        updater.gate.data.fill_(7)
        updater.model.layers[0].mlp.bias.fill_(7)
        if experts:
            load(updater.experts, random_raw(SPEC, 2), [0])
        return success, "connection lost"

    return run
