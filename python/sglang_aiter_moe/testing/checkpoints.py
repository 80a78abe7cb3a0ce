"""Writes small random MXFP4 checkpoints as real files: config.json, tokenizer, safetensors.

Two formats: compressed-tensors ``mxfp4-pack-quantized`` as Kimi-K3 stores its experts (one tensor for each
expert and projection, gate and up apart) and gpt-oss ``*_blocks`` / ``*_scales`` (one tensor for all experts,
gate and up rows interleaved, biases). Values are random but scaled so that every expert changes the logits.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

MXFP4_BLOCK = 32  # elements that share one E8M0 scale (OCP MX specification, section 5.2)


@dataclass(frozen=True)
class CarrierConfig:
    """Sizes shared by both checkpoint kinds.

    ``hidden_size`` is the width of the residual stream; ``latent_size`` the width the K3 experts work in.
    """

    vocab_size: int = 128
    hidden_size: int = 256
    latent_size: int = 256
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    num_experts: int = 16
    topk: int = 4
    seed: int = 20260731


# gpt-oss pads 2880 to 3072 in both dimensions; 192 to 256 is the same kind of padding.
GPT_OSS_CONFIG = CarrierConfig(hidden_size=192, intermediate_size=192, num_experts=8, topk=2)


class _Random:
    """Seeded tensors: bf16 matrices with unit gain, packed E2M1 codes and E8M0 scales."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, rows: int, cols: int, gain: float = 1.0) -> torch.Tensor:
        return (self.normal(rows, cols) * gain * cols**-0.5).to(torch.bfloat16)

    def packed(self, *shape: int) -> torch.Tensor:
        """Two random E2M1 codes a byte: uint8 of ``shape``."""
        return torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)

    def scales(self, *shape: int) -> torch.Tensor:
        """E8M0 bytes for 2^-5 and 2^-4: with E2M1's rms of 2.9, a gain near 2 for 256 inputs."""
        return torch.randint(122, 124, shape, generator=self.generator, dtype=torch.uint8)


