"""One layer's way through the package, as a server takes it: load, plan, prepare, run.

Nothing here knows a layout or a rule: the plan decides, `prepare_weights` packs, `AiterRunnerCore` calls
whatever is installed as `aiter`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.contract.capabilities import Capabilities
from sglang_aiter_moe.contract.plan import MoePlan, plan_moe
from sglang_aiter_moe.contract.spec import MoeSpec, Target
from sglang_aiter_moe.numerics.activations import Activation
from sglang_aiter_moe.numerics.oracle import RawExperts
from sglang_aiter_moe.portable import backends
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import (
    AiterRunnerCore,
    AiterRunnerInput,
)
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization.mxfp4 import (
    moe_quant_info,
    pad_hidden_states,
    prepare_weights,
)
from sglang_aiter_moe.verify.batches import Batch, expert_mask
from sglang_aiter_moe.verify.cases import Case
from sglang_aiter_moe.verify.layers import Layer
from sglang_aiter_moe.verify.weights import read_checkpoint

SGLANG_ACTIVATIONS = {
    Activation.SILU: "silu",
    Activation.GELU: "gelu",
    Activation.SWIGLU: "swiglu",
    Activation.SITUV2: "situ",
}


@dataclass(frozen=True)
class Machine:
    """Where cases run.

    Attributes:
        backend: "cpu" or "triton" (the executable contract), or "aiter" (what is installed).
        device: of the tensors.
        arch: with "aiter", the GPU's architecture; None where the case chooses.
    """

    backend: str
    device: torch.device
    arch: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A layer that is ready for calls."""

    module: torch.nn.Module
    plan: MoePlan
    core: AiterRunnerCore


@contextlib.contextmanager
def aiter_of(case: Case, machine: Machine) -> Iterator[None]:
    """The AITER that a case runs on: the executable contract for its target, or the installed one."""
    if machine.backend == "aiter":
        importlib.import_module("aiter.fused_moe")
        yield
        return
    with (
        portable.installed(arch=case.arch, aiter=case.aiter, a16w4_kernel=case.a16w4_kernel),
        backends.forced(machine.backend),
    ):
        yield


def spec_of(layer: Layer) -> MoeSpec:
    """The plan's view of a layer."""
    situ = layer.activation is Activation.SITUV2
    return MoeSpec(
        activation=layer.activation,
        num_experts=layer.shape.experts,
        topk=layer.topk,
        hidden_size=layer.shape.hidden,
        intermediate_size=layer.shape.intermediate,
        gate_up_interleaved=layer.shape.gate_up_interleaved,
        has_bias=layer.shape.bias,
        swiglu_limit=layer.limit,
        beta=layer.beta if situ else None,
        linear_beta=layer.linear_beta if situ else None,
        expert_parallel=layer.global_experts is not None,
        name=layer.name,
    )


def target_of(case: Case, machine: Machine) -> Target:
    """Where a case runs: architecture, AITER and environment as they are now."""
    # By feature test on what is installed as `aiter`, the executable contract as well as a real one.
    return Target.current(machine.arch or case.arch, Capabilities.from_modules(sys.modules))


def aiter_is_installed() -> bool:
    """Whether a real AITER is there: PyPI's `aiter` is another project, and has no `ops.shuffle`."""
    try:
        return importlib.util.find_spec("aiter.ops.shuffle") is not None
    except ImportError:
        return False


def raw_experts(layer: Layer, path: Path) -> RawExperts:
    """The checkpoint tensors as the oracle takes them, memory-mapped."""
    tensors = read_checkpoint(path)
    return RawExperts(
        w13=tensors["w13_weight"],
        w13_scale=tensors["w13_weight_scale"],
        w2=tensors["w2_weight"],
        w2_scale=tensors["w2_weight_scale"],
        b13=tensors.get("w13_weight_bias"),
        b2=tensors.get("w2_weight_bias"),
        gate_up_interleaved=layer.shape.gate_up_interleaved,
    )


def load_module(path: Path, device: torch.device) -> torch.nn.Module:
    """A module with the file's tensors as parameters, as SGLang's loader leaves a layer.

    On a CPU the tensors are a private mapping of the file: packing in place copies the pages that it
    writes and leaves the file alone.
    """
    module = torch.nn.Module()
    for name, tensor in read_checkpoint(path).items():
        tensor = tensor.to(device)
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def load(case: Case, path: Path, machine: Machine) -> Loaded:
    """Loads, plans and prepares the layer of a case, under the environment as it is now.

    Raises:
        ContractError: the plan refuses the case.
    """
    layer = case.layer
    plan = plan_moe(spec_of(layer), target_of(case, machine))
    module = load_module(path, machine.device)
    prepare_weights(module, plan)
    return Loaded(module, plan, AiterRunnerCore(runner_config(layer)))


def runner_config(layer: Layer) -> MoeRunnerConfig:
    """What SGLang's model files tell the runner about such a layer."""
    situ = layer.activation is Activation.SITUV2
    swiglu = layer.activation is Activation.SWIGLU
    return MoeRunnerConfig(
        num_experts=layer.routed_experts,
        num_local_experts=layer.shape.experts,
        hidden_size=layer.shape.hidden,
        intermediate_size_per_partition=layer.shape.intermediate,
        top_k=layer.topk,
        activation=SGLANG_ACTIVATIONS[layer.activation],
        gemm1_alpha=layer.beta if situ else 1.702 if swiglu else None,
        gemm1_clamp_limit=layer.linear_beta if situ else layer.limit if swiglu else None,
        swiglu_limit=None if situ or swiglu else layer.limit,
        gate_up_interleaved=layer.shape.gate_up_interleaved,
    )


def call(loaded: Loaded, layer: Layer, batch: Batch, device: torch.device) -> torch.Tensor:
    """One call of the runner: bfloat16 `[M, H]`, without the padding columns, on the CPU."""
    mask = expert_mask(layer)
    quant_info = moe_quant_info(loaded.module, None if mask is None else mask.to(device))
    hidden_states = pad_hidden_states(batch.hidden_states.to(device), loaded.plan)
    output = loaded.core.run(
        AiterRunnerInput(
            hidden_states=hidden_states,
            topk_ids=batch.topk_ids.to(device),
            topk_weights=batch.topk_weights.to(device),
            quant_type=quant_info.quant_type,
        ),
        quant_info,
        {},
    )
    return output.hidden_states[:, : layer.shape.hidden].cpu()
