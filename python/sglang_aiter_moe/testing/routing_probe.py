"""SGLang's real routing, expert rebalancing and weight-update code with the patch set, in one process on a CPU.

``python -m sglang_aiter_moe.testing.routing_probe CHECKPOINT PORT``: prints one line ``RESULT {json}``; the test
judges it. A graph capture is simulated: what a reader is given under it is what a graph would keep reading.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_aiter_moe.patches import routing_glue
from sglang_aiter_moe.srt.layers.moe import correction_bias as owner_module
from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.routing import reference_routing

EXPERTS, TOPK, TOKENS = 32, 4, 12


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 logits as a strided slice, and an fp32 bias around 7, which bf16 rounds to 2^-5."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(TOKENS, EXPERTS + 8, generator=generator).bfloat16()
    return wide[:, 4 : 4 + EXPERTS], 6.8 + 0.26 * torch.rand(EXPERTS, generator=generator)


def config_of(bias: torch.Tensor, **fields: Any) -> Any:
    from sglang.srt.layers.moe.topk import TopKConfig

    fields = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1} | fields
    parameter = torch.nn.Parameter(bias.clone(), requires_grad=False)
    return TopKConfig(top_k=TOPK, renormalize=True, correction_bias=parameter, **fields)


def select(logits: torch.Tensor, config: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.moe import topk

    hidden = torch.zeros(len(logits), 8, dtype=torch.bfloat16)
    return topk.select_experts(hidden, logits, config, layer_id=0, **kwargs)


def rows_that_differ(
    output: Any, logits: torch.Tensor, bias: torch.Tensor, names: list[int] | None = None, **options
) -> int:
    """Rows whose experts (renamed by ``names``) or weights are not those of the float64 reference."""
    differ = 0
    expected = reference_routing(logits, bias, TOPK, **options)
    got = zip(output.topk_ids.tolist(), output.topk_weights.tolist(), strict=True)
    for (ids, weights), (found, found_weights) in zip(expected, got, strict=True):
        want = {(names[i] if names else i): w for i, w in zip(ids, weights, strict=True)}
        have = dict(zip(found, found_weights, strict=True))
        right = want.keys() == have.keys()
        differ += not (right and all(abs(have[e] - w) <= 1e-5 * abs(w) for e, w in want.items()))
    return differ


@contextlib.contextmanager
def captured() -> Iterator[None]:
    with mock.patch.object(owner_module, "_is_capturing", lambda tensor: True):
        yield


def held_by_a_graph(config: Any) -> torch.Tensor:
    """The bias that a graph around ``select_experts`` keeps reading."""
    logits, _ = inputs()
    with captured():
        select(logits, config)
    (copy,) = [c.tensor for c in owner_module.correction_bias_of(config)._copies.values() if c.held]
    return copy


# --- rebalancing ---------------------------------------------------------------------------------


def location(order: list[int]) -> Any:
    """Metadata of one layer on one rank: physical expert ``p`` holds logical expert ``order[p]``."""
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata

    physical_to_logical = torch.tensor([order])
    logical_to_all = torch.full((1, EXPERTS, EXPERTS), -1)
    dispatch = torch.empty(1, EXPERTS, dtype=torch.int64)
    for physical, logical in enumerate(order):
        logical_to_all[0, logical, 0] = physical
        dispatch[0, logical] = physical
    return ExpertLocationMetadata(
        physical_to_logical_map=physical_to_logical,
        physical_to_logical_map_cpu=physical_to_logical.clone(),
        logical_to_all_physical_map=logical_to_all,
        logical_to_all_physical_map_cpu=logical_to_all.clone(),
        logical_to_all_physical_map_num_valid=torch.ones(1, EXPERTS, dtype=torch.int64),
        ep_size=1,
        logical_to_rank_dispatch_physical_map=dispatch,
    )


def dispatch_info(metadata: Any, algorithm: str) -> Any:
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,
        partial_logical_to_rank_dispatch_physical_map=metadata.logical_to_rank_dispatch_physical_map[
            0
        ],
        partial_logical_to_all_physical_map=metadata.logical_to_all_physical_map[0],
        partial_logical_to_all_physical_map_num_valid=metadata.logical_to_all_physical_map_num_valid[
            0
        ],
        num_physical_experts=EXPERTS,
    )


def probe_rebalancing() -> dict[str, Any]:
    """SGLang's updater moves a layer's experts in place; choices follow the map, and the bias stays."""
    from sglang.srt.eplb import expert_location, expert_location_updater

    logits, bias = inputs()
    config = config_of(bias)
    held, address = held_by_a_graph(config), config.correction_bias.data_ptr()
    old, new = list(range(EXPERTS)), torch.randperm(EXPERTS).tolist()
    metadata = location(old)
    weights = torch.arange(EXPERTS, dtype=torch.float32)[:, None] * torch.ones(1, 4)
    found: dict[str, Any] = {}

    def look(when: str, order: list[int]) -> None:
        names = [order.index(logical) for logical in range(EXPERTS)]
        for algorithm in ("static", "dynamic"):
            info = dispatch_info(metadata, algorithm)
            output = select(logits, config, expert_location_dispatch_info=info)
            found[f"{when}, {algorithm}"] = rows_that_differ(output, logits, bias, names)

    look("before", old)
    updater = expert_location_updater.ExpertLocationUpdater()
    updater._first_execution = False  # would empty the cache of a GPU
    with mock.patch.object(
        expert_location_updater, "get_global_expert_location_metadata", lambda: metadata
    ):
        assert expert_location is not None
        updater.update({0: [weights]}, location(new), update_layer_ids=[0], nnodes=1, rank=0)
    look("after", new)
    found["experts_moved"] = weights[:, 0].tolist() == [float(e) for e in new]
    found["bias_stays"] = (
        config.correction_bias.data_ptr() == address
        and torch.equal(config.correction_bias.detach(), bias)
        and torch.equal(held, bias)
    )
    return found


def probe_recovery() -> dict[str, Any]:
    """Rebalancing that has to reload weights from disk, as after the failure of a rank."""
    from sglang.srt.eplb import eplb_manager

    _, bias = inputs()
    config = config_of(bias)
    held = held_by_a_graph(config)
    calls = []

    def from_disk(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        config.correction_bias.data.copy_(bias + 1)  # as loaders write

    model_path = SimpleNamespace(model_path="path", load_format="auto")
    move = eplb_manager.update_expert_location_with_recovery
    # Older releases are told the number of nodes here.
    nodes = {"nnodes": 1} if "nnodes" in inspect.signature(move).parameters else {}
    with mock.patch.object(eplb_manager, "get_model", lambda: model_path, create=True):
        move(
            expert_location_updater=SimpleNamespace(update=lambda *a, **k: {0: [1]}),
            model=SimpleNamespace(routed_experts_weights_of_layer={}),
            new_expert_location_metadata=None,
            update_layer_ids=[0],
            tp_rank=0,
            expert_backup_client=None,
            update_weights_from_disk_callable=from_disk,
            ep_dispatch_algorithm="static",
            init_lplb_solvers_callable=None,
            **nodes,
        )
    return {"reloads": len(calls), "graph_follows": torch.equal(held, bias + 1)}


# --- weight updates, sleep and wake ------------------------------------------------------------------


def probe_wake_up() -> dict[str, Any]:
    """SGLang's ``resume_memory_occupation``, tag by tag: nothing is touched while any memory is released."""
    from sglang.srt.managers.scheduler_components import weight_updater

    _, bias = inputs()
    config = config_of(bias)
    held = held_by_a_graph(config)
    manager = SimpleNamespace(
        offload_tags={"kv_cache", "cuda_graph"},
        memory_saver_adapter=SimpleNamespace(resume=lambda tag: None),
        scheduler=None,
    )
    config.correction_bias.data.copy_(bias + 1)
    resume = weight_updater.SchedulerWeightUpdaterManager.resume_memory_occupation
    found = {}
    for tag in ("kv_cache", "cuda_graph"):
        resume(manager, SimpleNamespace(tags=[tag]))
        found[tag] = torch.equal(held, bias + 1)
    return found


