"""A :class:`MoeSpec` from a model's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_aiter_moe.contract.spec import MoeSpec, shard
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import Activation

_NAMES = {
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "topk": ("num_experts_per_tok", "num_experts_per_token", "top_k"),
    "hidden_size": ("routed_expert_hidden_size", "hidden_size"),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
}


def spec_from_config(config: Mapping[str, Any], *, tp: int = 1, ep: int = 1) -> MoeSpec:
    """One rank's MoE layer as a model's configuration gives it.

    Args:
        config: ``config.json``; of a multimodal model its ``text_config`` is read.
        tp: ranks that share an expert's intermediate size.
        ep: ranks that share the experts.

    Raises:
        ContractError: a size is missing, the experts do not divide, or the activation is unknown.
    """
    config = config.get("text_config", config)
    sizes = {ours: _first(config, names, ours) for ours, names in _NAMES.items()}
    if ep < 1 or sizes["num_experts"] % ep:
        raise ContractError(
            f"{sizes['num_experts']} experts on {ep} expert-parallel ranks",
            allowed="a number of ranks that divides the experts",
            fix="take --ep from the launch command",
        )
    sizes["num_experts"] //= ep
    sizes["intermediate_size"] = shard(sizes["intermediate_size"], tp)
    gpt_oss = _is_gpt_oss(config)
    activation = str(config.get("hidden_act", "silu"))
    options: dict[str, Any] = {"expert_parallel": ep > 1}
    if activation.startswith("situ"):
        activation = "situv2"
        options["beta"] = config.get("activation_situ_beta", 4.0)
        options["linear_beta"] = config.get("activation_situ_linear_beta", 25.0)
    elif gpt_oss:
        activation = "swiglu"
        options |= {"gate_up_interleaved": True, "has_bias": True}
    if activation not in set(Activation):
        raise ContractError(
            f"hidden_act is {activation!r}",
            allowed=", ".join(a.value for a in Activation),
            fix="name the activation that the experts have",
        )
    if config.get("swiglu_limit") and activation != "situv2":
        options["swiglu_limit"] = float(config["swiglu_limit"])
    return MoeSpec(activation, **sizes, **options)


def _is_gpt_oss(config: Mapping[str, Any]) -> bool:
    return "gpt_oss" in (config.get("model_type"), config.get("carrier_block"))


def _first(config: Mapping[str, Any], names: tuple[str, ...], ours: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return config[name]
    raise ContractError(
        f"the config gives no {ours}",
        allowed=" or ".join(names),
        fix="pass the config.json of the model that the weights belong to",
    )