def _dense_tensors(config: CarrierConfig, rand: _Random) -> dict[str, torch.Tensor]:
    heads = config.num_heads * config.head_dim
    ones = torch.ones(config.hidden_size, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": rand.normal(config.vocab_size, config.hidden_size).bfloat16(),
        "model.norm.weight": ones,
        "lm_head.weight": rand.matrix(config.vocab_size, config.hidden_size, gain=3.0),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ones.clone()
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = rand.matrix(heads, config.hidden_size)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = rand.matrix(config.hidden_size, heads)
    return tensors


def _kimi_layer(config: CarrierConfig, rand: _Random, bias_centre: float) -> dict:
    hidden, latent, inter = config.hidden_size, config.latent_size, config.intermediate_size
    tensors = {
        "gate.weight": rand.matrix(config.num_experts, hidden, gain=2.0),
        "gate.e_score_correction_bias": bias_centre + 0.1 * rand.normal(config.num_experts),
        "routed_expert_down_proj.weight": rand.matrix(latent, hidden),
        "routed_expert_norm.weight": torch.ones(latent, dtype=torch.bfloat16),
        # A third of the residual stream: enough that wrong experts change every token, little enough that
        # what bf16 rounding does to quantised activations does not.
        "routed_expert_up_proj.weight": rand.matrix(hidden, latent, gain=0.3),
        "shared_experts.gate_proj.weight": rand.matrix(inter, hidden),
        "shared_experts.up_proj.weight": rand.matrix(inter, hidden),
        "shared_experts.down_proj.weight": rand.matrix(hidden, inter, gain=0.1),
    }
    for expert in range(config.num_experts):
        for name, (rows, cols) in (
            ("w1", (inter, latent)),
            ("w3", (inter, latent)),
            ("w2", (latent, inter)),
        ):
            prefix = f"experts.{expert}.{name}"
            tensors[f"{prefix}.weight_packed"] = rand.packed(rows, cols // 2)
            tensors[f"{prefix}.weight_scale"] = rand.scales(rows, cols // MXFP4_BLOCK)
    return tensors


def _gpt_oss_layer(config: CarrierConfig, rand: _Random) -> dict:
    experts, hidden, inter = config.num_experts, config.hidden_size, config.intermediate_size
    return {
        "router.weight": rand.matrix(experts, hidden, gain=2.0),
        "router.bias": (0.1 * rand.normal(experts)).bfloat16(),
        "experts.gate_up_proj_blocks": rand.packed(experts, 2 * inter, hidden // MXFP4_BLOCK, 16),
        "experts.gate_up_proj_scales": rand.scales(experts, 2 * inter, hidden // MXFP4_BLOCK),
        "experts.gate_up_proj_bias": (0.3 * rand.normal(experts, 2 * inter)).bfloat16(),
        "experts.down_proj_blocks": rand.packed(experts, hidden, inter // MXFP4_BLOCK, 16),
        "experts.down_proj_scales": rand.scales(experts, hidden, inter // MXFP4_BLOCK) - 3,
        "experts.down_proj_bias": (0.3 * rand.normal(experts, hidden)).bfloat16(),
    }


def _base_config(config: CarrierConfig, block: str) -> dict:
    return {
        "architectures": ["CarrierForCausalLM"],
        "carrier_block": block,
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


def kimi_config(config: CarrierConfig) -> dict:
    """``config.json`` of a K3-like checkpoint."""
    return _base_config(config, "kimi_k3") | {
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "moe_intermediate_size": config.intermediate_size,
        "routed_expert_hidden_size": config.latent_size,
        "latent_moe_use_norm": True,
        "num_experts": config.num_experts,
        "n_routed_experts": config.num_experts,
        "num_experts_per_token": config.topk,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.5,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*gate$"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "strategy": "group",
                        "group_size": MXFP4_BLOCK,
                        "symmetric": True,
                        "dynamic": False,
                    },
                }
            },
        },
    }


def gpt_oss_config(config: CarrierConfig) -> dict:
    """``config.json`` of a gpt-oss-like checkpoint."""
    return _base_config(config, "gpt_oss") | {
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.topk,
        "quantization_config": {"quant_method": "mxfp4"},
    }


def write_kimi_checkpoint(
    path: Path, config: CarrierConfig | None = None, *, bias_centre: float = 10.0
) -> Path:
    """Writes a K3-like checkpoint: SiTUv2 (beta 4, linear beta 25), biased grouped top-k, latent experts.

    Args:
        path: directory to create.
        bias_centre: mean of the float32 correction bias. At 10 its spread of 0.1 is below the spacing
            of bf16 (0.0625), so a bias rounded to bf16 chooses other experts.
    """
    config = config or CarrierConfig()
    rand = _Random(config.seed)
    tensors = _dense_tensors(config, rand)
    for layer in range(config.num_layers):
        for name, tensor in _kimi_layer(config, rand, bias_centre).items():
            tensors[f"model.layers.{layer}.mlp.{name}"] = tensor
    return _write(path, kimi_config(config), tensors, config)


def write_gpt_oss_checkpoint(path: Path, config: CarrierConfig = GPT_OSS_CONFIG) -> Path:
    """Writes a gpt-oss-like checkpoint: SwiGLU-OAI (alpha 1.702, limit 7), biases, interleaved rows."""
    rand = _Random(config.seed)
    tensors = _dense_tensors(config, rand)
    for layer in range(config.num_layers):
        for name, tensor in _gpt_oss_layer(config, rand).items():
            tensors[f"model.layers.{layer}.mlp.{name}"] = tensor
    return _write(path, gpt_oss_config(config), tensors, config)


def _write(path: Path, model: dict, tensors: dict, config: CarrierConfig) -> Path:
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model, indent=1) + "\n")
    (path / "carrier.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(path, config.vocab_size)
    return path


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Writes a word-level tokenizer whose words are ``w2``, ``w3``, ...: the number is the token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<s>",
                "clean_up_tokenization_spaces": False,
            }
        )
    )
