"""SGLang's real layers loading a checkpoint that was laid out ahead of time.

``python -m sglang_aiter_moe.testing.packed_probe RAW PACKED PORT``: the same model raw and packed (A16W4).
Prints one line ``RESULT {json}``; the tests judge it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe.checkpoint.files import Checkpoint
from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.plans import A8W4


def build(config: Any, path: Path) -> torch.nn.Module:
    """The carrier model, loaded from every safetensors file of a directory."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    from sglang_aiter_moe.testing.carrier.carrier_model import CarrierForCausalLM

    quant_config = get_quant_config(config, LoadConfig(), {})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = CarrierForCausalLM(config.hf_config, quant_config)
    finally:
        torch.set_default_dtype(before)
    files = Checkpoint(path)
    model.load_weights([(name, files.tensor(name)) for name in files.names])
    sglang_process.process_after_loading(model)
    return model.eval()


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.data.clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main(raw: Path, packed: Path, port: int) -> dict[str, Any]:
    from sglang_aiter_moe.contract.layouts import WeightLayout
    from sglang_aiter_moe.srt.layers.quantization import mxfp4_packed

    config = sglang_process.become_single_rank(packed, port)
    path = mxfp4_packed._model_path
    mxfp4_packed._model_path = lambda: str(raw)
    want = state_of(build(config, raw))
    mxfp4_packed._model_path = path
    packs = []
    original = WeightLayout.pack
    WeightLayout.pack = lambda self, *args, **kwargs: (
        packs.append(1),
        original(self, *args, **kwargs),
    )[1]
    model = build(config, packed)
    WeightLayout.pack = original
    found = {"same": same(state_of(model), want), "transformations": len(packs)}
    with torch.no_grad():
        block = model.model.layers[0].mlp
        x = torch.ones(2, config.hf_config.hidden_size, dtype=torch.bfloat16)
        found["finite"] = bool(block(x).isfinite().all())
    os.environ[A8W4] = "1"
    try:
        build(config, packed)
        found["refusal"] = None
    except Exception as error:
        found["refusal"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    sglang_process.print_result(**main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
