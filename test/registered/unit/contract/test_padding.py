"""Allocated sizes and stated pads: field L10 and L13, docs/contract.md section f."""

import sys

import pytest

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.testing.plans import K3, MINIMAX, QWEN, gptoss, plan
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


PADS = [
    # spec, env, allocated H and I, stated pads
    (K3, {}, (3584, 384), (0, 0)),
    (K3, {"SGLANG_AITER_K3_OPT": "0"}, (3584, 384), (0, 0)),
    (gptoss(1), {}, (3072, 3072), (192, 192)),
    (gptoss(2), {}, (3072, 1536), (192, 64)),
    (gptoss(4), {}, (3072, 768), (192, 0)),
    (gptoss(8), {}, (3072, 512), (192, 128)),
    (MINIMAX, {}, (6144, 384), (0, 0)),
    (QWEN, {}, (4096, 256), (0, 0)),
    (MoeSpec("situv2", 896, 16, 3584, 192, beta=4.0, linear_beta=25.0), {}, (3584, 256), (0, 64)),
]


@pytest.mark.parametrize("spec, env, sizes, pads", PADS, ids=lambda v: getattr(v, "name", None))
def test_padding(spec, env, sizes, pads):
    made = plan(spec, env)
    assert (made.padded_hidden_size, made.padded_intermediate_size) == sizes
    assert (made.hidden_pad, made.intermediate_pad) == pads
    stated = (made.call_kwargs.get("hidden_pad", 0), made.call_kwargs.get("intermediate_pad", 0))
    assert stated == pads


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
