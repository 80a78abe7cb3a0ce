"""``fused_moe`` with the signature of an AITER release, executed by a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_aiter_moe.errors import check_integer
from sglang_aiter_moe.numerics.mxfp4 import dequantize_mxfp4
from sglang_aiter_moe.portable import backends
from sglang_aiter_moe.portable.dispatch import Dispatcher
from sglang_aiter_moe.portable.enums import FP4X2, QuantType, activation_type
from sglang_aiter_moe.portable.machine import Machine
from sglang_aiter_moe.portable.request import A4W4, KernelRequest
from sglang_aiter_moe.portable.resolution import Call, Resolution
from sglang_aiter_moe.portable.sorting import check_local_tokens

_REQUIRED = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids")
_SHARED_EXPERT = ("shared_w1", "shared_w2", "shared_w1_scale", "shared_w2_scale")
_OUTPUT_DTYPES = (torch.float16, torch.bfloat16)


def parameters(machine: Machine) -> dict[str, Any]:
    """Optional parameters of the release's ``fused_moe`` in order, with their defaults."""
    release = machine.release
    optional: dict[str, Any] = {
        "expert_mask": None,
        "activation": activation_type(release).Silu,
        "quant_type": QuantType.No,
        "doweight_stage1": False,
        "w1_scale": None,
        "w2_scale": None,
        "a1_scale": None,
        "a2_scale": None,
        "block_size_M": None,
        "num_local_tokens": None,
        "moe_sorting_dispatch_policy": 0,
        "dtype": None,
        "hidden_pad": 0,
        "intermediate_pad": 0,
        "bias1": None,
        "bias2": None,
        "splitk": 0,
    }
    if release.gate_mode_decides:
        optional["swiglu_limit"] = None
    if release.has_situv2:
        optional |= {"beta": None, "linear_beta": None}
    if release.has_gate_mode:
        optional["gate_mode"] = "separated"
    if release.has_shared_expert:
        optional |= dict.fromkeys(_SHARED_EXPERT) | {"shared_expert_id": -1}
    if release.has_stage2_scatter:
        optional["stage2_scatter"] = None
    for extension in machine.extensions:
        optional[extension] = None if extension == "output" else False
    return optional


def signature(machine: Machine) -> inspect.Signature:
    """The signature of the release's ``fused_moe``."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [inspect.Parameter(name, kind) for name in _REQUIRED]
    optional = [inspect.Parameter(n, kind, default=d) for n, d in parameters(machine).items()]
    return inspect.Signature(required + optional)


def bind(sig: inspect.Signature, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name.

    Raises:
        TypeError: as Python raises for a function of that signature.
    """
    try:
        bound = sig.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"fused_moe() {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def make_fused_moe(machine: Machine, dispatcher: Dispatcher) -> Callable[..., torch.Tensor]:
    """The ``fused_moe`` of a machine."""
    sig = signature(machine)

    def fused_moe(*args, **kwargs):
        return _fused_moe(dispatcher, bind(sig, args, kwargs))

    fused_moe.__signature__ = sig
    fused_moe.__doc__ = f"""AITER {machine.release.label}'s fused MoE on {machine.arch}, for MXFP4 weights per 1x32.

    Reads the bytes that the kernel of the resolved family would read, whatever they are.

    Args:
        hidden_states: bf16 or fp16 ``[M, H]``; float4_e2m1fn_x2 ``[M, H/2]`` with ``a1_scale`` for A4W4.
        w1: float4_e2m1fn_x2 ``[E, 2I, H/2]``. w2: ``[E, H, I/2]``. Both with the attribute ``is_shuffled``
            if they are.
        topk_weight: fp32 ``[M, K]``. topk_ids: int32 ``[M, K]``.

    Returns:
        ``[M, H]`` of ``dtype`` (that of hidden_states by default).

    Raises:
        What AITER raises (docs/contract.md section b); IndexError where it would read out of bounds; ContractError
        for pads and token counts that are no integers, which its kernels' bindings would not take.
    """
    return fused_moe


