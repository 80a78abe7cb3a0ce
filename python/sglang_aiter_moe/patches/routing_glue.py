"""SGLang's biased routers on a GPU by portable's fused kernel.

The routers are those that ``select_experts`` calls; what it does before (the bias's dtype) and after (EP maps,
padded rows, recording) stays SGLang's. Rows may be strided: the kernel reads them where they are.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from sglang_aiter_moe.portable.routing import biased_topk

logger = logging.getLogger(__name__)


def biased_grouped_topk(
    original: Any,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``biased_grouped_topk_gpu``: grouped (DeepSeek-V3) and ungrouped (Kimi) sigmoid routing with a bias."""
    if why := _why_not(original, gating_output, correction_bias, options):
        _say(why)
        return original(
            hidden_states,
            gating_output,
            correction_bias,
            topk,
            renormalize,
            num_expert_group,
            topk_group,
            **options,
        )
    groups = (num_expert_group or 1, topk_group or 1)
    return _fused(original, gating_output, correction_bias, topk, renormalize, groups, options)


def biased_topk_sigmoid(
    original: Any,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str = "sigmoid",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``biased_topk_jit_kernel_impl``: routing without ``use_grouped_topk``; other score functions pass through."""
    why = "" if scoring_func == "sigmoid" else "-"
    why = why or _why_not(original, gating_output, correction_bias, options)
    if why:
        _say(why)
        return original(
            hidden_states,
            gating_output,
            correction_bias,
            topk,
            renormalize,
            scoring_func,
            **options,
        )
    return _fused(original, gating_output, correction_bias, topk, renormalize, (1, 1), options)


def _fused(
    original: Any,
    logits: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    groups: tuple[int, int],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    shared = options.get("num_fused_shared_experts", 0)
    factor = options.get("routed_scaling_factor")
    folded = bool(options.get("apply_routed_scaling_factor_on_output"))
    shared_weight = 1.0
    if shared:
        weight_of = _globals(original)["fused_shared_expert_weight"]
        shared_weight = weight_of(routed_scaling_factor=factor, fused_in_topk=folded)
    return biased_topk(
        logits,
        bias,
        topk - shared,
        num_expert_group=groups[0],
        topk_group=groups[1],
        renormalize=renormalize,
        routed_scaling_factor=factor if folded and factor is not None else 1.0,
        num_shared_slots=shared,
        shared_weight=shared_weight,
    )


def _why_not(
    original: Any, logits: torch.Tensor, bias: torch.Tensor | None, options: dict[str, Any]
) -> str:
    """Why SGLang's own router is called; "-" where nobody expects another one, "" if the kernel takes it."""
    if not _on_gpu(logits) or bias is None or torch.compiler.is_compiling():
        return "-"
    names = _globals(original)
    if names.get("_use_aiter"):
        return "-"  # select_experts has widened the logits, and AITER's name routes
    if options.get("packed_out") is not None or options.get("router_logits_partials") is not None:
        return "the router also has to write packed ids, or to sum partial logits"
    if options.get("num_fused_shared_experts") and "fused_shared_expert_weight" not in names:
        return "this SGLang release chooses shared experts at random"
    if logits.shape[1] > 4096:
        return f"{logits.shape[1]} experts are more than a program of the kernel holds (4096)"
    return ""


def _globals(function: Any) -> dict[str, Any]:
    return getattr(function, "__globals__", {})


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@functools.cache
def _say(why: str) -> None:
    if why != "-":
        logger.warning("SGLang's own router is used: %s", why)
