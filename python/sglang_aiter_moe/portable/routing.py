"""Biased grouped top-k routing (sigmoid scores), executed anywhere.

Shapes: ``M`` tokens, ``E`` experts, ``G`` expert groups, ``K`` routed experts a token.

The rule (AITER ``biased_grouped_topk``; DeepSeek-V3 "noaux_tc" routing):

1. ``score = sigmoid(logit)``; ``choice = score + bias``. The bias decides who is chosen, never the weight.
2. With ``topk_group < G``: a group's score is the sum of its two largest choices (its only one when
   ``E == G``); the ``topk_group`` best groups stay, the lowest group wins a tie.
3. The ``K`` largest choices among the groups that stay, the lowest expert wins a tie. Which of the ``K`` slots
   an expert gets is not part of the rule: torch returns the best first, Triton ascending experts.
4. ``weight = score``; with ``renormalize`` divided by the sum over the ``K``; times
   ``routed_scaling_factor`` (AITER folds it here; 1.0 leaves it to the caller).

The chosen set is that of float64 arithmetic for whatever mix of dtypes comes in (Triton: see what is compared
in ``triton/biased_topk.py``); AITER itself computes in float32 with hardware approximations. Weights are within
1e-6 of float64's, relative.

Extreme logits. From about 37 on float64's sigmoid is 1 and experts tie; scores below float32's smallest number
(logits under about -88) still choose, and are normalised in float64, so weights stay in ``[0, scale]``. Without
``renormalize`` such a weight is subnormal or 0. Below about -709 a score is 0 in float64, too; a row whose chosen
scores are all 0 gets weights of 0.

Rows that hold NaN or Inf. Ids are always in ``[0, E)`` and distinct:

- a choice that is NaN or -Inf ranks below every other of the groups that stay, in order of expert. A
  row of NaN therefore chooses the first ``K`` experts of the first ``topk_group`` groups;
- a weight is NaN exactly where its logit is NaN. With ``renormalize`` the other weights of such a
  row are 0, as they are when all chosen scores are 0 (AITER divides only by a sum above 0);
- rows from ``num_tokens`` on are padding: ids ``padded_id`` (0 by default, since AITER reads out of
  bounds at -1, aiter#4636), weights 0.
"""

from __future__ import annotations

import importlib.util

import torch

from ..errors import ContractError, check_integer, check_number

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_AITER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# csrc/kernels/topk_softmax_kernels_group.cu instantiates these and raises for the rest.
_AITER_GROUPS = (1, 2, 4, 8)
_CONFIG = "take it from the model's config"