def _fused_moe(dispatcher: Dispatcher, a: dict[str, Any]) -> torch.Tensor:
    if (
        any(a.get(name) is not None for name in _SHARED_EXPERT)
        or a.get("shared_expert_id", -1) != -1
    ):
        raise NotImplementedError("portable does not model AITER's shared-expert path (FHMoE)")
    if a.get("stage2_scatter") is not None:
        raise NotImplementedError("portable does not model stage2_scatter")
    if a["quant_type"].value != QuantType.per_1x32.value:
        raise NotImplementedError(
            f"portable models QuantType.per_1x32 with MXFP4 weights, not {a['quant_type']}"
        )
    for name in ("hidden_pad", "intermediate_pad"):
        check_integer(name, a[name], least=0, fix="pass how many of the last columns are padding")
    if a["num_local_tokens"] is not None:
        check_local_tokens(a["num_local_tokens"])
    call = call_of(a)
    x, ids = a["hidden_states"], a["topk_ids"]
    dtype = a["dtype"] or x.dtype
    if dtype not in _OUTPUT_DTYPES:
        raise AssertionError(f"Fused_moe unsupported out dtype: {dtype}")
    resolved = dispatcher.resolve(call)
    request = request_of(call, resolved, a)
    for name in ("w1_scale", "w2_scale"):
        if a[name] is None:
            raise TypeError(f"{resolved.family} needs {name}, got None")

    out = _output(a, (call.tokens, call.topk, call.hidden), dtype)
    if not call.tokens:
        return out
    if x.dtype == FP4X2:
        if resolved.mode != A4W4 or a["a1_scale"] is None:
            raise RuntimeError(f"{resolved.family} takes no float4 input in mode {resolved.mode}")
        # Quantising these values again gives them back unchanged.
        scale = a["a1_scale"].view(torch.uint8).reshape(call.tokens, -1)
        x = dequantize_mxfp4(x.view(torch.uint8), scale).to(torch.bfloat16)
    elif x.dtype not in _OUTPUT_DTYPES:
        x = x.to(dtype)
    backends.select(x.device).run(
        request, x, a["w1"], a["w2"], a["w1_scale"], a["w2_scale"], a["topk_weight"], ids, out
    )
    return out


def call_of(a: Mapping[str, Any]) -> Call:
    """What dispatch looks at, out of all arguments.

    Raises:
        AssertionError: the shapes of w1 and w2 do not belong together.
    """
    w1, w2, ids = a["w1"], a["w2"], a["topk_ids"]
    experts, rows, k1 = w1.shape
    _, hidden, k2 = w2.shape
    inter = k2 * (hidden // k1)  # 2 codes a byte
    if rows not in (inter, 2 * inter):
        raise AssertionError(f"Invalid MoE weight: w1.shape={w1.shape} w2.shape={w2.shape}")
    return Call(
        tokens=ids.shape[0],
        topk=ids.shape[1],
        num_experts=experts,
        hidden=hidden,
        inter=inter,
        activation=a["activation"].value,
        gate_mode=a.get("gate_mode", "separated"),
        w_dtype="fp4x2" if w1.dtype == FP4X2 else str(w1.dtype).removeprefix("torch."),
        w1_shuffled=getattr(w1, "is_shuffled", False),
        w2_shuffled=getattr(w2, "is_shuffled", False),
        g1u1=rows != inter,
        has_bias1=a["bias1"] is not None,
        has_bias2=a["bias2"] is not None,
        has_expert_mask=a["expert_mask"] is not None,
        doweight_stage1=a["doweight_stage1"],
        limit=a.get("swiglu_limit"),
        beta=a.get("beta"),
        linear_beta=a.get("linear_beta"),
        hidden_pad=a["hidden_pad"],
        intermediate_pad=a["intermediate_pad"],
    )


def request_of(call: Call, resolved: Resolution, a: Mapping[str, Any]) -> KernelRequest:
    """The backend's request for a resolved call.

    Raises:
        NotImplementedError: w1 without up rows. TypeError: a bias that the family uses is not fp32.
    """
    if not call.g1u1:
        raise NotImplementedError("portable models w1 with gate and up rows only")
    for name, used in (("bias1", resolved.uses_bias1), ("bias2", resolved.uses_bias2)):
        if used and a[name] is not None and a[name].dtype != torch.float32:
            raise TypeError(f"MoE bias must be fp32, got {a[name].dtype}")
    return KernelRequest(
        mode=resolved.mode,
        family=resolved.family,
        num_experts=call.num_experts,
        hidden_size=call.hidden,
        intermediate_size=call.inter,
        w13_layout=resolved.w13_layout,
        w13_scale_layout=resolved.w13_scale_layout,
        w2_layout=resolved.w2_layout,
        w2_scale_layout=resolved.w2_scale_layout,
        activation=resolved.activation,
        limit=resolved.limit,
        beta=resolved.beta,
        linear_beta=resolved.linear_beta,
        input_rounding=resolved.input_rounding,
        requantization=resolved.requantization,
        bias13=a["bias1"] if resolved.uses_bias1 else None,
        bias2=a["bias2"] if resolved.uses_bias2 else None,
        hidden_skip_k=resolved.hidden_skip_k,
        intermediate_skip_n=resolved.intermediate_skip_n,
        intermediate_skip_k=resolved.intermediate_skip_k,
        hidden_skip_n=resolved.hidden_skip_n,
        expert_mask=a["expert_mask"],
        weight_on_input=resolved.weight_on_input,
        weight_on_output=not call.doweight_stage1,
        num_local_tokens=a["num_local_tokens"] if resolved.forwards_num_local_tokens else None,
    )


def _output(a: Mapping[str, Any], shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    tokens, topk, hidden = shape
    expected = (tokens, topk, hidden) if a.get("no_combine") else (tokens, hidden)
    out = a.get("output")
    if out is None:
        return torch.empty(expected, dtype=dtype, device=a["hidden_states"].device)
    if tuple(out.shape) != expected or out.dtype != dtype or not out.is_contiguous():
        raise RuntimeError(
            f"output must be contiguous {expected} {dtype}, got {tuple(out.shape)} {out.dtype}"
        )
    return out
