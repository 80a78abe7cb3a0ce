"""Which dtype routing computes in, and where SGLang is patched for a correction bias that is never stale.

**Policy.** Routing adds a per-expert bias to ``sigmoid(logit)`` and ranks. It computes in the wider
of the two dtypes: the narrower *tensor* is widened, the bias is never narrowed. (SGLang 0.5.20 to
0.5.23 convert an fp32 bias to the bf16 of the logits before the check that should protect it; with a
bias around 7, half of the rows choose other experts.)

**Never stale.** :mod:`.correction_bias` owns every copy; :func:`refresh_correction_biases` writes them
after each of the calls by which SGLang changes weights.

| target | releases | function here |
|---|---|---|
| ``select_experts`` (around) | 0.5.12 to 0.5.23 | :func:`select_experts_inputs`, :func:`bias_for_readers` |
| ``TopKConfig.correction_bias_for_dtype`` (replace) | 0.5.20 to 0.5.23 | :func:`correction_bias_for_dtype` |
| ``TopKConfig.__init__`` (after) | 0.5.12 to 0.5.23 | :func:`correction_bias_of` |
| :data:`UPDATE_ENTRY_POINTS` (after) | 0.5.17 to 0.5.23 | :func:`refresh_correction_biases` |

``select_experts_inputs`` in front of everything is what covers the siblings at once: AITER's grouped
path, its non-grouped sigmoid path (``fused_topk`` converts the bias to the logits' dtype),
``SGLANG_K3_RADIX4_TOPK`` and the torch fallbacks (which take the score function in the logits' dtype)
all take their dtype from the logits. Kimi-K3's fused front passes logits as a row-strided slice; its
merged front on CUDA calls no top-k at all and reads the fp32 parameter in its own kernel, so it sees
what is written in place and not a replaced storage.

EP rebalancing moves the routed experts' weights and the map from logical to physical experts; choices
and bias are by logical expert. With experts missing after a rank's failure, though, SGLang reloads
weights from disk inside the rebalancing, past its own entry points: hence the last target below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .correction_bias import correction_bias_of, is_narrower, refresh_all

# What SGLang calls when weights change; each returns after the last write.
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
UPDATE_ENTRY_POINTS: dict[str, str] = {
    f"{_MANAGER}.update_weights_from_disk": "0.5.17",
    f"{_MANAGER}.update_weights_from_distributed": "0.5.17",
    f"{_MANAGER}.update_weights_from_tensor": "0.5.17",
    f"{_MANAGER}.update_weights_from_ipc": "0.5.17",
    f"{_MANAGER}.resume_memory_occupation": "0.5.17",
    f"{_MANAGER}.check_weights": "0.5.17",  # its action reset_tensors writes random values
    f"{_MANAGER}.end_weight_update": "0.5.21",
    "sglang.srt.eplb.eplb_manager:update_expert_location_with_recovery": "0.5.17",
}
"""Target to hook -> first release that has it (read in the released sources, 0.5.17 to 0.5.23)."""


def routing_dtype(logits_dtype: torch.dtype, bias_dtype: torch.dtype) -> torch.dtype:
    """The dtype that routing computes in: the wider of the two (bf16 with fp16 gives fp32)."""
    return torch.promote_types(logits_dtype, bias_dtype)


def aligned_routing_inputs(
    logits: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(logits, bias)`` in one dtype, the wider, for a kernel that takes only equal dtypes.

    Args:
        logits: ``[M, E]``; returned as it is when it is the wider, else a converted copy.
        bias: ``[E]`` or ``[M, E]``; likewise. The conversion belongs to this call.
    """
    dtype = routing_dtype(logits.dtype, bias.dtype)
    return logits.to(dtype), bias.to(dtype)


def select_experts_inputs(
    router_logits: torch.Tensor,
    topk_config: Any,
    *,
    dynamic_expert_bias: torch.Tensor | None = None,
    router_logits_partials: torch.Tensor | None = None,
    strided_rows: bool = False,
) -> torch.Tensor:
    """The router logits that SGLang's ``select_experts`` may take its dtype from.

    Args:
        router_logits: ``[M, E]``.
        topk_config: SGLang's TopKConfig; ``correction_bias``, ``scoring_func``, ``use_grouped_topk``,
            ``torch_native`` and ``custom_routing_function`` are read.
        dynamic_expert_bias: per-token bias of 0.5.21 on, which takes the place of the config's.
        router_logits_partials: split-K partials of 0.5.22 on. With them ``router_logits`` is an
            unwritten buffer of fixed dtype, which passes through untouched.
        strided_rows: whether the kernel behind takes rows with a stride (AITER's biased top-k since
            aiter#4397; portable's).

    Returns:
        ``router_logits`` itself (always so without a bias), or a copy widened to the bias, contiguous.
    """
    bias = topk_config.correction_bias if dynamic_expert_bias is None else dynamic_expert_bias
    if bias is None or router_logits_partials is not None or not _bias_takes_part(topk_config):
        return router_logits
    if not _bias_is_read_in_its_own_dtype(topk_config):
        router_logits = router_logits.to(routing_dtype(router_logits.dtype, bias.dtype))
        if strided_rows and router_logits.stride(-1) == 1:
            return router_logits
    return router_logits.contiguous()


