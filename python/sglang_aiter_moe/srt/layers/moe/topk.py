"""Which dtype routing computes in, and a correction bias that no captured graph can see stale.

**Policy.** Routing adds a per-expert bias to ``sigmoid(logit)`` and ranks. It computes in the wider
of the two dtypes: the narrower *tensor* is widened, the bias is never narrowed. (SGLang 0.5.20 to
0.5.23 convert an fp32 bias to the bf16 of the logits before the check that should protect it; with a
bias around 7, half of the rows choose other experts.)

**Never stale.** Nothing is derived from the bias outside the forward pass. A kernel reads the bias
parameter itself (:func:`portable.routing.biased_topk` takes any mix of dtypes), or a copy that the
forward pass converts again at each call: under graph capture that conversion is a node of the graph,
so a replay converts what the parameter holds then. Version counters decide nothing: a loader's
``param.data.copy_()`` does not bump them, and inference tensors have none. What replaces the storage
itself (``param.data = new``) cannot reach a graph by any read, because the graph holds the address:
:func:`refresh_correction_biases` writes the new content into every storage that a graph has
captured; it runs after each of :data:`UPDATE_ENTRY_POINTS`, and each eager call checks too.

**Where SGLang is patched** (module ``sglang.srt.layers.moe.topk`` unless named):

| target | releases | function here |
|---|---|---|
| ``select_experts`` (around) | 0.5.12 to 0.5.23 | :func:`select_experts_inputs` on its arguments |
| ``TopKConfig.correction_bias_for_dtype`` (replace) | 0.5.20 to 0.5.23 | :func:`correction_bias_for_dtype` |
| :data:`UPDATE_ENTRY_POINTS` (after) | 0.5.17 to 0.5.23 | :func:`refresh_correction_biases` |

``select_experts_inputs`` in front of everything is what covers the siblings at once: AITER's grouped
path, its non-grouped sigmoid path (``fused_topk`` converts the bias to the logits' dtype),
``SGLANG_K3_RADIX4_TOPK`` and the torch fallbacks (which take the sigmoid in the logits' dtype) all
take their dtype from the logits. Kimi-K3's fused front passes logits as a row-strided slice; K3's
merged front on CUDA calls no top-k at all and reads the fp32 parameter in its own kernel.
EP rebalancing needs no entry: choices and bias are indexed by logical expert, and only the map from
logical to physical experts changes.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import ContractError

# What SGLang calls when weights change, per scheduler process; each returns after the last write.
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATE_ENTRY_POINTS: dict[str, str] = {
    f"{_MANAGER}.update_weights_from_disk": "0.5.17",
    f"{_MANAGER}.update_weights_from_distributed": "0.5.17",
    f"{_MANAGER}.update_weights_from_tensor": "0.5.17",
    f"{_MANAGER}.update_weights_from_ipc": "0.5.17",
    f"{_MANAGER}.resume_memory_occupation": "0.5.17",
    f"{_MANAGER}.end_weight_update": "0.5.21",
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
        bias: ``[E]`` or ``[M, E]``; likewise. The conversion belongs to this call: captured in a
            graph, it reads the parameter at every replay.
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
        topk_config: SGLang's TopKConfig; ``correction_bias``, ``scoring_func`` and
            ``use_grouped_topk`` are read.
        dynamic_expert_bias: per-token bias of 0.5.21 on, which takes the place of the config's.
        router_logits_partials: split-K partials of 0.5.22 on. With them ``router_logits`` is an
            unwritten buffer of fixed dtype, which passes through untouched.
        strided_rows: whether the kernel behind takes rows with a stride (AITER since aiter#4397).

    Returns:
        ``router_logits`` itself, or a copy widened to the bias (and contiguous).
    """
    bias = topk_config.correction_bias if dynamic_expert_bias is None else dynamic_expert_bias
    if bias is not None and dynamic_expert_bias is None:
        correction_bias_of(topk_config).read(bias)
    if router_logits_partials is not None:
        return router_logits
    if bias is not None and not _bias_is_read_in_its_own_dtype(topk_config):
        router_logits = router_logits.to(routing_dtype(router_logits.dtype, bias.dtype))
    return router_logits if strided_rows else router_logits.contiguous()


def _bias_is_read_in_its_own_dtype(topk_config: Any) -> bool:
    # sqrtsoftplus goes to AITER's topk_gating, which has an instance for each pair of dtypes.
    grouped = getattr(topk_config, "use_grouped_topk", False)
    return not grouped and getattr(topk_config, "scoring_func", "softmax") == "sqrtsoftplus"