def probe_check_weights() -> bool:
    """``check_weights`` with ``reset_tensors`` writes random values past every loader."""
    from sglang.srt.managers.scheduler_components import weight_updater

    _, bias = inputs()
    config = config_of(bias)
    held = held_by_a_graph(config)

    def reset(*args: Any, **kwargs: Any) -> None:
        config.correction_bias.data.copy_(bias + 1)
        raise RuntimeError("the rest of the check is not wanted")

    manager = mock.MagicMock(offload_tags=set())
    manager._select_runners = reset
    manager.tp_worker.model_runner.check_weights = reset
    request = SimpleNamespace(
        selector="all", action="reset_tensors", skip_tensor_list=None, allow_quant_error=False
    )
    with contextlib.suppress(RuntimeError):
        weight_updater.SchedulerWeightUpdaterManager.check_weights(manager, request)
    return torch.equal(held, bias + 1)


# --- the fused routers, and SM100 ----------------------------------------------------------------------


def probe_fused() -> dict[str, Any]:
    """``select_experts`` as on a GPU without AITER: the routers lead to portable's kernel with strided rows."""
    from sglang.srt.layers.moe import topk

    logits, bias = inputs()
    grouped = {"num_expert_group": 4, "topk_group": 2}
    ungrouped = {"num_expert_group": 1, "topk_group": 1}
    sigmoid = {"use_grouped_topk": False, "scoring_func": "sigmoid"}
    found: dict[str, Any] = {}
    with (
        mock.patch.object(topk, "_use_aiter", False),
        mock.patch.object(topk, "_is_cpu", False),
        mock.patch.object(routing_glue, "_on_gpu", lambda tensor: True),
        mock.patch.object(
            routing_glue, "biased_topk", side_effect=routing_glue.biased_topk
        ) as kernel,
    ):
        for name, fields in (("grouped", grouped), ("ungrouped", ungrouped), ("sigmoid", sigmoid)):
            for folded in (False, True):
                config = config_of(
                    bias,
                    routed_scaling_factor=2.5,
                    apply_routed_scaling_factor_on_output=folded,
                    **fields,
                )
                before = kernel.call_count
                output = select(logits, config)
                options = {k: v for k, v in fields.items() if k in grouped}
                found[f"{name}, {'folded' if folded else 'apart'}"] = {
                    "by_the_kernel": kernel.call_count - before,
                    "differ": rows_that_differ(
                        output,
                        logits,
                        bias,
                        routed_scaling_factor=2.5 if folded else 1.0,
                        **options,
                    ),
                }
    return found


