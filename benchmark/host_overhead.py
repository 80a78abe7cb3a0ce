#!/usr/bin/env python3
"""Host overhead of the patched ``AiterRunnerCore.run`` against the released SGLang's, side by side.

The kernel is a no-op with the signature of ``aiter.fused_moe``, so that only Python is measured. Rounds
of both runners alternate in one process; each round gives one ratio patched / upstream, and the median
over the rounds is reported with the spread. A ratio of at most 1.0 means no overhead added; the exit
status says whether that holds for every layer. Those without a plan are handed to SGLang's own runner,
whose look-up of AITER's quant type is kept from the call before.

    python benchmark/host_overhead.py                          # SGLang of this environment
    python benchmark/host_overhead.py --sglang-path DIR        # an unpacked wheel of another release
"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import importlib.util
import json
import os
import statistics
import sys
import time
import types
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TOKENS, TOPK, EXPERTS, HIDDEN, INTER = 4, 2, 4, 256, 128


def noop_fused_moe(
    hidden_states,
    w1,
    w2,
    topk_weight,
    topk_ids,
    expert_mask=None,
    activation=None,
    quant_type=None,
    doweight_stage1=False,
    w1_scale=None,
    w2_scale=None,
    a1_scale=None,
    a2_scale=None,
    block_size_M=None,
    num_local_tokens=None,
    moe_sorting_dispatch_policy=0,
    dtype=None,
    hidden_pad=0,
    intermediate_pad=0,
    bias1=None,
    bias2=None,
    gate_mode="separated",
    swiglu_limit=None,
    beta=None,
    linear_beta=None,
):
    """Takes what ``aiter.fused_moe`` takes and returns its input."""
    return hidden_states


def install_noop_aiter() -> None:
    """Registers modules under AITER's names whose only kernel is :func:`noop_fused_moe`."""

    class ActivationType(IntEnum):
        Silu, Gelu, Swiglu, Situv2 = range(4)

    class QuantType(IntEnum):
        No, per_Tensor, per_Token, per_1x32, per_1x128, per_128x128 = range(6)

    class GateMode:
        SEPARATED = SimpleNamespace(value="separated")
        INTERLEAVE = SimpleNamespace(value="interleave")

    packages = ("aiter", "aiter.ops", "aiter.ops.flydsl")
    for name in (*packages, "aiter.fused_moe", "aiter.ops.flydsl.moe_common"):
        # As the import system makes them: an import statement is slower for a module without a spec.
        spec = importlib.machinery.ModuleSpec(name, None, is_package=name in packages)
        sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.modules["aiter.ops.flydsl.moe_common"].GateMode = GateMode
    sys.modules["aiter"].__dict__.update(ActivationType=ActivationType, QuantType=QuantType)
    sys.modules["aiter.fused_moe"].fused_moe = noop_fused_moe


def import_upstream(sglang_path: str | None) -> Any:
    """The released module ``sglang.srt.layers.moe.moe_runner.aiter``."""
    if sglang_path:
        sys.path.insert(0, sglang_path)
    missing = [n for n in ("torchvision", "sgl_kernel") if importlib.util.find_spec(n) is None]
    if missing:
        import sglang_aiter_moe.testing

        sys.path.append(str(Path(sglang_aiter_moe.testing.__file__).parent / "placeholders"))
    import sglang.srt.layers.moe.moe_runner.aiter as upstream

    return upstream


@dataclass
class Case:
    """One kind of layer: the runner's configuration, the weights' extra fields, the plan's keywords."""

    name: str
    activation: str = "silu"
    quant_type: str = "PER_1X32"
    alpha: float | None = None
    limit: float | None = None
    info: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    mask: int = 0
    mori: bool | None = None


CASES = [
    Case(
        "k3",
        "situ",
        alpha=4.0,
        limit=25.0,
        plan={"activation": "situv2", "beta": 4.0, "linear_beta": 25.0},
    ),
    Case(
        "gpt-oss",
        "swiglu",
        alpha=1.702,
        limit=7.0,
        info={"swiglu_limit": 7.0},
        plan={"activation": "swiglu", "swiglu_limit": 7.0},
    ),
    Case("silu", plan={"activation": "silu"}),
    Case(
        "deepep",
        mask=EXPERTS + 1,
        mori=False,
        plan={"activation": "silu", "expert_parallel": True},
    ),
    Case("deepseek-v4-fp8, no plan", quant_type="PER_128X128", info={"swiglu_limit": 10.0}),
    Case("bf16, no plan", quant_type="NONE"),
]