class CorrectionBias:
    """What kernels may read of one TopK's correction bias, and which storages graphs have captured.

    One per TopKConfig. The source tensor is passed in at each call, since ``.data`` or the config's
    attribute may be replaced. Conversions run on the current stream.
    """

    def __init__(self, config: Any) -> None:
        self.config = weakref.ref(config)
        self._copies: dict[torch.dtype, tuple[torch.Tensor, tuple]] = {}
        self._captured_copies: set[torch.dtype] = set()
        self._captured_sources: list[torch.Tensor] = []
        _live.add(self)

    def read(self, source: torch.Tensor) -> torch.Tensor:
        """``source``, for a kernel that reads it in its own dtype; remembered under capture."""
        if torch.compiler.is_compiling():
            return source
        if not _is_capturing(source):
            self.follow(source)
        elif all(_moved(seen, source) for seen in self._captured_sources):
            # An alias: keeps the storage, which the graph will read, from being freed.
            self._captured_sources.append(source.detach())
        return source

    def as_dtype(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``source`` in ``dtype``: itself if it has it, else a copy converted in this call.

        The copy keeps its address while the source is unchanged, and for good once a graph capture
        has seen it. Before that, a change that shows (version counter, storage) gives a new tensor,
        as SGLang's own test expects.
        """
        self.read(source)
        if source.dtype == dtype:
            return source
        if torch.compiler.is_compiling():
            return source.to(dtype)  # traced: the compiled code converts at each run
        key = _key(source)
        copy, seen = self._copies.get(dtype, (None, None))
        if copy is None or (seen != key and dtype not in self._captured_copies):
            with torch.inference_mode(False):  # a normal tensor, so that any caller may use it
                copy = torch.empty(source.shape, dtype=dtype, device=source.device)
        if _is_capturing(source):
            self._captured_copies.add(dtype)
        self._copies[dtype] = (copy, key)
        _write(copy, source)
        return copy

    def follow(self, source: torch.Tensor) -> None:
        """Writes ``source`` into every storage that graphs read and that is no longer its own."""
        for seen in self._captured_sources:
            if _moved(seen, source):
                _write_captured(seen, source)

    def refresh(self, source: torch.Tensor) -> None:
        """:meth:`follow`, and converts every copy again, in place."""
        self.follow(source)
        for dtype, (copy, _) in self._copies.items():
            _write(copy, source)
            self._copies[dtype] = (copy, _key(source))


_live: weakref.WeakSet[CorrectionBias] = weakref.WeakSet()
_ATTRIBUTE = "_aiter_moe_correction_bias"


def correction_bias_of(config: Any) -> CorrectionBias:
    """The :class:`CorrectionBias` of a TopKConfig, made at the first call."""
    state = getattr(config, _ATTRIBUTE, None)
    if state is None or state.config() is not config:  # the second: copy.copy() of a config
        state = CorrectionBias(config)
        setattr(config, _ATTRIBUTE, state)
    return state


def correction_bias_for_dtype(config: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """``config.correction_bias`` in ``dtype``: SGLang's ``TopKConfig.correction_bias_for_dtype``.

    The original when the dtypes match (or no bias: None); else a copy with the address and
    freshness that :meth:`CorrectionBias.as_dtype` promises. The caller alone decides on the dtype:
    ``select_experts`` asks for that of the logits, which :func:`select_experts_inputs` has widened.
    """
    source = config.correction_bias
    if source is None:
        return None
    return correction_bias_of(config).as_dtype(source, dtype)


def refresh_correction_biases() -> int:
    """Brings everything that graphs read up to date with its parameter; returns how many biases.

    To be called after weights have changed, before the next replay. In-place writes do not need
    it; replaced storages do.
    """
    refreshed = 0
    for state in list(_live):
        config = state.config()
        if config is not None and config.correction_bias is not None:
            state.refresh(config.correction_bias)
            refreshed += 1
    return refreshed


def refresh_biases_after(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around each of :data:`UPDATE_ENTRY_POINTS`: what captured graphs read follows the parameters."""
    result = original(*args, **kwargs)
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

    def correction_bias_for_dtype(self, dtype: torch.dtype) -> torch.Tensor | None:
        """See :func:`correction_bias_for_dtype`."""
        return correction_bias_for_dtype(self, dtype)


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _moved(seen: torch.Tensor, source: torch.Tensor) -> bool:
    return seen.data_ptr() != source.data_ptr() or seen.dtype != source.dtype


def _key(source: torch.Tensor) -> tuple:
    # Only for the address of the copy, never for its content.
    version = None if source.is_inference() else source._version
    return source.data_ptr(), version, source.device, source.dtype, source.shape


def _write_captured(captured: torch.Tensor, source: torch.Tensor) -> None:
    if routing_dtype(captured.dtype, source.dtype) != captured.dtype:
        raise ContractError(
            f"the correction bias changed from {captured.dtype} to {source.dtype}, "
            "and a captured graph reads it in the narrower dtype",
            allowed="the dtype at capture, or a narrower one",
            fix="capture the graphs again (update_weights_from_disk takes recapture_cuda_graph)",
        )
    _write(captured, source)


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise ContractError(
            f"the correction bias changed its shape from {tuple(target.shape)} "
            f"to {tuple(source.shape)} under captured graphs",
            allowed="new values in the same shape",
            fix="capture the graphs again after changing the model",
        )
    with torch.inference_mode():  # allowed to write normal and inference tensors alike
        target.copy_(source)
