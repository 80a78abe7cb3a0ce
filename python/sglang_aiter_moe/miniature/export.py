"""From trained weights to a checkpoint directory that SGLang loads: config.json, tokenizer, safetensors.

Experts in the formats of the two models (compressed-tensors ``mxfp4-pack-quantized`` by expert; gpt-oss ``*_blocks``
and ``*_scales`` with alternating rows), everything else in bfloat16, the correction bias in float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_aiter_moe.miniature import task
from sglang_aiter_moe.miniature.experts import TrainableExperts
from sglang_aiter_moe.miniature.model import EPS, Miniature, Shape
from sglang_aiter_moe.testing.checkpoints import CarrierConfig, gpt_oss_config, kimi_config
from sglang_aiter_moe.testing.expert_files import expert_tensors

LICENCE = "Apache-2.0; trained from random weights on generated sums, nothing external is in it"


def write_checkpoint(
    path: Path, model: Miniature, experts: TrainableExperts, **notes: object
) -> Path:
    """Writes a checkpoint directory.

    Args:
        path: directory to create.
        model: with its dense weights.
        experts: quantised to MXFP4 here.
        notes: stored in the safetensors file's metadata, beside the licence.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = dense_tensors(model)
    kind = "compressed_tensors" if model.shape.kimi else "gpt_oss"
    for layer in range(model.shape.layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, tensor in expert_tensors(experts.raw(layer), kind, prefix).items():
            tensors[name] = tensor.bfloat16() if name.endswith("_bias") else tensor
    metadata = {name: str(value) for name, value in notes.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt", "licence": LICENCE, **metadata},
    )
    (path / "config.json").write_text(json.dumps(config(model.shape), indent=1) + "\n")
    write_tokenizer(path, model.shape.vocab)
    return path


def dense_tensors(model: Miniature) -> dict[str, torch.Tensor]:
    """Everything but the experts, by the checkpoint's names."""
    return {
        name: (t if name.endswith("correction_bias") else t.bfloat16()).detach().cpu().clone()
        for name, t in model.state_dict().items()
    }


def config(shape: Shape) -> dict:
    """``config.json``."""
    sizes = CarrierConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        latent_size=shape.latent,
        intermediate_size=shape.inter,
        num_layers=shape.layers,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        topk=shape.topk,
    )
    made = kimi_config(sizes) if shape.kimi else gpt_oss_config(sizes)
    return made | {
        "learned_positions": shape.length,
        "max_position_embeddings": shape.length,
        "rms_norm_eps": EPS,
        "bos_token_id": task.ID[task.PAD],
        "eos_token_id": task.ID[task.END],
        "pad_token_id": task.ID[task.PAD],
    }


def write_tokenizer(path: Path, vocab: int) -> None:
    """One token a word, words parted by spaces."""
    words = list(task.WORDS) + [f"<unused-{i}>" for i in range(vocab - len(task.WORDS))]
    special = [
        {
            "id": task.ID[word],
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for word in (task.PAD, task.END)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": task.PAD,
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": task.PAD,
                "eos_token": task.END,
                "unk_token": task.PAD,
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
        + "\n"
    )
