"""There and back to the raw form for random sizes."""

import sys

import pytest

pytest.importorskip("hypothesis", reason="SGLang's environments do not have it")

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_aiter_moe.contract import MoeSpec
from sglang_aiter_moe.srt.layers.quantization import mxfp4
from sglang_aiter_moe.testing import plans
from sglang_aiter_moe.testing.loaded_layers import (
    PLANS,
    loaded_layer,
    packed_bytes,
    random_raw,
    same,
    small_gpt_oss,
)
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(1, 4),
    hidden=st.integers(1, 9).map(lambda n: 32 * n),
    inter=st.integers(1, 9).map(lambda n: 32 * n),
    kind=st.sampled_from(["gpt_oss", "situ", "situ a8w4", "silu"]),
)
def test_there_and_back_for_random_sizes(experts, hidden, inter, kind):
    topk = 1
    if kind == "gpt_oss":
        plan = plans.plan(
            small_gpt_oss(experts, hidden, inter) if experts > 1 else PLANS["padding"].spec
        )
    elif kind == "silu":
        plan = plans.plan(MoeSpec("silu", experts, topk, hidden, inter), {plans.ITLV: "0"})
    else:
        env = {plans.A8W4: "1"} if "a8w4" in kind else {}
        plan = plans.plan(plans.situv2(experts, topk, hidden, inter), env)
    raw = random_raw(plan.spec, experts + hidden + inter)
    layer = loaded_layer(plan, raw)
    before = packed_bytes(layer)
    mxfp4.restore_raw(layer)
    assert same(packed_bytes(layer), raw)
    mxfp4.prepare_weights(layer, plan)
    assert same(packed_bytes(layer), before)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
