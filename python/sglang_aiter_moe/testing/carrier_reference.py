"""A float32 forward of the carrier checkpoints in plain torch: what the server has to agree with.

Reads the checkpoint file itself. Shares with the served model the oracle's number formats and nothing
else: no SGLang, no plan, no layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_aiter_moe.numerics.activations import apply_gate_up
from sglang_aiter_moe.numerics.oracle import RawExperts, routed_moe


@dataclass(frozen=True)
class Generation:
    """Greedy continuation of a prompt.

    Attributes:
        tokens: the chosen ids.
        logprobs: natural logarithm of each one's probability.
        margin: smallest distance, over all steps, from the best to the second logit.
        routing_margin: smallest distance, over all tokens and layers, from the last chosen expert's
            score to the first not chosen.
    """

    tokens: list[int]
    logprobs: list[float]
    margin: float
    routing_margin: float


class CarrierReference:
    """One checkpoint, in float32.

    Args:
        path: the checkpoint directory.
        mode: activation quantisation inside the experts: None, "A16W4", "A8W4" or "A4W4".
    """

    def __init__(self, path: Path | str, mode: str | None = None) -> None:
        self.config = json.loads((Path(path) / "config.json").read_text())
        self.weights = load_file(Path(path) / "model.safetensors")
        self.mode = mode
        self.kimi = self.config["carrier_block"] == "kimi_k3"
        layers = range(self.config["num_hidden_layers"])
        self.experts = [
            self._kimi_experts(i) if self.kimi else self._gpt_oss_experts(i) for i in layers
        ]
        self.routing_margin = float("inf")

    def _get(self, name: str) -> torch.Tensor:
        return self.weights[name].float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._get(f"{name}.weight").T

    def _kimi_experts(self, layer: int) -> RawExperts:
        prefix = f"model.layers.{layer}.mlp.experts"
        count = self.config["num_experts"]

        def stack(proj: str, part: str) -> torch.Tensor:
            return torch.stack([self.weights[f"{prefix}.{e}.{proj}.{part}"] for e in range(count)])

        return RawExperts(
            w13=torch.cat([stack("w1", "weight_packed"), stack("w3", "weight_packed")], dim=1),
            w13_scale=torch.cat([stack("w1", "weight_scale"), stack("w3", "weight_scale")], dim=1),
            w2=stack("w2", "weight_packed"),
            w2_scale=stack("w2", "weight_scale"),
        )

    def _gpt_oss_experts(self, layer: int) -> RawExperts:
        prefix = f"model.layers.{layer}.mlp.experts"
        get = self.weights.__getitem__
        return RawExperts(
            w13=get(f"{prefix}.gate_up_proj_blocks").flatten(-2),
            w13_scale=get(f"{prefix}.gate_up_proj_scales"),
            w2=get(f"{prefix}.down_proj_blocks").flatten(-2),
            w2_scale=get(f"{prefix}.down_proj_scales"),
            b13=self._get(f"{prefix}.gate_up_proj_bias"),
            b2=self._get(f"{prefix}.down_proj_bias"),
            gate_up_interleaved=True,
        )

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits ``[len(tokens), vocab]`` of every position."""
        x = self._get("model.embed_tokens.weight")[tokens]
        if self.config.get("learned_positions"):
            x = x + self._get("model.embed_positions.weight")[: len(tokens)]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), prefix)
            normed = self._norm(x, f"{prefix}.post_attention_layernorm")
            x = x + (self._kimi_mlp if self.kimi else self._gpt_oss_mlp)(normed, layer)
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self._get(f"{name}.weight")

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        q, k, v = (
            (x @ self._get(f"{prefix}.self_attn.{n}_proj.weight").T)
            .view(-1, heads, dim)
            .transpose(0, 1)
            for n in "qkv"
        )
        scores = q @ k.transpose(1, 2) * dim**-0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        mixed = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v
        merged = mixed.transpose(0, 1).reshape(x.shape[0], heads * dim)
        return self._linear(merged, f"{prefix}.self_attn.o_proj")

    def _choose(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        best = scores.topk(topk + 1, dim=-1)
        gap = (best.values[:, topk - 1] - best.values[:, topk]).min().item()
        self.routing_margin = min(self.routing_margin, gap)
        return best.indices[:, :topk]

    def _kimi_mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        prefix, config = f"model.layers.{layer}.mlp", self.config
        scores = torch.sigmoid(self._linear(x, f"{prefix}.gate"))
        bias = self.weights[f"{prefix}.gate.e_score_correction_bias"]
        ids = self._choose(scores + bias, config["num_experts_per_token"])
        weights = scores.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        routed = self._routed(
            self._linear(x, f"{prefix}.routed_expert_down_proj"),
            layer,
            ids,
            weights,
            activation="situv2",
            beta=config["activation_situ_beta"],
            linear_beta=config["activation_situ_linear_beta"],
        )
        routed = self._norm(routed, f"{prefix}.routed_expert_norm")
        return routed @ self._get(f"{prefix}.routed_expert_up_proj.weight").T + self._shared(
            x, prefix
        )

    def _shared(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = (self._linear(x, f"{prefix}.shared_experts.{n}_proj") for n in ("gate", "up"))
        y = apply_gate_up(
            "situv2",
            gate,
            up,
            beta=self.config["activation_situ_beta"],
            linear_beta=self.config["activation_situ_linear_beta"],
        )
        return self._linear(y, f"{prefix}.shared_experts.down_proj")

    def _gpt_oss_mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        prefix = f"model.layers.{layer}.mlp"
        logits = x @ self._get(f"{prefix}.router.weight").T + self._get(f"{prefix}.router.bias")
        ids = self._choose(logits, self.config["num_experts_per_tok"])
        weights = logits.gather(-1, ids).softmax(-1)
        limit = self.config["swiglu_limit"]
        return self._routed(x, layer, ids, weights, activation="swiglu", limit=limit)

    def _routed(self, x, layer, ids, weights, **activation) -> torch.Tensor:
        # The experts' input is bf16 in every engine: the formats of the modes start from there.
        x = x.bfloat16().float() if self.mode else x
        return routed_moe(
            x,
            self.experts[layer],
            ids,
            weights,
            mode=self.mode,
            dtype=torch.float32,
            # No tuned row has these sizes: AITER requantises from bf16 (docs/contract.md section d).
            requantization="roundup",
            **activation,
        )

    def generate(self, prompt: list[int], count: int) -> Generation:
        """Continues ``prompt`` greedily by ``count`` tokens, recomputing everything at each step."""
        self.routing_margin = margin = float("inf")
        tokens, logprobs = list(prompt), []
        for _ in range(count):
            last = self.logits(tokens)[-1]
            best = last.topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            logprobs.append(last.log_softmax(-1)[best.indices[0]].item())
            tokens.append(int(best.indices[0]))
        return Generation(tokens[len(prompt) :], logprobs, margin, self.routing_margin)

    def score(self, prompt: list[int], continuation: list[int]) -> list[float]:
        """Logprobs of a given continuation."""
        logprobs = self.logits(prompt + continuation).log_softmax(-1)
        start = len(prompt) - 1
        return [logprobs[start + i, token].item() for i, token in enumerate(continuation)]


#: Token margin that an engine's rounding cannot turn. Activation quantisation amplifies bf16 noise: a value
#: near the border of two codes may take either.
CLEAR_MARGIN = {None: 0.2, "A16W4": 0.2, "A8W4": 0.4, "A4W4": 0.4}
CLEAR_ROUTING = 0.004


def clear_prompts(
    reference: CarrierReference, count: int, steps: int, *, length: int = 6, tries: int = 800
) -> list[list[int]]:
    """Prompts whose continuation the reference does not find close: rounding cannot turn it.

    Chosen by the reference alone, from a fixed sequence of random prompts.
    """
    generator = torch.Generator().manual_seed(7)
    found: list[list[int]] = []
    for _ in range(tries):
        prompt = torch.randint(2, reference.config["vocab_size"], (length,), generator=generator)
        if _is_clear(reference, prompt.tolist(), 1) and _is_clear(
            reference, prompt.tolist(), steps
        ):
            found.append(prompt.tolist())
            if len(found) == count:
                return found
    raise RuntimeError(f"only {len(found)} clear prompts in {tries} tries; loosen the margins")


def _is_clear(reference: CarrierReference, prompt: list[int], steps: int) -> bool:
    run = reference.generate(prompt, steps)
    return run.margin > CLEAR_MARGIN[reference.mode] and run.routing_margin > CLEAR_ROUTING
