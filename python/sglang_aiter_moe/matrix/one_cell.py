"""Runs one cell: SGLang's own loader, layer, quantisation method and AITER runner, from checkpoint to output."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_aiter_moe.matrix import expected, rocm, routing
from sglang_aiter_moe.matrix.cells import BIAS_UPDATE, Cell
from sglang_aiter_moe.matrix.layer import (
    ACTIVATIONS,
    EXPERTS,
    NEW_SEED,
    PREFIX,
    SIZES,
    TOPK,
    Rank,
    batch,
    broken,
    checkpoint,
    whole,
)
from sglang_aiter_moe.matrix.trace import Trace

_KIMI_QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "ignore": [],
    "config_groups": {},
}


@dataclass(frozen=True)
class Outcome:
    """What happened.

    Attributes:
        stage: "load", "first call" (before a change; also where the call after it says what that one says),
            "change" or "call": where an error came up; "done": there is a result.
        error: type and first line of the error.
        mode: the mode whose oracle the result agrees with best.
        diff: its logits_diff; infinite if the result is not finite.
        why: where the result is wrong, in what the call differs from the layer (:mod:`.trace`).
    """

    stage: str
    error_type: str = ""
    error: str = ""
    mode: str = ""
    diff: float = 0.0
    why: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        values = {k: v for k, v in asdict(self).items() if v not in ("", 0.0, ())}
        if self.diff == math.inf:
            values["diff"] = "inf"
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        """The inverse; other keys are left alone."""
        names = {f.name for f in fields(cls)}
        own = {k: v for k, v in values.items() if k in names}
        return cls(**own | {"diff": float(own.get("diff", 0.0)), "why": tuple(own.get("why", ()))})


class UpdateFailed(Exception):
    """SGLang reported a weight update as failed; the text is its message."""


class Carrier(torch.nn.Module):
    """What a model is to SGLang's loader and weight updater: one MoE layer, and the models' ways to fill it."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        hidden, inter = SIZES[cell.rows]
        self.rows = cell.rows
        self.config = SimpleNamespace(intermediate_size=inter, num_local_experts=EXPERTS)
        self.quant_config = _quantisation(cell.rows)
        mlp = torch.nn.Module()
        mlp.experts = _fused_moe(cell, hidden, inter, self.quant_config)
        bias = None
        if routing.has_bias(cell):
            empty = torch.zeros_like(routing.correction_bias(cell.routing))
            bias = torch.nn.Parameter(empty, requires_grad=False)
            mlp.gate = torch.nn.Module()
            mlp.gate.e_score_correction_bias = bias
        self.topk = None if cell.routing == "given" else routing.make_topk(cell, bias)
        layer = torch.nn.Module()
        layer.mlp = mlp
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])
        self.experts_of = [mlp.experts]  # in a list: registered once

    @property
    def experts(self) -> torch.nn.Module:
        return self.experts_of[0]

    def load_weights(self, weights: Any) -> None:
        """As ``GptOssForCausalLM`` and Kimi-K3 do."""
        if self.rows == "interleaved":
            from sglang.srt.models.gpt_oss import GptOssForCausalLM

            GptOssForCausalLM._load_mxfp4_experts_weights(self, weights)
            return
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        mapping = FusedMoE.make_expert_params_mapping(
            ckpt_gate_proj_name="w1",
            ckpt_down_proj_name="w2",
            ckpt_up_proj_name="w3",
            num_experts=EXPERTS,
        )
        for name, tensor in weights:
            if name == routing.BIAS_NAME:
                default_weight_loader(parameters[name], tensor)
            for target, source, expert, shard in mapping:
                if source in name:
                    full = name.replace(source, target)
                    parameter = parameters[full]
                    parameter.weight_loader(
                        parameter, tensor, full, shard_id=shard, expert_id=expert
                    )


