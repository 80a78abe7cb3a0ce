"""The layer of a cell: its sizes, its checkpoint tensors, the tokens, and a rank's share of all of it.

Two formats, as in ``testing/checkpoints.py``: Kimi K3's (one tensor for each expert and projection) for rows in
halves, gpt-oss's (one tensor for all experts) for interleaved rows. Sizes are small stand-ins with the same
remainders: K3's 384 columns of a TP8 rank fill 128 but not 256, gpt-oss's 2880 are 90 blocks that 4 and 8 ranks
do not divide and 192 columns short of 3072.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.numerics.oracle import RawExperts

EXPERTS, TOPK = 4, 2
#: (hidden, intermediate) of the whole layer.
SIZES = {"halves": (256, 1024), "interleaved": (320, 480)}
BLOCK = 32
PREFIX = "model.layers.0.mlp.experts"


@dataclass(frozen=True)
class Activation:
    """What SGLang's FusedMoE is told, and what the oracle computes.

    Attributes:
        fused_moe: arguments of SGLang's ``FusedMoE``.
        oracle: arguments of ``numerics.oracle.routed_moe``.
    """

    fused_moe: dict
    oracle: dict


#: As Kimi K3, gpt-oss and DeepSeek-V4 state them. SwiGLU without a stated limit clamps at 7, as gpt-oss does.
ACTIVATIONS = {
    "situv2": Activation(
        {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0},
        {"activation": "situv2", "beta": 4.0, "linear_beta": 25.0},
    ),
    "swiglu": Activation(
        {"activation": "silu", "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
        {"activation": "swiglu", "limit": 7.0},
    ),
    "swiglu_unclamped": Activation(
        {"activation": "silu", "gemm1_alpha": 1.702}, {"activation": "swiglu", "limit": 7.0}
    ),
    "swiglu_limit3": Activation(
        {"activation": "silu", "gemm1_alpha": 1.702, "gemm1_clamp_limit": 3.0},
        {"activation": "swiglu", "limit": 3.0},
    ),
    "silu": Activation({"activation": "silu"}, {"activation": "silu"}),
    "silu_limit2": Activation(
        {"activation": "silu", "swiglu_limit": 2.0}, {"activation": "silu", "limit": 2.0}
    ),
    "gelu": Activation({"activation": "gelu"}, {"activation": "gelu"}),
}


@dataclass(frozen=True)
class Rank:
    """One rank's place: tensor or expert parallel, how many, which."""

    kind: str
    size: int
    rank: int

    @classmethod
    def of(cls, parallel: str) -> Rank:
        """From a name of ``cells.PARALLEL``."""
        size, _, rank = parallel[2:].partition("r")
        return cls(parallel[:2], int(size), int(rank or 0))

    @property
    def overrides(self) -> dict[str, int]:
        """Fields of SGLang's parallel context that MoE layers and their loaders read."""
        others = {"moe_tp_size": 1, "moe_tp_rank": 0, "moe_ep_size": 1, "moe_ep_rank": 0}
        names = {f"moe_{self.kind}_size": self.size, f"moe_{self.kind}_rank": self.rank}
        return others | names


