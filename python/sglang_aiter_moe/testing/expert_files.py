"""The same expert weights as safetensors files in each format that checkpoints use."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_aiter_moe.numerics import RawExperts

FORMATS = ("compressed_tensors", "quark", "gpt_oss", "fused")
PREFIX = "model.layers.{}.mlp.experts"


def expert_tensors(
    experts: RawExperts, kind: str, prefix: str, *, e8m0: bool = False
) -> dict[str, torch.Tensor]:
    """One layer's tensors under the names of a format.

    Args:
        experts: w13 gate half first (``gate_up_interleaved`` False).
        kind: of :data:`FORMATS`.
        prefix: of the layer, up to ``experts``.
        e8m0: scales as float8_e8m0fnu and not as uint8.
    """
    assert not experts.gate_up_interleaved

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(torch.float8_e8m0fnu) if e8m0 else tensor.contiguous()

    if kind in ("compressed_tensors", "quark"):
        names = ("w1", "w3", "w2")
        weight = "weight_packed"
        if kind == "quark":
            names, weight = ("gate_proj", "up_proj", "down_proj"), "weight"
        found = {}
        for number in range(experts.w13.shape[0]):
            gate, up = experts.w13[number].chunk(2)
            gate_scale, up_scale = experts.w13_scale[number].chunk(2)
            packed = (gate, up, experts.w2[number])
            scales = (gate_scale, up_scale, experts.w2_scale[number])
            for name, codes, exponents in zip(names, packed, scales, strict=True):
                found[f"{prefix}.{number}.{name}.{weight}"] = codes.contiguous()
                found[f"{prefix}.{number}.{name}.weight_scale"] = scale(exponents)
        return found
    if kind == "gpt_oss":
        found = {
            f"{prefix}.gate_up_proj_blocks": _blocks(_alternate(experts.w13)),
            f"{prefix}.gate_up_proj_scales": scale(_alternate(experts.w13_scale)),
            f"{prefix}.down_proj_blocks": _blocks(experts.w2),
            f"{prefix}.down_proj_scales": scale(experts.w2_scale),
        }
        if experts.b13 is not None:
            found[f"{prefix}.gate_up_proj_bias"] = _alternate(experts.b13[..., None])[
                ..., 0
            ].contiguous()
            found[f"{prefix}.down_proj_bias"] = experts.b2
        return found
    if kind == "fused":
        return {
            f"{prefix}.w13_weight": experts.w13,
            f"{prefix}.w13_weight_scale": scale(experts.w13_scale),
            f"{prefix}.w2_weight": experts.w2,
            f"{prefix}.w2_weight_scale": scale(experts.w2_scale),
        } | (
            {}
            if experts.b13 is None
            else {f"{prefix}.w13_weight_bias": experts.b13, f"{prefix}.w2_weight_bias": experts.b2}
        )
    raise ValueError(f"{kind} is none of {FORMATS}")


def write_experts(path: Path, layers: list[RawExperts], kind: str, *, e8m0: bool = False) -> Path:
    """Writes layers 0, 1, ... as one safetensors file."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for number, experts in enumerate(layers):
        tensors |= expert_tensors(experts, kind, PREFIX.format(number), e8m0=e8m0)
    save_file(tensors, path)
    return path


def _alternate(halves: torch.Tensor) -> torch.Tensor:
    """``[E, 2I, C]`` gate half first to rows g0, u0, g1, u1, by indexing."""
    rows = halves.shape[1]
    order = [row // 2 + (row % 2) * (rows // 2) for row in range(rows)]
    return halves[:, order].contiguous()


def _blocks(packed: torch.Tensor) -> torch.Tensor:
    """``[E, N, K/2]`` as gpt-oss stores it: ``[E, N, K/32, 16]``."""
    return packed.contiguous().view(*packed.shape[:2], -1, 16)