def _steps(tensors: list, number: int) -> list[list]:
    """The tensors in as many parts, in their order."""
    size = -(-len(tensors) // number)
    return [tensors[i : i + size] for i in range(0, len(tensors), size)]


def _checkpoint(cell: Cell, seed: int = 5) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of the layer, and of its router if that has a correction bias."""
    tensors = checkpoint(whole(cell.rows, cell.bias, seed), cell.rows)
    if routing.has_bias(cell):
        tensors.append((routing.BIAS_NAME, routing.correction_bias(cell.routing, seed)))
    return tensors


def _quantisation(rows: str) -> Any:
    if rows == "halves":
        from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsConfig,
        )

        return CompressedTensorsConfig.from_config(_KIMI_QUANTISATION)
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    return Mxfp4Config.from_config({"quant_method": "mxfp4"})


def _fused_moe(cell: Cell, hidden: int, inter: int, quant_config: Any) -> torch.nn.Module:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    more = {"gate_up_interleaved": cell.rows == "interleaved"}
    if "gate_up_interleaved" not in inspect.signature(FusedMoE.__init__).parameters:
        more = {}  # 0.5.13
    return FusedMoE(
        num_experts=EXPERTS,
        hidden_size=hidden,
        intermediate_size=inter,
        layer_id=0,
        top_k=TOPK,
        params_dtype=torch.bfloat16,
        quant_config=quant_config,
        prefix=PREFIX,
        with_bias=cell.bias,
        **more,
        **ACTIVATIONS[cell.activation].fused_moe,
    )


def run(cell: Cell, worker: Worker) -> Outcome:
    """Runs a cell in the process of ``worker``.

    What the call after a change refuses, the layer may have had from its load on. So the layer runs without the
    change then, and an error that is the same is the first call's.
    """
    outcome = _run(cell, worker)
    if outcome.stage != "call" or cell.change == "nothing":
        return outcome
    before = _run(replace(cell, change="nothing", then="nothing"), worker)
    return replace(outcome, stage="first call") if before == outcome else outcome


def _run(cell: Cell, worker: Worker) -> Outcome:
    stage, trace = "load", Trace()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(rocm.one_device())
            trace.watch(rocm.start(cell))
            rocm.read_modules(cell)
            stack.enter_context(worker.rank(Rank.of(cell.parallel)))
            carrier = worker.load(cell)
            if carrier.topk is not None and cell.change != "nothing":
                stage = "first call"  # what is kept from it has to follow the change
                call(carrier, cell)
            stage = "change"
            worker.change(cell, carrier)
            stage = "call"
            got = call(carrier, cell, trace)
            hint = trace.resolved.mode if trace.resolved else ""
            mode, diff = expected.closest(cell, got[:, : SIZES[cell.rows][0]], hint)
    except Exception as error:  # whatever it is, it is what this cell does
        text = " ".join(str(error).split())
        return Outcome(stage, type(error).__name__, text[:300])
    finally:
        worker.tidy()
    outcome = Outcome("done", mode=mode, diff=diff)
    if diff < expected.CLOSE:
        return outcome
    return replace(outcome, why=tuple(trace.differences(cell)))


def call(carrier: Carrier, cell: Cell, trace: Trace | None = None) -> torch.Tensor:
    """One forward of the layer, and of its routing if that is SGLang's."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    x, ids, weights = batch(cell.rows, cell.tokens)
    if carrier.topk is None:
        topk = StandardTopKOutput(weights.clone(), ids.clone(), torch.zeros(len(x), EXPERTS))
    else:
        topk = routing.route(cell, carrier.topk, x)
        if trace is not None:
            trace.routing = routing.difference(cell, topk.topk_ids)
    return carrier.experts(x.clone(), topk)


@contextlib.contextmanager
def _moe_groups(rank: Rank) -> Iterator[None]:
    """Stand-ins for the groups that SGLang 0.5.13 asks for sizes and ranks of MoE layers."""
    from sglang.srt.distributed import parallel_state

    before = parallel_state._MOE_TP, parallel_state._MOE_EP
    parallel_state._MOE_TP, parallel_state._MOE_EP = (
        SimpleNamespace(
            world_size=rank.overrides[f"moe_{kind}_size"],
            rank_in_group=rank.overrides[f"moe_{kind}_rank"],
        )
        for kind in ("tp", "ep")
    )
    try:
        yield
    finally:
        parallel_state._MOE_TP, parallel_state._MOE_EP = before


class Worker:
    """SGLang in this process, a model worker of one rank.

    Args:
        model_config: from ``testing.sglang_process.become_single_rank``.
    """

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config

    @contextlib.contextmanager
    def rank(self, rank: Rank):
        """This process as one rank of several; nothing is communicated.

        Not SGLang's ``override``: that one compares with the process groups, and there is one process.
        """
        try:
            from sglang.srt.runtime_context import get_parallel
        except ImportError:  # 0.5.13
            with _moe_groups(rank):
                yield
            return
        parallel = get_parallel()
        before = parallel._overrides
        parallel._overrides = {**before, **rank.overrides}
        try:
            yield
        finally:
            parallel._overrides = before

    def load(self, cell: Cell) -> Carrier:
        """SGLang's model loader on a fresh carrier."""
        from sglang.srt.model_loader.loader import DefaultModelLoader

        carrier = Carrier(cell)
        tensors = _checkpoint(cell)
        DefaultModelLoader.load_weights_and_postprocess(carrier, tensors, torch.device("cpu"))
        return carrier.eval()

    def change(self, cell: Cell, carrier: Carrier) -> None:
        """What the cell says happens after the load.

        A server goes on after a failed update. After a broken one its answers have to be those of the old weights.

        Raises:
            UpdateFailed: SGLang's updater says so of tensors that fit.
        """
        rocm.change_environment(cell)
        if cell.change == "process again":
            carrier.experts.quant_method.process_weights_after_loading(carrier.experts)
        if not cell.update:
            return
        tensors = _checkpoint(cell, NEW_SEED)
        fits = not cell.update.startswith("broken")
        tensors = tensors if fits else broken(tensors)
        updater = self._updater(carrier)
        if cell.update.endswith("from disk"):
            done, message = self._from_disk(updater, tensors)
        elif cell.update == BIAS_UPDATE:
            done, message = self._from_tensors(updater, [tensors[-1:]])
        else:
            if cell.update.endswith("after a broken one"):
                self._from_tensors(updater, _steps(broken(tensors), 2))
            number = 2 if cell.update.endswith("in two steps") else 1
            done, message = self._from_tensors(updater, _steps(tensors, number))
        if fits and not done:
            raise UpdateFailed(message)

    def _updater(self, carrier: Carrier) -> Any:
        try:
            from sglang.srt.model_executor.model_runner_components.weight_updater import (
                WeightUpdater,
            )
        except ImportError:  # up to 0.5.15
            return self._runner(carrier)
        from sglang.srt.runtime_context import get_server_args

        return WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=self.model_config,
            custom_weight_loaders={},
            get_model=lambda: carrier,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: SimpleNamespace(server_args=get_server_args()),
        )

    def _runner(self, carrier: Carrier) -> Any:
        """SGLang's ``ModelRunner`` with what its weight updates read, and nothing else."""
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.server_args import get_global_server_args

        runner = object.__new__(ModelRunner)
        runner.model, runner.model_config = carrier, self.model_config
        runner.device, runner.gpu_id, runner.tp_rank = "cpu", 0, 0
        runner.server_args = get_global_server_args()
        return runner

    def _from_disk(self, updater: Any, tensors: list) -> tuple[bool, str]:
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory() as folder:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors},
                Path(folder) / "model.safetensors",
            )
            return updater.update_weights_from_disk(folder, "safetensors")

    def _from_tensors(self, updater: Any, steps: list[list]) -> tuple[bool, str]:
        """One update; its steps are only told apart where SGLang has sessions."""
        if not hasattr(updater, "begin_weight_update"):
            return updater.update_weights_from_tensor([pair for step in steps for pair in step])
        updater.begin_weight_update()
        try:
            for step in steps:
                done, message = updater.update_weights_from_tensor(step)
                if not done:
                    break
            return done, message
        finally:
            updater.end_weight_update(run_post_load=False)

    def tidy(self) -> None:
        """Nothing that a cell did stays in the patch set's state of this process."""
        for package in (
            "sglang_aiter_moe",
            "sglang.srt.layers.moe.aiter_moe",
        ):  # or in SGLang's source
            reload = sys.modules.get(f"{package}.srt.layers.quantization.mxfp4_reload")
            if reload is not None:
                with contextlib.suppress(ValueError):  # ContractError, of either
                    reload.end_session()
