"""What AITER would do with a call, without weights and without running it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

from sglang_aiter_moe.portable.dispatch import Dispatcher
from sglang_aiter_moe.portable.entry import parameters
from sglang_aiter_moe.portable.enums import ACTIVATION_NAMES, activation_type
from sglang_aiter_moe.portable.machine import Machine
from sglang_aiter_moe.portable.resolution import Call, Resolution

_VALUES = {name: value for value, name in ACTIVATION_NAMES.items()}


def explain(
    *,
    tokens: int,
    num_experts: int,
    topk: int,
    hidden_size: int,
    intermediate_size: int,
    activation: str | Enum,
    arch: str = "gfx950",
    aiter: str = "0.1.20",
    a16w4_kernel: str = "separated",
    flydsl: bool = True,
    env: Mapping[str, str] | None = None,
    is_shuffled: bool = True,
    has_bias: bool = False,
    has_expert_mask: bool = False,
    doweight_stage1: bool = False,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    **kwargs: Any,
) -> Resolution:
    """Mode, layouts, kernel family and rules for a call of ``fused_moe`` with per-1x32 MXFP4 weights.

    Args:
        tokens, num_experts, topk, hidden_size, intermediate_size: M, local experts, K, H and I, pads included.
        activation: "silu", "gelu", "swiglu", "situv2" or an ActivationType.
        arch, aiter, a16w4_kernel, flydsl: as for :func:`portable.install`.
        env: the environment, read afresh; ``os.environ`` by default.
        has_bias: both biases are passed.
        kwargs: ``gate_mode``, ``swiglu_limit``, ``beta``, ``linear_beta`` as passed to ``fused_moe``.

    Raises:
        What ``fused_moe`` raises before it looks at a tensor's contents: TypeError for an argument that
        the release does not have, AttributeError for an activation that it does not know.
    """
    machine = Machine.make(arch, aiter, a16w4_kernel, flydsl)
    known = parameters(machine)
    for name in kwargs:
        if name not in ("gate_mode", "swiglu_limit", "beta", "linear_beta") or name not in known:
            raise TypeError(f"fused_moe() got an unexpected keyword argument {name!r}")
    if isinstance(activation, Enum):
        value = activation.value
    else:
        value = getattr(activation_type(machine.release), str(activation).capitalize()).value
    call = Call(
        tokens=tokens,
        topk=topk,
        num_experts=num_experts,
        hidden=hidden_size,
        inter=intermediate_size,
        activation=value,
        gate_mode=kwargs.get("gate_mode", "separated"),
        w1_shuffled=is_shuffled,
        w2_shuffled=is_shuffled,
        has_bias1=has_bias,
        has_bias2=has_bias,
        has_expert_mask=has_expert_mask,
        doweight_stage1=doweight_stage1,
        limit=kwargs.get("swiglu_limit"),
        beta=kwargs.get("beta"),
        linear_beta=kwargs.get("linear_beta"),
        hidden_pad=hidden_pad,
        intermediate_pad=intermediate_pad,
    )
    return Dispatcher(machine, os.environ if env is None else env, log=False).resolve(call)
