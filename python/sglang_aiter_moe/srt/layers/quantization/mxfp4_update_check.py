"""Checks an update of expert weights before its first write: names, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sglang_aiter_moe.checkpoint.names import ExpertTensor, parse
from sglang_aiter_moe.contract.spec import BLOCK
from sglang_aiter_moe.errors import ContractError

_BYTES = {torch.uint8, torch.int8}
_CODES = _BYTES | {getattr(torch, "float4_e2m1fn_x2", torch.uint8)}
_EXPONENTS = _BYTES | {getattr(torch, "float8_e8m0fnu", torch.uint8)}
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}

#: (name, shape, dtype) of a tensor in an update; None: not known before it is unpacked.
Described = tuple[str, tuple[int, ...] | None, torch.dtype | None]


def check_update(described: Iterable[Described], states: Iterable[Any]) -> None:
    """Raises unless every expert tensor of an update fits the layer that it is for.

    Tensors of layers that this rank does not have, and all that are not of experts, are left to SGLang.

    Args:
        described: every tensor of the update.
        states: this process's ``LayerWeights``.

    Raises:
        ContractError: naming the first tensor that does not fit. Nothing has been written.
    """
    by_number = {getattr(state.layer, "layer_id", None): state for state in states}
    local = {
        f"layers.{number}.": state for number, state in by_number.items() if number is not None
    }
    for name, shape, dtype in described:
        what = parse(name)
        if what is None:
            _check_unparsed(name, local)
            continue
        state = by_number.get(what.layer)
        if state is None:
            continue
        if dtype is not None:
            _check_dtype(name, what.parameter, dtype)
        if shape is not None:
            _check_shape(name, what, shape, state)


def check_local(state: Any, tensors: Mapping[str, torch.Tensor], experts: Any) -> None:
    """Raises unless raw tensors fit a layer's parameters.

    Args:
        state: the layer's ``LayerWeights``.
        tensors: by parameter name.
        experts: an index into the first dimension.

    Raises:
        ContractError: an unknown name, another shape or dtype, a NaN scale.
    """
    for name, tensor in tensors.items():
        form = state.forms.get(name)
        if form is None:
            raise ContractError(
                f"{state.plan.spec.name} has no parameter {name}",
                allowed=", ".join(state.forms),
                fix="use the layer's parameter names",
            )
        _check_dtype(name, name, tensor.dtype)
        shape = tuple(torch.empty(form.shape, device="meta")[experts].shape)
        if tuple(tensor.shape) != shape:
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)} in the update",
                allowed=f"{shape}, as the loader first filled it",
                fix="pass this rank's raw tensor",
            )


def check_dtype(parameter: str, tensor: torch.Tensor, layer: str) -> None:
    """Raises unless a tensor's dtype is one of a parameter's.

    Raises:
        ContractError: bf16 weights for packed codes, say.
    """
    _check_dtype(f"{layer} {parameter}", parameter, tensor.dtype)


def _check_dtype(name: str, parameter: str, dtype: torch.dtype) -> None:
    bias, scale = parameter.endswith("bias"), parameter.endswith("scale")
    allowed = _FLOATS if bias else _EXPONENTS if scale else _CODES
    if dtype not in allowed:
        kind = "a bias" if bias else "E8M0 bytes" if scale else "two E2M1 codes a byte"
        raise ContractError(
            f"{name} has dtype {dtype} in the update",
            allowed=f"{kind}: " + ", ".join(sorted(map(str, allowed))),
            fix="quantise to MXFP4 before the update; only a bias is floating point",
        )


def _check_unparsed(name: str, local: Mapping[str, Any]) -> None:
    if ".experts." not in name or not any(prefix in name for prefix in local):
        return
    raise ContractError(
        f"{name} is no MXFP4 expert tensor that a loader knows",
        allowed="the names in docs/weights.md",
        fix="rename it: loaders drop an unknown expert tensor without a word",
    )


def _check_shape(name: str, what: ExpertTensor, shape: tuple[int, ...], state: Any) -> None:
    experts, inter, hidden = full_sizes(state)
    per = {"weight": 2, "scale": BLOCK, "bias": 1}[what.kind]
    rows = {"w1": inter, "w3": inter, "w13": 2 * inter, "w2": hidden}[what.part]
    columns = (inter if what.part == "w2" else hidden) // per
    one = (rows,) if what.kind == "bias" else (rows, columns)
    if what.expert is not None and what.expert >= experts:
        raise ContractError(
            f"{name} is of expert {what.expert}",
            allowed=f"experts 0 to {experts - 1} of {state.plan.spec.name}",
            fix="pass the update of this model",
        )
    allowed = [one if what.expert is not None else (experts, *one)]
    if what.expert is None:
        if what.kind == "weight":
            allowed.append((experts, rows, columns // 16, 16))  # gpt-oss blocks
        if what.parameter in state.forms:
            allowed.append(state.forms[what.parameter].shape)  # a rank's own share, loaded directly
    if shape not in allowed:
        raise ContractError(
            f"{name} has shape {shape} in the update",
            allowed=" or ".join(map(str, dict.fromkeys(allowed))),
            fix="pass the tensors of the checkpoint that the model was loaded from, updated",
        )


def full_sizes(state: Any) -> tuple[int, int, int]:
    """(experts, I, H) of the whole model's layer, of which this rank has a part."""
    layer, spec = state.layer, state.plan.spec
    ranks = getattr(layer, "moe_tp_size", 1)
    per_rank = getattr(layer, "intermediate_size_per_partition", spec.intermediate_size)
    experts = getattr(layer, "num_experts", spec.num_experts)
    return experts, per_rank * ranks, spec.hidden_size