def bias_for_readers(topk_config: Any, router_logits: torch.Tensor) -> torch.Tensor | None:
    """What ``topk_config.correction_bias`` has to be while SGLang's ``select_experts`` runs on these logits.

    Under graph capture and torch.compile that is a copy which :func:`refresh_correction_biases` keeps up to date,
    in the dtype of the reader; in an eager call the bias itself.
    """
    bias = topk_config.correction_bias
    if bias is None or not _bias_takes_part(topk_config):
        return bias
    dtype = bias.dtype
    if not _bias_is_read_in_its_own_dtype(topk_config):
        dtype = routing_dtype(router_logits.dtype, dtype)
    owner = correction_bias_of(topk_config)
    if torch.compiler.is_compiling():
        return owner.as_traced(bias, dtype)
    if owner.is_capturing(bias):
        return owner.as_dtype(bias, dtype)
    owner.look_at(bias, dtype)
    return bias


def _bias_takes_part(topk_config: Any) -> bool:
    grouped = getattr(topk_config, "use_grouped_topk", False)
    return grouped or getattr(topk_config, "custom_routing_function", None) is None


def _bias_is_read_in_its_own_dtype(topk_config: Any) -> bool:
    # sqrtsoftplus goes to AITER's topk_gating, which has an instance for each pair of dtypes; the torch
    # form adds the bias to a score in the dtype of the logits.
    return (
        not getattr(topk_config, "use_grouped_topk", False)
        and getattr(topk_config, "scoring_func", "softmax") == "sqrtsoftplus"
        and not getattr(topk_config, "torch_native", False)
    )


def correction_bias_for_dtype(config: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """``config.correction_bias`` in ``dtype``: SGLang's ``TopKConfig.correction_bias_for_dtype``.

    The original when the dtypes match (or no bias: None); else a copy with the address and
    freshness that :mod:`.correction_bias` promises. The caller alone decides on the dtype:
    ``select_experts`` asks for that of the logits, which :func:`select_experts_inputs` has widened.
    """
    source = config.correction_bias
    if source is None:
        return None
    return correction_bias_of(config).as_dtype(source, dtype)


def refresh_correction_biases() -> int:
    """Brings everything that graphs read up to date with its parameter; returns how many biases.

    To be called after weights have changed, before the next replay, while no memory is released.

    Raises:
        ContractError: see :func:`.correction_bias.refresh_all`.
    """
    return refresh_all()


def refresh_biases_after(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around each of :data:`UPDATE_ENTRY_POINTS`: what captured graphs read follows the parameters.

    Not while the scheduler has memory released (``offload_tags``): parameters, copies or graphs may be unmapped.
    The call that resumes the last of it comes through here, too.
    """
    result = original(*args, **kwargs)
    if not (args and getattr(args[0], "offload_tags", None)):
        refresh_correction_biases()
    return result


@dataclass
class TopKConfig:
    """The part of SGLang's TopKConfig that concerns the correction bias (for use without SGLang)."""

    top_k: int
    use_grouped_topk: bool = False
    topk_group: int | None = None
    num_expert_group: int | None = None
    renormalize: bool = True
    correction_bias: torch.Tensor | None = None
    routed_scaling_factor: float | None = None
    scoring_func: str = "softmax"
    torch_native: bool = False

    def __post_init__(self) -> None:
        correction_bias_of(self)

    def correction_bias_for_dtype(self, dtype: torch.dtype) -> torch.Tensor | None:
        """See :func:`correction_bias_for_dtype`."""
        return correction_bias_for_dtype(self, dtype)


__all__ = [
    "UPDATE_ENTRY_POINTS",
    "TopKConfig",
    "aligned_routing_inputs",
    "bias_for_readers",
    "correction_bias_for_dtype",
    "correction_bias_of",
    "is_narrower",
    "refresh_correction_biases",
    "routing_dtype",
    "select_experts_inputs",
]