def probe_sm100() -> dict[str, Any]:
    """The real runner's input for SiTUv2 with a bypassed top-k."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod

    logits, bias = inputs()
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        config = config_of(bias.to(dtype))
        output = topk.BypassedTopKOutput(torch.zeros(TOKENS, 8).bfloat16(), logits, config)
        seen: list[Any] = []
        method = mock.MagicMock()
        method.moe_runner_config = SimpleNamespace(activation="situ")
        method.runner.run = lambda dispatched, info, seen=seen: seen.append((dispatched, info))
        layer = mock.MagicMock(_situ_routing_bias_bf16=None, layer_id=0)
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

        dispatched = mock.MagicMock(spec=StandardDispatchOutput, topk_output=output)
        dispatched._replace = lambda topk_output: SimpleNamespace(topk_output=topk_output)
        Mxfp4MoEMethod._apply_sm100_trtllm_gen(method, layer, dispatched)
        ((passed, info),) = seen
        standard = topk.TopKOutputChecker.format_is_standard(passed.topk_output)
        found[str(dtype)] = {
            "standard": standard,
            "routing_bias": None if info.routing_bias is None else str(info.routing_bias.dtype),
            "differ": rows_that_differ(passed.topk_output, logits, bias) if standard else None,
        }
    return found


def main(checkpoint: Path, port: int) -> None:
    from sglang_aiter_moe import plugin

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sglang_process.become_single_rank(checkpoint, port, enable_eplb=False)
    probes: dict[str, Callable[[], Any]] = {
        "rebalancing": probe_rebalancing,
        "recovery": probe_recovery,
        "wake_up": probe_wake_up,
        "check_weights": probe_check_weights,
        "fused": probe_fused,
        "sm100": probe_sm100,
        "states": lambda: {s["name"]: s["state"] for s in map(_dict, plugin.inspect_states())},
    }
    sglang_process.report(probes)


def _dict(state: Any) -> dict[str, str]:
    return state.as_dict()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
