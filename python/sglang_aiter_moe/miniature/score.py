"""How many held-out questions a checkpoint answers exactly, outside of SGLang.

One forward over question and right answer tells what greedy decoding would say: it writes the right answer if and only
if the most likely token at every place of the answer is the right one.

``python -m sglang_aiter_moe.miniature.score CHECKPOINT``: without quantised activations, in each mode by the oracle,
and through this project's plan, layouts and kernels (on a GPU: Triton), with the right and with the wrong layout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.checkpoint.files import Checkpoint, Layer
from sglang_aiter_moe.checkpoint.rank import rank_tensors
from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.spec import Target
from sglang_aiter_moe.environ import exactly
from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.miniature import task
from sglang_aiter_moe.miniature.experts import (
    OTHER_LAYOUT,
    OracleExperts,
    PlannedExperts,
    layer_spec,
)
from sglang_aiter_moe.miniature.model import GPT_OSS, KIMI, Experts, Miniature, Shape
from sglang_aiter_moe.numerics.oracle import RawExperts
from sglang_aiter_moe.portable import backends

FLAGS = {"A16W4": {}, "A8W4": {"AITER_SITUV2_A8W4": "1"}, "A4W4": {"AITER_SITUV2_A4W4": "1"}}


def load(
    path: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Miniature, list[RawExperts]]:
    """A checkpoint's dense model, and its experts as they are stored."""
    path = Path(path)
    shape = shape_of(path)
    checkpoint = Checkpoint(path)
    model = Miniature(shape, dtype)
    model.load_state_dict(
        {name: checkpoint.tensor(name) for name in checkpoint.names if ".experts." not in name}
    )
    raw = [_experts(layer.whole, layer, device) for layer in checkpoint.layers().values()]
    return model.eval().to(device), raw


def load_rank(path: Path | str, rank: int, ranks: int) -> list[RawExperts]:
    """One tensor-parallel rank's share of the experts, divided as SGLang's loaders divide them."""
    layers = Checkpoint(path).layers().values()
    shape = shape_of(path)
    found = []
    for layer in layers:
        share = rank_tensors(layer, layer_spec(shape, ranks), tp_rank=rank)
        found.append(_experts(share.__getitem__, layer))
    return found


def shape_of(path: Path | str) -> Shape:
    """The sizes of a checkpoint's model."""
    settings = json.loads((Path(path) / "config.json").read_text())
    return KIMI if settings["carrier_block"] == "kimi_k3" else GPT_OSS


def _experts(
    tensor: Callable[[str], torch.Tensor], layer: Layer, device: str = "cpu"
) -> RawExperts:
    names = {field: f"{field[:-6]}_weight_scale" for field in ("w13_scale", "w2_scale")}
    names |= {"w13": "w13_weight", "w2": "w2_weight"}
    if layer.has("w13_weight_bias"):
        names |= {"b13": "w13_weight_bias", "b2": "w2_weight_bias"}
    return RawExperts(
        **{field: tensor(name).to(device) for field, name in names.items()},
        gate_up_interleaved=layer.alternating,
    )


@torch.no_grad()
def exact(model: Miniature, experts: Experts, batch: task.Batch, *, at_once: int = 400) -> float:
    """The share of a batch that would be answered exactly, with ``at_once`` questions in a forward."""
    device = model.lm_head.weight.device
    right = []
    for ids, answers in zip(batch.ids.split(at_once), batch.answers.split(at_once), strict=True):
        said = model(ids.to(device)[:, :-1], experts).argmax(-1).cpu()
        wrong = (said != ids[:, 1:]) & answers[:, 1:]
        right.append(~wrong.any(1))
    return torch.cat(right).double().mean().item()


def planned(shape: Shape, raw: list[RawExperts], device: str, **options: Any) -> PlannedExperts:
    """Experts through the plan, under the environment and the ``aiter`` as they are now."""
    target = Target.current("gfx950", Capabilities.from_modules(sys.modules))
    return PlannedExperts(shape, raw, target, device, **options)


def score(
    path: Path | str, *, dialect: str, count: int = 200, many: int = 4000, device: str = "cpu"
) -> Iterator[dict]:
    """Every figure of one checkpoint (see the module's text), yielded again each time that one came in.

    Args:
        path: the checkpoint directory.
        dialect: what its answers end with.
        count: questions to the planned path, the same as ``sglang-aiter-moe eval`` asks.
        many: questions to the oracle, from another seed: the truth that thresholds are made from.
        device: "cpu" or "cuda".
    """
    batch = task.held_out_batch(count, dialect=dialect)
    wide = task.held_out_batch(many, dialect=dialect, seed=task.TEST_SEED + 1)
    model, raw = load(path, device=device)
    engine, _ = load(path, torch.bfloat16, device)
    shape = model.shape
    modes = tuple(FLAGS) if shape.kimi else ("A16W4", "A8W4")
    backend = "cpu" if device == "cpu" else "triton"
    found: dict = {
        "checkpoint": Path(path).name,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "backend": backend,
        "questions": count,
        "many": many,
        "oracle": {},
        "planned": {},
        "wrong_layout": {},
    }
    for mode in (None, *modes):
        dense = model if mode is None else engine
        experts = OracleExperts(shape, raw, mode)
        found["oracle"][mode or "float32"] = {
            "right": round(count * exact(dense, experts, batch)),
            "right_of_many": round(many * exact(dense, experts, wide)),
        }
        yield found
    for mode in modes:
        with exactly(FLAGS[mode] if shape.kimi else {}), portable.installed():
            for name, wrong in (("planned", False), ("wrong_layout", True)):
                start = time.perf_counter()
                with backends.forced(backend):
                    experts = planned(shape, raw, device, wrong_layout=wrong)
                    # gpt-oss has no flag: it is A16W4 below 256 tokens and A8W4 from there on.
                    few = not shape.kimi and mode == "A16W4"
                    accuracy = exact(engine, experts, batch, at_once=4 if few else 400)
                layout = experts.plan.w13_layout
                found[name][mode] = {
                    "accuracy": accuracy,
                    "layout": OTHER_LAYOUT[layout][0] if wrong else layout,
                    "seconds": round(time.perf_counter() - start, 2),
                }
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dialect", default=task.DIALECTS[0], choices=task.DIALECTS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--many", type=int, default=4000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="default: standard output, at the end")
    options = parser.parse_args()
    for found in score(
        options.checkpoint,
        dialect=options.dialect,
        count=options.count,
        many=options.many,
        device=options.device,
    ):
        if options.json:
            provenance.write(options.json, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
