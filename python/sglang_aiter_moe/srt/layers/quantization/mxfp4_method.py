"""``Mxfp4MoEMethod`` of SGLang on the AITER path: sizes, weights and calls as the layer's plan says.

The four methods that SGLang calls, in the order in which it calls them. The first is for the layers of
which :func:`takes_aiter_path` is true, the others for those that it has planned (:func:`is_planned`);
SGLang's own methods serve all the rest.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from packaging.version import Version

from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.plan import MoePlan, plan_moe
from sglang_aiter_moe.contract.spec import BLOCK, MoeSpec, Target
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.numerics.activations import Activation
from sglang_aiter_moe.srt import switch
from sglang_aiter_moe.srt.layers.moe.moe_runner import aiter_api
from sglang_aiter_moe.srt.layers.quantization.mxfp4 import (
    mark_prepared,
    moe_quant_info,
    pad_hidden_states,
    prepare_weights,
)
from sglang_aiter_moe.srt.layers.quantization.mxfp4_packed import (
    STORED,
    filling,
    packed_tensors,
    raw_forms_of,
    stored_for,
)
from sglang_aiter_moe.srt.layers.quantization.mxfp4_progress import PROGRESS
from sglang_aiter_moe.srt.layers.quantization.mxfp4_reload import (
    WEIGHTS,
    LayerWeights,
    guarded,
    weights_of,
)
from sglang_aiter_moe.srt.releases import FIRST

#: Where a layer keeps its plan from its construction on; ``mxfp4.PLAN`` says that it is laid out.
PLANNED = "aiter_moe_planned"
NEUTRAL_SCALE = 0x7F  # E8M0 for 1.0


def takes_aiter_path(method: Any) -> bool:
    """Whether this ``Mxfp4MoEMethod`` runs through AITER: as SGLang decides on ROCm, always with portable.

    Marlin, FlashInfer, DeepGEMM and the other runners that a user can name are left alone.
    """
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    from sglang.srt.layers.quantization import mxfp4

    asked = get_moe_runner_backend()
    if not (asked.is_auto() or asked.is_aiter()):
        return False
    if getattr(method, "use_mega_moe", False):
        return False
    return switch.acts(mxfp4._use_aiter)


def target() -> Target:
    """Where this process runs: AITER's architecture, its capabilities, the environment."""
    import aiter.fused_moe  # noqa: F401, so that its features can be tested
    import sglang

    capabilities = Capabilities.from_modules(sys.modules)
    return Target.current(aiter_api.architecture(), capabilities, sglang=sglang.__version__)


def is_planned(layer: Any) -> bool:
    """Whether :func:`create_weights` has planned this layer."""
    return getattr(layer, PLANNED, None) is not None


def activation_of(config: Any) -> Activation:
    """The checkpoint's activation: ``silu`` with an alpha is SwiGLU-OAI (gpt-oss says it so), else SiLU."""
    if config.activation == "situ":
        return Activation.SITUV2
    if config.activation in ("silu", "swiglu") and config.gemm1_alpha is not None:
        return Activation.SWIGLU
    try:
        return Activation(config.activation)
    except ValueError:
        raise ContractError(
            f"the layer's activation is {config.activation!r}",
            allowed="silu, gelu, swiglu, situ",
            fix="choose another --moe-runner-backend for this model",
        ) from None


def spec_of(layer: Any, hidden_size: int, intermediate_size: int, with_bias: bool) -> MoeSpec:
    """The layer as its model describes it.

    Args:
        layer: SGLang's ``FusedMoE``; ``moe_runner_config``, ``num_local_experts``, ``moe_ep_size``
            and ``layer_id`` are read.
        hidden_size: width of the experts' input.
        intermediate_size: per rank, as the loader fills it.
        with_bias: whether the experts have biases.
    """
    config = layer.moe_runner_config
    activation = activation_of(config)
    situ = activation is Activation.SITUV2
    limit = config.swiglu_limit if config.gemm1_clamp_limit is None else config.gemm1_clamp_limit
    return MoeSpec(
        activation=activation,
        num_experts=layer.num_local_experts,
        topk=config.top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        gate_up_interleaved=bool(getattr(config, "gate_up_interleaved", True)),
        has_bias=with_bias,
        swiglu_limit=None if situ else limit,
        beta=config.gemm1_alpha if situ else None,
        linear_beta=config.gemm1_clamp_limit if situ else None,
        expert_parallel=layer.moe_ep_size > 1,
        doweight_stage1=bool(config.apply_router_weight_on_input),
        no_combine=bool(config.no_combine),
        name=f"layer {layer.layer_id}",
        **({} if situ or config.gemm1_alpha is None else {"alpha": config.gemm1_alpha}),
    )


