"""The worker's call is one that AITER's dispatch takes, for every activation and with an expert mask."""

import subprocess
import sys

import pytest
import torch

from sglang_aiter_moe import environ, portable
from sglang_aiter_moe.cli.plan_report import Setting
from sglang_aiter_moe.contract.plan import MoePlan
from sglang_aiter_moe.contract.spec import MoeSpec
from sglang_aiter_moe.prebuild.worker import call, zero_layer
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.verify.harness import aiter_is_installed

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

SITU = {"activation": "situv2", "beta": 4.0, "linear_beta": 25.0}
SWIGLU = {"activation": "swiglu", "swiglu_limit": 7.0}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in environ.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def make_plan(env, **fields):
    sizes = {"num_experts": 8, "topk": 2, "hidden_size": 256, "intermediate_size": 128}
    return Setting("gfx950", "0.1.20", env).plan(MoeSpec(**sizes | fields))


@pytest.mark.parametrize(
    ("env", "fields"),
    [
        ({}, SITU),
        ({"AITER_SITUV2_A8W4": "1"}, SITU),
        ({"AITER_SITUV2_A4W4": "1"}, SITU),
        ({"AITER_SITUV2_A4W4": "1"}, SITU | {"expert_parallel": True}),
        ({}, SWIGLU | {"has_bias": True, "gate_up_interleaved": True}),
        ({"SGLANG_USE_AITER_MOE_GU_ITLV": "0"}, {"activation": "silu"}),
    ],
)
def test_the_call_is_one_that_aiter_takes(monkeypatch, env, fields):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    plan = MoePlan.from_json(make_plan(env, **fields).to_json())  # as the worker gets it
    cpu = torch.device("cpu")
    with portable.installed(arch="gfx950", aiter="0.1.20"):
        output = call(plan, zero_layer(plan, cpu), 5, cpu)
    # Zero codes and no bias: a call that reads anything else does not give zeros.
    assert output.shape == (5, plan.padded_hidden_size)
    assert output.dtype == torch.bfloat16 and not output.any()


@pytest.mark.skipif(aiter_is_installed(), reason="a real AITER is installed")
def test_the_worker_fails_without_aiter(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(make_plan({}, **SITU).to_json())
    command = [sys.executable, "-m", "sglang_aiter_moe.prebuild.worker", str(path), "1"]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode != 0 and "aiter" in done.stderr.lower()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
