"""Checkpoints that were laid out ahead of time, in SGLang's loaders: filled as they are, or refused.

Such a checkpoint (``layout --pack``) carries its plan in the metadata of its files. A layer whose model path
is one is allocated in packed shapes; its loaders copy bytes, and nothing is transformed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe.contract.identity import Sizes
from sglang_aiter_moe.contract.scale_layouts import scale_layout
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization.mxfp4_raw_form import RawForm
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import weights_of

#: Where a layer keeps its :class:`Stored` from its construction on.
STORED = "aiter_moe_stored"


class Stored:
    """One layer of a pre-laid-out checkpoint.

    Attributes:
        layer: in the checkpoint.
        filled: the parameters that have got their bytes.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.filled: set[str] = set()

    def fill(self, name: str, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        """Copies a packed tensor.

        Raises:
            ContractError: it is not the packed tensor.
        """
        if loaded.shape != parameter.shape or loaded.dtype != parameter.dtype:
            raise ContractError(
                f"{name} of a pre-laid-out checkpoint is {tuple(loaded.shape)} {loaded.dtype}",
                allowed=f"{tuple(parameter.shape)} {parameter.dtype}",
                fix="do not mix raw expert tensors into a pre-laid-out checkpoint",
            )
        parameter.data.copy_(loaded)
        self.filled.add(name)

    def check_filled(self, plan: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Raises unless everything has been filled with the bytes that were packed.

        Raises:
            ContractError: a tensor is missing, or the fingerprint differs.
        """
        from sglang_aiter_moe.checkpoint.offline import check_bytes

        missing = sorted(tensors.keys() - self.filled)
        if missing:
            raise ContractError(
                f"{plan.spec.name} got no {', '.join(missing)}",
                allowed="all of a layer's packed tensors",
                fix="the checkpoint is incomplete: pack it again",
            )
        check_bytes(self.layer, plan, tensors)


def stored_for(layer: Any, plan: Any) -> Stored | None:
    """The pre-laid-out bytes for a layer of the model that SGLang is loading; None for a raw checkpoint.

    Raises:
        ContractError: they were laid out by another plan, or for another rank.
    """
    from sglang_aiter_moe.checkpoint.offline import check_rank, check_stored

    found = _stored_layers(_model_path()).get(getattr(layer, "layer_id", None))
    if found is None:
        return None
    check_stored(found, plan)
    check_rank(found, getattr(layer, "moe_tp_rank", 0), getattr(layer, "moe_ep_rank", 0))
    return Stored(found)


def packed_tensors(plan: Any, with_bias: bool) -> dict[str, torch.Size]:
    """The shapes of a layer's packed parameters; biases are float32, all others uint8."""
    sizes = Sizes.of_plan(plan)
    shapes = {}
    for name, scale in (("w13_weight", plan.w13_scale_layout), ("w2_weight", plan.w2_scale_layout)):
        shapes[name] = sizes.raw_shape(name, padded=True)
        raw = sizes.raw_shape(f"{name}_scale", padded=True)
        shapes[f"{name}_scale"] = scale_layout(scale).packed_shape(raw)
        if with_bias:
            shapes[f"{name}_bias"] = sizes.raw_shape(name, padded=True)[:2]
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def raw_forms_of(plan: Any, with_bias: bool) -> dict[str, RawForm]:
    """What loaders would have filled: the raw forms of a layer that was never raw."""
    sizes, forms = Sizes.of_plan(plan), {}
    for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
        forms[name] = RawForm(name, sizes.raw_shape(name), torch.uint8)
    if with_bias:
        for name in ("w13_weight", "w2_weight"):
            bias = f"{name}_bias"
            forms[bias] = RawForm(bias, sizes.raw_shape(name)[:2], torch.bfloat16)
    return forms


def filling(layer: Any, name: str, loader: Callable[..., Any]) -> Callable[..., Any]:
    """A ``weight_loader`` that fills a pre-laid-out layer once, and is SGLang's afterwards."""

    @functools.wraps(loader)
    def load(param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        stored = getattr(layer, STORED, None)
        if stored is None or weights_of(layer) is not None:
            return loader(param, loaded_weight, *args, **kwargs)
        return stored.fill(name, param, loaded_weight)

    return load


def _model_path() -> str:
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # up to 0.5.14
        from sglang.srt.server_args import get_global_server_args as get_server_args

    return str(get_server_args().model_path)


@functools.lru_cache(maxsize=2)
def _stored_layers(model_path: str) -> dict[int, Any]:
    """Layer number -> layer, of a pre-laid-out checkpoint; empty for any other."""
    from sglang_aiter_moe.checkpoint.check import PLAN_KEY
    from sglang_aiter_moe.checkpoint.files import Checkpoint
    from sglang_aiter_moe.checkpoint.names import ExpertTensor

    if not any(Path(model_path).glob("experts-*.safetensors")):
        return {}
    found = {}
    for prefix, layer in Checkpoint(model_path).layers().items():
        number = ExpertTensor(prefix, None, "w2", "weight").layer
        if PLAN_KEY in layer.metadata and number is not None:
            found[number] = layer
    return found
