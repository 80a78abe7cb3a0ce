"""The miniature in plain torch: what is trained, and what a checkpoint is scored with outside of SGLang.

The same model as ``testing/carrier`` builds from SGLang's own blocks, with the same parameter names. What computes
the experts is given (``experts.py``), everything else is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sglang_aiter_moe.miniature import task
from sglang_aiter_moe.numerics.activations import apply_gate_up

BETA, LINEAR_BETA, LIMIT = 4.0, 25.0, 7.0
EPS = 1e-6
ROUTED_SCALE = 1.5
#: Kimi-K3-like correction biases are large numbers that differ by little: bfloat16 cannot tell them apart.
BIAS_CENTRE = 7.0


@dataclass(frozen=True)
class Shape:
    """Sizes. ``latent``: the width that the experts work in; gpt-oss has none of its own."""

    block: str
    hidden: int = 192
    latent: int = 256
    inter: int = 128
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    experts: int = 32
    topk: int = 8
    vocab: int = 160
    length: int = 64

    @property
    def kimi(self) -> bool:
        return self.block == "kimi_k3"


#: Latent 256 and inter 128 are the smallest that AITER's A16W4 SiTUv2 kernel takes (docs/contract.md section a).
KIMI = Shape("kimi_k3")
#: 192 is padded to 256 in both dimensions, as gpt-oss's 2880 is to 3072.
GPT_OSS = Shape("gpt_oss", latent=192, inter=192, topk=4)
SHAPES = {"kimi": KIMI, "gpt_oss": GPT_OSS}

#: (x [T, H], ids [T, K], weights [T, K], layer) -> [T, H]
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


def _weight(rows: int, cols: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, cols) * gain * cols**-0.5)


class Linear(nn.Module):
    """``x @ weight.T`` (+ bias), computed in the dtype of ``x``."""

    def __init__(self, rows: int, cols: int, gain: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.weight = _weight(rows, cols, gain)
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


class Norm(nn.Module):
    """RMSNorm in float32, returned in the dtype of ``x``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
        return (y * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Causal softmax attention, every head with its own keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.heads * shape.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, Linear(width, shape.hidden))
        self.o_proj = Linear(shape.hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SharedExperts(nn.Module):
    """Kimi K3's shared expert: SiTUv2 on the residual stream's width, never quantised."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.inter, shape.hidden)
        self.up_proj = Linear(shape.inter, shape.hidden)
        self.down_proj = Linear(shape.hidden, shape.inter, gain=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = apply_gate_up(
            "situv2", self.gate_proj(x), self.up_proj(x), beta=BETA, linear_beta=LINEAR_BETA
        )
        return self.down_proj(y)


class Gate(nn.Module):
    """Sigmoid scores and their correction bias: the bias chooses, the scores weigh."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = _weight(shape.experts, shape.hidden)
        self.register_buffer("e_score_correction_bias", torch.full((shape.experts,), BIAS_CENTRE))


class KimiBlock(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.topk, self.layer = shape.topk, layer
        self.gate = Gate(shape)
        self.shared_experts = SharedExperts(shape)
        self.routed_expert_down_proj = Linear(shape.latent, shape.hidden)
        self.routed_expert_norm = Norm(shape.latent)
        self.routed_expert_up_proj = Linear(shape.hidden, shape.latent, gain=0.5)
        self.last_ids: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        scores = torch.sigmoid(x.float() @ self.gate.weight.to(x.dtype).float().T)
        ids = (scores.detach() + self.gate.e_score_correction_bias).topk(self.topk, dim=-1).indices
        weights = scores.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True) * ROUTED_SCALE
        self.last_ids = ids
        routed = experts(self.routed_expert_down_proj(x), ids, weights, self.layer)
        return self.routed_expert_up_proj(self.routed_expert_norm(routed)) + self.shared_experts(x)


class GptOssBlock(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.topk, self.layer = shape.topk, layer
        self.router = Linear(shape.experts, shape.hidden, bias=True)
        self.last_ids: torch.Tensor | None = None
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        logits = self.router(x).float()
        best = logits.topk(self.topk, dim=-1)
        self.last_ids = best.indices
        if self.training:
            # gpt-oss has no correction bias: training holds the load even with a loss instead (Switch Transformer's).
            share = torch.zeros_like(logits).scatter_(-1, best.indices, 1.0).mean(0) / self.topk
            self.balance = (share * logits.softmax(-1).mean(0)).sum() * logits.shape[-1]
        return experts(x, best.indices, best.values.softmax(-1), self.layer)


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = (KimiBlock if shape.kimi else GptOssBlock)(shape, layer)

    def forward(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x).flatten(0, 1)
        return x + self.mlp(y, experts).view(x.shape)


class Stack(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.embed_positions = nn.Embedding(shape.length, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.layers))
        self.norm = Norm(shape.hidden)


class Miniature(nn.Module):
    """Everything but the experts.

    Args:
        shape: of :data:`SHAPES`.
        dtype: of activations: bfloat16 as an engine has them, or float32.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        assert len(task.WORDS) <= shape.vocab and shape.length >= task.LENGTH
        self.shape, self.dtype = shape, dtype
        self.model = Stack(shape)
        self.lm_head = Linear(shape.vocab, shape.hidden)

    def forward(self, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Logits ``[N, L, vocab]`` of token ids ``[N, L]``, float32."""
        model = self.model
        x = (model.embed_tokens.weight[ids] + model.embed_positions.weight[: ids.shape[1]]).to(
            self.dtype
        )
        for layer in model.layers:
            x = layer(x, experts)
        return self.lm_head(model.norm(x)).float()

    def blocks(self) -> list[nn.Module]:
        """The MoE blocks, by layer."""
        return [layer.mlp for layer in self.model.layers]