@functools.cache
def whole(rows: str, bias: bool, seed: int = 5) -> RawExperts:
    """All experts of the layer, gate half first whatever ``rows``.

    Gates have a standard deviation near 4: every limit, beta and sign of the activations takes part.
    """
    hidden, inter = SIZES[rows]
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    def normal(*shape: int) -> torch.Tensor:
        return (3 * torch.randn(shape, generator=generator)).bfloat16()

    return RawExperts(
        w13=draw(0, 256, EXPERTS, 2 * inter, hidden // 2),
        w13_scale=draw(122, 125, EXPERTS, 2 * inter, hidden // BLOCK),
        w2=draw(0, 256, EXPERTS, hidden, inter // 2),
        w2_scale=draw(121, 124, EXPERTS, hidden, inter // BLOCK),
        b13=normal(EXPERTS, 2 * inter) if bias else None,
        b2=normal(EXPERTS, hidden) if bias else None,
    )


def columns(rows: str, rank: Rank) -> slice:
    """Which intermediate columns of the whole layer a rank holds.

    gpt-oss's loader divides whole MX blocks, rounded up, so that the last rank has fewer (sglang#27201).
    """
    inter = SIZES[rows][1]
    if rank.kind == "ep":
        return slice(0, inter)
    each = (
        -(-(inter // BLOCK) // rank.size) * BLOCK if rows == "interleaved" else inter // rank.size
    )
    return slice(min(rank.rank * each, inter), min((rank.rank + 1) * each, inter))


def share(raw: RawExperts, rows: str, rank: Rank) -> RawExperts:
    """A rank's experts, gate half first."""
    part = columns(rows, rank)
    inter = raw.intermediate_size
    first, last = 0, EXPERTS
    if rank.kind == "ep":
        each = EXPERTS // rank.size
        first, last = rank.rank * each, (rank.rank + 1) * each
    own = slice(first, last)

    def both(tensor: torch.Tensor) -> torch.Tensor:
        gate, up = tensor[own, :inter], tensor[own, inter:]
        return torch.cat((gate[:, part], up[:, part]), dim=1)

    b2 = None
    if raw.b2 is not None:
        b2 = raw.b2[own]
        if rank.kind == "tp" and rank.rank:
            b2 = torch.zeros_like(b2)  # the sum over ranks has to hold it once
    return RawExperts(
        w13=both(raw.w13),
        w13_scale=both(raw.w13_scale),
        w2=raw.w2[own, :, part.start // 2 : part.stop // 2],
        w2_scale=raw.w2_scale[own, :, part.start // BLOCK : part.stop // BLOCK],
        b13=None if raw.b13 is None else both(raw.b13),
        b2=b2,
    )


def checkpoint(raw: RawExperts, rows: str) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of the whole layer, as its format stores them."""
    if rows == "halves":
        return _by_expert(raw)
    hidden, inter = raw.hidden_size, raw.intermediate_size
    tensors = {
        "gate_up_proj_blocks": _mixed(raw.w13).view(EXPERTS, 2 * inter, hidden // BLOCK, 16),
        "gate_up_proj_scales": _mixed(raw.w13_scale),
        "down_proj_blocks": raw.w2.view(EXPERTS, hidden, inter // BLOCK, 16),
        "down_proj_scales": raw.w2_scale,
    }
    if raw.b13 is not None:
        tensors |= {"gate_up_proj_bias": _mixed(raw.b13), "down_proj_bias": raw.b2}
    return [(f"{PREFIX}.{name}", tensor.clone()) for name, tensor in tensors.items()]


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    """``[E, 2I, ...]``: g0, u0, g1, u1, ..."""
    gate, up = tensor.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def _by_expert(raw: RawExperts) -> list[tuple[str, torch.Tensor]]:
    inter, found = raw.intermediate_size, []
    for expert in range(EXPERTS):
        for suffix, w13, w2 in (("", raw.w13, raw.w2), ("_scale", raw.w13_scale, raw.w2_scale)):
            parts = {"w1": w13[expert, :inter], "w3": w13[expert, inter:], "w2": w2[expert]}
            found += [
                (f"{PREFIX}.{expert}.{shard}.weight{suffix}", tensor.clone())
                for shard, tensor in parts.items()
            ]
    return found


@functools.cache
def batch(rows: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 tokens ``[M, H]``, int32 ids ``[M, K]`` of global experts, float32 weights ``[M, K]``."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(tokens, SIZES[rows][0], generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)])
    return x, ids.to(torch.int32), torch.rand(tokens, TOPK, generator=generator) + 0.25


def expert_mask(rank: Rank) -> torch.Tensor | None:
    """``[E]`` int32: 1 for this rank's experts; None without expert parallelism."""
    if rank.kind != "ep":
        return None
    mask = torch.zeros(EXPERTS, dtype=torch.int32)
    each = EXPERTS // rank.size
    mask[rank.rank * each : (rank.rank + 1) * each] = 1
    return mask


def broken(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The same checkpoint with half of the last tensor's last dimension."""
    name, tensor = tensors[-1]
    return [*tensors[:-1], (name, tensor[..., : tensor.shape[-1] // 2].contiguous())]


#: What an update after the load brings.
NEW_SEED = 17


def weights_seed(cell: Cell) -> int:
    """Which weights the layer has to have when it is called: a broken update leaves the old ones."""
    return NEW_SEED if cell.update.startswith("update") else 5
