"""The fused routing kernel against a reference in Python floats: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable.routing import biased_topk
from sglang_aiter_moe.testing.registration import register_cpu_ci, register_cuda_ci
from sglang_aiter_moe.testing.routing_cases import CASES
from sglang_aiter_moe.testing.routing_graphs import (
    DTYPE_PAIRS,
    SHAPES,
    combinations,
    replay_after_change,
)

register_cpu_ci(est_time=120, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-a", runner_config="1-gpu-small")

pytest.importorskip("triton")
from sglang_aiter_moe.portable.triton.biased_topk import (  # noqa: E402
    THRESHOLDS,
    biased_topk_triton,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    # Compiling (or interpreting) takes the time: a part of the cases in each of some processes.
    parts = min(8, os.cpu_count() or 1)
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sglang_aiter_moe.testing.routing_cases",
                *list(CASES)[part::parts],
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(parts)
    ]
    rows = []
    for child in children:
        stdout, stderr = child.communicate(timeout=400)
        assert child.returncode == 0, stderr[-3000:]
        rows += [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(results, name):
    assert results[name]["error"] == "", results[name]


def test_more_experts_than_a_program_holds():
    with pytest.raises(ContractError, match="logits has 5000 experts"):
        biased_topk(torch.zeros(1, 5000), torch.zeros(5000), 2, backend="triton")


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_without_local_memory(shape, threshold, target):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sglang_aiter_moe.portable.triton.biased_topk import _biased_topk as kernel

    experts, topk, groups, kept = SHAPES[shape]
    constants = {
        "TOPK": topk,
        "WIDTH": topk,
        "SIZE": experts // groups,
        "KEPT": kept if kept < groups else 0,
        "RENORMALIZE": True,
        "COUNT_IS_TENSOR": False,
        "PDL": target[0] == "cuda",
        "GROUPS": groups,
        "GROUP": 1 << (experts // groups - 1).bit_length(),
        "SLOTS": topk,
        "COLUMNS": topk,
        "COUNTING": threshold == "count",
        "PTX": target[0] == "cuda",
    }
    types = {"logits_ptr": "*bf16", "bias_ptr": "*fp32", "weights_ptr": "*fp32"}
    types |= {"ids_ptr": "*i32", "tokens_ptr": "*i32", "scale": "fp32", "shared_weight": "fp32"}
    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names
    }
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = compile(ASTSource(kernel, signature, constexprs), target=GPUTarget(*target))
    if target[0] == "cuda":
        assert len(compiled.asm["cubin"]) and ".local" not in compiled.asm["ptx"]
    else:
        assert "ScratchSize: 0" in compiled.asm["amdgcn"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("combination", combinations(), ids="-".join)
def test_a_graph_that_only_replays_follows_the_bias(combination):
    result = replay_after_change(*combination)
    assert result["rows_that_differ"] == 0 and result["weights_agree"], result
    assert result["rows_that_the_change_moved"] > result["rows"] // 2, "the change must matter"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("spread", [2.0, 1e-6, 20.0])
def test_many_random_rows_on_the_gpu(threshold, spread):
    # Compared with torch.topk in float64, so that 4096 rows cost nothing; by value, since bf16 pairs tie exactly.
    # A spread of 1e-6 leaves most rows to float64, one of 20 saturates many scores.
    out = torch.empty(4096, 16, device="cuda"), torch.empty(4096, 16, device="cuda").int()
    options = {
        "num_expert_group": 1,
        "topk_group": 1,
        "renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_tokens": None,
        "padded_id": 0,
        "shared_weight": 1.0,
    }
    for logits_dtype, bias_dtype in DTYPE_PAIRS:
        for offset in (0.0, 7.0):
            logits = (torch.randn(4096, 896, device="cuda") * spread).to(
                getattr(torch, logits_dtype)
            )
            bias = torch.randn(896, device="cuda") * min(0.1, spread) + offset
            bias = bias.to(getattr(torch, bias_dtype))
            biased_topk_triton(logits, bias, 16, out, threshold=threshold, **options)
            weights, ids = out[0], out[1].long()
            assert (ids.diff(dim=1) > 0).all(), "ascending, none twice"
            scores = logits.double().sigmoid()
            choice = scores + bias.double()
            found = choice.gather(1, ids).sort(dim=1, descending=True).values
            assert torch.equal(found, choice.topk(16, dim=1).values)
            expected = scores.gather(1, ids)
            expected = expected / expected.sum(dim=1, keepdim=True)
            torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
