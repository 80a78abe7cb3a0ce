"""Lays a checkpoint's experts out ahead of time, and loads such a checkpoint without touching its bytes.

A pre-laid-out checkpoint is a directory: one safetensors file per MoE layer with the packed tensors under
the fused names, and in its metadata the plan and the fingerprint; one file with all other tensors; an
index; the model's other small files. It belongs to one rank of one parallel layout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe.checkpoint.check import FINGERPRINTS_KEY, PLAN_KEY
from sglang_aiter_moe.checkpoint.files import Checkpoint, Layer
from sglang_aiter_moe.checkpoint.names import parse
from sglang_aiter_moe.checkpoint.rank import rank_tensors
from sglang_aiter_moe.contract.identity import TENSORS, Fingerprint, Sizes, fingerprint
from sglang_aiter_moe.contract.moe_plan import MoePlan
from sglang_aiter_moe.errors import ContractError

RANK_KEY = "sglang_aiter_moe.rank"
INDEX = "model.safetensors.index.json"
_OTHER = "model-other.safetensors"
#: Small files of a model that belong to every copy of it.
_COPIED = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")

#: Called with (layers done, layers in all).
Progress = Callable[[int, int], Any]


def pack_checkpoint(
    source: Path,
    out: Path,
    plan: MoePlan,
    *,
    tp_rank: int = 0,
    ep_rank: int = 0,
    progress: Progress | None = None,
) -> list[Path]:
    """Writes one rank's pre-laid-out checkpoint, one layer in memory at a time.

    Args:
        source: raw checkpoint, a file or a directory, in any format of docs/weights.md.
        out: a directory that does not exist yet, or is empty.
        plan: by which to lay out; its ``spec`` is one rank's layer.
        tp_rank, ep_rank: which rank.
        progress: told after each layer.

    Returns:
        The safetensors files.

    Raises:
        ContractError: ``out`` is in use, the source is already laid out, or it does not fit the plan.
    """
    checkpoint = Checkpoint(source)
    layers = checkpoint.layers()
    if PLAN_KEY in checkpoint.metadata:
        raise ContractError(
            f"{source} is already laid out",
            allowed="a raw checkpoint",
            fix="pack the checkpoint that was downloaded",
        )
    if not layers:
        raise ContractError(
            f"{source} has no MXFP4 expert tensors",
            allowed="experts in a format of docs/weights.md",
            fix="pass the checkpoint of an MXFP4 mixture of experts",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ContractError(
            f"{out} is not empty",
            allowed="a new or an empty directory",
            fix="choose another --out",
        )
    out.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for number, layer in enumerate(layers.values()):
        _write_layer(out, layer, plan, number, (tp_rank, ep_rank), where)
        if progress is not None:
            progress(number + 1, len(layers))
    _write_others(out, checkpoint, set(layers), where)
    folder = source if source.is_dir() else source.parent
    for file in folder.iterdir():
        if file.suffix in _COPIED and file.name != INDEX:
            shutil.copy2(file, out / file.name)
    index = {"metadata": {}, "weight_map": where}
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return sorted(out.glob("*.safetensors"))


def _write_layer(
    out: Path,
    layer: Layer,
    plan: MoePlan,
    number: int,
    rank: tuple[int, int],
    where: dict[str, str],
) -> None:
    from safetensors.torch import save_file

    from sglang_aiter_moe.srt.layers.quantization.mxfp4 import prepare_weights

    module = torch.nn.Module()
    for name, tensor in rank_tensors(layer, plan.spec, tp_rank=rank[0], ep_rank=rank[1]).items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    prepare_weights(module, plan)
    packed = {name: parameter.data for name, parameter in module.named_parameters()}
    made = fingerprint({n: packed[n] for n in TENSORS}, _forms(plan), Sizes.of_plan(plan))
    tensors = {f"{layer.prefix}.{name}": tensor for name, tensor in packed.items()}
    file = f"experts-{number:05d}.safetensors"
    metadata = {
        "format": "pt",
        PLAN_KEY: plan.to_json(),
        FINGERPRINTS_KEY: json.dumps({layer.prefix: made.to_dict()}),
        RANK_KEY: json.dumps({"tp": rank[0], "ep": rank[1]}),
    }
    save_file(tensors, out / file, metadata=metadata)
    where |= dict.fromkeys(tensors, file)


def _write_others(
    out: Path, checkpoint: Checkpoint, prefixes: set[str], where: dict[str, str]
) -> None:
    from safetensors.torch import save_file

    others = {}
    for name in checkpoint.names:
        what = parse(name)
        if what is None or what.prefix not in prefixes:
            others[name] = checkpoint.tensor(name)
    if others:
        save_file(others, out / _OTHER, metadata={"format": "pt"})
        where |= dict.fromkeys(others, _OTHER)


def check_plan(stored: MoePlan, running: MoePlan, what: str) -> None:
    """Raises unless bytes packed by one plan are what another one's kernels read.

    Args:
        stored: from the file.
        running: of this environment.
        what: the file.

    Raises:
        ContractError: naming the first difference.
    """
    names = (
        "w13_layout",
        "w13_scale_layout",
        "w2_layout",
        "w2_scale_layout",
        "padded_hidden_size",
        "padded_intermediate_size",
    )
    pairs = [(n, getattr(stored, n), getattr(running, n)) for n in names]
    fields = ("num_experts", "hidden_size", "intermediate_size", "has_bias", "activation")
    pairs += [(n, getattr(stored.spec, n), getattr(running.spec, n)) for n in fields]
    for name, then, now in pairs:
        if then != now:
            raise ContractError(
                f"{what} was laid out with {name} = {then}, this environment needs {now}",
                allowed="the plan that the file was packed with",
                fix="pack the raw checkpoint again with this environment's plan, or restore the "
                f"environment of the packing ({stored.explain(name) or 'see its plan'})",
            )


def check_stored(stored: Layer, plan: MoePlan) -> None:
    """Raises unless a layer was laid out ahead of time, by a plan that packs the same bytes as ``plan``.

    Raises:
        ContractError: the file has no plan, or another one.
    """
    what = f"{stored.prefix} in {stored.file.name}"
    if PLAN_KEY not in stored.metadata or FINGERPRINTS_KEY not in stored.metadata:
        raise ContractError(
            f"{what} carries no plan",
            allowed="a checkpoint written by `sglang-aiter-moe layout --pack`",
            fix="load it as a raw checkpoint, or pack it first",
        )
    check_plan(MoePlan.from_json(stored.metadata[PLAN_KEY]), plan, what)


def check_rank(stored: Layer, tp_rank: int, ep_rank: int) -> None:
    """Raises unless a layer was packed for this rank.

    Raises:
        ContractError: it is another rank's.
    """
    rank = json.loads(stored.metadata.get(RANK_KEY, "{}"))
    if rank != {"tp": tp_rank, "ep": ep_rank}:
        raise ContractError(
            f"{stored.prefix} in {stored.file.name} was packed for rank {rank}",
            allowed=f"tp rank {tp_rank}, ep rank {ep_rank}",
            fix="pack one checkpoint per rank, and give each rank its own",
        )


def check_bytes(stored: Layer, plan: MoePlan, tensors: dict[str, torch.Tensor]) -> None:
    """Raises unless packed tensors have the content of the file's fingerprint.

    Raises:
        ContractError: they do not.
    """
    text = stored.metadata[FINGERPRINTS_KEY]
    known = Fingerprint.from_dict(json.loads(text)[stored.prefix])
    if fingerprint({n: tensors[n] for n in TENSORS}, _forms(plan), Sizes.of_plan(plan)) != known:
        raise ContractError(
            f"{stored.prefix} in {stored.file.name} does not hold the bytes that were packed",
            allowed="the content of its fingerprint",
            fix="pack the raw checkpoint again: the file is damaged or was edited",
        )


def load_packed(layer: Any, stored: Layer, plan: MoePlan) -> None:
    """Loads one layer of a pre-laid-out checkpoint: its bytes as they are.

    Args:
        layer: gets the parameters; existing ones of the right shape are filled in place.
        stored: the layer in the checkpoint.
        plan: of the running environment.

    Raises:
        ContractError: the file has no plan, another plan, or bytes that its fingerprint contradicts.
    """
    from sglang_aiter_moe.srt.layers.quantization.mxfp4 import mark_prepared

    check_stored(stored, plan)
    names = [*TENSORS, *(("w13_weight_bias", "w2_weight_bias") if plan.spec.has_bias else ())]
    tensors = {name: stored.whole(name) for name in names}
    check_bytes(stored, plan, tensors)
    for name, tensor in tensors.items():
        parameter = getattr(layer, name, None)
        if isinstance(parameter, torch.Tensor) and parameter.shape == tensor.shape:
            parameter.data.copy_(tensor)
        else:
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    mark_prepared(layer, plan)


def _forms(plan: MoePlan) -> dict[str, str]:
    layouts = (plan.w13_layout, plan.w13_scale_layout, plan.w2_layout, plan.w2_scale_layout)
    return dict(zip(TENSORS, layouts, strict=True))
