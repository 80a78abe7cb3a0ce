"""From a model's ``config.json`` to the MoE layers of one rank, as the plan takes them.

The field names are those that SGLang 0.5.23's model files read (``srt/models/kimi_k3.py``,
``gpt_oss.py``, ``deepseek_v4.py``, ``qwen3_5.py``, ``minimax_m3.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_aiter_moe.contract.spec import MoeSpec, shard
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import SWIGLU_ALPHA, Activation

EXAMPLES = Path(__file__).parent / "example_configs"

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_HIDDEN = ("routed_expert_hidden_size", "hidden_size")
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts")
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "situ": Activation.SITUV2,
    "swigluoai": Activation.SWIGLU,
}
# gpt-oss names plain SiLU and computes SwiGLU-OAI; its experts have biases and alternating rows.
_GPT_OSS = "gpt_oss"


@dataclass(frozen=True)
class MoeLayers:
    """The MoE layers of a model that are alike.

    Attributes:
        count: how many the model has, None if its config does not say.
        spec: one of them on one rank.
        full_intermediate_size: the experts' width over all ranks.
        ranks: how many ranks share one expert's columns.
    """

    count: int | None
    spec: MoeSpec
    full_intermediate_size: int
    ranks: int


def example_names() -> list[str]:
    """The names of the configs that come with this package."""
    return sorted(path.stem for path in EXAMPLES.glob("*.json"))


def read_config(source: str | Path) -> dict[str, Any]:
    """A config from a file, a model directory, or one of :func:`example_names`.

    Raises:
        ContractError: nothing is there, or it is no JSON object.
    """
    path = Path(source)
    if not path.exists() and str(source) in example_names():
        path = EXAMPLES / f"{source}.json"
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(
            f"{path}: {error.strerror}",
            allowed=f"a config.json, a model directory, or one of {', '.join(example_names())}",
            fix="give the path of the model that is to be served",
        ) from error
    except ValueError as error:
        raise ContractError(
            f"{path} is no JSON: {error}",
            allowed="a model's config.json",
            fix="give the config.json itself",
        ) from error
    if not isinstance(config, dict):
        raise ContractError(
            f"{path} holds a JSON {type(config).__name__}",
            allowed="an object, as config.json is",
            fix="give the config.json itself",
        )
    return config


def moe_layers(
    config: Mapping[str, Any], *, tp: int = 1, ep: int = 1, fuse_shared: bool = False
) -> MoeLayers:
    """The MoE layers of one rank.

    Args:
        config: the content of ``config.json``; of a multi-modal model its ``text_config`` is taken.
        tp: tensor-parallel size, over which each expert's columns are divided.
        ep: expert-parallel size, which has to divide ``tp``: experts go to ``ep`` groups of ranks and
            their columns to the ``tp / ep`` ranks of a group.
        fuse_shared: shared experts run as further routed ones, as SGLang does where it can.

    Raises:
        ContractError: a field that is needed is missing, or sizes do not divide.
    """
    name = config.get("model_type") or "moe"
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ContractError(
            f"text_config is a {type(config).__name__}",
            allowed="a JSON object",
            fix="give the model's own config.json",
        )
    # The second name is that of this package's own checkpoints (testing/carrier).
    gpt_oss = _GPT_OSS in (config.get("model_type"), config.get("carrier_block"))
    experts, topk = _integer(config, _EXPERTS), _integer(config, _TOPK)
    if fuse_shared:
        shared = _integer(config, _SHARED)
        experts, topk = experts + shared, topk + shared
    ranks = _ranks(tp, ep, experts)
    activation = Activation.SWIGLU if gpt_oss else _activation(config)
    situ = activation is Activation.SITUV2
    width = _integer(config, _INTERMEDIATE)
    if width % ranks:
        raise ContractError(
            f"intermediate size {width} on {ranks} ranks (--tp {tp}, --ep {ep})",
            allowed="ranks that divide it: SGLang's FusedMoE asserts it",
            fix="choose another --tp, or an --ep that leaves fewer ranks an expert",
        )
    spec = MoeSpec(
        activation=activation,
        num_experts=experts // ep,
        topk=topk,
        hidden_size=_integer(config, _HIDDEN),
        intermediate_size=shard(width, ranks),
        gate_up_interleaved=gpt_oss,
        has_bias=gpt_oss,
        swiglu_limit=config.get("swiglu_limit"),
        alpha=config.get("swiglu_alpha", config.get("hidden_act_alpha", SWIGLU_ALPHA)),
        beta=_need(config, "activation_situ_beta") if situ else None,
        linear_beta=_need(config, "activation_situ_linear_beta") if situ else None,
        expert_parallel=ep > 1,
        name=str(name),
    )
    return MoeLayers(_count(config), spec, width, ranks)


def rank_spec(
    config: Mapping[str, Any], *, tp: int, ep: int, tp_rank: int, ep_rank: int
) -> MoeSpec:
    """The layer of one rank of a checkpoint, after a look whether there is such a rank.

    Args:
        config, tp, ep: as :func:`moe_layers` takes them.
        tp_rank: which of the ``tp / ep`` ranks that share an expert's columns.
        ep_rank: which of the ``ep`` groups that share the experts.

    Raises:
        ContractError: as :func:`moe_layers`, or there is no such rank.
    """
    layers = moe_layers(config, tp=tp, ep=ep)
    for option, rank, ranks in (("--tp-rank", tp_rank, layers.ranks), ("--ep-rank", ep_rank, ep)):
        if not 0 <= rank < ranks:
            raise ContractError(
                f"{option} is {rank} with --tp {tp} and --ep {ep}",
                allowed=f"0 to {ranks - 1} (--tp / --ep ranks share an expert's columns)",
                fix="give the rank that holds these weights",
            )
    return layers.spec


def _ranks(tp: int, ep: int, experts: int) -> int:
    if tp < 1 or ep < 1 or tp % ep:
        raise ContractError(
            f"--tp is {tp} and --ep {ep}",
            allowed="both at least 1, and --ep a divisor of --tp",
            fix="give the sizes of the launch command (--tp-size, --ep-size)",
        )
    if experts % ep:
        raise ContractError(
            f"{experts} experts on {ep} expert-parallel ranks",
            allowed="a number of ranks that divides the experts",
            fix="choose another --ep",
        )
    return tp // ep


def _activation(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_act", config.get("hidden_activation"))
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ContractError(
            f"hidden_act is {name!r}",
            allowed=", ".join(_ACTIVATIONS),
            fix="use another MoE backend for this model",
        )
    return _ACTIVATIONS[name]


def _count(config: Mapping[str, Any]) -> int | None:
    """MoE layers: those after the first dense ones, as often as ``moe_layer_freq`` says."""
    if config.get("num_hidden_layers") is None:
        return None
    layers = _integer(config, ("num_hidden_layers",))
    names = ("moe_layer_freq", "decoder_sparse_step")
    every = config.get(names[0])
    if isinstance(every, list):
        return sum(bool(entry) for entry in every)
    every = _optional(config, names, 1)
    first = _optional(config, ("first_k_dense_replace",), 0)
    dense = config.get("mlp_only_layers") or []
    if every < 1 or not isinstance(dense, list):
        raise ContractError(
            f"a MoE layer every {every} layers, and mlp_only_layers is {dense!r}",
            allowed="moe_layer_freq of at least 1 or a list, and mlp_only_layers a list",
            fix="give the model's own config.json",
        )
    return sum(n >= first and n % every == 0 and n not in dense for n in range(layers))


def _optional(config: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    return _integer(config, names) if any(config.get(n) is not None for n in names) else default


def _integer(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ContractError(
                    f"{name} is {value!r}",
                    allowed="an integer",
                    fix="give the model's own config.json",
                )
            return value
    raise ContractError(
        f"the config has no {' or '.join(names)}",
        allowed="the config.json of a mixture-of-experts model",
        fix=f"give the model's own config.json, or add {names[0]}",
    )


def _need(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ContractError(
            f"the config has no {name}",
            allowed=f"a number: without it AITER takes another {name} on each path",
            fix=f"add {name} from the model's release",
        )
    return config[name]