def build(
    module: Any, config_class: Any, case: Case, plan_factory: Any
) -> tuple[Any, Any, Any, dict]:
    """Runner, input, weights and running state of a case in one module's classes."""
    quant_type = getattr(module.AiterQuantType, case.quant_type)
    config = config_class(
        activation=case.activation,
        gemm1_alpha=case.alpha,
        gemm1_clamp_limit=case.limit,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        top_k=TOPK,
    )
    runner_input = module.AiterRunnerInput(
        hidden_states=torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        topk_ids=torch.zeros(TOKENS, TOPK, dtype=torch.int32),
        topk_weights=torch.ones(TOKENS, TOPK),
        quant_type=quant_type,
    )
    dtype = torch.uint8 if case.quant_type == "PER_1X32" else torch.bfloat16
    info = module.AiterMoeQuantInfo(
        w13_weight=torch.zeros(EXPERTS, 2 * INTER, HIDDEN // 2, dtype=dtype),
        w2_weight=torch.zeros(EXPERTS, HIDDEN, INTER // 2, dtype=dtype),
        quant_type=quant_type,
        expert_mask=torch.ones(case.mask, dtype=torch.int32) if case.mask else None,
        **(case.info or {}),
    )
    if (
        plan_factory is not None
        and case.plan is not None
        and "plan" in {f.name for f in fields(info)}
    ):
        info.plan = plan_factory(case)
    state = {} if case.mori is None else {"aiter_combine_is_mori": case.mori}
    return module.AiterRunnerCore(config), runner_input, info, state


def patched_like_the_plugin(upstream: Any) -> Any:
    """SGLang's names with the plugin's runner behind them, as they are in a patched process."""
    from sglang_aiter_moe.patches import glue

    released = upstream.AiterRunnerCore.run
    # The same code with names of its own, so that the released function keeps looking its own up.
    names = dict(vars(upstream))
    original = types.FunctionType(
        released.__code__, names, released.__name__, released.__defaults__, released.__closure__
    )
    names["_aiter_quant_type"] = glue.quant_type(upstream._aiter_quant_type)

    class AiterRunnerCore(upstream.AiterRunnerCore):
        run = glue.run(original)

    class AiterRunnerInput(upstream.AiterRunnerInput):
        output = None  # a field from SGLang 0.5.22 on

    return SimpleNamespace(
        AiterRunnerCore=AiterRunnerCore,
        AiterMoeQuantInfo=glue.quant_info_with_plan(upstream.AiterMoeQuantInfo),
        AiterRunnerInput=AiterRunnerInput,
        AiterQuantType=upstream.AiterQuantType,
    )


def seconds(call: tuple[Any, Any, Any, dict], calls: int) -> float:
    """Processor time of ``calls`` calls of ``run``: what other processes take is not counted."""
    core, runner_input, info, state = call
    run = core.run
    start = time.thread_time()
    for _ in range(calls):
        run(runner_input, info, state)
    return time.thread_time() - start


def measure(upstream: Any, patched: Any, rounds: int, calls: int) -> dict[str, float]:
    """Ratios of alternating rounds; which of the two goes first alternates too."""
    ratios, ours, theirs = [], [], []
    for index in range(rounds + 2):
        if index % 2:
            b, a = seconds(patched, calls), seconds(upstream, calls)
        else:
            a, b = seconds(upstream, calls), seconds(patched, calls)
        if index >= 2:  # two warm-up rounds
            ratios.append(b / a)
            theirs.append(a / calls * 1e6)
            ours.append(b / calls * 1e6)
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "ratio_q1": quartiles[0],
        "ratio_q3": quartiles[2],
        "upstream_us": statistics.median(theirs),
        "patched_us": statistics.median(ours),
    }


def real_plan(case: Case) -> Any:
    """The plan of a case's layer, made for the environment of this process."""
    from sglang_aiter_moe.contract import Capabilities, MoeSpec, Target, plan_moe

    spec = MoeSpec(
        num_experts=EXPERTS, topk=TOPK, hidden_size=HIDDEN, intermediate_size=INTER, **case.plan
    )
    return plan_moe(spec, Target("gfx950", Capabilities.for_release("0.1.20"), dict(os.environ)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--sglang-path", help="folder that holds the package sglang, e.g. an unpacked wheel"
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help="pairs of rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--calls", type=int, default=200, help="calls a round (default: %(default)s)"
    )
    parser.add_argument("--json", help="write the results to this file, or - for standard output")
    args = parser.parse_args()

    torch.set_num_threads(1)
    install_noop_aiter()
    upstream = import_upstream(args.sglang_path)
    import sglang
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    patched = patched_like_the_plugin(upstream)
    gc.disable()
    results = {}
    text = sys.stderr if args.json == "-" else sys.stdout
    print(
        f"SGLang {sglang.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}",
        file=text,
    )
    print(f"{'case':<26}{'upstream us':>12}{'patched us':>12}{'ratio':>8}   quartiles", file=text)
    for case in CASES:
        calls = (
            build(upstream, MoeRunnerConfig, case, None),
            build(patched, MoeRunnerConfig, case, real_plan),
        )
        row = results[case.name] = measure(*calls, args.rounds, args.calls)
        gc.collect()
        print(
            f"{case.name:<26}{row['upstream_us']:>12.2f}{row['patched_us']:>12.2f}{row['ratio']:>8.3f}"
            f"   {row['ratio_q1']:.3f} to {row['ratio_q3']:.3f}",
            file=text,
        )
    if args.json:
        from sglang_aiter_moe.evaluation import provenance

        report = {"sglang": sglang.__version__, "torch": torch.__version__, "cases": results}
        provenance.may_keep(Path(args.json))
        out = json.dumps(provenance.provenance() | report, indent=2) + "\n"
        if args.json == "-":
            sys.stdout.write(out)
        else:
            Path(args.json).write_text(out)
    return 0 if all(row["ratio"] <= 1.0 for row in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
