"""SGLang's patched AITER runner in one process: the kernel that goes around AITER, tracing, DeepEP.

``python -m sglang_aiter_moe.testing.runner_probe MODEL PORT``. Prints one line ``RESULT {json}``; the tests judge it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_aiter_moe.contract.plan import plan_moe
from sglang_aiter_moe.numerics.oracle import routed_moe
from sglang_aiter_moe.srt.layers.quantization.mxfp4 import moe_quant_info
from sglang_aiter_moe.srt.layers.quantization.mxfp4_method import target
from sglang_aiter_moe.testing import sglang_process
from sglang_aiter_moe.testing.probe_layers import (
    EXPERTS,
    FLAGS,
    INTERLEAVED,
    MODES,
    SITU,
    agreement,
    call_layer,
    error_of,
    fused_moe,
    random_experts,
    routing,
    variables,
)

SMALLM = "sglang.kernels.ops.moe.smallm_moe_gfx950"


@contextlib.contextmanager
def aiter_is(function: Callable[..., Any]) -> Iterator[None]:
    """``aiter.fused_moe.fused_moe`` is ``function`` inside the block."""
    import aiter.fused_moe

    real, aiter.fused_moe.fused_moe = aiter.fused_moe.fused_moe, function
    try:
        yield
    finally:
        aiter.fused_moe.fused_moe = real


# --- the kernel that goes around AITER -----------------------------------------------------------


def install_smallm() -> list[str]:
    """A small-M kernel that takes every SiLU layer; the list grows by one with each of its calls."""
    import sglang.kernels.ops.moe as package

    calls: list[str] = []

    def forward(hidden_states: torch.Tensor, *operands: Any) -> torch.Tensor:
        calls.append("smallm")
        return torch.zeros_like(hidden_states)

    module = types.ModuleType(SMALLM)
    module.smallm_moe_supported = lambda *arguments: arguments[6]  # "the activation is SiLU"
    module.smallm_moe_fwd = forward
    module.SmallMMoeUnavailable = type("SmallMMoeUnavailable", (RuntimeError,), {})
    sys.modules[SMALLM] = package.smallm_moe_gfx950 = module
    return calls


def probe_bypass() -> dict[str, Any] | None:
    """Who computes a SiLU layer of few tokens; None in releases without the small-M kernel."""
    from sglang.srt.layers.moe.moe_runner import aiter as runner

    if not hasattr(runner, "_SMALLM_MOE_ON"):
        return None
    around, sent = install_smallm(), []

    def recorded(hidden_states: torch.Tensor, **call: Any) -> torch.Tensor:
        sent.append(call["gate_mode"])
        return hidden_states

    x, ids, weights = routing(2)
    found: dict[str, Any] = {"on": runner._SMALLM_MOE_ON}
    interleave = {INTERLEAVED: "1", "AITER_BF16_FP8_MOE_BOUND": "0"}
    with aiter_is(recorded):
        for name, values in {"separated": {}, "interleave": interleave}.items():
            with variables(values):
                layer = fused_moe(random_experts(), activation="silu")
                call_layer(layer, x, ids, weights)
                plan = moe_quant_info(layer).plan
                (bypass,) = plan.bypasses
                found[name] = {
                    "sent": sent[-1],
                    "calls_around": len(around),
                    "named": [bypass.name, bypass.active, bypass.allowed],
                }
                # What SGLang's own function does with the very same bytes.
                released = runner.AiterRunnerCore.run.__wrapped__
                given = runner.AiterRunnerInput(x, ids, weights, runner.AiterQuantType.PER_1X32)
                core = runner.AiterRunnerCore(layer.moe_runner_config)
                released(core, given, replace(moe_quant_info(layer), plan=None), {})
                found[name]["calls_around_by_sglang_alone"] = len(around)
                around.clear()
    return found


# --- tracing -------------------------------------------------------------------------------------


def traceable(hidden_states, w1, w2, topk_weight, topk_ids, *, beta=None, gate_mode="", **rest):
    """Depends on routing, ``beta`` and ``gate_mode``."""
    factor = (beta or 1.0) + (0.5 if gate_mode == "interleave" else 0.0)
    return hidden_states * factor + (topk_ids * topk_weight).sum(-1, keepdim=True).bfloat16()


def probe_tracing() -> dict[str, Any]:
    """``run`` of a planned layer under torch.compile(fullgraph) and on fake tensors, and of bf16 without a plan."""
    from sglang.srt.layers.moe.moe_runner import aiter as runner

    with variables(MODES["A8W4"]):
        layer = fused_moe(random_experts(), **SITU)
        info = moe_quant_info(layer)
    x, ids, weights = routing(3)
    quant = runner.AiterQuantType
    given = runner.AiterRunnerInput(x, ids, weights, quant.PER_1X32)
    core = runner.AiterRunnerCore(layer.moe_runner_config)

    def call(core: Any = core, given: Any = given, info: Any = info) -> torch.Tensor:
        return core.run(given, info, {}).hidden_states

    compiled = functools.partial(torch.compile, fullgraph=True, backend="eager")
    found = {}
    with aiter_is(traceable), torch.no_grad():
        with variables(MODES["A8W4"]):
            eager = call()
            found["same"] = torch.equal(compiled(lambda: call())(), eager)
            found["depends"] = not torch.equal(eager, x * 4.5)
        torch._dynamo.reset()
        with variables({}):  # another environment than that of the load
            found["eager_refuses"] = FLAGS[0] in str(error_of(call))
            found["traced_reads_nothing"] = torch.equal(compiled(lambda: call())(), eager)
        with variables(MODES["A8W4"]):
            fake = FakeTensorMode()
            tensors = lambda record: {  # noqa: E731
                f.name: fake.from_tensor(getattr(record, f.name).detach())
                for f in fields(record)
                if isinstance(getattr(record, f.name), torch.Tensor)
            }
            faked = replace(given, **tensors(given)), replace(info, **tensors(info))
            with fake:
                found["fake"] = list(call(core, *faked).shape)
        torch._dynamo.reset()
        # Of one byte an element SGLang asks its small-M kernel, which looks for a compiler on disk.
        weights_of = [torch.zeros(EXPERTS, 2, 2).bfloat16()] * 2
        other = runner.AiterMoeQuantInfo(*weights_of, quant.NONE)
        unquantised = replace(given, quant_type=quant.NONE)
        silu = runner.AiterRunnerCore(replace(layer.moe_runner_config, activation="silu"))
        without_plan = lambda: call(silu, unquantised, other)  # noqa: E731
        found["without_plan"] = error_of(compiled(without_plan))
    return found


# --- DeepEP --------------------------------------------------------------------------------------


def probe_deepep() -> dict[str, Any]:
    """A planned expert-parallel layer through SGLang's own DeepEP permute functions, with an empty slot."""
    from sglang.srt.layers.moe.moe_runner import aiter as runner
    from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
    from sglang.srt.layers.moe.token_dispatcher import deepep

    raw, tokens = random_experts(), 6
    x, ids, weights = routing(tokens)
    received = ids.clone()
    received[0, 0] = received[3, 1] = -1
    dispatched = {
        "deepep_normal": deepep.DeepEPNormalDispatchOutput(x, None, received, weights, [tokens]),
        "deepep_ll": deepep.DeepEPLLDispatchOutput(
            x, None, received, weights, torch.tensor([tokens]), tokens
        ),
    }
    found = {}
    for mode in ("A8W4", "A4W4"):
        with variables(MODES[mode]), torch.no_grad():
            layer = fused_moe(raw, **SITU)
            alone = moe_quant_info(layer)
            plan = plan_moe(replace(alone.plan.spec, expert_parallel=True), target())
            mask = torch.tensor([1] * EXPERTS + [0], dtype=torch.int32)
            info = replace(alone, plan=plan, expert_mask=mask)
            config = layer.moe_runner_config
            want = routed_moe(
                x,
                raw,
                received.clamp_min(0),
                weights * (received >= 0),
                activation="situv2",
                mode=mode,
                dtype=torch.float32,
                beta=4.0,
                linear_beta=25.0,
                requantization="roundup",
            )
            for form, output in dispatched.items():
                state: dict[str, Any] = {}
                given = PermuteMethodPool.get_pre_permute(form, "aiter")(
                    output, info, config, state
                )
                result = runner.AiterRunnerCore(config).run(given, info, state)
                unpermute = PermuteMethodPool.get_post_permute("aiter", form)
                combined = unpermute(result, info, config, state).hidden_states
                found[f"{mode} {form}"] = agreement(combined.float(), want)
    return found


def main(model: Path, port: int) -> None:
    torch.set_num_threads(1)
    sglang_process.become_single_rank(model, port)
    os.environ.pop("SGLANG_ROCM_SMALLM_MOE", None)
    sglang_process.report(
        {"tracing": probe_tracing, "deepep": probe_deepep, "bypass": probe_bypass}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
