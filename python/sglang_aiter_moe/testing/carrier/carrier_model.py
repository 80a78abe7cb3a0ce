"""A language model small enough for a CPU, whose MoE layers are SGLang's own.

SGLang's Kimi-K3 and gpt-oss models need attention kernels that only run on a GPU. The MoE blocks do not:
here they sit in a plain softmax-attention shell. The block is ``KimiK3MoE`` (SiTUv2, biased grouped top-k,
latent experts, shared expert) or ``GptOssSparseMoeBlock`` (SwiGLU-OAI, biases), and the experts are
loaded by the loaders of those models, from the tensors names of their checkpoints.

Attention has no positional encoding: a reference needs no rotary tables to follow it. A config with
``learned_positions`` adds a learned vector for each position to the embedding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce

# From 0.5.21 on the package does not export it.
from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_world_size
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn


class CarrierAttention(nn.Module):
    """Causal softmax attention, every head with its own keys and values."""

    def __init__(self, config, layer_id: int) -> None:
        super().__init__()
        self.local_heads = config.num_attention_heads // get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_attention_heads,
            bias=False,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )
        self.attn = RadixAttention(
            self.local_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.local_heads,
            layer_id=layer_id,
        )

    def forward(self, hidden_states: torch.Tensor, forward_batch) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.local_heads * self.head_dim, dim=-1)
        return self.o_proj(self.attn(q, k, v, forward_batch))[0]


def _kimi_block(config, layer_id: int, quant_config, prefix: str) -> nn.Module:
    from sglang.srt.models.kimi_k3 import KimiK3MoE

    return KimiK3MoE(config, quant_config=quant_config, prefix=prefix, layer_idx=layer_id)


def _gpt_oss_block(config, layer_id: int, quant_config, prefix: str) -> nn.Module:
    from sglang.srt.models.gpt_oss import GptOssSparseMoeBlock

    return GptOssSparseMoeBlock(layer_id, config, quant_config=quant_config, prefix=prefix)


_BLOCKS = {"kimi_k3": _kimi_block, "gpt_oss": _gpt_oss_block}


def _returns_partial_sums(block: nn.Module) -> bool:
    """Whether the sum over ranks is left to the layer: gpt-oss's block does so in releases that have
    ``layer_boundary``; before, it reduces itself, as Kimi-K3's always does."""
    module = sys.modules[type(block).__module__]
    is_gpt_oss = module.__name__.endswith(".gpt_oss")
    return is_gpt_oss and not hasattr(module, "tensor_model_parallel_all_reduce")


class CarrierLayer(nn.Module):
    def __init__(self, config, layer_id: int, quant_config, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = CarrierAttention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _BLOCKS[config.carrier_block](config, layer_id, quant_config, f"{prefix}.mlp")
        # SGLang 0.5.22 dropped the argument from KimiK3MoE.forward.
        self.mlp_takes_batch = "forward_batch" in inspect.signature(self.mlp.forward).parameters
        self.mlp_is_partial = get_tensor_model_parallel_world_size() > 1 and _returns_partial_sums(
            self.mlp
        )

    def forward(self, hidden_states: torch.Tensor, forward_batch) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), forward_batch)
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        extra = {"forward_batch": forward_batch} if self.mlp_takes_batch else {}
        output = self.mlp(normed, **extra)
        if self.mlp_is_partial:
            output = tensor_model_parallel_all_reduce(output)
        return hidden_states + output


class CarrierModel(nn.Module):
    def __init__(self, config, quant_config, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        positions = getattr(config, "learned_positions", 0)
        self.embed_positions = nn.Embedding(positions, config.hidden_size) if positions else None
        self.layers = nn.ModuleList(
            CarrierLayer(config, i, quant_config, f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids, positions, forward_batch) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(positions)
        for layer in self.layers:
            hidden_states = layer(hidden_states, forward_batch)
        return self.norm(hidden_states)


class CarrierForCausalLM(nn.Module):
    """``config.carrier_block`` ("kimi_k3" or "gpt_oss") says which MoE block is carried."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        self.model = CarrierModel(config, quant_config, "model")
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **kwargs):
        hidden_states = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.config.carrier_block == "gpt_oss":
            weights = self._load_gpt_oss_experts(weights)
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            # As Kimi-K3's loader does: compressed-tensors says weight_packed, the layer weight.
            name = name.replace("weight_packed", "weight")
            if not self._load_stacked(parameters, name, tensor):
                parameter = parameters[name]
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                loader(parameter, tensor)

    def _load_gpt_oss_experts(self, weights):
        """Hands the expert tensors to gpt-oss's own loader, returns the other tensors."""
        from sglang.srt.models.gpt_oss import GptOssForCausalLM

        rest = []

        def experts():
            for name, tensor in weights:
                if ".experts." in name:
                    yield name, tensor
                else:
                    rest.append((name, tensor))

        GptOssForCausalLM._load_mxfp4_experts_weights(self, experts())
        return rest

    def _load_stacked(self, parameters, name: str, tensor: torch.Tensor) -> bool:
        stacked = [("qkv_proj", f"{part}_proj", part) for part in "qkv"]
        if ".experts." not in name:
            stacked += [("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1)]
        for target, source, shard in stacked:
            if f".{source}." in name:
                parameter = parameters[name.replace(source, target)]
                parameter.weight_loader(parameter, tensor, shard)
                return True
        if ".experts." not in name or self.config.carrier_block != "kimi_k3":
            return False
        mapping = FusedMoE.make_expert_params_mapping(
            ckpt_gate_proj_name="w1",
            ckpt_down_proj_name="w2",
            ckpt_up_proj_name="w3",
            num_experts=self.config.num_experts,
        )
        for target, source, expert, shard in mapping:
            if source in name:
                parameter = parameters[name.replace(source, target)]
                parameter.weight_loader(
                    parameter,
                    tensor,
                    name.replace(source, target),
                    shard_id=shard,
                    expert_id=expert,
                )
                return True
        return False


EntryClass = CarrierForCausalLM
