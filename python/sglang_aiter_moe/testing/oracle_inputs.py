"""What tests of the oracle call it with: raw experts of random bytes, tokens and their routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_aiter_moe.numerics import RawExperts, routed_moe

E, H, I, M, K = 5, 96, 64, 7, 3


def make_experts(
    seed: int = 0, experts: int = E, hidden: int = H, inter: int = I, bias: bool = False
) -> RawExperts:
    """Any packed bytes, scales of 2**-7 to 2**-3, biases of a normal distribution."""
    rng = np.random.default_rng(seed)

    def draw(low, high, *shape):
        return torch.from_numpy(rng.integers(low, high, shape, dtype=np.uint8))

    biases = {}
    if bias:
        biases = {
            "b13": torch.from_numpy(rng.standard_normal((experts, 2 * inter), dtype=np.float32)),
            "b2": torch.from_numpy(rng.standard_normal((experts, hidden), dtype=np.float32)),
        }
    return RawExperts(
        draw(0, 256, experts, 2 * inter, hidden // 2),
        draw(120, 125, experts, 2 * inter, hidden // 32),
        draw(0, 256, experts, hidden, inter // 2),
        draw(120, 125, experts, hidden, inter // 32),
        **biases,
    )


def make_tokens(
    seed: int = 1, tokens: int = M, hidden: int = H
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 ``[tokens, hidden]``, K different experts for each (int32), and their float32 weights."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((tokens, hidden), dtype=np.float32)).bfloat16()
    ids = np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
    weights = torch.from_numpy(rng.random((tokens, K), dtype=np.float32))
    return x, torch.from_numpy(ids), weights


X, IDS, WEIGHTS = make_tokens()
RAW = make_experts()
BIASED = make_experts(bias=True)


def interleaved(experts: RawExperts) -> RawExperts:
    """The same experts with rows g0, u0, g1, u1, ..."""
    inter = experts.intermediate_size
    order = [half * inter + i for i in range(inter) for half in (0, 1)]
    pick = {n: getattr(experts, n)[:, order] for n in ("w13", "w13_scale")}
    if experts.b13 is not None:
        pick["b13"] = experts.b13[:, order]
    return replace(experts, gate_up_interleaved=True, **pick)


def run(
    experts: RawExperts = RAW,
    x: torch.Tensor = X,
    ids: torch.Tensor = IDS,
    weights: torch.Tensor = WEIGHTS,
    **kwargs: Any,
) -> torch.Tensor:
    """The oracle's output; a SiTUv2 layer unless ``kwargs`` say another."""
    return routed_moe(x, experts, ids, weights, **({"activation": "situv2"} | kwargs))