def create_weights(
    method: Any,
    layer: Any,
    num_experts: int,
    hidden_size: int,
    intermediate_size_per_partition: int,
    params_dtype: torch.dtype,
    with_bias: bool = False,
    **attributes: Any,
) -> None:
    """Plans the layer and allocates what the loader fills, without padding.

    Padding is added when the weights are laid out. SGLang's loaders take the size of a buffer for the
    rank's share of the checkpoint on some devices; unpadded, it is.

    Raises:
        ContractError: AITER would refuse, crash on, or compute this layer wrong. At load, not at the
            first request.
    """
    _refuse_what_older_releases_load_wrong(layer)
    # gpt-oss's loader shards whole MX blocks: 2880 on 4 ranks is 736 columns, not 720.
    columns = -(-intermediate_size_per_partition // BLOCK) * BLOCK
    plan = plan_moe(spec_of(layer, hidden_size, columns, with_bias), target())
    setattr(layer, PLANNED, plan)
    PROGRESS.planned(layer)
    setattr(layer, STORED, stored_for(layer, plan))
    method.num_experts, method.with_bias = num_experts, with_bias
    method.hidden_size, method.hidden_pad = plan.padded_hidden_size, plan.hidden_pad
    method.intermediate_size_per_partition = plan.padded_intermediate_size
    method.intermediate_pad = plan.intermediate_pad
    _allocate(layer, plan, with_bias, attributes)


def _refuse_what_older_releases_load_wrong(layer: Any) -> None:
    import sglang

    if Version(Version(sglang.__version__).public) >= Version(FIRST):
        return
    config = layer.moe_runner_config
    if activation_of(config) is not Activation.SWIGLU:
        raise ContractError(
            f"layer {layer.layer_id} has MXFP4 experts with activation {config.activation!r}, and SGLang "
            f"{sglang.__version__} loads MXFP4 experts as gpt-oss stores them and no other way",
            allowed=f"gpt-oss (SwiGLU with an alpha), or SGLang {FIRST} and newer",
            fix=f"pip install 'sglang>={FIRST}'",
        )


def _allocate(layer: Any, plan: MoePlan, with_bias: bool, attributes: dict[str, Any]) -> None:
    from sglang.srt.utils import set_weight_attrs

    hidden, inter = plan.spec.hidden_size, plan.spec.intermediate_size
    shapes = {
        "w13_weight": (2 * inter, hidden // 2),
        "w13_weight_scale": (2 * inter, hidden // BLOCK),
        "w2_weight": (hidden, inter // 2),
        "w2_weight_scale": (hidden, inter // BLOCK),
    }
    if with_bias:
        shapes |= {"w13_weight_bias": (2 * inter,), "w2_weight_bias": (hidden,)}
    shapes = {name: (layer.num_local_experts, *shape) for name, shape in shapes.items()}
    packed = getattr(layer, STORED) is not None
    if packed:
        shapes = packed_tensors(plan, with_bias)
    for name, shape in shapes.items():
        # Ranks whose share is smaller than the buffer keep the fill: zeros that weigh nothing.
        fill = NEUTRAL_SCALE if name.endswith("scale") else 0
        dtype = torch.uint8
        if name.endswith("bias"):
            dtype = torch.float32 if packed else torch.bfloat16
        tensor = torch.full(shape, fill, dtype=dtype)
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
        own = dict(attributes)
        if "weight_loader" in own:
            loader = filling(layer, name, own["weight_loader"])
            own["weight_loader"] = guarded(layer, name, loader)
        set_weight_attrs(parameter, own)
        if name.endswith("scale"):
            parameter.quant_method = "group"


def create_moe_runner(method: Any, layer: Any, moe_runner_config: Any) -> None:
    """The AITER runner, with the activation that the checkpoint states (SGLang makes it ``swiglu``)."""
    from sglang.srt.layers.moe import MoeRunner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    method.moe_runner_config = moe_runner_config
    method.runner = MoeRunner(MoeRunnerBackend.AITER, moe_runner_config)


def process_weights_after_loading(method: Any, layer: Any) -> None:
    """Brings the loaded tensors into the plan's layout."""
    plan = getattr(layer, PLANNED)
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    if get_moe_a2a_backend().is_mori() and hasattr(layer.dispatcher, "set_quant_config"):
        layer.dispatcher.set_quant_config({})  # as SGLang does before anything else
    stored = getattr(layer, STORED)
    if stored is not None and weights_of(layer) is None:
        forms = raw_forms_of(plan, plan.spec.has_bias)
        stored.check_filled(plan, {name: getattr(layer, name).data for name in forms})
        mark_prepared(layer, plan)
        setattr(layer, WEIGHTS, LayerWeights(layer, plan, forms))
    else:
        prepare_weights(layer, plan)
    PROGRESS.done(layer, _rank())


def _rank() -> int:
    distributed = torch.distributed
    up = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if up else 0


def apply(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """One forward call. Serves standard and DeepEP dispatch alike: only ``hidden_states`` is read here."""
    plan = getattr(layer, PLANNED)
    hidden_states = pad_hidden_states(dispatch_output.hidden_states, plan)
    quant_info = moe_quant_info(layer, layer.dispatcher.expert_mask_gpu)
    return method.runner.run(dispatch_output._replace(hidden_states=hidden_states), quant_info)
