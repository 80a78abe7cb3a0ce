"""SGLang's real loaders fill a checkpoint that was laid out ahead of time, and refuse it under another plan."""

import sys

import pytest

from sglang_aiter_moe.checkpoint.offline import pack_checkpoint
from sglang_aiter_moe.contract import Capabilities, Target, plan_moe
from sglang_aiter_moe.model_config import rank_spec, read_config
from sglang_aiter_moe.testing.checkpoints import CarrierConfig, write_kimi_checkpoint
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_releases import FREE_PORT, run_probe

register_cpu_ci(est_time=100, suite="base-a-test-cpu")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    # I 384: w2's scales are padded, so packed and raw shapes differ.
    config = CarrierConfig(num_experts=8, intermediate_size=384)
    raw = write_kimi_checkpoint(folder / "raw", config)
    spec = rank_spec(read_config(raw), tp=1, ep=1, tp_rank=0, ep_rank=0)
    plan = plan_moe(spec, Target("gfx950", Capabilities.for_release("0.1.20")))
    pack_checkpoint(raw, folder / "packed", plan)
    module = "sglang_aiter_moe.testing.packed_probe"
    return run_probe(module, str(raw), str(folder / "packed"), FREE_PORT)


def test_the_bytes_are_those_of_a_raw_load_and_nothing_was_transformed(report):
    assert report["same"] and report["transformations"] == 0
    assert report["finite"]


def test_another_plan_is_refused_at_load(report):
    assert "ContractError" in report["refusal"] and "w13_layout" in report["refusal"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
