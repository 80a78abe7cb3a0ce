"""``python -m sglang_aiter_moe.testing.graph_reload``: a CUDA graph captured before a weight update, replayed after.

Prints one JSON line: ``before`` and ``after``: the replay equals an eager call of a fresh layer with the same
weights, bit by bit; ``differs``: the two weights give different results; ``invalid_is_nan``: after a failed
update without a copy the replay gives NaN.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.evaluation import provenance
from sglang_aiter_moe.srt.layers.moe.moe_runner.aiter import AiterRunnerCore, AiterRunnerInput
from sglang_aiter_moe.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import load, loaded_layer, random_raw
from sglang_aiter_moe.testing.raw_layers import make_raw_layer

TOKENS = 16


def main(device: str = "cuda") -> dict[str, Any]:
    os.environ[plans.A8W4] = "1"
    spec = plans.situv2(16, 4, 512, 384)
    plan = plans.plan(spec, {plans.A8W4: "1"})
    old, new = ({n: t.to(device) for n, t in random_raw(spec, s).items()} for s in (1, 2))
    made = make_raw_layer(spec, TOKENS, seed=3)
    config = MoeRunnerConfig(activation="situ", gemm1_alpha=4.0, gemm1_clamp_limit=25.0)

    def call(layer: torch.nn.Module, inputs: AiterRunnerInput) -> torch.Tensor:
        return AiterRunnerCore(config).run(inputs, mxfp4.moe_quant_info(layer), {}).hidden_states

    with portable.installed(force=True):
        layer = loaded_layer(plan, old)
        addresses = [p.data_ptr() for p in layer.parameters()]
        kind = mxfp4.moe_quant_info(layer).quant_type
        inputs = AiterRunnerInput(
            made.hidden_states.to(device),
            made.topk_ids.to(device),
            made.topk_weights.to(device),
            kind,
        )
        eager_old = call(layer, inputs).clone()
        eager_new = call(loaded_layer(plan, new), inputs).clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(layer, inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(layer, inputs)
        graph.replay()
        torch.cuda.synchronize()
        before = torch.equal(result, eager_old)
        with mxfp4_reload.updating():
            load(layer, new)
        graph.replay()
        torch.cuda.synchronize()
        after = torch.equal(result, eager_new)
        same = addresses == [p.data_ptr() for p in layer.parameters()]
        try:
            with mxfp4_reload.updating():
                load(layer, {"w2_weight": old["w2_weight"]})
                raise OSError("connection lost")
        except OSError:
            graph.replay()
        torch.cuda.synchronize()
        return {
            "before": before,
            "after": after,
            "differs": not torch.equal(eager_old, eager_new),
            "same_addresses": same,
            "invalid_is_nan": bool(result.isnan().any()),
        }


if __name__ == "__main__":
    print(json.dumps(provenance.provenance() | main()))