def biased_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    *,
    num_expert_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    num_tokens: torch.Tensor | int | None = None,
    padded_id: int = 0,
    num_shared_slots: int = 0,
    shared_weight: float = 1.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses ``topk`` experts a token by the rule at the top of this file.

    Args:
        logits: router logits ``[M, E]``, float32, bfloat16, float16 or float64, any strides.
        bias: correction bias ``[E]``, or ``[M, E]`` for one bias a token; any of the same dtypes,
            mixed freely with that of ``logits``.
        num_tokens: how many rows are real, as a number or as a tensor of one integer on the device
            of ``logits`` (read by the kernel, so a captured graph follows it).
        num_shared_slots: columns appended after the routed ones: ids ``E, E+1, ...``, weight
            ``shared_weight``, neither renormalised nor scaled.
        out: ``(weights, ids)`` to write into, float32 and int32, ``[M, topk + num_shared_slots]``.
        backend: ``"torch"``, ``"triton"``, or None: Triton for tensors on a GPU, else torch.

    Returns:
        weights float32 and ids int32, both ``[M, topk + num_shared_slots]``.

    Raises:
        ContractError: for shapes, dtypes, devices or group numbers that do not fit, and for counts that are no
            integers.
    """
    _check(logits, bias, topk, num_expert_group, topk_group)
    _check_counts(logits, num_tokens, num_shared_slots)
    check_integer("padded_id", padded_id, fix="pass the id of an expert, or -1")
    for name, value in (
        ("routed_scaling_factor", routed_scaling_factor),
        ("shared_weight", shared_weight),
    ):
        check_number(name, value, fix=f"take {name} from the model's config")
    width = topk + num_shared_slots
    if out is None:
        out = (
            torch.empty((logits.shape[0], width), dtype=torch.float32, device=logits.device),
            torch.empty((logits.shape[0], width), dtype=torch.int32, device=logits.device),
        )
    _check_out(out, logits, width)
    if logits.shape[0] == 0:
        return out
    arguments = {
        "num_expert_group": num_expert_group,
        "topk_group": topk_group,
        "renormalize": renormalize,
        "routed_scaling_factor": routed_scaling_factor,
        "num_tokens": num_tokens,
        "padded_id": padded_id,
        "shared_weight": shared_weight,
    }
    if _backend(logits, backend) == "triton":
        from .triton.biased_topk import biased_topk_triton

        biased_topk_triton(logits, bias, topk, out, **arguments)
    else:
        biased_topk_torch(logits, bias, topk, out, **arguments)
    return out


def biased_topk_torch(
    logits: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    out: tuple[torch.Tensor, torch.Tensor],
    *,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
    num_tokens: torch.Tensor | int | None,
    padded_id: int,
    shared_weight: float,
) -> None:
    """:func:`biased_topk` in plain torch, into ``out``; the arguments are checked already."""
    tokens, experts = logits.shape
    scores = logits.double().sigmoid()
    choice = scores + bias.double()
    choice = torch.where(choice.isnan(), -torch.inf, choice)
    if topk_group < num_expert_group:
        grouped = choice.reshape(tokens, num_expert_group, -1)
        top2 = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
        top2 = torch.where(top2.isnan(), -torch.inf, top2)  # Inf - Inf
        best = top2.sort(dim=1, descending=True, stable=True).indices[:, :topk_group]
        stays = torch.zeros_like(top2, dtype=torch.bool).scatter_(1, best, True)
        # -Inf is for the groups that go: what stays ranks above, whatever it is.
        grouped = grouped.clamp(min=torch.finfo(torch.float64).min)
        choice = torch.where(stays[:, :, None], grouped, -torch.inf).view(tokens, experts)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    picked = scores.gather(1, ids)
    if renormalize:
        total = picked.sum(dim=1, keepdim=True)
        # First the quotient, which is at most 1: scale / total may be infinite.
        picked = torch.where(total > 0, picked / total, picked * 0.0)
    picked = picked * routed_scaling_factor

    weights_out, ids_out = out
    weights_out[:, :topk] = picked
    ids_out[:, :topk] = ids
    weights_out[:, topk:] = shared_weight
    ids_out[:, topk:] = torch.arange(experts, experts + ids_out.shape[1] - topk, device=ids.device)
    if num_tokens is not None:
        padded = (torch.arange(tokens, device=logits.device) >= num_tokens)[:, None]
        weights_out.masked_fill_(padded, 0.0)
        ids_out.masked_fill_(padded, padded_id)


def biased_grouped_topk(
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    """AITER's entry point: routes into ``topk_weights`` and ``topk_ids`` ``[M, K]`` in place.

    AITER's kernels are instantiated for one dtype and reinterpret the bytes of a bias in another
    (an fp32 bias read as bf16 chooses noise); here that is an error.

    Raises:
        ContractError: where AITER raises (dtypes of the outputs, group numbers, columns that are
            not adjacent) and where it would read or write the wrong bytes (mixed dtypes, outputs
            with different row strides).
    """
    for name, tensor in (
        ("gating_output", gating_output),
        ("correction_bias", correction_bias),
        ("topk_weights", topk_weights),
        ("topk_ids", topk_ids),
    ):
        _check_tensor(name, tensor)
    check_integer("num_expert_group", num_expert_group, fix=_CONFIG)
    if gating_output.dtype != correction_bias.dtype:
        raise ContractError(
            f"correction_bias is {correction_bias.dtype}, gating_output is {gating_output.dtype}",
            allowed="one dtype for both (AITER reinterprets the bytes of the other)",
            fix="widen the narrower one (srt.layers.moe.topk.aligned_routing_inputs), "
            "or call portable.routing.biased_topk, which takes any mix",
        )
    if gating_output.dtype not in _AITER_DTYPES:
        raise ContractError(
            f"gating_output and correction_bias are {gating_output.dtype}",
            allowed=f"{_AITER_DTYPES} (AITER instantiates no other)",
            fix="convert both to float32, or call portable.routing.biased_topk",
        )
    if correction_bias.dim() != 1 or (
        correction_bias.shape[0] > 1 and correction_bias.stride(0) != 1
    ):
        raise ContractError(
            f"correction_bias has shape {tuple(correction_bias.shape)}, strides {correction_bias.stride()}",
            allowed="one dense vector (AITER reads E adjacent numbers from its address)",
            fix="pass correction_bias.contiguous(); a bias for each token goes to "
            "portable.routing.biased_topk",
        )
    if gating_output.dim() == 2 and gating_output.shape[1] > 1 and gating_output.stride(1) != 1:
        raise ContractError(
            f"gating_output has stride {gating_output.stride(1)} between experts",
            allowed="1 (rows may be strided)",
            fix="pass gating_output.contiguous()",
        )
    if num_expert_group not in _AITER_GROUPS:
        raise ContractError(
            f"num_expert_group is {num_expert_group}",
            allowed=f"{_AITER_GROUPS} (AITER instantiates no other)",
            fix="call portable.routing.biased_topk, which takes any divisor of the expert number",
        )
    if topk_weights.dim() == topk_ids.dim() == 2 and topk_weights.stride() != topk_ids.stride():
        raise ContractError(
            f"topk_weights has strides {topk_weights.stride()}, topk_ids {topk_ids.stride()}",
            allowed="equal strides (AITER writes both with those of topk_ids)",
            fix="allocate both with torch.empty((M, K))",
        )
    topk = topk_ids.shape[1] if topk_ids.dim() == 2 else 0
    biased_topk(
        gating_output,
        correction_bias,
        topk,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        renormalize=need_renorm,
        routed_scaling_factor=routed_scaling_factor,
        out=(topk_weights, topk_ids),
    )


def _backend(logits: torch.Tensor, backend: str | None) -> str:
    if backend is None:
        return "triton" if logits.is_cuda and importlib.util.find_spec("triton") else "torch"
    if backend not in ("torch", "triton"):
        raise ContractError(
            f"backend is {backend!r}", allowed="'torch', 'triton' or None", fix="pass one of these"
        )
    return backend


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ContractError(
            f"{name} is {value!r}, a {type(value).__name__}",
            allowed="a torch.Tensor",
            fix=f"pass {name} as a tensor",
        )


def _check(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, num_expert_group: int, topk_group: int
) -> None:
    for name, tensor in (("logits", logits), ("bias", bias)):
        _check_tensor(name, tensor)
        if tensor.dtype not in _FLOATS:
            raise ContractError(
                f"{name} is {tensor.dtype}", allowed=f"one of {_FLOATS}", fix=f"convert {name}"
            )
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ContractError(
            f"logits has shape {tuple(logits.shape)}",
            allowed="[tokens, experts] with at least one expert",
            fix="pass the router's output as a matrix",
        )
    tokens, experts = logits.shape
    if tuple(bias.shape) not in ((experts,), (tokens, experts)):
        raise ContractError(
            f"bias has shape {tuple(bias.shape)} for logits {tuple(logits.shape)}",
            allowed=f"[{experts}], or [{tokens}, {experts}] for one bias a token",
            fix="pass the correction bias of this layer",
        )
    if bias.device != logits.device:
        raise ContractError(
            f"bias is on {bias.device}, logits on {logits.device}",
            allowed="one device",
            fix="move the bias to the device of the logits",
        )
    for name, value in (
        ("topk", topk),
        ("num_expert_group", num_expert_group),
        ("topk_group", topk_group),
    ):
        check_integer(name, value, fix=_CONFIG)
    if num_expert_group < 1 or experts % num_expert_group:
        raise ContractError(
            f"num_expert_group is {num_expert_group} for {experts} experts",
            allowed="a divisor of the number of experts",
            fix="take num_expert_group (n_group) from the model's config",
        )
    if not 1 <= topk_group <= num_expert_group:
        raise ContractError(
            f"topk_group is {topk_group}",
            allowed=f"1 to num_expert_group ({num_expert_group})",
            fix="take topk_group from the model's config",
        )
    available = experts // num_expert_group * topk_group
    if not 1 <= topk <= available:
        raise ContractError(
            f"topk is {topk}",
            allowed=f"1 to {available}, the experts of {topk_group} of {num_expert_group} groups",
            fix="take topk from the model's config, without the shared experts",
        )


def _check_counts(
    logits: torch.Tensor, num_tokens: torch.Tensor | int | None, num_shared_slots: int
) -> None:
    check_integer("num_shared_slots", num_shared_slots, least=0, fix="pass a count of columns")
    if not isinstance(num_tokens, torch.Tensor):
        if num_tokens is not None:
            check_integer("num_tokens", num_tokens, fix="pass the number of real rows")
    elif (
        num_tokens.numel() != 1
        or num_tokens.dtype not in (torch.int32, torch.int64)
        or num_tokens.device != logits.device
    ):
        raise ContractError(
            f"num_tokens is {num_tokens.dtype} {tuple(num_tokens.shape)} on {num_tokens.device}",
            allowed=f"one int32 or int64 on {logits.device}",
            fix="pass the number of real rows, as SGLang's num_token_non_padded",
        )


def _check_out(out: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, width: int) -> None:
    shape = (logits.shape[0], width)
    for name, tensor, dtype in zip(
        ("topk_weights", "topk_ids"), out, (torch.float32, torch.int32), strict=True
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != logits.device:
            raise ContractError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
                allowed=f"{dtype} {shape} on {logits.device}",
                fix=f"allocate it with torch.empty({shape}, dtype={dtype})",
            )
